"""What a step should give: the unsharded model on each sample alone, and the loss in float64, sample by sample.

The loss shares no code with the reducers, the token window or the scale contract that it judges.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler
from torch import Tensor

from megatron_pg.check.model import build_chunks, model_config
from megatron_pg.check.options import (
    ADAM_EPSILON,
    CUSTOM,
    DIVISOR,
    ENTROPY_COEFFICIENT,
    KL_COEFFICIENT,
    CheckOptions,
    config_of,
)
from megatron_pg.check.samples import with_log_probs
from megatron_pg.check.sharded_parameters import gradient_slices
from megatron_pg.loss.policy_loss import policy_loss_from_log_probs
from megatron_pg.step.batch import pack
from megatron_pg.step.sample import Sample
from megatron_pg.step.totals import step_totals

Scores = tuple[Tensor, Tensor]
"""[response] log-probs and entropies of a sample, float64."""


@dataclass(frozen=True)
class Expected:
    """The whole step's loss, and whole gradients by name."""

    loss: float
    gradients: dict[str, Tensor]
    norm: float | None = None
    """Of all gradients together, where these are parameters after the optimizer's step."""

    def after_update(self) -> Expected:
        """The same, with the parameters that Adam's first step at learning rate 1 makes of zeros.

        The gradients are clipped to half their norm. Adam's first step is `-g / (|g| + epsilon)`.
        """
        norm = math.sqrt(sum(float(each.square().sum()) for each in self.gradients.values()))
        clip = 0.5 * norm / (norm + 1e-6)
        clipped = {name: clip * each for name, each in self.gradients.items()}
        updated = {name: -g / (g.abs() + ADAM_EPSILON) for name, g in clipped.items()}
        return replace(self, gradients=updated, norm=norm)


@dataclass(frozen=True)
class ScoredSamples:
    """The samples of a step, with old and reference log-probs, and what the model makes of them."""

    samples: Sequence[Sample]
    scores: Sequence[Scores]


