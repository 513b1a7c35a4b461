"""`PolicyStep`: the policy loss of one optimizer step in Megatron's schedules."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_pg.config import PolicyLossConfig
from megatron_pg.config.policy_loss import require_config
from megatron_pg.loss.corrections import counts_accepted_afterwards
from megatron_pg.loss.from_logits import loss_of_logits
from megatron_pg.loss.metrics import SumsReport, reduce_metrics
from megatron_pg.loss.micro_batch import MicroBatchLoss
from megatron_pg.loss.resolved import resolve
from megatron_pg.loss.teacher import TeacherChannels
from megatron_pg.megatron.context_layout import require_zigzag
from megatron_pg.megatron.experts import padding_mask, take_padding_mask
from megatron_pg.megatron.fused_head import FusedHead
from megatron_pg.megatron.groups import ParallelGroups, chunks_of, unwrapped
from megatron_pg.megatron.multi_token import multi_token_mask, scale_multi_token_loss
from megatron_pg.megatron.output_layer import prepare_output_layer
from megatron_pg.megatron.routing_replay import RoutingReplay
from megatron_pg.megatron.scale_contract import ScheduleOutput, scale_contract
from megatron_pg.megatron.training_loop import (
    AcceptedCount,
    GradientWatch,
    put_in_accepted_count,
    require_scalable_gradients,
    require_training_loop,
)
from megatron_pg.megatron.varying_log_probs import require_steady_log_probs
from megatron_pg.step.batch import PackedBatch
from megatron_pg.step.plan import StepPlan
from megatron_pg.step.totals import StepTotals


@dataclass(frozen=True)
class MicroBatchHead:
    """The model's inputs for one micro-batch, and the function from its output to the loss."""

    loss_func: Callable[[Tensor], ScheduleOutput]
    """The function that `forward_step` returns with the model's output. The schedule calls it on
    the last pipeline stage, and it returns `(loss, metrics)` or `(loss, n, metrics)` (see
    `scale_contract.py`)."""
    model_inputs: dict[str, Any]
    """Keyword arguments of the model's forward: the micro-batch and `model_arguments`."""
    model_arguments: dict[str, Any]
    """The keyword arguments that the head adds, if you call the model yourself. Empty without
    `--fused-lm-head` and `--replay-routing`."""


