"""The teacher of a distillation, in side channels of the samples."""

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
"""The side channels that hold a teacher, by `--distill-teacher`. Each has a row for every response
token."""


@dataclass(frozen=True)
class TeacherChannels:
    """The divergence of a loss from its teacher, and the kind of side channels that hold it."""

    divergence: Divergence
    kind: str
    output: ClassVar[str] = "divergence"
    shape: ClassVar[tuple[int, ...]] = WholeTeacher.shape
    flags: ClassVar[str] = "--policy-loss distill or --distill-coef"

    @classmethod
    def of(cls, config: PolicyLossConfig) -> Self | None:
        """Return None for a loss without a teacher."""
        divergence = Divergence(config.distill_divergence, config.distill_beta)
        return cls(divergence, str(config.distill_teacher)) if config.distills else None

    def require(self, batch: PackedBatch) -> None:
        """Refuse a micro-batch without these side channels."""
        for name in TEACHER_CHANNELS[self.kind] if batch.samples else ():
            channel, length = batch.side_channels.get(name), len(batch.window)
            if not isinstance(channel, Tensor) or len(channel) != length:
                problem = "none" if channel is None else f"{len(channel)} rows for {length} tokens"
                raise ValueError(
                    f"{batch.samples[0].name}: side_channels[{name!r}] is missing or of the wrong "
                    f"length ({problem}), and "
                    f"--distill-teacher {self.kind} needs it: give a tensor "
                    f"[response_length, ...] to every sample"
                )

    def checked_weight(self, weight: Tensor | None) -> Tensor | None:
        """Return the output weight of a teacher's hidden states, detached, or refuse its absence;
        None for a teacher of another kind.
        """
        if self.kind != "hidden":
            return None
        if weight is None:
            raise ValueError(
                "--distill-teacher hidden needs teacher_weight=, this tensor-parallel rank's rows "
                "of the teacher's output weight"
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
        """Collect the teacher on the rows that `place` makes of [window, ...]; None where there is
        no sample.

        `local_columns` are those of the student's output layer on this rank, `weight` is [v/tp,
        teacher's hidden].
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
                f"{list(first.shape[1:])} logits, expected the "
                f"student's vocabulary of {width} (with padding {padded_width}): teacher and "
                f"student need one vocabulary"
            )
        own = first[:, rank * local_columns : (rank + 1) * local_columns]
        return WholeTeacher(self.divergence, logits=pad(own, (0, local_columns - own.shape[1])))
