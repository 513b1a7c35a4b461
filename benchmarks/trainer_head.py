r"""Memory and time of the output layer and loss in slime, miles and verl, with their code and with
the fused head.

    # checkouts named slime, miles and verl; one GPU
    TRAINERS=/folder python -m benchmarks.trainer_head
    TRAINERS=/folder python -m benchmarks.trainer_head --device cpu --hidden-size 16 \
        --vocab-sizes 64 --tokens 64

It uses a GPTModel of one layer without attention, under Megatron's DDP, bfloat16 on a GPU. Each
number is from the trainer's code. `score` is only its forward pass (slime and miles `forward_only`,
verl `forward_backward_batch(forward_only=True)`), `train` its training step up to the gradients
(`train_one_step`, `forward_backward_batch`), for one micro-batch of eight sequences. Memory is the
peak above model and gradients. Only Ray, the data and the optimizer's step are left out. `saving`
uses the trainer's memory-saving settings: --log-probs-chunk-size 1024 --recompute-loss-function,
for verl `use_fused_kernels`.
"""

import argparse
import contextlib
import functools
import gc
import math
import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_pg.megatron import enable_cpu_runtime
from megatron_pg.megatron.groups import unwrapped

PROMPT, NUM_SEQUENCES = 64, 8
NO_PACKAGES = (
    *(
        "transformers",
        "safetensors",
        "huggingface_hub",
        "accelerate",
        "datasets",
        "tokenizers",
        "polars",
        "mooncake",
        "tqdm",
    ),
    *(
        "pydantic",
        "yaml",
        "aiohttp",
        "requests",
        "PIL",
        "pandas",
        "pyarrow",
        "numba",
        "wandb",
        "tensorboard",
        "blobfile",
    ),
)
"""Packages that the trainers import without use here. Empty modules replace missing ones."""


class Way(NamedTuple):
    """A variant of the head in a trainer."""

    trainer: str
    name: str
    settings: dict[str, Any]

    @property
    def is_ours(self) -> bool:
        return self.name == "megatron_pg"