class PolicyStep:
    """The policy loss of one optimizer step on this rank, built before the step on every rank and
    stage.

        step = PolicyStep(config, plan, model=model)
        def forward_step(data_iterator, model):
            head = step.head(next(data_iterator))
            output = model(**head.model_inputs)
            return output, head.loss_func
        metrics = step.metrics(schedule_output)

    The lines are the same with or without `--fused-lm-head`, in both of Megatron's loss modes and
    at any sharding.

    Args:
        config: the policy loss.
        plan: the result of `plan_step`, with the step's totals and this data-parallel rank's number
            of micro-batches.
        model: the model that the schedule runs, wrapped or a list of virtual-pipeline chunks. Its
            config determines the loss mode and whether tokens scale an auxiliary loss, and its
            `pg_collection` the groups. Without it, the mode is `config.calculate_per_token_loss`,
            which the validated flags set, and the groups come from `parallel_state`. This is right
            unless the trainer overrides either on the model.
        totals: the step's totals, if there is no plan.
        num_microbatches: this data-parallel rank's number of micro-batches in the step, if there is
            no plan.
        groups: the process groups. None: the model's.
        vocab_size: the vocabulary without padding. None: every column of the logits.
        grad_divisor: `config.grad_divisor` for this step, such as the square of its number of
            rollouts.
        teacher_weight: the teacher's output weight for `--distill-teacher hidden`: this
            tensor-parallel rank's rows [v/tp, teacher's hidden], padded like the student's. Read on
            the last pipeline stage.
        policy_version: the policy version at the step's start, counted like
            `Sample.policy_version`, for `--old-log-probs interpolated` and `metrics`.
        accumulate_gradients: add to an earlier step's gradients that were not zeroed, instead of
            raising in backward. The earlier step must leave its gradients unreduced.

    Raises:
        TypeError: the config is not a `PolicyLossConfig`.
        ValueError: a `grad_divisor` out of range or with `--divide-gradient-twice`, neither a plan
            nor totals with a number of micro-batches, an impossible scale contract,
            `--distill-teacher hidden` without `teacher_weight`, `--replay-routing` with a model
            without experts, accepted counts of the trained forward pass with gradients that hold
            another term, or log-probs that vary at the same weights (dropout) without
            `--allow-varying-log-probs`.
        NotImplementedError: `--fused-lm-head` or `--fp32-lm-head` with an unsupported output layer,
            a model that gathers its logits, or context parallelism that is not zigzag.
    """

    def __init__(
        self,
        config: PolicyLossConfig,
        plan: StepPlan | None = None,
        *,
        model: Any | None = None,
        totals: StepTotals | None = None,
        num_microbatches: int | None = None,
        groups: ParallelGroups | None = None,
        vocab_size: int | None = None,
        grad_divisor: float | None = None,
        teacher_weight: Tensor | None = None,
        policy_version: int | None = None,
        accumulate_gradients: bool = False,
    ) -> None:
        require_config(config)
        if grad_divisor is not None:
            config = dataclasses.replace(config, grad_divisor=grad_divisor)
        self.config, self._resolved = config, (resolved := resolve(config))
        if plan is not None:
            totals = plan.totals if totals is None else totals
            num_microbatches = num_microbatches or plan.num_microbatches
        if totals is None or num_microbatches is None:
            raise ValueError(
                "PolicyStep requires the step's totals and number of micro-batches: pass the plan "
                "that plan_step() returned, or both totals= and num_microbatches="
            )
        # Every rank and stage refuses the same totals, not only the last stage in its loss.
        resolved.normalization.require(totals)
        if model is not None:
            require_steady_log_probs(model, config)
        prepare_output_layer(model, config)
        groups = ParallelGroups.from_model(model) if groups is None else groups
        scorer = resolved.scorer
        if isinstance(scorer, TeacherChannels) and groups.is_last_pipeline_stage:
            scorer.checked_weight(teacher_weight)
        if model is not None and groups.context_size > 1:
            require_zigzag(model)
        chunk = chunks_of(model)[0]
        # DDP and Float16Module have the wrapped model's config.
        model_config = None if chunk is None else chunk.config
        self.totals, self.num_microbatches = totals, num_microbatches
        self.policy_version = policy_version
        self.groups, self.vocab_size, self.teacher_weight = groups, vocab_size, teacher_weight
        self._head = dataclasses.replace(
            resolved.head, tensor_parallel_group=groups.tensor, vocab_size=vocab_size
        )
        self.model, self._chunk, self._is_loop_checked = model, chunk, False
        watched = chunk, groups, num_microbatches, accumulate_gradients
        self._gradients = GradientWatch(*watched)
        self._accepted: AcceptedCount | None = None
        if counts_accepted_afterwards(config):
            require_scalable_gradients(chunk, accumulate_gradients)
            self._accepted = AcceptedCount(groups, self.device)
        self._table_sizes = _table_sizes(chunk)
        self._masks_padding = model is not None and take_padding_mask(model, groups)
        self._replay = RoutingReplay.of_step(config.replay_routing, model, groups)
        if plan is not None:
            _require_one_length(plan, model_config)
        mode_config: Any = model_config or config
        self.scale = scale_contract(
            model_config,
            totals,
            calculate_per_token_loss=bool(mode_config.calculate_per_token_loss),
            data_parallel_size=groups.data_size,
            context_parallel_size=groups.context_size,
            num_microbatches=num_microbatches,
        )
        ranks = groups.data_size * groups.context_size
        self._predicts_more = scale_multi_token_loss(
            chunk, float(ranks * num_microbatches), groups.context
        )
        self.share = 1.0 / (ranks * num_microbatches)
        """The weight of one micro-batch on this rank in the step's report."""

    def head(self, batch: PackedBatch, *, chunk_tokens: int | None = None) -> MicroBatchHead:
        """Make a micro-batch's head. Call it in `forward_step`, before the model, on every rank and
        stage.

        Args:
            batch: the micro-batch, packed for this context-parallel rank, on the model's device.
            chunk_tokens: rows of logits that the fused head has in memory at once. None: chosen
                within `--fused-lm-head-memory-gib`.

        Raises:
            ValueError: the batch was packed for a different context-parallel size or rank, or lacks
                an input of the objective; a sample has a token id or learned position beyond the
                model's embedding, or experts that the model does not have; the loop would leave
                gradients unreduced.
        """
        inputs = self.checked_inputs(batch)
        if self._predicts_more:
            inputs["loss_mask"] = multi_token_mask(batch, self.totals.num_active_tokens)
        of_step = self.totals, self.groups.context, self.share, self.policy_version
        scales = self._accepted is not None
        loss = MicroBatchLoss(self._resolved, batch, *of_step, scales_gradients=scales)
        options = dataclasses.replace(self._head, chunk_tokens=chunk_tokens)
        of_head: Any = {"options": options, "teacher_weight": self.teacher_weight}
        added: dict[str, Any] = {} if self._replay is None else self._replay.model_inputs(batch)
        if not self.config.fused_lm_head:
            read = functools.partial(loss_of_logits, loss, **of_head)
            return self.scaled_head(batch, inputs, read, **added)
        fused = FusedHead(loss, **of_head)
        added["output_processor"] = fused.output_processor
        return self.scaled_head(batch, inputs, fused.loss, **added)

    def checked_inputs(self, batch: PackedBatch) -> dict[str, Any]:
        """Check the loop and the micro-batch, and return `model_inputs`. Arguments and errors as
        for `head`.
        """
        if self._chunk is not None and torch.is_grad_enabled() and not self._is_loop_checked:
            require_training_loop(self._chunk, self.groups, self.num_microbatches)
            put_in_accepted_count(self._chunk, self._accepted)
            self._is_loop_checked = True
        self.check_packing(batch)
        self._check_embedding(batch)
        inputs = model_inputs(batch)
        if self._masks_padding:
            inputs["padding_mask"] = padding_mask(batch)
        return inputs

    def scaled_head(
        self,
        batch: PackedBatch,
        inputs: dict[str, Any],
        loss_of_output: Callable[[Tensor], tuple[Tensor, Mapping[str, Tensor]]],
        **added: Any,
    ) -> MicroBatchHead:
        """Make the head for a function from the model's output to the local loss and its
        metrics.
        """
        num_tokens = batch.num_active_tokens, batch.num_tokens

        def scaled_loss(output: Tensor) -> ScheduleOutput:
            loss, metrics = loss_of_output(output)
            self._gradients.watch(loss)
            if self._accepted is not None:
                self._accepted.watch(loss, metrics["pg_loss"])
            return self.scale.apply(loss, metrics, *num_tokens)

        return MicroBatchHead(scaled_loss, inputs | added, added)

    def _check_embedding(self, batch: PackedBatch) -> None:
        """Raise ValueError for ids and lengths beyond the model's tables. A GPU would only report
        an index out of bounds.
        """
        (tokens, positions), longest = self._table_sizes, max(batch.window.total_lengths, default=0)
        for kind, largest, index_of, size in (
            ("token id", batch.largest_token, lambda sample: int(sample.tokens.max()), tokens),
            ("position", longest - 1, lambda sample: sample.total_length - 1, positions),
        ):
            if size is not None and largest >= size:
                raise ValueError(
                    f"{max(batch.samples, key=index_of).name} has {kind} {largest}, but the "
                    f"model's embedding has {size} rows: use the model's tokenizer, or with "
                    "learned positions shorten the sample (max_sequence_length)"
                )

    def metrics(
        self,
        schedule_output: Sequence[Mapping[str, Tensor]],
        *,
        device: torch.device | str | None = None,
        policy_version: int | None = None,
        critic: SumsReport | None = None,
    ) -> dict[str, float]:
        """Reduce the step's metrics, by name and the same on every rank. Every rank of the job
        calls it once per step.

        Args:
            schedule_output: the schedule's result on this rank.
            device: where numbers are reduced. None: the device of the model's parameters.
            policy_version: see `reduce_metrics`. None: this step's.
            critic: the report of a critic's step (`ValueStep.report`), to reduce and return with
                these metrics.

        Raises:
            RuntimeError: under `--check-aggregation`, the aggregation checksum is not 1.
            ValueError: the gradients are not yet divided by the step's accepted tokens.
        """
        if self._accepted is not None:
            self._accepted.require_end()
        replay = None if self._replay is None else self._replay.report()
        return reduce_metrics(
            self.config,
            schedule_output,
            contributes=self.groups.contributes,
            device=self.device if device is None else device,
            policy_version=self.policy_version if policy_version is None else policy_version,
            beside=[report for report in (critic, replay) if report is not None],
        )

    @property
    def device(self) -> torch.device:
        """The device of the model's parameters, where numbers are reduced."""
        return torch.device("cpu") if self._chunk is None else next(self._chunk.parameters()).device

    def check_packing(self, batch: PackedBatch) -> None:
        """Raise ValueError for a micro-batch that was packed for a different context-parallel
        rank.
        """
        window, groups = batch.window, self.groups
        rank, size = groups.context_rank, groups.context_size
        if (window.cp_rank, window.cp_size) != (rank, size):
            raise ValueError(
                f"the micro-batch is packed for context-parallel rank {window.cp_rank} of "
                f"{window.cp_size}, but this is rank {rank} of {size}: call pack(samples, "
                "cp_rank=..., cp_size=...) with this rank's values"
            )


