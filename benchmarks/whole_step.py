r"""Table: a whole training step, tokens per second and peak memory, by head.

    torchrun --nproc-per-node 1 -m benchmarks.whole_step --tokens 8192 32768
    torchrun --nproc-per-node 2 -m benchmarks.whole_step --context-parallel-size 2 --tokens 32768
    torchrun --nproc-per-node 2 -m benchmarks.whole_step --tensor-model-parallel-size 2 \
        --tokens 32768
    torchrun --nproc-per-node 2 -m benchmarks.whole_step --device cpu --model tiny \
        --context-parallel-size 2 --tokens 64

GPTModel of about 1 billion parameters (2048 wide, 16 layers, vocabulary 151936 tied to the
embedding; --model 8b: 8 layers of Llama 3's 8 billion, 4096 wide, vocabulary 128256, untied) with
random weights, bfloat16, Transformer Engine, DDP with float32 gradients and the distributed
optimizer, Megatron's schedule, gradient clipping and Adam (at rate 0, so that every head has the
same weights), without recomputation. A step is two micro-batches of `tokens` packed tokens over the
context-parallel group, each with two synthetic rollouts, an eighth of them prompt. The loss is
PPO's clipped loss without entropy or KL term. Tensor parallelism includes sequence parallelism.

`no head` ends at the hidden states, the rest of the step.
"""

import argparse
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from torch import Tensor

from benchmarks.whole_step_model import SHAPES, Trainer, build_trainer
from megatron_pg import PackedBatch, PolicyLossConfig, Sample, StepTotals, pack, step_totals
from megatron_pg.head import LogitTransform
from megatron_pg.loss.from_logits import policy_loss_from_log_probs
from megatron_pg.megatron import PolicyStep
from megatron_pg.megatron.output_layer import take_output_processor
from megatron_pg.megatron.policy_step import MicroBatchHead
from megatron_pg.megatron.schedule import run_micro_batches

WARM_UP_ROUNDS, TIMED_ROUNDS = 2, 8
MICRO_BATCHES = ((1 / 4, 3 / 4), (1 / 2, 1 / 2))
"""Each micro-batch's rollouts, as fractions of its tokens."""

HeadBuilder = Callable[[PackedBatch, StepTotals, Any], MicroBatchHead]


@dataclass(frozen=True)
class Measurement:
    """The seconds of each timed step, the gradient norm, and the largest memory that a rank
    allocated.
    """

    seconds: list[float]
    gradient_norm: float
    peak_gib: float


def rollouts(
    tokens: int, vocab_size: int, parts_of: Sequence[tuple[float, ...]] = MICRO_BATCHES
) -> list[list[Sample]]:
    """Make each micro-batch's samples, with old log-probs near an untrained model's."""
    generator = torch.Generator().manual_seed(0)
    micro_batches = []
    for parts in parts_of:
        samples = []
        for part in parts:
            length = round(part * tokens)
            response_length = length - length // 8
            samples.append(
                Sample(
                    tokens=torch.randint(vocab_size, (length,), generator=generator),
                    response_length=response_length,
                    loss_mask=torch.ones(response_length),
                    advantages=0.5 + part,
                    old_log_probs=0.1 * torch.randn(response_length, generator=generator)
                    - math.log(vocab_size),
                )
            )
        micro_batches.append(samples)
    return micro_batches