SAVING = {"log_probs_chunk_size": 1024, "recompute_loss_function": True}
WAYS = [
    *(Way(name, "as it is", {}) for name in ("slime", "miles", "verl")),
    *(Way(name, "saving", SAVING) for name in ("slime", "miles")),
    Way("verl", "saving", {"use_fused_kernels": True}),
    *(Way(name, "megatron_pg", {}) for name in ("slime", "miles", "verl")),
]
Runs = tuple[Callable[[], Any], Callable[[], Any]]
"""Only the forward pass, and the training step, which returns the loss and the norm of the output
layer's gradient."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--trainers", nargs="+", default=["slime", "verl", "miles"])
    parser.add_argument("--vocab-sizes", nargs="+", type=int, default=[151936, 248320])
    parser.add_argument("--tokens", nargs="+", type=int, default=[8192, 32768, 131072])
    parser.add_argument("--hidden-size", type=int, default=4096)
    parser.add_argument("--entropy-coef", type=float, default=0.0)
    parser.add_argument("--seconds", type=float, default=220.0, help="no row starts later")
    args = parser.parse_args()
    begin = time.monotonic()
    join(args.device)
    where = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    print(f"{where}, torch {torch.__version__}, hidden {args.hidden_size}\n", flush=True)
    head = (
        "trainer | way | vocabulary | tokens | score ms | score GiB | train ms | train GiB | loss "
        "| gradient"
    )
    print(f"| {head} |\n|{'---|' * 10}", flush=True)
    for way in (way for name in args.trainers for way in WAYS if way.trainer == name):
        full: list[tuple[int, int]] = []
        for vocabulary in args.vocab_sizes:
            for tokens in args.tokens:
                if time.monotonic() - begin > args.seconds:
                    result = "not run: time is up"
                elif args.device == "cpu" and "use_fused_kernels" in way.settings:
                    result = "needs a GPU"
                elif any(vocabulary >= columns and tokens >= rows for columns, rows in full):
                    result = "out of memory |  | out of memory |  |  | "
                else:
                    result = row(way, vocabulary, tokens, args)
                if result.count("out of memory") == 2:  # so will more tokens and columns
                    full.append((vocabulary, tokens))
                print(
                    f"| {way.trainer} | {way.name} | {vocabulary} | {tokens} | {result} |",
                    flush=True,
                )
    print(f"\n{time.monotonic() - begin:.0f} s", flush=True)


def join(device: str) -> None:
    from megatron.core import parallel_state

    if device == "cpu":
        enable_cpu_runtime()
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    if device == "cuda":
        torch.cuda.set_device(0)
    from tests.trainers import sources

    sources.stand_in_for(NO_PACKAGES)


def row(way: Way, vocabulary: int, tokens: int, args: argparse.Namespace) -> str:
    """Return the cells of one row, or one cell with the error."""
    gc.collect()  # free the previous row's memory, also after an error
    if args.device == "cuda":
        torch.cuda.empty_cache()
    try:
        model = one_layer(args.device, args.hidden_size, vocabulary)
        prepare = verl_runs if way.trainer == "verl" else slime_runs
        cells, result = [], None
        for run in prepare(way, model, vocabulary, tokens, args):
            try:
                result, milliseconds, gib = measure(run, args.device, 1 if tokens > 40000 else 2)
            except torch.OutOfMemoryError:
                result, found = None, ["out of memory", ""]
            else:
                found = [f"{milliseconds:.1f}", f"{gib:.2f}"]
            cells += found
        numbers = ["", ""] if result is None else [f"{result[0]:.6f}", f"{result[1]:.5e}"]
        return " | ".join(cells + numbers)
    except torch.OutOfMemoryError:
        return "out of memory |  | out of memory |  |  | "
    except Exception as error:
        if os.environ.get("RAISE"):
            raise
        return f"{type(error).__name__}: {str(error)[:300]}"


def measure(run: Callable[[], Any], device: str, times: int) -> tuple[Any, float, float]:
    """Return a run's result, its milliseconds after a warm-up, and the GiB of peak memory that it
    added.
    """
    run()
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    begin = time.monotonic()
    for _ in range(times):
        result = run()
    if device == "cuda":
        torch.cuda.synchronize()
    milliseconds = (time.monotonic() - begin) / times * 1e3
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    return result, milliseconds, (peak - before) / 2**30


def one_layer(device: str, hidden_size: int, vocabulary: int) -> list[Any]:
    """Build a GPTModel with attention that returns queries, because only the layer's shapes
    matter.
    """
    from megatron.core.transformer.module import MegatronModule

    from megatron_pg.check import model as builder
    from megatron_pg.check.options import CheckOptions
    from megatron_pg.megatron.cpu.layer_spec import torch_block_spec

    class NoAttention(MegatronModule):  # type: ignore[misc]
        def __init__(self, config: Any, **_: Any) -> None:
            super().__init__(config=config)

        def forward(self, query: Tensor, *_: Any, **__: Any) -> Tensor:
            return query.flatten(1)

    torch.manual_seed(1)
    if device == "cuda":
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    options = CheckOptions(device=device, dtype="bf16" if device == "cuda" else "fp32")  # type: ignore[arg-type]
    sizes = {"hidden_size": hidden_size, "ffn_hidden_size": hidden_size, "num_layers": 1}
    config = builder.model_config(options, num_attention_heads=2, num_query_groups=2, **sizes)
    spec = torch_block_spec(config)
    spec.layer_specs[0].submodules.self_attention.submodules.core_attention = NoAttention
    changes = {"vocab_size": vocabulary, "transformer_layer_spec": spec, "same_parameters": False}
    return builder.build_model(options, config, **changes)


def sequences(vocabulary: int, tokens: int, device: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(vocabulary, (NUM_SEQUENCES, tokens // NUM_SEQUENCES), generator=generator)
    return list(ids.to(device))


def prompt_of(tokens: int) -> int:
    return min(PROMPT, tokens // NUM_SEQUENCES // 2)


@functools.cache
def imported(name: str, device: str) -> Any:
    from tests.trainers import head_step

    trainer = head_step.import_trainer(name, on_cpu=device == "cpu")
    if name == "miles":
        head_step.miles_groups(head_step.arguments())
    if device == "cuda":
        import torch._dynamo

        torch._dynamo.config.disable = False  # the tests disable it
    return trainer


def slime_runs(
    way: Way, model: list[Any], vocabulary: int, tokens: int, args: argparse.Namespace
) -> Runs:
    """Return `forward_only` and `train_one_step` of slime or miles."""
    from megatron_pg.integrations import fused_head
    from tests.trainers import head_step

    trainer = imported(way.trainer, args.device)
    unused = {"use_kl_loss": False, "rollout_temperature": 1.0, "entropy_coef": args.entropy_coef}
    settings = head_step.arguments(**unused | way.settings)
    if way.is_ours:
        with contextlib.redirect_stdout(None):
            getattr(fused_head, way.trainer)(settings)
    rows, length = sequences(vocabulary, tokens, args.device), tokens // NUM_SEQUENCES
    response = length - prompt_of(tokens)
    vectors = torch.linspace(-1, 1, response, device=args.device).expand(NUM_SEQUENCES, -1)
    data = {
        "tokens": rows,
        "total_lengths": [length] * NUM_SEQUENCES,
        "response_lengths": [response] * NUM_SEQUENCES,
        "loss_masks": list(torch.ones_like(vectors, dtype=torch.int)),
        "log_probs": list(0.1 * vectors - math.log(vocabulary)),
        "advantages": list(-vectors),
        "rollout_mask_sums": [torch.tensor(float(response), device=args.device)] * NUM_SEQUENCES,
    }
    indices = [list(range(NUM_SEQUENCES))]
    step = head_step.Step(way.trainer, trainer, model, settings, data, indices, NUM_SEQUENCES)
    weight = unwrapped(model[0]).output_layer.weight
    recorder = head_step.Recorder(keep=lambda: weight.main_grad.norm().item())

    def train() -> tuple[float, float]:
        loss = float(step.train(recorder)["loss"])
        return loss, recorder.kept

    return step.score, train


def verl_runs(
    way: Way, model: list[Any], vocabulary: int, tokens: int, args: argparse.Namespace
) -> Runs:
    """Return runs of `forward_backward_batch` in verl's Megatron engine."""
    from tests.trainers import sources, verl_step

    sources.find_verl()
    from verl.models.mcore.model_forward_fused import patch_fused_forward
    from verl.utils import tensordict_utils
    from verl.workers.config import McoreActorConfig
    from verl.workers.utils.losses import ppo_loss

    engine = verl_step.engine_of(model, 1)
    if way.settings:
        engine.engine_config.use_fused_kernels = True
        patch_fused_forward(model[0])
    if way.is_ours:
        from megatron_pg.integrations import verl_head

        verl_head.put_in()
    length, prompt = tokens // NUM_SEQUENCES, prompt_of(tokens)
    vectors = torch.linspace(-1, 1, length - prompt).expand(NUM_SEQUENCES, -1)

    def nested(rows: Any) -> Tensor:
        return torch.nested.as_nested_tensor(
            [row.contiguous() for row in rows], layout=torch.jagged
        )

    ids = sequences(vocabulary, tokens, "cpu")
    masks = nested(torch.ones_like(vectors, dtype=torch.int64))
    tensors = {
        "input_ids": nested(ids),
        "prompts": nested([row[:prompt] for row in ids]),
        "responses": nested([row[prompt:] for row in ids]),
        "response_mask": masks,
        "loss_mask": masks,
        "old_log_probs": nested(0.1 * vectors - math.log(vocabulary)),
        "advantages": nested(-vectors),
        "temperature": torch.ones(NUM_SEQUENCES),
    }
    settings = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": NUM_SEQUENCES}
    settings |= {"global_batch_size": NUM_SEQUENCES, "calculate_entropy": True}
    actor = McoreActorConfig(
        rollout_n=1, ppo_micro_batch_size_per_gpu=NUM_SEQUENCES, entropy_coeff=args.entropy_coef
    )
    data = tensordict_utils.get_tensordict(tensors, settings)

    def score() -> None:
        with torch.no_grad():
            engine.forward_backward_batch(data.clone(), None, forward_only=True)

    def train() -> tuple[float, float]:
        # Scoring computes the entropy. In training, verl computes it only if its coefficient is not
        # 0.
        tensordict_utils.assign_non_tensor(data, calculate_entropy=args.entropy_coef != 0)
        model[0].zero_grad_buffer()
        result = engine.forward_backward_batch(
            data.clone(), functools.partial(ppo_loss, config=actor)
        )
        loss = float(torch.as_tensor(result["loss"]).sum())
        return loss, unwrapped(model[0]).output_layer.weight.main_grad.norm().item()

    return score, train


if __name__ == "__main__":
    main()
