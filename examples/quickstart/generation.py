"""Batched sampling from the model that is being trained, with a cache of keys and values.

Megatron's core attention is exchanged for one that remembers, so the same module, in the same sharding,
generates and trains. Each context-parallel rank generates answers of its own: nothing here crosses ranks but
the tensor-parallel collectives of the model itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Response:
    """A sampled continuation.

    Attributes:
        tokens: its tokens, the end token included where one was sampled.
        log_probs: log-probability of each, in nats, at the temperature it was sampled at.
    """

    tokens: list[int]
    log_probs: list[float]


class _VisibleTokens:
    """Which tokens of a left-padded batch are real; grows as the batch does."""

    def __init__(self, real: Tensor) -> None:
        self.real = real  # [batch, tokens so far] bool

    def mask(self, num_new: int) -> Tensor:
        """[batch, 1, num_new, tokens so far]: each new token sees the real ones up to itself."""
        total = self.real.size(1)
        columns = torch.arange(total, device=self.real.device)
        rows = columns[total - num_new :, None]
        # Padding sees itself, or its softmax would be empty and NaN.
        return (((columns <= rows) & self.real[:, None]) | (columns == rows))[:, None]


class _RememberingAttention(nn.Module):
    """Causal core attention of the new tokens over all tokens so far."""

    def __init__(self, visible: _VisibleTokens, softmax_scale: float | None) -> None:
        super().__init__()
        self.visible, self.softmax_scale = visible, softmax_scale
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """Query [new tokens, batch, heads, dim], key and value with their own heads -> [new tokens, batch, heads * dim]."""
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        if self.keys is not None and self.values is not None:
            key, value = torch.cat((self.keys, key), dim=2), torch.cat((self.values, value), dim=2)
        self.keys, self.values = key, value
        context = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=self.visible.mask(query.size(2)),
            scale=self.softmax_scale,
            enable_gqa=query.size(1) != key.size(1),
        )
        return context.permute(2, 0, 1, 3).flatten(2)


@contextlib.contextmanager
def _remembering(model: nn.Module, visible: _VisibleTokens) -> Iterator[None]:
    """Exchange every core attention of `model` for a remembering one, and put it back."""
    owners = [module for module in model.modules() if hasattr(module, "core_attention")]
    originals = [owner.core_attention for owner in owners]
    was_training = model.training
    model.eval()
    try:
        for owner, original in zip(owners, originals, strict=True):
            owner.core_attention = _RememberingAttention(
                visible, getattr(original, "softmax_scale", None)
            )
        yield
    finally:
        for owner, original in zip(owners, originals, strict=True):
            owner.core_attention = original
        model.train(was_training)


class Sampler:
    """Samples answers, and scores answers; every tensor-parallel rank must call it alike, with the same random state.

    Args:
        model: a GPTModel with learned absolute positions, wrapped or not.
        vocabulary_size: true size; the padded columns of the logits are never sampled.
        max_new_tokens: longest answer, the end token included.
        padding, end: those tokens.
        temperature: logits are divided by it.
        seed: of the random state, which `generator` holds.
        device: the model's.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        vocabulary_size: int,
        max_new_tokens: int,
        padding: int,
        end: int,
        temperature: float,
        seed: int,
        device: torch.device,
    ) -> None:
        self.model, self.device, self.temperature = model, device, temperature
        self.vocabulary_size, self.max_new_tokens = vocabulary_size, max_new_tokens
        self.padding, self.end = padding, end
        self.generator = torch.Generator(device).manual_seed(seed)

    @torch.no_grad()
    def sample(self, prompts: Sequence[Sequence[int]]) -> list[Response]:
        """One response to each prompt, which is stopped by the end token or by `max_new_tokens`."""
        if not prompts:
            return []
        new_tokens, positions, real = self._left_padded(prompts)
        visible = _VisibleTokens(real)
        ended = torch.zeros_like(new_tokens[:, :1], dtype=torch.bool)
        tokens, log_probs = [], []
        with _remembering(self.model, visible):
            for _ in range(self.max_new_tokens):
                distribution = self._log_probs(new_tokens, positions)[:, -1]
                new_tokens = torch.multinomial(distribution.exp(), 1, generator=self.generator)
                tokens.append(new_tokens)
                log_probs.append(distribution.gather(1, new_tokens))
                ended |= new_tokens == self.end
                if bool(ended.all()):
                    break
                positions = positions[:, -1:] + 1
                visible.real = F.pad(visible.real, (0, 1), value=True)
        return [
            self._until_end(row, row_log_probs)
            for row, row_log_probs in zip(
                torch.cat(tokens, dim=1).tolist(), torch.cat(log_probs, dim=1).tolist(), strict=True
            )
        ]

    @torch.no_grad()
    def score(
        self, prompts: Sequence[Sequence[int]], responses: Sequence[Response]
    ) -> list[list[float]]:
        """Log-probs of the tokens of each response under this model, at the temperature of sampling."""
        if not prompts:
            return []
        sequences = [
            [*prompt, *response.tokens] for prompt, response in zip(prompts, responses, strict=True)
        ]
        tokens, positions, real = self._left_padded(sequences)
        with _remembering(self.model, _VisibleTokens(real[:, :-1])):
            distribution = self._log_probs(tokens[:, :-1], positions[:, :-1])
        log_probs = distribution.gather(2, tokens[:, 1:, None]).squeeze(2).tolist()
        return [
            row[len(row) - len(response.tokens) :]
            for row, response in zip(log_probs, responses, strict=True)
        ]

    def _left_padded(self, sequences: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, positions and which tokens are real, each [batch, longest]."""
        longest = max(map(len, sequences))
        padded = [
            [self.padding] * (longest - len(sequence)) + list(sequence) for sequence in sequences
        ]
        lengths = torch.tensor([len(sequence) for sequence in sequences], device=self.device)[
            :, None
        ]
        positions = torch.arange(longest, device=self.device) - (longest - lengths)
        return torch.tensor(padded, device=self.device), positions.clamp(min=0), positions >= 0

    def _log_probs(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Run the model on [batch, new] tokens: [batch, new, vocabulary] float32."""
        logits = self.model(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=None,
            runtime_gather_output=True,
        )
        logits = logits[..., : self.vocabulary_size].float() / self.temperature
        return torch.log_softmax(logits, dim=-1)

    def _until_end(self, tokens: list[int], log_probs: list[float]) -> Response:
        length = tokens.index(self.end) + 1 if self.end in tokens else len(tokens)
        return Response(tokens[:length], log_probs[:length])
