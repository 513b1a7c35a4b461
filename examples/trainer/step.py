"""One optimizer step on rollouts: how it is cut into micro-batches, and its loss."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from megatron.training import training
from torch import Tensor

from megatron_pg import PackedBatch, PolicyLossConfig, Sample, StepPlan, pack, plan_step
from megatron_pg.megatron import PolicyStep
from megatron_pg.megatron.groups import ParallelGroups
from megatron_pg.step import SampleCost

from .initialize import StepMicrobatches


class RolloutStep:
    """Runs Megatron's `train_step` on the samples of a step.

    Args:
        args: validated.
        config: the policy loss.
        groups: this rank's.
        microbatches: told how many there are in a step.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        config: PolicyLossConfig,
        groups: ParallelGroups,
        microbatches: StepMicrobatches,
    ) -> None:
        self._args, self._config, self._groups = args, config, groups
        self._microbatches = microbatches
        split = groups.tensor_size * groups.context_size if args.sequence_parallel else 1
        self._layout: dict[str, Any] = {
            "cp_size": groups.context_size,
            "pad_to_multiple": split,
            "cp_partition_mode": config.cp_partition_mode,
        }

    def plan(self, samples: Sequence[Sample], model_config: Any) -> StepPlan:
        """The step's totals and this data-parallel rank's micro-batches; every rank must call it.

        Args:
            samples: this data-parallel rank's.
            model_config: the `TransformerConfig` of the model.

        Raises:
            ValueError: a sample is longer than the budget.
        """
        is_interleaved = self._args.virtual_pipeline_model_parallel_size is not None
        return plan_step(
            samples,
            max_tokens_per_microbatch=self._args.max_tokens_per_microbatch,
            data_parallel_group=self._groups.data,
            **self._layout,
            cost=SampleCost.balancing(self._args.balance, model_config, self._args.vocab_size),
            microbatch_group_size=(
                model_config.microbatch_group_size_per_vp_stage if is_interleaved else 1
            ),
            ragged=self._args.ragged_microbatches,
            oversized=self._args.oversized_samples,
            allow_different_prompts=self._args.allow_different_prompts_in_group,
            # The collector of files has not cut a group: their sizes are those of the files.
            allow_different_group_sizes=bool(self._args.rollout_files),
            samples_per_group=None if self._args.rollout_files else self._args.samples_per_prompt,
        )

    def train(
        self,
        train_step: Callable[..., tuple[Any, ...]],
        samples: Sequence[Sample],
        plan: StepPlan,
        model: list[Any],
        optimizer: Any,
        scheduler: Any,
        model_config: Any,
        forward_backward: Callable[..., Any],
        **named: Any,
    ) -> tuple[tuple[Any, ...], dict[str, float]]:
        """Forward, backward and update; every rank must call it.

        Args:
            train_step: Megatron's; the further arguments are what its loop gives it.

        Returns:
            What `train_step` returned, and the step's metrics.
        """
        step = PolicyStep(self._config, plan, model=model, vocab_size=self._args.vocab_size)
        batches = self._pack(samples, plan)
        reported: list[Any] = []

        def forward_step(batch_iterator: Iterator[PackedBatch], model: Any) -> tuple[Tensor, Any]:
            head = step.head(next(batch_iterator))
            return model(**head.model_inputs), head.loss_func

        def run_schedule(**arguments: Any) -> list[Any]:
            arguments["data_iterator"] = [iter(batches) for _ in model]
            reported.extend(forward_backward(**arguments))
            return []  # Megatron would average what is there

        self._microbatches.plan(plan.num_microbatches)
        _count_tokens(samples)
        by_iteration = SimpleNamespace(step=lambda increment: scheduler.step(increment=1))
        result = train_step(
            forward_step, None, model, optimizer, by_iteration, model_config, run_schedule, **named
        )
        return result, {**step.metrics(reported), "grad_norm": result[5]}

    def _pack(self, samples: Sequence[Sample], plan: StepPlan) -> list[PackedBatch]:
        return [
            pack(
                [samples[index] for index in microbatch],
                cp_rank=self._groups.context_rank,
                **self._layout,
            ).to(torch.cuda.current_device())
            for microbatch in plan.microbatches
        ]


def _count_tokens(samples: Sequence[Sample]) -> None:
    """Tell Megatron's throughput how long the sequences are; before 0.18 it takes all for --seq-length long."""
    if hasattr(training, "update_seqlen_stats_from_cu_seqlens"):
        lengths = itertools.accumulate((sample.total_length for sample in samples), initial=0)
        training.update_seqlen_stats_from_cu_seqlens(torch.tensor(list(lengths)))
