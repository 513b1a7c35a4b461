"""Teacher for distillation, from side channels of the samples."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from megatron_pg.config.policy_loss import PolicyLossConfig
from megatron_pg.head import Divergence, HeadOptions, TopKTeacher, WholeTeacher
from megatron_pg.step.batch import PackedBatch

TEACHER_CHANNELS = {
    "logits": ("teacher_logits",),
    "hidden": ("teacher_hidden",),
    "top_k": ("teacher_ids", "teacher_log_probs"),
}
"""Side channels of a teacher, by `--distill-teacher`. Each has a row per response token."""


@dataclass(frozen=True)
class TeacherChannels:
    """Divergence from a teacher, and the kind of its side channels."""

    divergence: Divergence
    kind: str
    output: ClassVar[str] = "divergence"
    shape: ClassVar[tuple[int, ...]] = WholeTeacher.shape
    flags: ClassVar[str] = "--policy-loss distill or --distill-coef"

    @classmethod
    def of(cls, config: PolicyLossConfig) -> Self | None:
        """Return the config's teacher, or None without one."""
        divergence = Divergence(config.distill_divergence, config.distill_beta)
        return cls(divergence, str(config.distill_teacher)) if config.distills else None

    def require(self, batch: PackedBatch) -> None:
        """Raise a ValueError if a micro-batch lacks the side channels."""
        for name in TEACHER_CHANNELS[self.kind] if batch.samples else ():
            channel, length = batch.side_channels.get(name), len(batch.window)
            if not isinstance(channel, Tensor) or len(channel) != length:
                problem = "none" if channel is None else f"{len(channel)} rows for {length} tokens"
                raise ValueError(
                    f"{batch.samples[0].name}: side_channels[{name!r}] is missing or has the wrong "
                    f"length ({problem}), but --distill-teacher {self.kind} requires it. Pass a "
                    "tensor [response_length, ...] for every sample."
                )

    def checked_weight(self, weight: Tensor | None) -> Tensor | None:
        """Return the output weight for a teacher's hidden states, detached, or None for other kinds
        of teachers.

        Raises:
            ValueError: the weight is missing.
        """
        if self.kind != "hidden":
            return None
        if weight is None:
            raise ValueError(
                "--distill-teacher hidden requires teacher_weight=, this tensor-parallel rank's "
                "rows of the teacher's output weight"
            )
        return weight.detach()

    def on_rows(
        self,
        batch: PackedBatch,
        place: Callable[[Any], Tensor],
        local_columns: int,
        options: HeadOptions,
        weight: Tensor | None,
    ) -> WholeTeacher | TopKTeacher | None:
        """Collect the teacher on rows, which `place` makes from [window, ...]. Return None without
        samples.

        `local_columns` is the number of columns of the student's output layer on this rank,
        `weight` is [v/tp, teacher's hidden].
        """
        if not batch.samples:
            return None
        first, *others = (place(batch.side_channels[name]) for name in TEACHER_CHANNELS[self.kind])
        if self.kind == "top_k":
            (log_probs,) = others
            log_probs = log_probs if log_probs.dtype == torch.float64 else log_probs.float()
            return TopKTeacher(self.divergence, first.long(), log_probs)
        if (weight := self.checked_weight(weight)) is not None:
            return WholeTeacher(self.divergence, hidden=first.to(weight.dtype), weight=weight)
        group = options.tensor_parallel_group
        rank, size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        padded_width = size * local_columns
        width = options.vocab_size or padded_width
        if first.shape[1:] not in {(width,), (padded_width,)}:
            raise ValueError(
                f"{batch.samples[0].name}: side_channels['teacher_logits'] has rows of "
                f"{list(first.shape[1:])} logits, expected the student's vocabulary of {width} "
                f"(with padding {padded_width}). Use a teacher with the student's vocabulary."
            )
        own = first[:, rank * local_columns : (rank + 1) * local_columns]
        return WholeTeacher(self.divergence, logits=pad(own, (0, local_columns - own.shape[1])))
