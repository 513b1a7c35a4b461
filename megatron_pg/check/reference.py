"""The expected results of a step: the unsharded model on each sample separately, and a float64
loss.

The loss shares no code with the reducers, token window and scale contract that it checks.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_pg.check.cases import GRADIENT, Case, Run
from megatron_pg.check.model import NewModel, build_chunks, model_config, provider_of
from megatron_pg.check.options import (
    ADAM_EPSILON,
    CUSTOM,
    DIVISOR,
    ENTROPY_COEFFICIENT,
    KL_COEFFICIENT,
    CheckOptions,
    config_of,
)
from megatron_pg.check.placement import pieces_of, placed, whole_tensors
from megatron_pg.check.routers import Choices, Pack, bias_update, choices, route, router_losses
from megatron_pg.check.samples import with_log_probs
from megatron_pg.loss.aggregation import AGGREGATIONS
from megatron_pg.loss.from_logits import policy_loss_from_log_probs
from megatron_pg.megatron.groups import unwrapped
from megatron_pg.step.agreement import gather
from megatron_pg.step.batch import pack
from megatron_pg.step.routed_experts import no_choice
from megatron_pg.step.sample import Sample
from megatron_pg.step.totals import step_totals

Scores = tuple[Tensor, ...]
"""[response] log-probs and entropies of a sample, and its centering if it has an engine's likeliest
tokens, float64."""
Scored = tuple[Sequence[Sample], Sequence[Scores]]
"""The samples of a step, with old and reference log-probs, and a model's scores of them."""


class Outputs(NamedTuple):
    """The results of a pack."""

    logits: list[Tensor]
    """Each sample's logits."""
    scores: list[Tensor]
    """Each sample's `Scores` in turn."""
    router_logits: list[Tensor]
    """[tokens, experts] float64 per layer."""
    taken: list[Tensor]
    """[tokens, experts] bool per layer: the experts that a token goes to."""


class Expected(NamedTuple):
    """The step's samples, its whole loss, and its whole gradients by name."""

    samples: Sequence[Sample]
    loss: float
    gradients: dict[str, Tensor]
    norm: float | None = None
    """The norm of all gradients, if `gradients` holds the optimizer's updates instead."""
    labels: Mapping[str, str] = {}
    """The parameters' names in the unsharded model, by name in `gradients`."""
    units: Mapping[str, float] = {}
    """The measured unit of each gradient's error (`compare.STEPS`). Only the user's model has
    units."""
    loss_unit: float = 0.0
    norm_unit: float = 0.0
    tokens_of_experts: Mapping[str, Tensor] = {}
    """[experts] tokens of the step per expert, by the name of the router's bias. `gradients` has
    the bias update."""

    def after_update(self) -> Expected:
        """Replace the gradients by the updates of Adam's first step, as in `step.update`.

        The gradients are clipped to half their norm. Adam adds `-g / (|g| + epsilon)`. The decay
        adds minus the parameter, which is the same amount.
        """
        norm = self.gradient_norm()
        clip = 0.5 * norm / (norm + 1e-6)
        clipped = {name: clip * each for name, each in self.gradients.items()}
        updated = {name: -2.0 * g / (g.abs() + ADAM_EPSILON) for name, g in clipped.items()}
        return self._replace(gradients=updated, norm=norm)

    def label(self, name: str) -> str:
        """Return a parameter's name in the unsharded model."""
        return self.labels.get(name, name)

    def gradient_norm(self) -> float:
        """Return the 2-norm of all gradients."""
        return math.sqrt(sum(float(each.square().sum()) for each in self.gradients.values()))


