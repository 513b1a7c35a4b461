"""Steps from rollout files: nothing is generated, and where the files have been read to is in the checkpoint."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_pg import PolicyLossConfig, Sample
from megatron_pg.config.planning import PlanningConfig
from megatron_pg.megatron.groups import ParallelGroups
from megatron_pg.rollout_files import RewardedSample, RolloutFiles, with_group_advantages
from megatron_pg.step import StepCollector, StepSamples
from megatron_pg.step.agreement import compute_and_gather
from megatron_pg.step.sources import no_sample_in

from .model import Policy
from .training_step import TrainingStep


class FileSteps:
    """A `SampleStream` of `--rollout-files`, in steps of `--docs-per-step`.

    Args:
        args: validated.
        config: the policy loss; what it needs of a sample, every row must have.
        groups: this rank's.
        device: what the collectives of `groups` take.

    Raises:
        ValueError, FileNotFoundError: naming the file.
    """

    title = "rollout files"
    steps_per_round = 1

    def __init__(
        self,
        args: argparse.Namespace,
        config: PolicyLossConfig,
        groups: ParallelGroups,
        device: torch.device,
    ) -> None:
        planning = PlanningConfig.from_args(args)
        self.vocabulary_size = int(args.vocab_size)
        self._max_length = int(args.max_position_embeddings)
        self._num_steps = int(args.train_iters)
        self._paths = planning.rollout_files
        self._keeps_groups = planning.keep_prompt_groups
        self._allows_different_prompts = planning.allow_different_prompts_in_group
        self._refuses_cut_groups = config.loss_aggregation == "prompt_mean"
        self._groups, self._device = groups, device
        files = RolloutFiles(
            planning.rollout_files,
            data_parallel_rank=groups.data_rank,
            data_parallel_size=groups.data_size,
            on_bad_row=planning.on_bad_row,
            required_fields=config.required_sample_fields,
            vocab_size=self.vocabulary_size,
            distinct_ids=planning.distinct_ids == "file",
        )
        self._collector = StepCollector(
            files,
            docs_per_step=planning.docs_per_step or 1,
            mode=planning.docs_per_step_mode,
            keep_prompt_groups=planning.keep_prompt_groups,
            refuse_cut_groups=self._refuses_cut_groups,
            data_parallel_group=groups.data,
        )

    def attach(self, policy: Policy) -> None:
        """Nothing here needs the policy."""

    def steps(self, first_step: int) -> Iterator[TrainingStep]:
        """The steps that remain: `--train-iters`, or until the files end.

        Raises:
            ValueError: there is not even a first one.
        """
        for step in range(first_step, self._num_steps):
            collected = self._collector.collect()
            if collected is None:
                if step == 0:
                    raise no_sample_in(self._paths, self._collector.state().num_skipped)
                return
            yield TrainingStep(self._samples(collected), self._metrics(collected))

    @property
    def reference(self) -> None:
        """The files have the log-probs of a reference policy."""

    def rank_state(self) -> dict[str, Any]:
        """Where the files have been read to, and the samples that are carried over."""
        return {
            "data_parallel_rank": self._groups.data_rank,
            "is_first_copy": self._is_first_copy,
            "collector": self._collector.state(),
        }

    @property
    def _is_first_copy(self) -> bool:
        """Of the ranks that hold the same samples."""
        groups = self._groups
        return groups.tensor_rank == groups.pipeline_rank == groups.context_rank == 0

    def restore(self, ranks: Sequence[dict[str, Any]]) -> None:
        """Go on where the files were left, at any number of data- and context-parallel ranks."""
        states = {
            rank["data_parallel_rank"]: rank["collector"] for rank in ranks if rank["is_first_copy"]
        }
        self._collector.load_states([states[rank] for rank in sorted(states)])

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
        if _needs_advantages(sample) and not (self._keeps_groups or self._refuses_cut_groups):
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
            device=self._device,
        )
        dist.all_reduce(sums, group=self._groups.data)
        reward, num_without, length, count = sums.tolist()
        return {
            "docs": collected.num_documents,
            "skipped_rows": collected.num_skipped,
            "reward": None if num_without or not count else reward / count,
            "response_length": length / count if count else None,
        }


def _needs_advantages(sample: Sample) -> bool:
    return isinstance(sample, RewardedSample) and not sample.has_advantages
