"""The fused head in Megatron's GPTModel: the loss straight from hidden states, without the logits.

`GPTModel.forward(output_processor=...)` of megatron-core 0.18 and later hands over the hidden states, the output
layer and its weight before the logits are computed (models/gpt/gpt_model.py). What takes them there and what turns
the model's output into the loss belong to one micro-batch, so they are one object:

    fused = FusedOutput(config, batch, totals, num_microbatches=..., model=model)
    output = model(tokens, position_ids, None, packed_seq_params=..., output_processor=fused.output_processor)
    return output, fused.loss_func

`megatron_pg.megatron.output_head` chooses between this and `megatron_loss` by `--fused-lm-head`.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from megatron_pg.config.policy_loss import PolicyLossConfig
from megatron_pg.config.versions import supports_output_processor
from megatron_pg.head import (
    HeadOptions,
    linear_log_probs_and_entropy,
    linear_token_loss,
)
from megatron_pg.loss.metrics import MicroBatchMetrics
from megatron_pg.loss.policy_loss import (
    LossReductions,
    check_inputs,
    check_vocabulary,
    loss_terms,
    policy_loss_from_log_probs,
)
from megatron_pg.megatron.groups import ParallelGroups
from megatron_pg.megatron.micro_batch import MicroBatchScale
from megatron_pg.megatron.scale_contract import ScheduleOutput
from megatron_pg.megatron.token_sums import active_rows, is_sum_over_tokens
from megatron_pg.step.batch import PackedBatch
from megatron_pg.step.totals import StepTotals
from megatron_pg.step.transfer import to_device


class FusedOutput:
    """The output end of the model for one micro-batch: `output_processor` and `loss_func`.

    Only rows that score an active token enter the output layer, and only those with a gradient the products of
    backward (see `active_rows`). Where `is_sum_over_tokens`, the gradients are computed in the same pass (three matrix
    products); otherwise the log-probs are, and backward multiplies again unless `keep_logits` (see
    `megatron_pg.head.from_hidden`). In the first case the gradient that the schedule hands to the loss is worked out
    beforehand (`ScaleContract.incoming_gradient`) and the weight's gradient goes straight to `main_grad`, in forward: a
    forward pass that is to have no backward belongs under `torch.no_grad()` or `model.eval()`.

    Args:
        config, batch, totals, num_microbatches, model, groups, vocab_size: as for
            `megatron_pg.megatron.loss.megatron_loss`. `config.fp32_lm_head` asks for float32 logits.
        keep_logits: for losses that are no sum over tokens: hold the logits of all active tokens until backward.
        chunk_tokens: rows of logits in memory at once; None: about 1.25 GiB of them.

    Raises:
        NotImplementedError: megatron-core is older than 0.18, or the model is no GPTModel.
        ValueError: as `megatron_loss`.
    """

    def __init__(
        self,
        config: PolicyLossConfig,
        batch: PackedBatch,
        totals: StepTotals,
        *,
        num_microbatches: int,
        model: Any,
        groups: ParallelGroups | None = None,
        vocab_size: int | None = None,
        keep_logits: bool | None = None,
        chunk_tokens: int | None = None,
    ) -> None:
        _check_model(model)
        self._model = model
        self._config, self._batch, self._totals = config, batch, totals
        self._keep_logits = keep_logits
        self._scale = MicroBatchScale.build(
            config, batch, totals, num_microbatches=num_microbatches, model=model, groups=groups
        )
        self._groups = self._scale.groups
        self._options = HeadOptions(
            tensor_parallel_group=self._groups.tensor,
            temperature=config.rollout_temperature,
            vocab_size=vocab_size,
            fp32_logits=config.fp32_lm_head,
            chunk_tokens=chunk_tokens,
        )
        check_inputs(config, batch)
        active, self._gradient_rows = active_rows(config, batch)
        self._active = to_device(active, batch.tokens.device)
        self._metrics: MicroBatchMetrics | None = None

    def output_processor(
        self,
        *,
        hidden_states: Tensor,
        output_layer: torch.nn.Module,
        output_weight: Tensor | None = None,
        config: Any = None,
        **_: Any,
    ) -> Tensor:
        """What `GPTModel.forward` calls in place of the output layer; every tensor-parallel rank of the last stage.

        Args:
            hidden_states: [sequence, 1, hidden], or its slice of the sequence under sequence parallelism.
            output_layer: Megatron's `ColumnParallelLinear`.
            output_weight: the weight where it is tied to the embedding.
            config: the model's.

        Returns:
            The loss [1], or log_probs and entropy [2, active tokens]: `loss_func` takes either.

        Raises:
            NotImplementedError: the output layer does more than multiply by its weight.
            ValueError: the hidden states are not those of the micro-batch, or a response token is outside the
                vocabulary.
        """
        weight = _plain_weight(output_layer, output_weight, config)
        check_vocabulary(
            self._batch, weight.shape[0], self._groups.tensor, self._options.vocab_size
        )
        hidden = self._active_rows(self._whole_hidden(hidden_states, output_layer))
        targets = self._batch.targets[self._batch.logit_rows[self._active]]
        loss_scale = self._scale.incoming_gradient(self._model, hidden.device)
        # What float16 cannot hold without the loss scale waits for backward.
        waits = hidden.dtype == torch.float16 and loss_scale is None
        if is_sum_over_tokens(self._config) and not waits:
            return self._loss_in_one_pass(hidden, weight, targets, loss_scale)
        outputs = linear_log_probs_and_entropy(
            hidden, weight, targets, self._options, keep_logits=self._keep_logits
        )
        return torch.stack(outputs)

    def loss_func(self, output_tensor: Tensor) -> ScheduleOutput:
        """What the schedule calls on the last stage with the model's output."""
        if self._metrics is None:
            log_probs, entropy = output_tensor.unbind()
            loss, metrics = self._policy_loss(log_probs, entropy)
        else:
            loss, metrics = output_tensor[0], self._metrics
        return self._scale.apply(loss, metrics)

    def _whole_hidden(self, hidden_states: Tensor, output_layer: torch.nn.Module) -> Tensor:
        """[local_tokens, hidden] on every tensor-parallel rank; backward sums the parts of the gradient."""
        group = self._groups.tensor
        if getattr(output_layer, "sequence_parallel", False):
            hidden_states = gather_from_sequence_parallel_region(hidden_states, group=group)
        elif self._groups.tensor_size > 1:
            hidden_states = copy_to_tensor_model_parallel_region(hidden_states, group=group)
        tokens = self._batch.window.local_tokens
        if tuple(hidden_states.shape[:2]) != (tokens, 1):
            raise ValueError(
                f"hidden states are {tuple(hidden_states.shape)} and the micro-batch has {tokens} tokens on this rank: "
                "feed the model batch.tokens[None]"
            )
        return hidden_states[:, 0]

    def _active_rows(self, hidden: Tensor) -> Tensor:
        return hidden.index_select(0, self._batch.logit_rows[self._active])

    def _in_window(self, values: Tensor, rows: slice = slice(None)) -> Tensor:
        """[rows of the active tokens] -> [window], 0 elsewhere: the loss masks those positions."""
        window = values.new_zeros(len(self._batch.window))
        return window.index_copy(0, self._active[rows], values)

    @functools.cached_property
    def _reductions(self) -> LossReductions:
        return LossReductions.build(self._config, self._batch, self._totals)

    def _policy_loss(
        self, log_probs: Tensor, entropy: Tensor, rows: slice = slice(None)
    ) -> tuple[Tensor, MicroBatchMetrics]:
        return policy_loss_from_log_probs(
            self._config,
            self._batch,
            self._in_window(log_probs, rows),
            self._in_window(entropy, rows),
            totals=self._totals,
            context_parallel_group=self._groups.context,
            step_share=self._scale.step_share,
            reductions=self._reductions,
        )

    def _loss_in_one_pass(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, loss_scale: Tensor | None
    ) -> Tensor:
        """Gradients chunk by chunk; value and metrics from all log-probs together.

        The other tokens of a chunk's window hold zeros. They change the value of the loss and not the chunk's
        coefficients, which is what a sum over tokens means.
        """
        self._metrics = None
        everything = slice(0, len(self._active))

        def token_loss(log_probs: Tensor, entropy: Tensor, rows: slice) -> Tensor:
            if rows == everything:
                loss, self._metrics = self._policy_loss(log_probs, entropy)
                return loss
            return loss_terms(
                self._config,
                self._batch,
                self._in_window(log_probs, rows),
                self._in_window(entropy, rows),
                self._reductions,
            ).loss

        total, log_probs, entropy = linear_token_loss(
            hidden,
            weight,
            targets,
            token_loss,
            self._options,
            gradient_rows=self._gradient_rows,
            loss_scale=loss_scale,
        )
        if self._metrics is None:  # in several chunks, or of no token
            value, self._metrics = self._policy_loss(log_probs, entropy)
            total = value + (total - total.detach())
        return total[None]