def heads(trainer: Trainer) -> dict[str, HeadBuilder]:
    """Return the variants from hidden states to the loss, by name in the table."""
    as_computed = {"fp32_output": False} if trainer.model.config.bf16 else {}

    def of_config(config: PolicyLossConfig, **arguments: Any) -> HeadBuilder:
        def build(batch: PackedBatch, totals: StepTotals, model: Any) -> MicroBatchHead:
            head = step_of(config, totals, model, trainer.vocab_size).head(batch)
            return replace(head, model_inputs=head.model_inputs | arguments)

        return build

    return {
        "no head": no_head,
        "--fused-lm-head": of_config(PolicyLossConfig(fused_lm_head=True)),
        "--fused-lm-head --fp32-lm-head": of_config(
            PolicyLossConfig(fused_lm_head=True, fp32_lm_head=True)
        ),
        "--fp32-lm-head": of_config(PolicyLossConfig(fp32_lm_head=True)),
        "logits bfloat16, our loss": of_config(PolicyLossConfig(), **as_computed),
        "logits as Float16Module gives them, our loss": of_config(PolicyLossConfig()),
        "logits as Float16Module gives them, Megatron's cross-entropy": megatron_cross_entropy,
    }


def step_of(
    config: PolicyLossConfig, totals: StepTotals, model: Any, vocab_size: int | None = None
) -> PolicyStep:
    count = len(MICRO_BATCHES)
    return PolicyStep(
        config, totals=totals, num_microbatches=count, model=model, vocab_size=vocab_size
    )


def no_head(batch: PackedBatch, totals: StepTotals, model: Any) -> MicroBatchHead:
    """Make a head that returns a number of the hidden states instead of the loss."""

    def processor(hidden_states: Tensor, weight: Tensor, transform: LogitTransform) -> Tensor:
        return hidden_states.mean(dtype=torch.float32)

    take_output_processor(model)
    head = step_of(PolicyLossConfig(), totals, model).head(batch)
    added = {"output_processor": processor}
    return MicroBatchHead(lambda output: (output.reshape(()), {}), head.model_inputs | added, added)


def megatron_cross_entropy(batch: PackedBatch, totals: StepTotals, model: Any) -> MicroBatchHead:
    """Make a head with log-probs by Megatron's vocabulary-parallel cross-entropy, and the same
    loss.
    """
    config = PolicyLossConfig()
    step = step_of(config, totals, model)

    def loss_func(logits: Tensor) -> Any:
        # [sequence, batch, v/tp], as in Megatron's loss.
        losses = vocab_parallel_cross_entropy(logits.transpose(0, 1), batch.targets[:, None])
        log_probs = -losses[:, 0].index_select(0, batch.logit_rows)
        loss, metrics = policy_loss_from_log_probs(
            config,
            batch,
            log_probs,
            None,
            totals=totals,
            context_parallel_group=step.groups.context,
            step_share=step.share,
        )
        return step.scale.apply(loss, metrics, batch.num_active_tokens, batch.window.local_tokens)

    return replace(step.head(batch), loss_func=loss_func)


def train_step(
    trainer: Trainer, build: HeadBuilder, batches: list[PackedBatch], totals: StepTotals
) -> float:
    """Run one optimizer step and return its gradient norm. Every rank calls it."""
    trainer.model.zero_grad_buffer()
    trainer.optimizer.zero_grad()
    run_micro_batches(lambda batch: build(batch, totals, trainer.model), batches, [trainer.model])
    _, norm, _ = trainer.optimizer.step()
    return float(norm)


def one_step(trainer: Trainer, method: Callable[[Trainer], float]) -> tuple[float, float, float]:
    """Return a step's wall seconds between barriers, gradient norm, and this rank's peak memory in
    bytes.
    """
    is_cuda = trainer.device.type == "cuda"
    if is_cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    dist.barrier()
    start = time.perf_counter()
    norm = method(trainer)
    if is_cuda:
        torch.cuda.synchronize()
    dist.barrier()
    seconds = time.perf_counter() - start
    return seconds, norm, float(torch.cuda.max_memory_allocated()) if is_cuda else 0.0


def measure(
    trainer: Trainer,
    methods: dict[str, HeadBuilder],
    batches: list[PackedBatch],
    totals: StepTotals,
    rounds: int,
) -> dict[str, Measurement]:
    """Measure steps of all heads. See `measure_steps`."""

    def step(build: HeadBuilder) -> Callable[[Trainer], float]:
        return lambda trainer: train_step(trainer, build, batches, totals)

    steps = {name: step(build) for name, build in methods.items()}
    return measure_steps(trainer, steps, rounds)


