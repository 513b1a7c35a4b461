"""Real Megatron-Core on gloo processes; every test here is compared with one unsharded process."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
# megatron-core 0.15 asks for it when it is imported: see megatron_pg.megatron.cpu.runtime.
os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "9.0")
