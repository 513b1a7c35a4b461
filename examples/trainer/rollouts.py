"""Steps from rollout files: nothing is generated, and where the files have been read to is in the checkpoint."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_pg import PolicyLossConfig, Sample
from megatron_pg.config.planning import PlanningConfig
from megatron_pg.megatron.groups import ParallelGroups
from megatron_pg.rollout_files import RewardedSample, RolloutFiles, with_group_advantages
from megatron_pg.step import CollectorState, StepCollector, StepSamples
from megatron_pg.step.agreement import compute_and_gather
from megatron_pg.step.sources import no_sample_in

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
        self._max_length = int(args.max_position_embeddings)
        self._paths = planning.rollout_files
        self._cuts_groups = not (
            planning.keep_prompt_groups or config.loss_aggregation == "prompt_mean"
        )
        self._allows_different_prompts = planning.allow_different_prompts_in_group
        self._groups = groups
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
            return self._samples(collected), self._metrics(collected)
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

    def _samples(self, collected: StepSamples) -> list[Sample]:
        """The samples, those without advantages in the file with advantages from the rewards of the step."""
        compute_and_gather(
            lambda: [self._check(sample) for sample in collected.samples], len, self._groups.data
        )
        rewarded = [sample for sample in collected.samples if _needs_advantages(sample)]
        replaced, _ = with_group_advantages(
            rewarded,
            data_parallel_group=self._groups.data,
            allow_different_prompts=self._allows_different_prompts,
        )
        remaining = iter(replaced)
        return [
            next(remaining) if _needs_advantages(sample) else sample for sample in collected.samples
        ]

    def _check(self, sample: Sample) -> None:
        if sample.total_length > self._max_length:
            raise ValueError(
                f"{sample.name} has {sample.total_length} tokens, more than --max-position-embeddings "
                f"{self._max_length}"
            )
        if _needs_advantages(sample) and self._cuts_groups:
            raise ValueError(
                f"{sample.name} has a reward and no advantages: its prompt group is the baseline, which a step must "
                "not cut; give --keep-prompt-groups"
            )

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


def _needs_advantages(sample: Any) -> bool:
    return isinstance(sample, RewardedSample) and not sample.has_advantages
