"""Steps from rollout files: nothing is generated, and where the files have been read to is in the checkpoint."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_pg import PolicyLossConfig, Sample, StepCollector
from megatron_pg.config.planning import PlanningConfig
from megatron_pg.megatron.groups import ParallelGroups
from megatron_pg.rollout_files import (
    CollectorState,
    RewardedSample,
    RolloutFiles,
    StepSamples,
    with_group_advantages,
)
from megatron_pg.rollout_files.collector import no_sample_in
from megatron_pg.step.advantages import half_of_dr_grpo
from megatron_pg.step.agreement import compute_and_gather

Step = tuple[list[Sample], dict[str, float | None]]
"""This data-parallel rank's samples, and what is known of them before the step, over all ranks."""


def required_fields(args: argparse.Namespace, config: PolicyLossConfig) -> list[str]:
    """What the policy loss needs of every row: all but the log-probs that a model here can say."""
    computed = {"old_log_probs"} | ({"ref_log_probs"} if args.ref_load else set())
    return [name for name in config.required_sample_fields if name not in computed]


class FileSteps:
    """The steps of `--rollout-files`, each of `--docs-per-step` rollouts.

    Args:
        args: validated.
        config: the policy loss; what it needs of a sample, every row must have, but for log-probs that are computed.
        groups: this rank's.

    Raises:
        ValueError, FileNotFoundError: naming the file.
    """

    def __init__(
        self, args: argparse.Namespace, config: PolicyLossConfig, groups: ParallelGroups
    ) -> None:
        planning = PlanningConfig.from_args(args)
        self._args, self._config, self._groups = args, config, groups
        self._paths = planning.rollout_files
        files = RolloutFiles(
            planning.rollout_files,
            data_parallel_rank=groups.data_rank,
            data_parallel_size=groups.data_size,
            on_bad_row=planning.on_bad_row,
            required_fields=required_fields(args, config),
            vocab_size=args.vocab_size,
            distinct_ids=planning.distinct_ids == "file",
        )
        self._collector = StepCollector(
            files,
            docs_per_step=planning.docs_per_step or 1,
            mode=planning.docs_per_step_mode,
            keep_prompt_groups=planning.keep_prompt_groups,
            refuse_cut_groups=config.loss_aggregation == "prompt_mean",
            data_parallel_group=groups.data,
        )

    def attach(self, model: Sequence[Any]) -> None:
        """Nothing here needs the model."""

    def step(self, iteration: int) -> Step | None:
        """The step that comes next, None at the end of the files; every rank must call it.

        Args:
            iteration: steps done.

        Raises:
            ValueError: there is not even a first step, or a sample of it cannot be trained on.
        """
        collected = self._collector.collect()
        if collected is not None:
            samples = with_advantages(
                self._args, self._config, collected.samples, self._groups.data
            )
            return samples, self._metrics(collected)
        if iteration == 0:
            raise no_sample_in(self._paths, self._collector.state().num_skipped)
        return None

    def shown(self, samples: Sequence[Sample]) -> list[str]:
        """Nothing: no tokenizer is known here."""
        return []

    def state(self) -> CollectorState[Sample]:
        """Of this data-parallel rank: where the files have been read to, and the samples that are carried over."""
        return self._collector.state()

    def restore(self, states: Sequence[CollectorState[Sample]]) -> None:
        """Go on where a run left the files, at any sharding; every rank must call it.

        Args:
            states: of all data-parallel ranks of that run.
        """
        self._collector.load_states(states)

    def _metrics(self, collected: StepSamples) -> dict[str, float | None]:
        """Documents, skipped rows, mean reward (None where a row has none) and mean response length."""
        rewards = [
            sample.reward if isinstance(sample, RewardedSample) else None
            for sample in collected.samples
        ]
        sums = torch.tensor(
            [
                sum(reward for reward in rewards if reward is not None),
                rewards.count(None),
                sum(sample.response_length for sample in collected.samples),
                len(rewards),
            ],
            dtype=torch.float64,
            device=torch.cuda.current_device(),
        )
        dist.all_reduce(sums, group=self._groups.data)
        reward, num_without, length, count = sums.tolist()
        return {
            "docs": collected.num_documents,
            "skipped_rows": collected.num_skipped,
            "reward": None if num_without or not count else reward / count,
            "response_length": length / count if count else None,
        }


def with_advantages(
    args: argparse.Namespace,
    config: PolicyLossConfig,
    samples: Sequence[Sample],
    data_parallel_group: dist.ProcessGroup | None = None,
) -> list[Sample]:
    """Check the samples of a step, and give those that have rewards alone the advantages of `--advantage`.

    Every rank of the group must call it.

    Raises:
        ValueError: a sample is too long, or the step may cut the prompt groups of rewards.
    """
    cuts_groups = not (args.keep_prompt_groups or config.loss_aggregation == "prompt_mean")

    def checked() -> list[Sample]:
        for sample in samples:
            if sample.total_length > args.max_position_embeddings:
                raise ValueError(
                    f"{sample.name} has {sample.total_length} tokens, more than --max-position-embeddings "
                    f"{args.max_position_embeddings}"
                )
            if cuts_groups and _needs_advantages(sample):
                raise ValueError(
                    f"{sample.name} has a reward and no advantages: its prompt group is the baseline, which a step must "
                    "not cut; give --keep-prompt-groups"
                )
        return list(filter(_needs_advantages, samples))

    rewarded, _ = compute_and_gather(checked, len, data_parallel_group)
    replaced, _ = with_group_advantages(
        rewarded,
        method=args.advantage,
        data_parallel_group=data_parallel_group,
        allow_different_prompts=args.allow_different_prompts_in_group,
    )
    if rewarded and args.rank == 0:
        say_half_of_dr_grpo(args.advantage, config.loss_aggregation)
    remaining = iter(replaced)
    return [next(remaining) if _needs_advantages(sample) else sample for sample in samples]


@functools.cache  # said once
def say_half_of_dr_grpo(method: str, loss_aggregation: str) -> None:
    """Print which half of Dr.GRPO a run lacks that has the other one."""
    if remark := half_of_dr_grpo(method, loss_aggregation):
        print(f"remark: {remark}", flush=True)


def _needs_advantages(sample: Any) -> bool:
    return isinstance(sample, RewardedSample) and not sample.has_advantages
