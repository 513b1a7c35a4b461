"""The fused head in Megatron's models: the loss straight from hidden states, without the logits.

The output layer hands over what enters it and its weight (`take_output_processor`). What takes them there and what turns
the model's output into the loss belong to one micro-batch, so they are one object.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_pg.config import PolicyLossConfig
from megatron_pg.head import (
    HeadOptions,
    Ragged,
    TopKTeacher,
    WholeTeacher,
    linear_log_probs_and_entropy,
    linear_token_loss,
)
from megatron_pg.head.output_layer import largest_chunk
from megatron_pg.loss.distillation import teacher_of
from megatron_pg.loss.gradient_scope import gradient_scope, leaves_out_zero_advantages
from megatron_pg.loss.inputs import check_vocabulary
from megatron_pg.loss.metrics import MicroBatchMetrics
from megatron_pg.loss.micro_batch import MicroBatchLoss
from megatron_pg.megatron.groups import ParallelGroups
from megatron_pg.step.batch import PackedBatch, to_device


class OutputRows:
    """The rows of one micro-batch that enter the output layer, on one rank: those that score an active token.

    Args:
        config: the temperature, the precision of the logits, and which tokens have a gradient.
        batch: the micro-batch.
        groups: the process groups.
        vocab_size: the vocabulary without padding; None counts every column.
        chunk_tokens: rows of logits in memory at once; None: about 1.25 GiB of them.
    """

    def __init__(
        self,
        config: PolicyLossConfig,
        batch: PackedBatch,
        groups: ParallelGroups,
        *,
        vocab_size: int | None = None,
        chunk_tokens: int | None = None,
    ) -> None:
        self._batch, self._group = batch, groups.tensor
        self.options = HeadOptions(
            tensor_parallel_group=groups.tensor,
            temperature=config.rollout_temperature,
            vocab_size=vocab_size,
            fp32_logits=config.fp32_lm_head,
            chunk_tokens=chunk_tokens,
            with_entropy=config.needs_entropy,
        )
        """Settings that the functions of `megatron_pg.head` take."""
        active, self.gradient_rows = active_rows(config, batch)
        self.kept: Ragged | None = None
        """Their kept sets, on the host; None without `--replay-sampling-set`, and where no sample has one."""
        # By the samples, which all context-parallel ranks have, and not by this rank's rows: who takes the other way calls
        # the all-reduce of sequence sums another number of times.
        sets = [sample.kept_tokens for sample in batch.samples if config.replay_sampling_set]
        if batch.kept_tokens is not None and any(each and each.values.numel() for each in sets):
            self.kept = batch.kept_tokens.select(active)
        self._active = to_device(active, batch.tokens.device)
        self._samples = batch.window.window_segment_ids[active]

    def __len__(self) -> int:
        return len(self._active)

    def factors(self, hidden_states: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the hidden states [rows, hidden], the weight [v/tp, hidden] and the targets [rows] int64.

        Args and errors are those of `FusedHead.output_processor`.
        """
        vocab_size, tokens = self.options.vocab_size, self._batch.window.local_tokens
        check_vocabulary(self._batch, weight.shape[0], self._group, vocab_size)
        if tuple(hidden_states.shape[:2]) != (tokens, 1):
            raise ValueError(
                f"hidden states are {tuple(hidden_states.shape)} and the micro-batch has {tokens} tokens on this rank: "
                "feed the model batch.tokens[None]"
            )
        rows = self._batch.logit_rows[self._active]
        return hidden_states[:, 0].index_select(0, rows), weight, self._batch.targets[rows]

    def teacher(
        self, config: PolicyLossConfig, local_columns: int, weight: Tensor | None
    ) -> WholeTeacher | TopKTeacher | None:
        """Collect the teacher on these rows, where one is distilled; see `teacher_of`."""
        if not config.distills or not self._batch.samples:
            return None
        return teacher_of(
            config,
            self._batch,
            local_columns,
            self._group,
            weight,
            lambda channel: channel[self._active],
            self.options.vocab_size,
        )

    def in_window(self, values: Tensor, rows: slice = slice(None)) -> Tensor:
        """Values [rows] -> [window], 0 elsewhere: the loss masks those positions."""
        window = values.new_zeros(len(self._batch.window))
        return window.index_copy(0, self._active[rows], values)

    def of_whole_samples(self, size: int) -> list[int]:
        """Count the rows [parts] in a row that end on a border of samples, `size` or fewer unless one sample has more; maybe 0.

        The parts are of the same samples on every rank of the context-parallel group. Rows have to be in the window's order.
        """
        masks = [torch.zeros(0)] + [sample.loss_mask for sample in self._batch.samples]
        borders = self._batch.window.sample_borders(torch.cat(masks).bool(), size)
        ends: list[int] = torch.searchsorted(self._samples, torch.tensor(borders)).diff().tolist()
        return ends


