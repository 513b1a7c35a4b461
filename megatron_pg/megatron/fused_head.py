"""The fused head in Megatron's models: the loss from the output layer's input and weight, without
logits.
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
"""The transform of an output layer that computes only its product."""


class OutputRows:
    """The rows of one micro-batch on one rank that score an active token, which enter the output
    layer.
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
        self.kept: Ragged | None = None  # the rows' kept sets, on the host
        # All context-parallel ranks share the samples. If they chose differently, the all-reduces
        # would deadlock.
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
                f"hidden states are {tuple(hidden_states.shape)}, but the micro-batch has {tokens} "
                "tokens on this rank: give the model batch.tokens[None]"
            )
        rows = batch.logit_rows[self.active]
        return hidden_states[:, 0].index_select(0, rows), weight, batch.targets[rows]

    def log_probs_and_entropy(
        self, hidden_states: Tensor, weight: Tensor, transform: LogitTransform, scorer: Any = None
    ) -> list[Tensor]:
        """Compute log-probs and entropy, [window] each, and a sampler head's values [5, window]."""
        factors = self.factors(hidden_states, weight)
        options = replace(self._options, transform=transform)
        center = None if scorer is None else scorer.on_rows(self._batch, lambda x: x[self.active])
        scores = linear_log_probs_and_entropy(*factors, options, kept=self.kept, centering=center)
        return [self.in_window(score) for score in scores]

    def in_window(self, values: Tensor, rows: slice = slice(None)) -> Tensor:
        """Scatter values [..., rows] into the window, with 0 at masked tokens."""
        window = values.new_zeros(*values.shape[:-1], len(self._batch.window))
        return window.index_copy(-1, self.active[rows], values)

    def of_whole_samples(self, size: int) -> list[int]:
        """Split the rows into parts of whole samples, and count each part's rows: at most `size`,
        unless one sample has more.

        The parts have the same samples on every context-parallel rank, and may be empty on one.
        Rows must be in the window's order.
        """
        masks = of_all_responses("loss_mask", self._batch)
        borders = torch.tensor(self._batch.window.sample_borders(masks, size), device="cpu")
        ends: list[int] = torch.searchsorted(self._samples, borders).diff().tolist()
        return ends


class FusedHead:
    """The model's output end for one micro-batch: `output_processor` and `loss`.

    Only rows that score an active token enter the output layer, and only rows with a gradient enter
    the backward products. Backward computes the loss, its metrics and all gradients in one pass
    over chunks of logits. Value and metrics are NaN until then, unless gradients are off. A chunk
    holds whole sequences if the loss reads sequences, and all rows if a custom function may read
    any: up to twice the usual chunk with three matrix products, above that with up to four (see
    `megatron_pg.head.from_hidden`). Under `--replay-sampling-set`, rows with a set are multiplied
    by only the kept columns, and the values are available at once.
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
        """Compute the 0-d loss instead of the output layer's product. This is an `OutputProcessor`.

        Raises:
            ValueError: the hidden states do not fit the micro-batch, or a response token is outside
                the vocabulary.
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

        Tokens outside the chunk are zeros in its window. They change the loss's value, but not the
        chunk's coefficients. Sums over sequences are all-reduced once per piece, and
        context-parallel ranks have the same number of pieces.
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
        value = total.detach()  # `total` would create a reference cycle with its node

        def fill(*_: Any) -> None:
            if not whole:  # several pieces, or none
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
        """Count the rows of each piece, whose gradients depend on each other. Return None if tokens
        are independent.
        """
        tokens = self._resolved.scope.tokens
        if tokens != "sequence":
            return None if tokens == "token" else [len(self._rows)]
        # The size must not depend on the device: a rank with more all-reduces would wait forever.
        options = self._options
        size = options.chunk_tokens or largest_chunk(columns, options.memory_gib)
        return self._rows.of_whole_samples(size)


def of_all_responses(field: str, batch: PackedBatch) -> Tensor:
    """Concatenate a field of all samples' response tokens, on the host."""
    return torch.cat([RESPONSE_FIELDS[field], *(getattr(s, field) for s in batch.samples)])


def active_rows(batch: PackedBatch, scope: GradientScope | None) -> tuple[Tensor, int]:
    """List the window's scored tokens, [active tokens] int64 on the host, and count the tokens with
    a gradient, which come first.

    If the policy objective is the loss's only term, a token with advantage 0 has no gradient, and
    only metrics need its log-prob. If tokens depend on each other, they stay in the window's order.
    """
    in_window = batch.window.response_indices
    with_gradient = active = of_all_responses("loss_mask", batch)[in_window]
    if scope is not None and scope.tokens == "token" and scope.leaves_out_zero_advantages:
        with_gradient = active & (of_all_responses("advantages", batch)[in_window] != 0)
    first = with_gradient.nonzero()[:, 0]
    rest = (active & ~with_gradient).nonzero()[:, 0]
    return torch.cat([first, rest]), len(first)
