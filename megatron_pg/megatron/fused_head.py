"""The fused head in Megatron's models: the loss from what enters the output layer and its weight,
without the logits.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_pg.head import (
    HeadOptions,
    LogitTransform,
    Ragged,
    linear_log_probs_and_entropy,
    linear_token_loss,
)
from megatron_pg.head.chunks import largest_chunk
from megatron_pg.loss.from_logits import check_vocabulary
from megatron_pg.loss.metrics import MicroBatchMetrics
from megatron_pg.loss.micro_batch import MicroBatchLoss
from megatron_pg.loss.resolved import GradientScope
from megatron_pg.step.batch import RESPONSE_FIELDS, PackedBatch, to_device

PRODUCT = LogitTransform()
"""Of an output layer that computes its product only."""


class OutputRows:
    """The rows of one micro-batch that enter the output layer, on one rank: those that score an
    active token.
    """

    def __init__(
        self,
        batch: PackedBatch,
        options: HeadOptions,
        *,
        with_sets: bool,
        scope: GradientScope | None = None,  # None: no gradient
    ) -> None:
        self._batch, self._options = batch, options
        active, self.gradient_rows = active_rows(batch, scope)
        self.kept: Ragged | None = None  # their kept sets, on the host
        # By the samples, which all context-parallel ranks share: if they chose differently, the
        # all-reduces would deadlock.
        sets = [sample.kept_tokens for sample in batch.samples if with_sets]
        if batch.kept_tokens is not None and any(each and each.values.numel() for each in sets):
            self.kept = batch.kept_tokens.select(active)
        self.active = to_device(active, batch.tokens.device)  # [rows] int64 into the window
        self._samples = batch.window.window_segment_ids[active]

    def __len__(self) -> int:
        return len(self.active)

    def factors(self, hidden_states: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the hidden states [rows, hidden], the weight [v/tp, hidden] and the targets [rows]
        int64.
        """
        batch, tokens = self._batch, self._batch.window.local_tokens
        check_vocabulary(batch, len(weight), self._options)
        if tuple(hidden_states.shape[:2]) != (tokens, 1):
            raise ValueError(
                f"hidden states are {tuple(hidden_states.shape)} and the micro-batch has {tokens} "
                f"tokens on this rank: "
                "feed the model batch.tokens[None]"
            )
        rows = batch.logit_rows[self.active]
        return hidden_states[:, 0].index_select(0, rows), weight, batch.targets[rows]

    def log_probs_and_entropy(
        self, hidden_states: Tensor, weight: Tensor, transform: LogitTransform, scorer: Any = None
    ) -> list[Tensor]:
        """Compute both, [window] each, and the values [5, window] of a `SamplerHead`."""
        factors = self.factors(hidden_states, weight)
        options = replace(self._options, transform=transform)
        center = None if scorer is None else scorer.on_rows(self._batch, lambda x: x[self.active])
        scores = linear_log_probs_and_entropy(*factors, options, kept=self.kept, centering=center)
        return [self.in_window(score) for score in scores]

    def in_window(self, values: Tensor, rows: slice = slice(None)) -> Tensor:
        """Spread values [..., rows] over the window, 0 elsewhere, where the loss is masked."""
        window = values.new_zeros(*values.shape[:-1], len(self._batch.window))
        return window.index_copy(-1, self.active[rows], values)

    def of_whole_samples(self, size: int) -> list[int]:
        """Count the rows of parts that end on borders of samples, `size` or fewer unless one sample
        has more.

        The parts are of the same samples on every rank of the context-parallel group, and may be
        empty on one. Rows have to be in the window's order.
        """
        masks = of_all_responses("loss_mask", self._batch)
        borders = torch.tensor(self._batch.window.sample_borders(masks, size), device="cpu")
        ends: list[int] = torch.searchsorted(self._samples, borders).diff().tolist()
        return ends