class FusedHead:
    """The output end of the model for one micro-batch: `output_processor` and `loss`.

    Only rows that score an active token enter the output layer, and only those with a gradient the products of backward.
    Backward computes the loss, its metrics and all gradients in one pass over chunks of logits; value and metrics are NaN
    until then, unless gradients are off. A chunk holds whole sequences where the loss looks at those, and all rows where a
    function of the user's own may look at any: up to four times the usual chunk in three matrix products, above that in up
    to four (see `megatron_pg.head.from_hidden`). Under `--replay-sampling-set` the kept columns alone are multiplied, of rows
    that have a set, and the values are there at once.

    Args:
        micro_batch_loss: the loss of the micro-batch as a function of its log-probs.
        groups, vocab_size, chunk_tokens: see `OutputRows`.
        teacher_weight: see `PolicyStep`.
    """

    def __init__(
        self,
        micro_batch_loss: MicroBatchLoss,
        groups: ParallelGroups,
        *,
        vocab_size: int | None = None,
        chunk_tokens: int | None = None,
        teacher_weight: Tensor | None = None,
    ) -> None:
        self._micro_batch_loss, self._teacher_weight = micro_batch_loss, teacher_weight
        self._rows = OutputRows(
            micro_batch_loss.config,
            micro_batch_loss.batch,
            groups,
            vocab_size=vocab_size,
            chunk_tokens=chunk_tokens,
        )
        self._metrics = MicroBatchMetrics()

    def output_processor(self, hidden_states: Tensor, weight: Tensor) -> Tensor:
        """Compute the loss in the place of the output layer's product, on every tensor-parallel rank of the last stage.

        Args:
            hidden_states: [local_tokens, 1, hidden], all tokens also under sequence parallelism.
            weight: [v/tp, hidden], tied or not.

        Returns:
            The 0-d loss. `loss` takes what the model makes of it.

        Raises:
            ValueError: the hidden states are not those of the micro-batch, or a response token is outside the
                vocabulary.
        """
        factors = self._rows.factors(hidden_states, weight)
        if (kept := self._rows.kept) is not None:
            found = linear_log_probs_and_entropy(*factors, self._rows.options, kept=kept)
            loss, self._metrics = self._micro_batch_loss(*map(self._rows.in_window, found))
            return loss
        config = self._micro_batch_loss.config
        teacher = self._rows.teacher(config, len(weight), self._teacher_weight)
        return self._loss_in_one_pass(*factors, teacher)

    def loss(self, output_tensor: Tensor) -> tuple[Tensor, MicroBatchMetrics]:
        """Return the local loss and its metrics from the model's output."""
        return output_tensor.reshape(()), self._metrics

    def _loss_in_one_pass(
        self,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        teacher: WholeTeacher | TopKTeacher | None,
    ) -> Tensor:
        """Gradients chunk by chunk; value and metrics from all log-probs together, as soon as they are there.

        The other tokens of a chunk's window hold zeros. They change the value of the loss and not the chunk's
        coefficients, which is what a sum over tokens, or over whole sequences of a chunk, means. Sums over sequences are
        all-reduced once for each piece, and ranks of the context-parallel group have equally many.
        """
        metrics = self._metrics = MicroBatchMetrics.awaited(
            self._micro_batch_loss.config, hidden.device
        )
        sizes = self._piece_sizes(len(weight))
        everything = slice(0, len(self._rows)) if sizes is None or len(sizes) == 1 else None
        whole: list[tuple[Tensor, MicroBatchMetrics]] = []

        def token_loss(*given: Any) -> Tensor:
            *vectors, rows = given
            of_window = [self._rows.in_window(each, rows) for each in vectors]
            if rows != everything:
                return self._micro_batch_loss.loss(*of_window)
            whole[:] = [self._micro_batch_loss(*of_window)]
            return whole[0][0]

        total, *vectors = linear_token_loss(
            hidden,
            weight,
            targets,
            token_loss,
            self._rows.options,
            gradient_rows=self._rows.gradient_rows,
            piece_sizes=sizes,
            defer=True,
            teacher=teacher,
        )
        value = total.detach()  # `total` would hold its node, which holds what is called after it

        def fill(*_: Any) -> None:
            if not whole:  # in several pieces, or in none
                whole.append(self._micro_batch_loss(*map(self._rows.in_window, vectors)))
            loss, found = whole.pop()
            value.copy_(loss.detach())
            metrics.fill(found)

        if total.grad_fn is None:
            fill()
        else:
            total.grad_fn.register_hook(fill)
        return total

    def _piece_sizes(self, columns: int) -> list[int] | None:
        """Count the rows whose gradients wait for one another, [pieces]; None where none waits."""
        scope = gradient_scope(self._micro_batch_loss.config)
        if scope == "token":
            return None
        if scope == "micro_batch":
            return [len(self._rows)]
        # Never a size that the rank's own device decides: a rank that calls the all-reduce more often waits forever.
        return self._rows.of_whole_samples(
            self._rows.options.chunk_tokens or largest_chunk(columns)
        )


def active_rows(config: PolicyLossConfig, batch: PackedBatch) -> tuple[Tensor, int]:
    """List the tokens of the window that are scored, on the host: those with a gradient first.

    Where the policy objective is the only term of the loss, a token whose advantage is 0 has none: its log-prob is
    wanted for the metrics alone. Where other tokens wait for it, tokens stay in the window's order.

    Returns:
        [active tokens] int64 into the window, and how many of them have a gradient.
    """
    in_window = batch.window.response_indices
    nothing = [torch.zeros(0)]
    active = torch.cat(nothing + [sample.loss_mask for sample in batch.samples])[in_window].bool()
    with_gradient = active
    if gradient_scope(config) == "token" and leaves_out_zero_advantages(config):
        advantages = torch.cat(nothing + [s.advantages for s in batch.samples])
        with_gradient = active & (advantages[in_window] != 0)
    first = with_gradient.nonzero()[:, 0]
    rest = (active & ~with_gradient).nonzero()[:, 0]
    return torch.cat([first, rest]), len(first)