class WholeModel:
    """The model of some options without any sharding, made by `new_model`; every rank has one for itself.

    In float64 where it is the reference of float32: what is measured is then the float32 run's error alone, and not
    the difference of two. The ranks share the samples and add up what they find.
    """

    def __init__(self, options: CheckOptions, new_model: Callable[..., torch.nn.Module]) -> None:
        self._options = options
        dtype = torch.float64 if options.dtype == "fp32" else torch.bfloat16
        self.config = model_config(options, sharded=False, dtype=dtype)
        self._module = build_chunks(options, self.config, new_model)[0].to(dtype)
        self._ahead: list[Tensor] = []
        """What the output layer makes of the hidden states of multi-token prediction, by depth, in the call that runs."""
        if options.mtp_num_layers is not None:
            layer: Any = self._module
            while hasattr(layer, "module"):
                layer = layer.module
            layer.output_layer.register_forward_hook(lambda *call: self._ahead.append(call[2][0]))

    @torch.no_grad()
    def score(self, samples: Sequence[Sample]) -> ScoredSamples:
        """Asks the model, and sets log-probs near its own; the same on every rank, and every rank calls it."""
        rank, size = dist.get_rank(), dist.get_world_size()
        mine = [
            tuple(each.cpu() for each in _scores(sample, self._logits([sample])[0]))
            for sample in samples[rank::size]
        ]
        gathered: list[list[Scores]] = [[]] * size
        dist.all_gather_object(gathered, mine)
        scores = [gathered[place % size][place // size] for place in range(len(samples))]
        return ScoredSamples(with_log_probs(samples, [each for each, _ in scores]), scores)

    def expected(
        self,
        step: ScoredSamples,
        aggregation: str,
        policy_loss: str = "ppo",
        micro_batches: Sequence[tuple[Sequence[int], float]] = (),
    ) -> Expected:
        """The loss and the gradients of a step; every rank calls it.

        Args:
            step: of this model's `score`.
            aggregation: one of them or, for `CUSTOM`, the user's own functions.
            policy_loss: the per-token loss, "ppo" or "gspo".
            micro_batches: which samples are packed together, and the weight of the auxiliary loss of the pack; every
                sample by itself where there are none.
        """
        samples = step.samples
        leaves = [(a.clone().requires_grad_(), b.clone().requires_grad_()) for a, b in step.scores]
        if aggregation == CUSTOM:
            # The user's functions on the whole step at once, in one micro-batch on one rank.
            batch, device = pack(samples).to(self._options.device), self._options.device
            parts = (torch.cat(part).to(device) for part in zip(*leaves, strict=True))
            config, totals = (
                config_of(CUSTOM, self._options),
                step_totals(samples, allow_different_group_sizes=True),
            )
            loss, _ = policy_loss_from_log_probs(config, batch, *parts, totals=totals)
        else:
            loss = _reference_loss(aggregation, policy_loss, samples, leaves)
        loss.backward()  # type: ignore[no-untyped-call]
        micro_batches = micro_batches or [([index], 0.0) for index in range(len(samples))]
        gradients: dict[str, Tensor] = {
            # In float64: many bf16 sums would lose digits of their own.
            shard.name: torch.zeros_like(part, dtype=torch.float64)
            for shard, part in gradient_slices([self._module])
        }
        for indices, weight in micro_batches[dist.get_rank() :: dist.get_world_size()]:
            MoEAuxLossAutoScaler.set_loss_scale(torch.tensor([weight], device=self._options.device))
            MTPLossAutoScaler.set_loss_scale(torch.zeros(1, device=self._options.device))  # ours
            self._module.zero_grad(set_to_none=True)
            packed = [samples[index] for index in indices]
            outputs = [
                score
                for sample, logits in zip(packed, self._logits(packed), strict=True)
                for score in _scores(sample, logits)
            ]
            wanted = [leaf.grad for index in indices for leaf in leaves[index]]
            if self._options.mtp_num_layers is not None:
                outputs.append(self._loss_ahead(packed, step.samples))
                wanted.append(torch.ones(()))
            torch.autograd.backward(
                outputs,
                [
                    torch.zeros_like(o) if w is None else w.to(o)
                    for o, w in zip(outputs, wanted, strict=True)
                ],
            )
            for shard, part in gradient_slices([self._module]):
                gradients[shard.name] += part.double()
        for gradient in gradients.values():
            dist.all_reduce(gradient)
        return Expected(float(loss.detach()), gradients)

    def _loss_ahead(self, packed: Sequence[Sample], samples: Sequence[Sample]) -> Tensor:
        """0-d float64: multi-token prediction of a pack as a mean over the active tokens of all samples."""
        depths = self._options.mtp_num_layers or 0
        active = sum(int(sample.loss_mask.sum()) for sample in samples)
        lengths = [sample.total_length for sample in packed]
        loss = torch.zeros((), dtype=torch.float64)
        for depth, output in enumerate(self._ahead[:depths], start=1):
            # With the columns that are padding: Megatron's cross-entropy counts them.
            parts = torch.split(output[:, 0], lengths)
            for sample, logits in zip(packed, parts, strict=True):
                mask = torch.cat([torch.zeros(sample.prompt_length), sample.loss_mask.float()])
                ahead = 1 + depth  # a position's own logits are of the next token
                rows = torch.log_softmax(logits.double(), dim=-1)[:-ahead]
                targets = sample.tokens[ahead:, None].to(logits.device)
                loss = loss - (rows.gather(1, targets)[:, 0] * mask[ahead:].to(rows)).sum().cpu()
        weight = float(self.config.mtp_loss_scaling_factor or 0.0) / (depths * active)
        return loss * weight

    def _logits(self, samples: Sequence[Sample]) -> list[Tensor]:
        """[total_length, vocab] logits of each sample, in one pack without padding; the vocabulary's own columns."""
        lengths, device = [sample.total_length for sample in samples], self._options.device
        boundaries = torch.tensor([0, *lengths], dtype=torch.int32, device=device).cumsum(0)
        boundaries = boundaries.to(torch.int32)
        longest = {"max_seqlen_q": max(lengths), "max_seqlen_kv": max(lengths)}
        packed = PackedSeqParams("thd", boundaries, boundaries, **longest)
        tokens = torch.cat([sample.tokens for sample in samples]).to(device)
        positions = torch.cat([torch.arange(length) for length in lengths]).to(device)
        self._ahead.clear()
        logits: Tensor = self._module(tokens[None], positions[None], None, packed_seq_params=packed)
        return list(torch.split(logits[0, :, : self._options.vocab_size], lengths))


def _scores(sample: Sample, logits: Tensor) -> Scores:
    """Of one sample, from its [total_length, vocab] logits; over its kept sets where it has some."""
    # The logits of a position score the next token.
    scored = logits.double()[sample.prompt_length - 1 : -1]
    is_dropped = torch.zeros_like(scored, dtype=torch.bool)
    for token in range(len(sample.kept_tokens or ())):
        ids = sample.kept_tokens.row(token).to(logits.device)  # type: ignore[union-attr]
        if len(ids):
            is_dropped[token] = True
            is_dropped[token, ids] = False
    rows = torch.log_softmax(scored.masked_fill(is_dropped, -math.inf), dim=-1)
    targets = sample.tokens[sample.prompt_length :].to(logits.device)
    of_kept = rows.masked_fill(is_dropped, 0.0)  # 0 times minus infinity is no number
    return rows.gather(1, targets[:, None])[:, 0], -(rows.exp() * of_kept).sum(1)


def _reference_loss(
    aggregation: str, policy_loss: str, samples: Sequence[Sample], scores: Sequence[Scores]
) -> Tensor:
    """0-d float64: the whole step's loss, differentiable through the log-probs and entropies of every sample."""
    rollout_tokens: Counter[object] = Counter()
    group_tokens: Counter[object] = Counter()
    for sample in samples:
        rollout_tokens[sample.rollout_id] += int(sample.loss_mask.sum())
        group_tokens[sample.group_index] += int(sample.loss_mask.sum())
    terms = []
    for sample, (log_probs, entropy) in zip(samples, scores, strict=True):
        fields = ("loss_mask", "advantages", "old_log_probs", "ref_log_probs")
        values = (torch.as_tensor(getattr(sample, field)).to(log_probs) for field in fields)
        mask, advantages, old, ref = values
        log_ratio = log_probs - old
        if policy_loss == "gspo":
            # The mean over the sequence; each token has the gradient of its own log-prob.
            mean = (mask * log_ratio).sum().detach() / max(float(mask.sum()), 1.0)
            log_ratio = mean + log_probs - log_probs.detach()
        ratio = torch.exp(log_ratio)
        surrogate = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        kl = torch.exp(ref - log_probs) - 1 + log_probs - ref
        sample_mean = 1 / (len(rollout_tokens) * max(rollout_tokens[sample.rollout_id], 1))
        weight = {
            "sample_mean": sample_mean,
            "prompt_mean": 1 / (len(group_tokens) * max(group_tokens[sample.group_index], 1)),
            "token_mean": 1 / max(rollout_tokens.total(), 1),
            "constant": 1 / (len(rollout_tokens) * DIVISOR),
        }[aggregation]
        penalty = KL_COEFFICIENT * kl - ENTROPY_COEFFICIENT * entropy
        terms.append((mask * (weight * surrogate + sample_mean * penalty)).sum())
    return sum(terms, torch.zeros_like(terms[0]))
