"""Log-probs that rollouts lack: of the policy that the step starts from, and of the reference policy."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from megatron.training import checkpointing, training

from megatron_pg import PolicyLossConfig, Sample
from megatron_pg.megatron import compute_log_probs
from megatron_pg.megatron.groups import ParallelGroups
from megatron_pg.step.agreement import gather

from .initialize import provide_model


class Scoring:
    """Fills in what the policy loss needs of samples and a model can say; every rank calls everything alike."""

    def __init__(
        self, args: argparse.Namespace, config: PolicyLossConfig, groups: ParallelGroups
    ) -> None:
        self._args, self._config, self._groups = args, config, groups
        self._reference = None if args.ref_load is None else load_reference(args)

    def filled(self, samples: Sequence[Sample], policy: list[Any]) -> list[Sample]:
        """Give this data-parallel rank's samples the log-probs that the loss needs; those that they have stay."""
        found = self._with(list(samples), "old_log_probs", policy)
        return self._with(found, "ref_log_probs", self._reference)

    def _with(self, samples: list[Sample], name: str, model: list[Any] | None) -> list[Sample]:
        if name not in self._config.required_sample_fields or model is None:
            return samples
        missing = [i for i, sample in enumerate(samples) if getattr(sample, name) is None]
        if not any(gather(len(missing), self._groups.data)):
            return samples
        scored = compute_log_probs(
            model,
            [samples[index] for index in missing],
            self._config,
            max_tokens_per_microbatch=self._args.max_tokens_per_microbatch,
            oversized=self._args.oversized_samples,
            groups=self._groups,
            vocab_size=self._args.vocab_size,
        )
        for index, log_probs in zip(missing, scored.log_probs, strict=True):
            samples[index] = dataclasses.replace(samples[index], **{name: log_probs})
        return samples


def load_reference(args: argparse.Namespace) -> list[Any]:
    """The chunks of the reference policy, frozen; every rank must call it."""
    is_hugging_face = (Path(args.ref_load) / "config.json").exists()
    if not (is_hugging_face or checkpointing.checkpoint_exists(args.ref_load)):
        raise ValueError(
            f"--ref-load: {args.ref_load} holds neither a checkpoint of Megatron nor Hugging Face weights"
        )
    chunks: list[Any] = training.get_model(provide_model, wrap_with_ddp=False)
    for chunk in chunks:
        chunk.requires_grad_(False)
    if is_hugging_face:
        from .hugging_face import load_hugging_face  # needs safetensors

        load_hugging_face(chunks, args.ref_load)
    else:
        # The weights of the last checkpoint of the folder and nothing else; the count is put back.
        alone = {"finetune": True, "ckpt_step": None, "pretrained_checkpoint": None}
        count = args.consumed_train_samples
        with mock.patch.multiple(args, **alone, consumed_train_samples=count):
            checkpointing.load_checkpoint(chunks, None, None, load_arg="ref_load")
    return chunks
