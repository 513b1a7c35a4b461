"""The boundary between a packed micro-batch and the page: here samples become tensors, and inputs are checked.

`MicroBatchLoss` is built on the host before the model has run. Called with log-probs, it evaluates `policy_loss` and the
metrics: in a few generated kernels on a GPU, operator by operator elsewhere.
"""

import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import Tensor

from megatron_pg.config.custom import CUSTOM_FUNCTIONS
from megatron_pg.config.policy_loss import LOG_PROB_FIELDS, PolicyLossConfig
from megatron_pg.loss import compiled
from megatron_pg.loss.aggregation import Weights, host_weights, position_coefficients
from megatron_pg.loss.compiled import Function, Outputs, Tensors
from megatron_pg.loss.inputs import require_inputs
from megatron_pg.loss.metrics import MicroBatchMetrics, metric_parts, metric_table
from megatron_pg.loss.policy_loss import policy_loss
from megatron_pg.loss.reducer import add_over_group, custom_reduction, weighted_sum
from megatron_pg.loss.sequence import SequenceSums, sequence_sum_names, sums_of_rank
from megatron_pg.loss.tokens import DIFFERENTIATED, Tokens
from megatron_pg.step.batch import PackedBatch
from megatron_pg.step.totals import StepTotals

logger = logging.getLogger("megatron_pg")

BATCH_FIELDS = (
    *("loss_mask", "advantages", "loss_weights", "policy_version", "kept_set_size"),
    *LOG_PROB_FIELDS,
)
"""The fields of a packed micro-batch that are fields of `Tokens` by the same name."""


