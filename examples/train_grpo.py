"""Policy gradients on Megatron-Core, online or from rollout files, with the policy loss of megatron_pg: a training loop to start your own from.

Launched by quickstart.sh, or by hand (one line of flags; --help explains each):

    torchrun --nproc-per-node 2 examples/train_grpo.py --device cpu --context-parallel-size 2 ...
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

from megatron.core.pipeline_parallel import get_forward_backward_func
from quickstart.arguments import parse_arguments
from quickstart.dry_run import print_plan
from quickstart.errors import mendable, plain_errors
from quickstart.model import Policy
from quickstart.run import Run
from torch import Tensor

from megatron_pg import PackedBatch, PolicyLossConfig, Sample, accepted_samples, pack
from megatron_pg.megatron import PolicyStep
from megatron_pg.step import plan_step


def train_step(
    args: argparse.Namespace, config: PolicyLossConfig, policy: Policy, samples: Sequence[Sample]
) -> dict[str, float]:
    """One optimizer step on this data-parallel rank's samples; every rank must call it.

    Returns:
        The step's metrics; empty where no token is active, and then nothing is updated.
    """
    groups = policy.groups
    with mendable():
        samples = accepted_samples(config, samples)
        plan = plan_step(
            samples,
            max_tokens_per_microbatch=args.max_tokens_per_microbatch,
            data_parallel_group=groups.data,
            cp_size=groups.context_size,
            pad_to_multiple=policy.pad_to_multiple,
            microbatch_group_size=policy.microbatch_group_size,
            ragged=args.ragged_microbatches,
            oversized=args.oversized_samples,
            allow_different_prompts=args.allow_different_prompts_in_group,
        )
    if plan.totals.num_active_tokens == 0:
        return {}
    batches = [
        pack(
            [samples[index] for index in microbatch],
            cp_rank=groups.context_rank,
            cp_size=groups.context_size,
            pad_to_multiple=policy.pad_to_multiple,
        ).to(policy.device)
        for microbatch in plan.microbatches
    ]

    step = PolicyStep(config, plan, model=policy.chunks, vocab_size=policy.vocabulary_size)

    def forward_step(batch_iterator: Iterator[PackedBatch], model: Any) -> tuple[Tensor, Any]:
        head = step.head(next(batch_iterator))
        return model(**head.model_inputs), head.loss_func

    policy.zero_grad()
    micro_batch_metrics = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(batches) for _ in policy.chunks],
        model=policy.chunks,
        num_microbatches=plan.num_microbatches,
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        forward_only=False,
    )
    grad_norm = policy.update()
    return {**step.metrics(micro_batch_metrics), "grad_norm": grad_norm}


@plain_errors()
def main() -> None:
    """Warm start and generation, or rollout files."""
    with mendable():
        args = parse_arguments()
        config = PolicyLossConfig.from_args(args)
        if args.dry_run:
            print_plan(args, config)
            return
        run = Run(args, config)
    imitation = PolicyLossConfig(
        policy_loss="reinforce",
        loss_aggregation="token_mean",
        calculate_per_token_loss=config.calculate_per_token_loss,
        fused_lm_head=config.fused_lm_head,
        fp32_lm_head=config.fp32_lm_head,
    )
    for samples in run.warm_start():
        run.log_warm_start(train_step(args, imitation, run.policy, samples))
    for step in run.steps():
        run.log_step(step, train_step(args, config, run.policy, step.samples))
    run.finish()


if __name__ == "__main__":
    main()
