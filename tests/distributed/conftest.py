"""Settings of the distributed tests, made before Megatron is imported."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "9.0")  # as in megatron_pg.megatron.cpu_runtime
