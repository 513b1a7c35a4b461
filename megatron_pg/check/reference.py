"""What a step should give: the unsharded model on each sample alone, and the loss in float64, sample by sample.

The loss shares no code with the reducers, the token window or the scale contract that it judges.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_pg.check.model import build_chunks, model_config
from megatron_pg.check.options import (
    CUSTOM,
    DIVISOR,
    ENTROPY_COEFFICIENT,
    KL_COEFFICIENT,
    CheckOptions,
    config_of,
)
from megatron_pg.check.sharded_parameters import gradient_slices
from megatron_pg.loss.policy_loss import policy_loss_from_log_probs
from megatron_pg.step.batch import pack
from megatron_pg.step.sample import Sample
from megatron_pg.step.totals import step_totals


@dataclass(frozen=True)
class Expected:
    """The whole step's loss, and whole gradients by name."""

    loss: float
    gradients: dict[str, Tensor]


class WholeModel:
    """The model of some options without any sharding, made by `new_model`; every rank has one for itself.

    In float64 where it is the reference of float32: what is measured is then the float32 run's error alone, and not
    the difference of two.
    """

    def __init__(self, options: CheckOptions, new_model: Callable[..., torch.nn.Module]) -> None:
        self._options = options
        dtype = torch.float64 if options.dtype == "fp32" else torch.bfloat16
        config = model_config(options, sharded=False, dtype=dtype)
        self._module = build_chunks(options, config, new_model)[0].to(dtype)

    @torch.no_grad()
    def log_probs(self, samples: Sequence[Sample]) -> list[Tensor]:
        """The [response] float32 log-probs of each sample, on the host."""
        return [
            _response_log_probs(sample, self._logits(sample))[0].float().cpu() for sample in samples
        ]

    def expected(self, samples: Sequence[Sample], aggregation: str) -> Expected:
        """The loss and the gradients of a step under an aggregation or, for `CUSTOM`, the user's own functions."""
        # Anew for each: Transformer Engine goes through a graph once.
        outputs = [self._logits(sample) for sample in samples]
        logits = [output.detach().requires_grad_() for output in outputs]
        scores = [_response_log_probs(*each) for each in zip(samples, logits, strict=True)]
        if aggregation == CUSTOM:
            # The user's functions on the whole step at once, in one micro-batch on one rank.
            batch = pack(samples).to(self._options.device)
            log_probs, entropies = (torch.cat(parts) for parts in zip(*scores, strict=True))
            loss, _ = policy_loss_from_log_probs(
                config_of(CUSTOM, self._options),
                *(batch, log_probs, entropies),
                totals=step_totals(samples, allow_different_prompts=True),
            )
        else:
            loss = _reference_loss(aggregation, samples, scores)
        loss.backward()  # type: ignore[no-untyped-call]
        gradients: dict[str, Tensor] = {}
        for output, leaf in zip(outputs, logits, strict=True):
            self._module.zero_grad(set_to_none=True)
            output.backward(leaf.grad)  # type: ignore[no-untyped-call]
            # In float64: many bf16 sums would lose digits of their own.
            for shard, part in gradient_slices([self._module]):
                gradients[shard.name] = gradients.get(shard.name, 0.0) + part.double()
        return Expected(float(loss.detach()), gradients)

    def _logits(self, sample: Sample) -> Tensor:
        """[total_length, vocab] logits of one sample, neither packed nor padded."""
        length, device = sample.total_length, self._options.device
        boundaries = torch.tensor([0, length], dtype=torch.int32, device=device)
        lengths = {"max_seqlen_q": length, "max_seqlen_kv": length}
        packed = PackedSeqParams("thd", boundaries, boundaries, **lengths)
        tokens, positions = sample.tokens.to(device), torch.arange(length, device=device)
        logits: Tensor = self._module(tokens[None], positions[None], None, packed_seq_params=packed)
        return logits[0]


def _response_log_probs(sample: Sample, logits: Tensor) -> tuple[Tensor, Tensor]:
    """([response] log-probs, [response] entropy), float64, from the [total_length, vocab] logits of one sample."""
    # The logits of a position score the next token.
    rows = torch.log_softmax(logits.double(), dim=-1)[sample.prompt_length - 1 : -1]
    targets = sample.tokens[sample.prompt_length :].to(logits.device)
    return rows.gather(1, targets[:, None])[:, 0], -(rows.exp() * rows).sum(1)


def _reference_loss(
    aggregation: str, samples: Sequence[Sample], scores: Sequence[tuple[Tensor, Tensor]]
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
        ratio = torch.exp(log_probs - old)
        ppo = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        kl = torch.exp(ref - log_probs) - 1 + log_probs - ref
        sample_mean = 1 / (len(rollout_tokens) * max(rollout_tokens[sample.rollout_id], 1))
        weight = {
            "sample_mean": sample_mean,
            "prompt_mean": 1 / (len(group_tokens) * max(group_tokens[sample.group_index], 1)),
            "token_mean": 1 / max(rollout_tokens.total(), 1),
            "constant": 1 / (len(rollout_tokens) * DIVISOR),
        }[aggregation]
        penalty = KL_COEFFICIENT * kl - ENTROPY_COEFFICIENT * entropy
        terms.append((mask * (weight * ppo + sample_mean * penalty)).sum())
    return sum(terms, torch.zeros_like(terms[0]))