def _check_model(model: Any) -> None:
    if not supports_output_processor():
        raise NotImplementedError(
            "the fused head needs GPTModel.forward(output_processor=...) of megatron-core 0.18 or later; with an "
            "older one drop --fused-lm-head and use megatron_loss on the model's logits"
        )
    module = model[0] if isinstance(model, (list, tuple)) else model
    while hasattr(module, "module"):
        module = module.module
    if "output_processor" not in inspect.signature(type(module).forward).parameters:
        raise NotImplementedError(
            f"the fused head needs a model whose forward takes output_processor, as GPTModel's; found "
            f"{type(module).__name__}: drop --fused-lm-head and use megatron_loss on the model's logits"
        )


def _plain_weight(output_layer: Any, output_weight: Tensor | None, config: Any) -> Tensor:
    """The weight, of a layer that is nothing but a product with it."""
    if getattr(output_layer, "bias", None) is not None:
        raise NotImplementedError("the fused head takes an output layer without bias")
    if getattr(config, "use_mup", False):
        raise NotImplementedError("the fused head does not scale logits: use it without --use-mup")
    weight: Tensor = output_layer.weight if output_weight is None else output_weight
    if getattr(config, "mtp_num_layers", None):
        # Multi-token prediction multiplies by this weight too, in the same graph, and where Megatron does not fuse the
        # addition to main_grad its gradient comes through autograd: DDP has to add it, and ours has to be zeros there.
        weight.zero_out_wgrad = True  # type: ignore[attr-defined]
    return weight
