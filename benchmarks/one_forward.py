r"""Table: an optimizer step with and without the forward pass for old log-probs.

    torchrun --nproc-per-node 1 -m benchmarks.one_forward --tokens 32768
    torchrun --nproc-per-node 2 -m benchmarks.one_forward --context-parallel-size 2 --tokens 65536
    torchrun --nproc-per-node 2 -m benchmarks.one_forward --device cpu --model tiny \
        --context-parallel-size 2 --tokens 64

It uses the model and step of `benchmarks.whole_step` with the fused head. `two passes` first scores
the step's samples with `compute_log_probs`. `one forward` uses `--old-log-probs current`, and the
last method adds `--score-centering` with the engine's 32 tokens per position. Each step packs and
moves its micro-batches. All methods run in turn in one process.
"""

import argparse
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import whole_step
from benchmarks.whole_step_model import Trainer, build_trainer
from megatron_pg import PolicyLossConfig, Sample, pack, step_totals
from megatron_pg.megatron import compute_log_probs

K = 32
FUSED = PolicyLossConfig(policy_loss="reinforce", fused_lm_head=True)
ONE = replace(FUSED, old_log_probs="current")


def with_engine(sample: Sample, vocab_size: int) -> Sample:
    """Add an untrained engine's likeliest tokens to a sample."""
    generator = torch.Generator().manual_seed(sample.total_length)
    length = sample.response_length
    first = torch.randint(vocab_size - K, (length, 1), generator=generator)
    log_probs = torch.full((length, K), 1.0 / vocab_size).log()
    top_k: Any = (first + torch.arange(K), log_probs)
    return replace(sample, old_log_probs=None, sampler_top_k=top_k)


def main() -> None:
    args = whole_step.parse_arguments(argparse.ArgumentParser(description=__doc__.splitlines()[0]))
    trainer = build_trainer(args)
    groups = trainer.groups
    for tokens in args.tokens:
        parts = whole_step.rollouts(tokens, trainer.vocab_size)
        centered = [[with_engine(x, trainer.vocab_size) for x in samples] for samples in parts]
        plain = [[replace(x, sampler_top_k=None) for x in samples] for samples in centered]

        def step(config: PolicyLossConfig, given: list[list[Sample]]) -> Callable[[Trainer], float]:
            def run(trainer: Trainer) -> float:
                samples = [x for part in given for x in part]
                for sample in samples:  # a different step than in the last round
                    vars(sample)["trained_in"] = None
                if config.old_log_probs == "given":
                    budget = {"max_tokens_per_microbatch": tokens}  # noqa: B023
                    scored = compute_log_probs(trainer.model, samples, config, **budget)
                    pairs = zip(samples, scored.log_probs, strict=True)
                    samples = [replace(x, old_log_probs=old) for x, old in pairs]
                totals = step_totals(samples)
                layout = {
                    "cp_rank": groups.context_rank,
                    "cp_size": groups.context_size,
                    "pad_to_multiple": groups.context_size * groups.tensor_size,
                }
                sizes = [len(part) for part in given]
                split = [samples[: sizes[0]], samples[sizes[0] :]]
                batches = [pack(part, **layout).to(trainer.device) for part in split]

                def head(batch: Any, totals: Any, model: Any) -> Any:
                    made = whole_step.step_of(config, totals, model, trainer.vocab_size)
                    return made.head(batch)

                return whole_step.train_step(trainer, head, batches, totals)

            return run

        methods = {
            "two passes": step(FUSED, plain),
            "one forward": step(ONE, plain),
            "one forward, score centering": step(replace(ONE, score_centering=True), centered),
        }
        found = whole_step.measure_steps(trainer, methods, args.rounds)
        if dist.get_rank() == 0:
            sharding = f"TP {groups.tensor_size}, CP {groups.context_size}"
            first = "two passes"
            print(whole_step.report(found, tokens, sharding, first), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