def measure_steps(
    trainer: Trainer, methods: dict[str, Callable[[Trainer], float]], rounds: int
) -> dict[str, Measurement]:
    """Measure steps of all methods in turn, in a random order per round, after unmeasured rounds.
    Every rank calls it.

    A method that runs out of memory is left out from then on.
    """
    shuffle = random.Random(0)  # the same on every rank
    steps: dict[str, list[tuple[float, float, float]]] = {name: [] for name in methods}
    names = list(methods)
    for index in range(WARM_UP_ROUNDS + rounds):
        for name in shuffle.sample(names, len(names)):
            try:
                step = one_step(trainer, methods[name])
            except torch.OutOfMemoryError:
                print(f"{name} runs out of memory", file=sys.stderr)
                names.remove(name)
                continue
            if index >= WARM_UP_ROUNDS:
                steps[name].append(step)
    found = {}
    for name in names:
        seconds, norms, peaks = zip(*steps[name], strict=True)
        peak = torch.tensor(max(peaks), device=trainer.device)
        dist.all_reduce(peak, op=dist.ReduceOp.MAX)
        found[name] = Measurement(list(seconds), norms[-1], float(peak) / 2**30)
    return found


def report(
    found: dict[str, Measurement], tokens: int, sharding: str, first: str = "no head"
) -> str:
    """Return a Markdown table, with each step's time relative to the method `first`."""
    first_median = statistics.median(found[first].seconds)
    lines = [
        f"**{sharding}, {tokens} tokens per micro-batch**",
        "",
        f"| head | ms a step (fastest, slowest) | tokens/s | times {first} | peak GiB | "
        "gradient norm |",
        "|---|---|---|---|---|---|",
    ]
    for name, measurement in found.items():
        seconds = measurement.seconds
        median = statistics.median(seconds)
        lines.append(
            f"| {name} | {1e3 * median:.0f} ({1e3 * min(seconds):.0f}, {1e3 * max(seconds):.0f}) "
            f"| {len(MICRO_BATCHES) * tokens / median:.0f} | {median / first_median:.2f} "
            f"| {measurement.peak_gib:.1f} | {measurement.gradient_norm:.4g} |"
        )
    return "\n".join([*lines, ""])


def parse_arguments(parser: argparse.ArgumentParser | None = None) -> argparse.Namespace:
    """Add the arguments of a whole step to the parser, parse, and check the number of processes."""
    parser = parser or argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tensor-model-parallel-size", type=int, default=1)
    parser.add_argument("--context-parallel-size", type=int, default=1)
    parser.add_argument("--tokens", type=int, nargs="+", default=[32768])
    parser.add_argument("--rounds", type=int, default=TIMED_ROUNDS)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--model", choices=list(SHAPES), default="1b")
    args = parser.parse_args()
    size = args.tensor_model_parallel_size * args.context_parallel_size
    if size != int(os.environ["WORLD_SIZE"]):
        parser.error(f"start {size} processes: torchrun --nproc-per-node {size}")
    return args


def main() -> None:
    args = parse_arguments()
    trainer = build_trainer(args)
    groups = trainer.groups
    sharding = f"TP {groups.tensor_size}, CP {groups.context_size}"
    for tokens in args.tokens:
        micro_batches = rollouts(tokens, trainer.vocab_size)
        totals = step_totals([sample for samples in micro_batches for sample in samples])
        batches = [
            pack(
                samples,
                cp_rank=groups.context_rank,
                cp_size=groups.context_size,
                pad_to_multiple=groups.context_size * groups.tensor_size,
            ).to(trainer.device)
            for samples in micro_batches
        ]
        found = measure(trainer, heads(trainer), batches, totals, args.rounds)
        if dist.get_rank() == 0:
            print(report(found, tokens, sharding), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
