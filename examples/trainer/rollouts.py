"""Steps from rollout files, with their position for the checkpoint, and missing log-probs."""

import itertools
from argparse import Namespace
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest import mock

import torch.distributed as dist
from megatron.training import checkpointing, training

from megatron_pg import PolicyLossConfig, Sample, StepCollector, StepPlan, plan_step, whiten
from megatron_pg.megatron import ParallelGroups, compute_log_probs
from megatron_pg.rollout_files import (
    CollectorState,
    RewardedSample,
    RolloutFiles,
    StepSamples,
    with_group_advantages,
)
from megatron_pg.rollout_files.collector import no_sample_in
from megatron_pg.step import SampleCost
from megatron_pg.step.advantages import OF_PROMPT_GROUPS
from megatron_pg.step.agreement import compute_and_gather, gather

from .model import provide_model

Step = tuple[list[Sample], dict[str, float | None]]
"""This data-parallel rank's samples, and their metrics before the step over all ranks."""


def row_settings(args: Namespace, config: PolicyLossConfig) -> dict[str, Any]:
    """Return the reader's settings. Rows need the loss's inputs except those that a model
    computes.
    """
    computed = {"old_log_probs"} | ({"ref_log_probs"} if args.ref_load else set())
    return {
        "required_fields": [n for n in config.required_sample_fields if n not in computed],
        "vocab_size": args.vocab_size,
        "distinct_ids": args.distinct_ids == "file",
    }


def layout_of(args: Namespace) -> dict[str, Any]:
    """Return a micro-batch's layout over ranks for `plan_step` and `pack`."""
    split = args.tensor_model_parallel_size * args.context_parallel_size
    multiple = split if args.sequence_parallel else 1
    return {"cp_size": args.context_parallel_size, "pad_to_multiple": multiple}


def plan_of(
    args: Namespace, samples: Sequence[Sample], group: dist.ProcessGroup | None = None
) -> StepPlan:
    """Plan a step with this rank's samples. Every rank of the group calls it."""
    stages = args.microbatch_group_size_per_vp_stage or args.pipeline_model_parallel_size
    shape = Namespace(**vars(args) | {"num_layers": args.transformer_layers})
    return plan_step(
        samples,
        max_tokens_per_microbatch=args.max_tokens_per_microbatch,
        data_parallel_group=group,
        **layout_of(args),
        cost=SampleCost.balancing(args.balance, shape, args.vocab_size),
        microbatch_group_size=stages if args.virtual_pipeline_model_parallel_size else 1,
        ragged=args.ragged_microbatches,
        oversized=args.oversized_samples,
        allow_different_prompts=args.allow_different_prompts_in_group,
        # The collector of files does not split groups, so their sizes are the files'.
        allow_different_group_sizes=bool(args.rollout_files),
        samples_per_group=None if args.rollout_files else args.samples_per_prompt,
    )


class FileSteps:
    """The steps of `--rollout-files`. Every rank makes one and makes the same calls.

    Without groups, they have all data-parallel ranks' samples, in file order.
    """

    def __init__(self, args: Any, config: Any, groups: ParallelGroups | None = None) -> None:
        self._args, self._config, self._group = args, config, groups.data if groups else None
        files = RolloutFiles(
            args.rollout_files,
            data_parallel_rank=groups.data_rank if groups else 0,
            data_parallel_size=groups.data_size if groups else 1,
            on_bad_row=args.on_bad_row,
            **row_settings(args, config),
        )
        self._collector = StepCollector(
            files,
            docs_per_step=args.docs_per_step,
            mode=args.docs_per_step_mode,
            keep_prompt_groups=args.keep_prompt_groups,
            refuse_cut_groups=config.loss_aggregation == "prompt_mean",
            data_parallel_group=self._group,
        )

    def collect(self, iteration: int) -> StepSamples[Sample] | None:
        """Return the samples of the step after `iteration` steps, None at the end of the files."""
        if (step := self._collector.collect()) is None and iteration == 0:
            raise no_sample_in(self._args.rollout_files, self._collector.num_skipped)
        return step

    def step(self, iteration: int) -> Step | None:
        """Return the step after `iteration` steps, None at the end of the files."""
        if (step := self.collect(iteration)) is None:
            return None
        samples = with_advantages(self._args, self._config, step.samples, self._group)
        counts = {"docs": step.num_documents, "skipped_rows": step.num_skipped}
        return samples, counts | means_of(step.samples, self._group)

    def attach(self, *_: Any) -> None:
        """Do nothing: the files have responses."""

    def shown(self, samples: Sequence[Sample]) -> list[str]:
        """Return nothing, because the tokenizer is unknown."""
        return []

    def state(self) -> tuple[Any, ...]:
        """Return the position in the files as plain values, the same on every rank."""
        return tuple(self._collector.state())

    def restore(self, state: tuple[Any, ...]) -> None:
        """Resume the files at the position of a run with any sharding."""
        self._collector.load_state(CollectorState(*state))