class WholeModel:
    """The unsharded model, whole on every rank. The ranks divide the samples and add up their
    gradients.
    """

    def __init__(self, options: CheckOptions, module: Any, vocab_size: int | None = None) -> None:
        self._options, self._module, self.config = options, module, module.config
        self._vocab_size = vocab_size
        # `_loss_ahead` computes this loss instead of Megatron.
        self._scale_ahead = float(getattr(self.config, "mtp_loss_scaling_factor", 0.0) or 0.0)
        self.config.mtp_loss_scaling_factor = 0.0
        # Values of the current call: multi-token logits by depth, [tokens, experts] float64 of each
        # layer's router, and [tokens] positions in their sequences.
        self._ahead: list[Tensor] = []
        self._router_logits: list[Tensor] = []
        self._taken: list[Tensor] = []
        self._positions = torch.zeros(0)
        # Transformer Engine and Megatron's multi-token loss overwrite tensors saved for backward.
        is_local = options.transformer_impl == "local" and options.model_provider is None
        self._keeps_outputs = is_local and options.mtp_num_layers is None
        self._kept: dict[tuple[object, ...], Outputs] = {}
        # [tokens, layers, k] int64: the experts that a pack's tokens take, -1 for none.
        self._experts: Tensor | None = None
        self._case = GRADIENT
        """The case being scored."""
        self._bias_names: list[str] = []

    @classmethod
    def built_in(cls, options: CheckOptions, new_model: NewModel) -> WholeModel:
        """Build a tiny model with the reference's routers and positions."""
        # In float64, the comparison measures only the float32 run's error.
        dtype = torch.float64 if options.dtype == "fp32" else torch.bfloat16
        config = model_config(options, sharded=False, dtype=dtype)
        provider = provider_of(options, new_model)
        whole = cls(
            options, build_chunks(options, config, provider)[0].to(dtype), options.vocab_size
        )
        whole._replace_modules()
        return whole

    def _replace_modules(self) -> None:
        options = self._options
        for name, module in self._module.named_modules():
            place = name.rsplit(".", 1)[-1]
            if place == "output_layer" and options.mtp_num_layers is not None:
                module.register_forward_hook(lambda *call: self._ahead.append(call[2][0]))
            elif place == "router":
                module.register_forward_hook(self._note_router)
                self._bias_names.append(f"{name}.expert_bias")
                module.routing = functools.partial(self._route, module, self._bias_names[-1])
            elif place == "position_embeddings":
                # Megatron's model might pass wrong positions.
                module.register_forward_hook(lambda table, *_: table.weight[self._positions][None])

    def _note_router(self, router: Any, inputs: tuple[Tensor, ...], _: Any) -> None:
        self._router_logits.append(inputs[0].flatten(0, -2).double() @ router.weight.double().T)

    def _route(self, router: Any, name: str, logits: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
        given = self._experts
        if given is not None:
            given = given[:, router.layer_number - 1].to(logits.device)
        rows = logits.flatten(0, -2).double()
        probs, is_taken = route(self._case, name, rows, self.config.moe_router_topk, given)
        self._taken.append(is_taken)
        return probs.to(logits), is_taken

    @torch.no_grad()
    def score(self, samples: Sequence[Sample], case: Case = GRADIENT) -> Scored:
        """Score the samples and set log-probs near the scores. Every rank calls it and gets the
        same.
        """
        self._case = case
        scores = self.scores(samples)
        return with_log_probs(samples, [log_probs for log_probs, *_ in scores]), scores

    @torch.no_grad()
    def scores(self, samples: Sequence[Sample]) -> list[Scores]:
        """Score each sample separately. Every rank calls it and gets the same."""
        mine: list[Any] = [
            tuple(score.cpu() for score in self._scores(sample, self._logits([sample])[0]))
            for sample in samples[dist.get_rank() :: dist.get_world_size()]
        ]
        in_turn = itertools.zip_longest(*gather(mine, dist.group.WORLD))
        return [score for score in itertools.chain(*in_turn) if score is not None]

    @torch.no_grad()
    def packed_log_probs(self, samples: Sequence[Sample]) -> list[Tensor]:
        """Score samples in one pack."""
        pairs = zip(samples, self._logits(samples), strict=True)
        return [self._scores(sample, logits)[0].cpu() for sample, logits in pairs]

    def expected(self, step: Scored, run: Run, packs: Sequence[Pack]) -> Expected:
        """Compute the loss and the gradients of a step from a result of `score`. Every rank
        calls it.
        """
        (samples, scores), case, self._case = step, run.case, run.case
        leaves = [tuple(score.clone().requires_grad_() for score in each) for each in scores]
        if run.aggregation == CUSTOM:
            loss = self._custom_loss(samples, leaves)
        else:
            loss = _reference_loss(run.aggregation, case.policy_loss, samples, leaves)
        loss.backward()  # type: ignore[no-untyped-call]
        model = unwrapped(self._module)
        named = {name: each for name, each in model.named_parameters() if each.requires_grad}
        # Sums in bf16 would lose digits.
        sums: dict[str, Tensor] = {
            name: torch.zeros_like(parameter, dtype=torch.float64)
            for name, parameter in named.items()
        }
        mine = range(dist.get_rank(), len(packs), dist.get_world_size())
        packed_at = {place: [samples[index] for index in packs[place].indices] for place in mine}
        counts = self._choices(packed_at) if case.balancing else []
        for place, packed in packed_at.items():
            outputs, pack = self._outputs(packed), packs[place]
            wanted = (leaf.grad for index in pack.indices for leaf in leaves[index])
            losses = [
                (score * gradient.to(score)).sum()
                for score, gradient in zip(outputs.scores, wanted, strict=True)
                if gradient is not None
            ]
            if self._options.mtp_num_layers is not None:
                losses.append(self._loss_ahead(packed, samples))
            if case.logit_coefficient:
                squares = torch.cat(outputs.logits).double().square().sum()
                losses.append(pack.weight * case.logit_coefficient * squares)
            if case.balancing:
                losses.append(router_losses(case, outputs.router_logits, place, packs, counts))
            parts = torch.autograd.grad(
                losses, list(named.values()), allow_unused=True, retain_graph=self._keeps_outputs
            )
            for gradient, part in zip(sums.values(), parts, strict=True):
                if part is not None:
                    gradient += part.double()
        for gradient in sums.values():
            dist.all_reduce(gradient)
        gradients = whole_tensors([*placed(model, sums)])
        tokens_of_experts: dict[str, Tensor] = {}
        if case.has_expert_bias:
            taken = torch.stack([of_pack.taken for of_pack in counts]).sum(0)
            tokens_of_experts = dict(zip(self._bias_names, taken, strict=True))
            gradients |= {name: bias_update(tokens) for name, tokens in tokens_of_experts.items()}
        pieces = pieces_of(model, named)
        labels = {piece.name: name for name, own in pieces.items() for piece in own}
        return Expected(
            samples,
            float(loss.detach()),
            gradients,
            labels=labels,
            tokens_of_experts=tokens_of_experts,
        )

    def _custom_loss(self, samples: Sequence[Sample], leaves: Sequence[Scores]) -> Tensor:
        """Call the user's functions with the whole step as one micro-batch on one rank."""
        device = self._options.device
        parts = (torch.cat(part).to(device) for part in zip(*leaves, strict=True))
        totals = step_totals(samples, allow_different_group_sizes=True)
        config, batch = config_of(CUSTOM, self._options), pack(samples).to(device)
        return policy_loss_from_log_probs(config, batch, *parts, totals=totals)[0]

    def _loss_ahead(self, packed: Sequence[Sample], samples: Sequence[Sample]) -> Tensor:
        """Return a pack's multi-token loss, divided by the active tokens of all samples: 0-d
        float64.
        """
        depths = self._options.mtp_num_layers or 0
        active = sum(int(sample.loss_mask.sum()) for sample in samples)
        lengths = [sample.total_length for sample in packed]
        loss = torch.zeros((), dtype=torch.float64)
        for depth, output in enumerate(self._ahead[:depths], start=1):
            ahead = 1 + depth  # a position's own logits score the next token
            # Megatron's cross-entropy includes the padding columns.
            parts = torch.split(output[:, 0], lengths)
            for sample, logits in zip(packed, parts, strict=True):
                mask = torch.cat([torch.zeros(sample.prompt_length), sample.loss_mask.float()])
                rows = torch.log_softmax(logits.double(), dim=-1)[:-ahead]
                targets = sample.tokens[ahead:, None].to(logits.device)
                loss = loss - (rows.gather(1, targets)[:, 0] * mask[ahead:].to(rows)).sum().cpu()
        return loss * self._scale_ahead / (depths * active)

    def _choices(self, packed_at: dict[int, list[Sample]]) -> list[Choices]:
        """Count the choices in every pack from this rank's. Every rank calls it and gets the
        same.
        """
        mine = []
        for place, packed in packed_at.items():
            outputs = self._outputs(packed)
            topk = int(self.config.moe_router_topk)
            mine.append((place, choices(outputs.router_logits, outputs.taken, topk)))
        by_place = dict(itertools.chain(*gather(mine, dist.group.WORLD)))
        return [by_place[place] for place in sorted(by_place)]

    def _outputs(self, packed: Sequence[Sample]) -> Outputs:
        """Run a pack. If its graph allows several backward passes, rows with the same samples share
        it.
        """
        key = self._case.has_sigmoid, self._case.has_expert_bias, *packed
        if key in self._kept:
            return self._kept[key]
        logits = self._logits(packed)
        scores = itertools.chain(*map(self._scores, packed, logits))
        outputs = Outputs(logits, list(scores), list(self._router_logits), list(self._taken))
        if self._keeps_outputs:
            self._kept[key] = outputs
        return outputs

    def _logits(self, samples: Sequence[Sample]) -> list[Tensor]:
        """Return each sample's [total_length, columns] logits, padding columns included, from an
        unpadded pack.
        """
        lengths, device = [sample.total_length for sample in samples], self._options.device
        ends = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
        longest = {"max_seqlen_q": max(lengths), "max_seqlen_kv": max(lengths)}
        packed = PackedSeqParams("thd", ends, ends, **longest)
        tokens = torch.cat([sample.tokens for sample in samples]).to(device)
        self._positions = torch.cat([torch.arange(length) for length in lengths]).to(device)
        self._ahead.clear()
        self._router_logits.clear()
        self._taken.clear()
        experts = [s.routed_experts for s in samples if s.routed_experts is not None]
        self._experts = None
        if experts:
            ids = torch.cat(experts, 1).transpose(0, 1)
            self._experts = ids.long().masked_fill(ids == no_choice(ids), -1)
        logits = self._module(tokens[None], self._positions[None], None, packed_seq_params=packed)
        return list(torch.split(logits[0], lengths))

    def _scores(self, sample: Sample, logits: Tensor) -> Scores:
        """Score a sample from its [total_length, columns] logits, over its sampling sets if any."""
        # The logits of a position score the next token.
        scored = logits[sample.prompt_length - 1 : -1, : self._vocab_size].double()
        is_dropped = torch.zeros_like(scored, dtype=torch.bool)
        if (kept := sample.kept_tokens) is not None:
            is_dropped[kept.sizes > 0] = True
            is_dropped[kept.row_of_element(), kept.values] = False
        rows = torch.log_softmax(scored.masked_fill(is_dropped, -math.inf), dim=-1)
        targets = sample.tokens[sample.prompt_length :].to(logits.device)
        kept_rows = rows.masked_fill(is_dropped, 0.0)  # 0 times minus infinity is NaN
        scores = rows.gather(1, targets[:, None])[:, 0], -(rows.exp() * kept_rows).sum(1)
        return scores if sample.sampler_top_k is None else (*scores, _centering(sample, rows))


def _centering(sample: Sample, rows: Tensor) -> Tensor:
    """Return C of arXiv:2609.20807 eq. 14 for each response token: the sum of sg(q - rho p) log p
    over the engine's likeliest tokens. `rows` are log-probs [response, vocabulary], float64.
    """
    head: Any = sample.sampler_top_k
    places = head.ids.row_of_element(), head.ids.values.long()
    p, q = rows.detach().exp(), torch.zeros_like(rows)
    q[places] = head.log_probs.values.to(rows).exp()
    is_head = q > 0
    rho = (1 - q.sum(1)) / (1 - (p * is_head).sum(1))
    return (torch.where(is_head, q - rho[:, None] * p, 0.0) * rows).sum(1)


def _reference_loss(
    aggregation: str, policy_loss: str, samples: Sequence[Sample], scores: Sequence[Scores]
) -> Tensor:
    """Return the step's whole loss, differentiable in every sample's log-probs and entropies: 0-d
    float64.
    """
    rollout_tokens: Counter[object] = Counter()
    group_tokens: Counter[object] = Counter()
    for sample in samples:
        rollout_tokens[sample.rollout_id] += int(sample.loss_mask.sum())
        group_tokens[sample.group_index] += int(sample.loss_mask.sum())
    num_rollouts, num_groups = len(rollout_tokens), len(group_tokens)
    terms = []
    for sample, (log_probs, entropy, *centering) in zip(samples, scores, strict=True):
        mask, ref = (getattr(sample, name).to(log_probs) for name in ("loss_mask", "ref_log_probs"))
        surrogate = _surrogate(policy_loss, sample, mask, log_probs)
        for center in centering:
            surrogate = surrogate + sample.advantages.to(center) * center
        kl = torch.exp(ref - log_probs) - 1 + log_probs - ref
        sample_mean = 1 / (num_rollouts * max(rollout_tokens[sample.rollout_id], 1))
        weights = {
            "sample_mean": sample_mean,
            "prompt_mean": 1 / (num_groups * max(group_tokens[sample.group_index], 1)),
            "token_mean": 1 / max(rollout_tokens.total(), 1),
            "constant": 1 / (num_rollouts * DIVISOR),
        }
        weight = weights.get(aggregation) or _row_weight(aggregation, samples, sample)
        penalty = KL_COEFFICIENT * kl - ENTROPY_COEFFICIENT * entropy
        terms.append((mask * (weight * surrogate + sample_mean * penalty)).sum())
    return sum(terms, torch.zeros_like(terms[0]))


def _surrogate(policy_loss: str, sample: Sample, mask: Tensor, log_probs: Tensor) -> Tensor:
    """Return the policy loss of each token of a sample, [response] float64."""
    anchor = "rollout_log_probs" if policy_loss == "dis" else "old_log_probs"
    fields: list[Tensor] = [getattr(sample, name).to(log_probs) for name in ("advantages", anchor)]
    advantages, old = fields
    if policy_loss == "dis":
        ratio = torch.exp(log_probs.detach() - old)
        return -ratio * ((ratio > 0.8) & (ratio < 1.2)) * advantages * log_probs
    log_ratio = log_probs - old
    if policy_loss == "gspo":
        # The value is the sequence's mean. Each token keeps its own log-prob's gradient.
        mean = (mask * log_ratio).sum().detach() / max(float(mask.sum()), 1.0)
        log_ratio = mean + log_probs - log_probs.detach()
    ratio = torch.exp(log_ratio)
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)


def _row_weight(aggregation: str, samples: Sequence[Sample], sample: Sample) -> float:
    """Return the token weight of an aggregation unknown to this file, from its table row."""
    row, totals = AGGREGATIONS[aggregation], step_totals(samples, allow_different_group_sizes=True)
    divisors = row.divisors_of(totals, [sample], DIVISOR if row.needs else None)
    return 1 / (float(divisors[0]) * row.outer_count(totals))