class MicroBatchLoss:
    """The loss of one micro-batch on one rank, as a function of its log-probs.

    Arguments and errors are those of `policy_loss_function`.
    """

    def __init__(
        self,
        config: PolicyLossConfig,
        batch: PackedBatch,
        totals: StepTotals,
        context_parallel_group: dist.ProcessGroup | None = None,
        step_share: float = 1.0,
    ) -> None:
        require_inputs(config, batch)
        self.config, self.batch, self._totals = config, batch, totals
        self._group = context_parallel_group
        counts, sample_weights = host_weights(config, batch, totals, step_share)
        self._tensors: dict[str, Tensor | None] = {
            **{name: getattr(batch, name) for name in BATCH_FIELDS},
            "sample_ids": batch.window_segment_ids,
            "positions": position_coefficients(config, batch, totals),
            "counts": counts,
            "sample_weights": sample_weights,
        }
        self._reduce = weighted_sum
        if config.custom_pg_loss_reducer_function_path is not None:
            self._reduce = custom_reduction(config, batch, context_parallel_group)

    def __call__(
        self,
        log_probs: Tensor,
        entropy: Tensor | None,
        divergence: Tensor | None = None,
        kept_set_mass: Tensor | None = None,
    ) -> tuple[Tensor, MicroBatchMetrics]:
        """Compute the loss, to be differentiated, and its detached metrics. Arguments are [window] float32, in nats.

        Every rank of the context-parallel group must call it, those whose window is empty included.

        Args:
            log_probs: as for `policy_loss_from_log_probs`.
            entropy: the same.
            divergence: from the teacher, where one is distilled.
            kept_set_mass: the probability of the kept set, where `--kept-set-mass` asks for it; 1 for an empty set.
        """
        tensors = self._inputs(log_probs, entropy, divergence, kept_set_mass)
        loss, maxima, is_nan, *parts = self._bind(self._loss_and_metrics, tensors)()
        table = metric_table(self.config, _lacking(tensors))
        pairs = table.pairs([*parts, tensors["counts"]])
        metrics = MicroBatchMetrics.of(table.names, pairs, self.batch, self._totals)
        metrics.maxima, metrics.is_nan = maxima, is_nan
        return loss, metrics

    def loss(
        self, log_probs: Tensor, entropy: Tensor | None, divergence: Tensor | None = None
    ) -> Tensor:
        """Compute the loss without metrics; arguments as for a call."""
        loss: Tensor
        (loss,) = self._bind(self._loss_alone, self._inputs(log_probs, entropy, divergence))()
        return loss

    def _inputs(
        self,
        log_probs: Tensor,
        entropy: Tensor | None,
        divergence: Tensor | None,
        kept_set_mass: Tensor | None = None,
    ) -> Tensors:
        """Collect the tensors that the loss depends on by name, with the sums over sequences of every rank."""
        config = self.config
        if divergence is None and config.distills and not self.batch.samples:
            divergence = 0.0 * log_probs
        if config.needs_entropy and entropy is None:
            raise ValueError(
                "entropy is None, and --entropy-coef or --pg-metrics with_entropy needs it: give the entropy [window] of the "
                "window's response tokens, in nats"
            )
        if config.distills and divergence is None:
            raise ValueError(
                "divergence is None, and --policy-loss distill and --distill-coef need the divergence from the teacher, which is "
                "made of logits or of hidden states: use PolicyStep or policy_loss_function"
            )
        tensors = self._tensors | {
            "log_probs": log_probs,
            "entropy": entropy if config.needs_entropy else None,
            "divergence": divergence,
            "kept_set_mass": kept_set_mass,
        }
        if sequence_sum_names(config):
            # The config alone decides if there is an all-reduce, and of what size: every rank of the group joins it, those
            # that have no token and those that could not compile included.
            (sums,) = self._bind(self._sums_of_rank, tensors, differentiated=())()
            tensors["sums"] = add_over_group(sums, self._group)
        return tensors

    def _bind(
        self, function: Function, tensors: Tensors, differentiated: Sequence[str] = DIFFERENTIATED
    ) -> Callable[[], Outputs]:
        log_probs, mask = tensors["log_probs"], tensors["loss_mask"]
        # Sizes of 0 and 1 would be graphs of their own.
        is_regular = len(log_probs) > 1 and log_probs.shape == mask.shape
        is_compiled = is_regular and not _calls_custom_functions(self.config)
        settings = _without_divisor(self.config) if is_compiled else None
        return compiled.bind(function, settings, tensors, differentiated)

    # Functions of tensors by name, which a GPU runs as compiled programs.

    def _loss_and_metrics(self, tensors: Tensors) -> Outputs:
        tokens, weights, sums = self._arguments(tensors)
        terms = policy_loss(self.config, tokens, weights, sums, self._reduce)
        table = metric_table(self.config, _lacking(tensors))
        return terms.loss, *metric_parts(self.config, table, tokens, weights, terms)

    def _loss_alone(self, tensors: Tensors) -> Outputs:
        return (policy_loss(self.config, *self._arguments(tensors), self._reduce).loss,)

    def _sums_of_rank(self, tensors: Tensors) -> Outputs:
        num_samples = tensors["sample_weights"].shape[1]
        return (sums_of_rank(self.config, self._masked(tensors), num_samples),)

    def _masked(self, tensors: Tensors) -> Tokens:
        return Tokens.masked(tensors, self.batch.side_channels)

    def _arguments(self, tensors: Tensors) -> tuple[Tokens, Weights, SequenceSums]:
        tokens = self._masked(tensors)
        window = (tokens.loss_mask, tokens.sample_ids, tokens.loss_weights)
        weights = Weights.spread(tensors["counts"], tensors["sample_weights"], *window)
        sums = SequenceSums.of_table(self.config, tokens.sample_ids, tensors.get("sums"))
        return tokens, weights, sums


def _lacking(tensors: Tensors) -> frozenset[str]:
    return frozenset(name for name in (*BATCH_FIELDS, "kept_set_mass") if tensors.get(name) is None)


@functools.lru_cache(maxsize=64)
def _without_divisor(config: PolicyLossConfig) -> PolicyLossConfig:
    """Drop from the config what kernels do not depend on: a divisor, which each step may have of its own, is a tensor there."""
    return config if config.grad_divisor is None else dataclasses.replace(config, grad_divisor=1.0)


@functools.lru_cache(maxsize=64)
def _calls_custom_functions(config: PolicyLossConfig) -> bool:
    """Say if a function of the user's own runs in the loss, and log it: nothing is known of such a function."""
    paths = [path for name in CUSTOM_FUNCTIONS if (path := getattr(config, name)) is not None]
    if paths:
        logger.info(
            "%s: a loss with functions of your own is not compiled and runs operator by operator, with more launches (said once)",
            ", ".join(paths),
        )
    return bool(paths)