def means_of(samples: Sequence[Any], group: dist.ProcessGroup | None) -> dict[str, float | None]:
    """Return the mean reward and response length of the rollouts on all data-parallel ranks.

    A rollout's reward is the mean over its samples, and its length the sum. The mean reward is None
    if any is missing.
    """
    rows = [(s.rollout_id, getattr(s, "reward", None), s.response_length) for s in samples]
    rewards: dict[Any, list[Any]] = defaultdict(list)
    lengths = []
    for number, (rollout, reward, length) in enumerate(itertools.chain(*gather(rows, group))):
        rewards[("sample", number) if rollout is None else rollout].append(reward)
        lengths.append(length)
    is_known = rewards and all(None not in of_rollout for of_rollout in rewards.values())
    return {
        "reward": fmean(map(fmean, rewards.values())) if is_known else None,
        "response_length": sum(lengths) / len(rewards) if rewards else None,
    }


def with_advantages(
    args: Namespace,
    config: PolicyLossConfig,
    samples: Sequence[Sample],
    group: dist.ProcessGroup | None = None,
) -> list[Sample]:
    """Check a step's samples, and compute `--advantage` for samples that have only rewards. Every
    data-parallel rank must call it.

    Raises ValueError for a sample that is too long, or with a prompt group that may be split.
    """
    has_groups = args.task or args.keep_prompt_groups or config.loss_aggregation == "prompt_mean"
    cuts_groups = args.advantage in OF_PROMPT_GROUPS and not has_groups

    def check() -> None:
        for sample in samples:
            if sample.total_length > args.max_position_embeddings:
                found = f"{sample.name} has {sample.total_length} tokens, more than"
                raise ValueError(
                    f"{found} --max-position-embeddings {args.max_position_embeddings}"
                )
            if cuts_groups and isinstance(sample, RewardedSample) and not sample.has_advantages:
                found = f"{sample.name} has a reward and no advantages, so its baseline needs the"
                raise ValueError(f"{found} whole prompt group: add --keep-prompt-groups")

    compute_and_gather(check, id, group)
    different = {"allow_different_prompts": args.allow_different_prompts_in_group}
    whole, _ = with_group_advantages(
        samples, method=args.advantage, data_parallel_group=group, **different
    )
    if not args.whiten_advantages:
        return whole
    rows, masks = ([getattr(s, name) for s in whole] for name in ("advantages", "loss_mask"))
    pairs = zip(whole, whiten(rows, masks, data_parallel_group=group), strict=True)
    return [replace(sample, advantages=advantages) for sample, advantages in pairs]


class Scoring:
    """The computation of missing log-probs that the policy loss needs. Every rank makes the same
    calls.
    """

    def __init__(self, args: Namespace, config: PolicyLossConfig, groups: ParallelGroups) -> None:
        self._args, self._config, self._groups = args, config, groups
        self._reference = None if args.ref_load is None else load_reference(args)

    def filled(self, samples: Sequence[Sample], policy: list[Any]) -> list[Sample]:
        """Add the log-probs that the loss needs and this rank's samples lack."""
        with_old = self._with(list(samples), "old_log_probs", policy)
        return self._with(with_old, "ref_log_probs", self._reference)

    def _with(self, samples: list[Sample], name: str, model: list[Any] | None) -> list[Sample]:
        if name not in self._config.required_sample_fields or model is None:
            return samples
        missing = [i for i, sample in enumerate(samples) if getattr(sample, name) is None]
        if any(gather(len(missing), self._groups.data)):
            chosen = [samples[index] for index in missing]
            for index, values in zip(missing, self.scored(chosen, model), strict=True):
                samples[index] = replace(samples[index], **{name: values})
        return samples

    def scored(self, samples: Sequence[Sample], model: list[Any]) -> list[Any]:
        """Return the samples' log-probs under a model."""
        config = self._config
        if model is self._reference:  # the engine's expert choices are only for the policy
            config = replace(config, replay_routing=False)
        names = {"max_tokens_per_microbatch": "max_tokens_per_microbatch"}
        names |= {"oversized": "oversized_samples", "vocab_size": "vocab_size"}
        settings = {name: getattr(self._args, own) for name, own in names.items()}
        found = compute_log_probs(model, samples, config, groups=self._groups, **settings)
        return list(found.log_probs)


def load_reference(args: Namespace) -> list[Any]:
    """Load the frozen chunks of the reference policy. Every rank must call it."""
    is_hugging_face = (Path(args.ref_load) / "config.json").exists()
    if not (is_hugging_face or checkpointing.checkpoint_exists(args.ref_load)):
        raise ValueError(
            f"--ref-load {args.ref_load} has neither Megatron's nor Hugging Face weights"
        )
    chunks: list[Any] = training.get_model(provide_model, wrap_with_ddp=False)
    for chunk in chunks:
        chunk.requires_grad_(False)
    if is_hugging_face:
        from .hugging_face import load_hugging_face  # needs safetensors

        load_hugging_face(chunks, args.ref_load)
    else:
        # Load only the last checkpoint's weights, and restore the sample count.
        alone = {"finetune": True, "ckpt_step": None, "pretrained_checkpoint": None}
        count = args.consumed_train_samples
        with mock.patch.multiple(args, **alone, consumed_train_samples=count):
            checkpointing.load_checkpoint(chunks, None, None, load_arg="ref_load")
    return chunks
