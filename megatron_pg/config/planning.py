"""`PlanningConfig`: the contents of a step, and its cut into micro-batches."""

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
    """Settings of a step's contents and of its micro-batches.

    Raises:
        ValueError: values are out of range or contradict each other. One error has all violations,
            and names flags.
    """

    # fmt: off
    max_tokens_per_microbatch: int = field(metadata={"interval": COUNT, "help": """
        The most packed tokens of a micro-batch over the context-parallel group, padding included.
        Needed."""})
    oversized_samples: OversizedSamples = setting("error", """
        Treatment of a sample longer than --max-tokens-per-microbatch: stop and name it, or a
        micro-batch of its own.""")
    balance: Balance = setting("time", """
        Quantity to even out between micro-batches, within --max-tokens-per-microbatch. time: a l +
        b l^2 of each sequence of l tokens, with a and b from the model's shape. tokens: their
        number.""")
    ragged_microbatches: bool = setting(False, """
        Let data-parallel ranks run different numbers of micro-batches, where those with fewer
        would run empty ones. Refused with expert parallelism, whose ranks run in step.""")
    docs_per_step: int | None = setting(None, COUNT, """
        Documents (rollouts) of a step, over all data-parallel ranks. Unset: the training script
        decides.""")
    docs_per_step_mode: DocsPerStepMode = setting("at_least", """
        Samples pulled beyond --docs-per-step. at_least: the step keeps them. exact: the next step
        gets them.""")
    keep_prompt_groups: bool = setting(False, """
        End steps between prompt groups; a step then may hold a part of a group more than
        --docs-per-step. Without it a group cut by the end of a step is an error with
        --loss-aggregation prompt_mean.""")
    rollout_files: tuple[str, ...] = setting((), """
        Parquet and JSON Lines files to train from, one row a sample, in this order; of a directory
        all, by name.""")
    on_bad_row: OnBadRow = setting("error", """
        Treatment of a row of --rollout-files that is no sample. error: stop and say why. skip:
        pass and count it.""")
    allow_different_prompts_in_group: bool = setting(False, """
        Let the samples of a prompt group have different prompts, from an environment that varies
        the prompt. Without it such a group is an error: two ranks or files that number their
        groups alike would look the same.""")
    allow_different_group_sizes: bool = setting(False, """
        Let the prompt groups of a step differ in size under --loss-aggregation prompt_mean, as
        dynamic sampling and agentic rollouts make them. Without it such a step is an error: its
        end may have cut a group.""")
    distinct_ids: DistinctIds | None = setting(None, """
        Make group_index and rollout_id distinct where each rank, or each of --rollout-files,
        numbers its own from 0. rank: ids of two data-parallel ranks are two. file: ids of two
        files are two. Unset: ids are unique over the step.""")
    # fmt: on

    def conflicts(self, given: Mapping[str, Any]) -> Iterator[str]:
        if self.on_bad_row != "error" and not self.rollout_files:
            yield "--on-bad-row is about --rollout-files: give files, or drop it"
        if self.distinct_ids == "file" and not self.rollout_files:
            yield (
                "--distinct-ids file is about --rollout-files: give files, choose rank, or drop it"
            )
        if self.distinct_ids == "rank" and self.rollout_files:
            apart = "rows are dealt over the ranks, and groups of a file would fall apart"
            yield f"--distinct-ids rank with --rollout-files: {apart}; choose file, or drop it"
        for name in ("docs_per_step_mode", "keep_prompt_groups"):
            is_given = getattr(self, name) != getattr(PlanningConfig, name)
            if is_given and given.get("docs_per_step") is None:
                yield (
                    f"{flag_of(name)} is about a step of --docs-per-step: give --docs-per-step, or "
                    f"drop it"
                )


def add_planning_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags of planning, in a group of their own; usable as Megatron's
    `extra_args_provider`.

    Raises:
        ValueError: the parser has a flag of the same name that stores to another attribute.
    """
    add_args(parser, PlanningConfig, "planning", "Contents of a step, and its micro-batches.")
    return parser


def validate_planning_args(args: argparse.Namespace) -> PlanningConfig:
    """Check the flags of planning against each other and against the trainer's own; change nothing.

    Raises:
        ValueError: a value is out of range, or `--ragged-microbatches` with expert parallelism or a
            global balancing loss.
    """
    config = PlanningConfig.from_args(args)
    expert_size = vars(args).get("expert_model_parallel_size") or 1
    if config.ragged_microbatches and expert_size > 1:
        raise ValueError(
            f"--ragged-microbatches with --expert-model-parallel-size {expert_size}: ranks that "
            f"exchange tokens of experts "
            "run the same number of micro-batches; drop --ragged-microbatches"
        )
    kinds = vars(args).get("moe_router_load_balancing_type") or ()
    if config.ragged_microbatches and "global_aux_loss" in kinds:
        raise ValueError(
            "--ragged-microbatches with --moe-router-load-balancing-type global_aux_loss: its "
            "all-reduce in every micro-batch "
            "takes all data-parallel ranks; drop --ragged-microbatches"
        )
    return config