class FusedHead:
    """The output end of the model for one micro-batch: `output_processor` and `loss`.

    Only rows that score an active token enter the output layer, and only those with a gradient the
    products of backward. Backward computes the loss, its metrics and all gradients in one pass over
    chunks of logits; value and metrics are NaN until then, unless gradients are off. A chunk holds
    whole sequences where the loss looks at those, and all rows where a function of the user's own
    may look at any: up to twice the usual chunk in three matrix products, above that in up to four
    (see `megatron_pg.head.from_hidden`). Under `--replay-sampling-set` the kept columns alone are
    multiplied, of rows that have a set, and the values are there at once.
    """

    def __init__(
        self, loss: MicroBatchLoss, options: HeadOptions, teacher_weight: Tensor | None = None
    ) -> None:
        self._loss, self._options, self._teacher_weight = loss, options, teacher_weight
        self._resolved = resolved = loss.resolved
        self._metrics: MicroBatchMetrics
        self._rows = OutputRows(
            loss.batch, options, with_sets=resolved.is_over_kept_sets, scope=resolved.scope
        )

    def output_processor(
        self, hidden_states: Tensor, weight: Tensor, transform: LogitTransform = PRODUCT
    ) -> Tensor:
        """Compute the 0-d loss in the place of the output layer's product; an `OutputProcessor`.

        Raises:
            ValueError: the hidden states are not those of the micro-batch, or a response token is
                outside the vocabulary.
        """
        if self._rows.kept is None:
            factors = self._rows.factors(hidden_states, weight)
            return self._loss_in_one_pass(*factors, replace(self._options, transform=transform))
        scores = self._rows.log_probs_and_entropy(
            hidden_states, weight, transform, self._resolved.scorer
        )
        loss, self._metrics = self._loss(*scores)
        return loss

    def loss(self, output_tensor: Tensor) -> tuple[Tensor, MicroBatchMetrics]:
        """Return the local loss and its metrics from the model's output."""
        return output_tensor.reshape(()), self._metrics

    def _loss_in_one_pass(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, options: HeadOptions
    ) -> Tensor:
        """Compute gradients chunk by chunk, and value and metrics from all log-probs together.

        The other tokens of a chunk's window hold zeros. They change the value of the loss and not
        the chunk's coefficients. Sums over sequences are all-reduced once for each piece, of which
        context-parallel ranks have equally many.
        """
        metrics = self._metrics = MicroBatchMetrics.awaited(
            self._resolved.metric_table(frozenset()), hidden.device
        )
        sizes = self._piece_sizes(len(weight))
        everything = slice(0, len(self._rows)) if sizes is None or len(sizes) == 1 else None
        whole: list[tuple[Tensor, MicroBatchMetrics]] = []

        def token_loss(*vectors_and_rows: Any) -> Tensor:
            *vectors, rows = vectors_and_rows
            window_vectors = [self._rows.in_window(vector, rows) for vector in vectors]
            if rows != everything:
                return self._loss.loss(*window_vectors)
            whole[:] = [self._loss(*window_vectors)]
            return whole[0][0]

        scorer = None
        if self._resolved.scorer:
            active, others = self._rows.active, (len(weight), options, self._teacher_weight)
            scorer = self._resolved.scorer.on_rows(self._loss.batch, lambda x: x[active], *others)
        total, *vectors = linear_token_loss(
            hidden,
            weight,
            targets,
            token_loss,
            options,
            gradient_rows=self._rows.gradient_rows,
            piece_sizes=sizes,
            defer=True,
            scorer=scorer,
        )
        value = total.detach()  # `total` would hold its node, which holds what is called after it

        def fill(*_: Any) -> None:
            if not whole:  # in several pieces, or in none
                whole.append(self._loss(*map(self._rows.in_window, vectors)))
            loss, own_metrics = whole.pop()
            value.copy_(loss.detach())
            metrics.fill(own_metrics)

        if total.grad_fn is None:
            fill()
        else:
            total.grad_fn.register_hook(fill)
        return total

    def _piece_sizes(self, columns: int) -> list[int] | None:
        """Count the rows whose gradients wait for one another, [pieces]; None where none waits."""
        tokens = self._resolved.scope.tokens
        if tokens != "sequence":
            return None if tokens == "token" else [len(self._rows)]
        # Never a size that the rank's own device decides: a rank that calls the all-reduce more
        # often waits forever.
        options = self._options
        size = options.chunk_tokens or largest_chunk(columns, options.memory_gib)
        return self._rows.of_whole_samples(size)


def of_all_responses(field: str, batch: PackedBatch) -> Tensor:
    """Lay a field of all samples' response tokens end to end, on the host."""
    return torch.cat([RESPONSE_FIELDS[field], *(getattr(s, field) for s in batch.samples)])


def active_rows(batch: PackedBatch, scope: GradientScope | None) -> tuple[Tensor, int]:
    """List the scored tokens of the window, [active tokens] int64 on the host; count those with a
    gradient, which come first.

    Where the policy objective is the only term of the loss, a token whose advantage is 0 has none:
    its log-prob is wanted for the metrics alone. Where other tokens wait for it, tokens stay in the
    window's order.
    """
    in_window = batch.window.response_indices
    with_gradient = active = of_all_responses("loss_mask", batch)[in_window]
    if scope is not None and scope.tokens == "token" and scope.leaves_out_zero_advantages:
        with_gradient = active & (of_all_responses("advantages", batch)[in_window] != 0)
    first = with_gradient.nonzero()[:, 0]
    rest = (active & ~with_gradient).nonzero()[:, 0]
    return torch.cat([first, rest]), len(first)