def _table_sizes(chunk: Any | None) -> tuple[int | None, int | None]:
    """Return the rows of the embeddings for token ids and learned positions. None: not on this
    stage, or unknown.
    """
    embedding = getattr(unwrapped(chunk), "embedding", None)
    tables = (getattr(embedding, f"{name}_embeddings", None) for name in ("word", "position"))
    tokens, positions = (getattr(table, "num_embeddings", None) for table in tables)
    return tokens, positions if getattr(embedding, "add_position_embedding", False) else None


def _require_one_length(plan: StepPlan, model_config: Any | None) -> None:
    """Raise ValueError for micro-batches of several lengths if pipeline stages exchange tensors of
    one shape.
    """
    stages = getattr(model_config, "pipeline_model_parallel_size", 1) or 1
    lengths = sorted(set(plan.microbatch_tokens))
    if stages > 1 and len(lengths) > 1 and not model_config.variable_seq_lengths:  # type: ignore[union-attr]
        raise ValueError(
            f"the model's config has pipeline_model_parallel_size={stages} and "
            f"variable_seq_lengths=False, but the plan's micro-batches have {len(lengths)} lengths "
            f"({lengths[0]} to {lengths[-1]} tokens): set variable_seq_lengths=True, which also "
            'requires moe_token_dispatcher_type="alltoall" in a dense model'
        )


def model_inputs(batch: PackedBatch) -> dict[str, Any]:
    """Return the keyword arguments of `GPTModel.forward` for a micro-batch on the model's device,
    without a head's `model_arguments`.
    """
    return {
        "input_ids": batch.tokens[None],
        "position_ids": batch.position_ids[None],
        "attention_mask": None,
        "packed_seq_params": packed_seq_params(batch),
    }


def packed_seq_params(batch: PackedBatch) -> PackedSeqParams:
    """Make the `packed_seq_params=` of `GPTModel.forward` in THD format, for a micro-batch on the
    model's device.

    Lengths are padded, so that they describe where each sequence lies in the pack. The padding at a
    sequence's end is harmless, because attention is causal and no loss scores padding.
    """
    window = batch.window
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=window.cu_seqlens,
        cu_seqlens_kv=window.cu_seqlens,
        max_seqlen_q=window.max_seqlen,
        max_seqlen_kv=window.max_seqlen,
    )
