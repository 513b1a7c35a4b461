"""`PlanningConfig`: the contents of a step and its split into micro-batches."""

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from megatron_pg.config.settings import Settings, add_args, setting
from megatron_pg.config.values import COUNT, flag_of

OversizedSamples = Literal["error", "own_microbatch"]
DocsPerStepMode = Literal["at_least", "exact"]
Balance = Literal["time", "tokens"]
OnBadRow = Literal["error", "skip"]
DistinctIds = Literal["rank", "file"]


@dataclass(frozen=True)
class PlanningConfig(Settings):
    """Settings for a step's contents and its micro-batches.

    Raises:
        ValueError: values are out of range or contradict each other. One error lists all
            violations and names flags.
    """

    # fmt: off
    max_tokens_per_microbatch: int = field(metadata={"interval": COUNT, "help": """
        Maximum packed tokens per micro-batch over the context-parallel group, including padding.
        Required."""})
    oversized_samples: OversizedSamples = setting("error", """
        Treatment of a sample longer than --max-tokens-per-microbatch. error: stop and name it.
        own_microbatch: give it its own micro-batch.""")
    balance: Balance = setting("time", """
        Quantity to balance between micro-batches, within --max-tokens-per-microbatch. time: a l +
        b l^2 per sequence of l tokens, with a and b from the model's shape. tokens: the number of
        tokens.""")
    ragged_microbatches: bool = setting(False, """
        Let data-parallel ranks run different numbers of micro-batches, without empty ones on the
        ranks with fewer. Not with expert parallelism, where ranks run in lockstep.""")
    docs_per_step: int | None = setting(None, COUNT, """
        Rollouts per step, over all data-parallel ranks. Unset: the training script decides.""")
    docs_per_step_mode: DocsPerStepMode = setting("at_least", """
        Treatment of samples beyond --docs-per-step. at_least: the step keeps them. exact: the next
        step gets them.""")
    keep_prompt_groups: bool = setting(False, """
        End steps between prompt groups. A step may then exceed --docs-per-step by part of a group.
        Otherwise --loss-aggregation prompt_mean rejects a group that the end of a step splits.""")
    rollout_files: tuple[str, ...] = setting((), """
        Parquet and JSON Lines files to train from, one row per sample, in this order. A directory
        stands for all its files, by name.""")
    on_bad_row: OnBadRow = setting("error", """
        Treatment of a row of --rollout-files that is not a valid sample. error: stop and report
        why. skip: skip and count it.""")
    allow_different_prompts_in_group: bool = setting(False, """
        Let the samples of a prompt group have different prompts, for environments that vary the
        prompt. By default different prompts are an error, because two ranks or files may have used
        the same group numbers.""")
    allow_different_group_sizes: bool = setting(False, """
        Let a step's prompt groups differ in size under --loss-aggregation prompt_mean, for dynamic
        sampling and agentic rollouts. By default different sizes are an error, because the end of
        the step may have split a group.""")
    distinct_ids: DistinctIds | None = setting(None, """
        Make group_index and rollout_id distinct if each rank, or each file of --rollout-files,
        numbers from 0. rank: equal ids on two data-parallel ranks are different. file: equal ids in
        two files are different. Unset: ids are unique over the step.""")
    # fmt: on

    def conflicts(self, given: Mapping[str, Any]) -> Iterator[str]:
        if self.on_bad_row != "error" and not self.rollout_files:
            yield "--on-bad-row has no effect without --rollout-files. Add files or remove it."
        if self.distinct_ids == "file" and not self.rollout_files:
            yield (
                "--distinct-ids file requires --rollout-files. Add files, choose rank or remove it."
            )
        if self.distinct_ids == "rank" and self.rollout_files:
            apart = "the rows of a group go to different ranks"
            yield f"--distinct-ids rank splits groups of --rollout-files: {apart}. Choose file."
        for name in ("docs_per_step_mode", "keep_prompt_groups"):
            is_given = getattr(self, name) != getattr(PlanningConfig, name)
            if is_given and given.get("docs_per_step") is None:
                yield (
                    f"{flag_of(name)} has no effect without --docs-per-step. Add --docs-per-step "
                    "or remove it."
                )


def add_planning_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the planning flags in an argument group. Usable as Megatron's `extra_args_provider`.

    Raises:
        ValueError: the parser has a flag of the same name that stores to a different attribute.
    """
    add_args(parser, PlanningConfig, "planning", "Contents of a step, and its micro-batches.")
    return parser


def validate_planning_args(args: argparse.Namespace) -> PlanningConfig:
    """Check the planning flags against each other and the trainer's flags, and change nothing.

    Raises:
        ValueError: a value is out of range, or `--ragged-microbatches` is combined with expert
            parallelism or a global balancing loss.
    """
    config = PlanningConfig.from_args(args)
    expert_size = vars(args).get("expert_model_parallel_size") or 1
    if config.ragged_microbatches and expert_size > 1:
        raise ValueError(
            f"--ragged-microbatches does not work with --expert-model-parallel-size {expert_size}: "
            "expert-parallel ranks must run the same number of micro-batches. Remove "
            "--ragged-microbatches."
        )
    kinds = vars(args).get("moe_router_load_balancing_type") or ()
    if config.ragged_microbatches and "global_aux_loss" in kinds:
        raise ValueError(
            "--ragged-microbatches does not work with --moe-router-load-balancing-type "
            "global_aux_loss, which all-reduces over all data-parallel ranks in every micro-batch. "
            "Remove --ragged-microbatches."
        )
    return config
