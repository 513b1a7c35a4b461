"""Sampling of responses from the model in training, at its tensor-parallel size.

Every core attention is replaced by one that caches keys and values, so the same modules train and
generate.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention


class Response(NamedTuple):
    """A sampled response, including the stop token if there is one, with token log-probs."""

    tokens: list[int]
    log_probs: list[float]


class CachedAttention(nn.Module):
    """Causal attention of new tokens over all tokens so far, with rows padded on the left."""

    def __init__(self, padding: Tensor, softmax_scale: float | None) -> None:
        super().__init__()
        self.padding, self.softmax_scale = padding, softmax_scale  # padding: [batch]
        self.cached: list[Tensor] = []

    def repeat(self, copies: int) -> None:
        """Continue with `copies` copies of each row."""
        self.cached = [tensor.repeat_interleave(copies, 0) for tensor in self.cached]
        self.padding = self.padding.repeat_interleave(copies, 0)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """Map [new tokens, batch, heads, dim] each to [new tokens, batch, heads * dim]."""
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        if self.cached:
            pairs = zip(self.cached, (key, value), strict=True)
            key, value = (torch.cat(pair, 2) for pair in pairs)
        self.cached = [key, value]
        columns = torch.arange(key.size(2), device=query.device)
        rows = columns[-query.size(2) :, None]
        # Padding attends to itself, because an empty softmax would be NaN.
        mask = (columns <= rows) & (columns >= self.padding[:, None, None]) | (columns == rows)
        options = {"scale": self.softmax_scale, "enable_gqa": query.size(1) != key.size(1)}
        context = scaled_dot_product_attention(query, key, value, mask[:, None], **options)
        return context.permute(2, 0, 1, 3).flatten(2)


@dataclass(frozen=True)
class Sampler:
    """A sampler of responses from an unwrapped model, without the columns that pad its vocabulary.

    Tensor-parallel ranks make the same calls with the same random state.
    """

    model: Any
    vocab_size: int
    stop_tokens: Sequence[int]
    max_new_tokens: int

    @torch.no_grad()
    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        copies: int,
        *,
        temperature: float,
        generator: torch.Generator | None,
    ) -> list[Response]:
        """Sample `copies` responses per prompt, or take the likeliest tokens without a
        generator.
        """
        if not prompts:
            return []
        device = next(self.model.parameters()).device
        longest = max(map(len, prompts))
        padding = torch.tensor([longest - len(prompt) for prompt in prompts], device=device)
        rows = [[0] * (longest - len(prompt)) + [*prompt] for prompt in prompts]
        tokens, stop = (torch.tensor(ids, device=device) for ids in (rows, self.stop_tokens))
        chosen: list[Tensor] = []
        log_probs: list[Tensor] = []
        with self._cached_attentions(padding) as attentions:
            for total in range(longest, longest + self.max_new_tokens):
                logits = self._logits(tokens, padding, total - tokens.size(1))
                if total == longest and copies > 1:  # prompts run once
                    logits, padding = (x.repeat_interleave(copies, 0) for x in (logits, padding))
                    for attention in attentions:
                        attention.repeat(copies)
                distribution = (logits / temperature).log_softmax(-1)
                if generator is None:
                    tokens = distribution.argmax(-1, keepdim=True)
                else:
                    tokens = torch.multinomial(distribution.exp(), 1, generator=generator)
                chosen.append(tokens)
                log_probs.append(distribution.gather(1, tokens))
                if bool(torch.isin(torch.cat(chosen, 1), stop).any(1).all()):
                    break
        answers = []
        for row, values in zip(
            torch.cat(chosen, 1).tolist(), torch.cat(log_probs, 1).tolist(), strict=True
        ):
            ends = (i + 1 for i, token in enumerate(row) if token in self.stop_tokens)
            length = next(ends, len(row))
            answers.append(Response(row[:length], values[:length]))
        return answers

    def _logits(self, tokens: Tensor, padding: Tensor, start: int) -> Tensor:
        """Run tokens [batch, new] from column `start` on, and return float32 logits [batch,
        vocabulary].
        """
        if (rotary := getattr(self.model, "rotary_pos_emb", None)) is not None:
            # It depends only on position differences, so padded columns' positions work.
            rotary.forward = lambda *_, **__: rotary.get_emb(tokens.size(1), offset=start)
        columns = torch.arange(start, start + tokens.size(1), device=tokens.device)
        positions = (columns - padding[:, None]).clamp(min=0)
        output = self.model(tokens, positions, None, runtime_gather_output=True)
        return output[:, -1, : self.vocab_size].float()

    @contextlib.contextmanager
    def _cached_attentions(self, padding: Tensor) -> Iterator[list[CachedAttention]]:
        """Replace every core attention inside the context."""
        modules = [module for module in self.model.modules() if hasattr(module, "core_attention")]
        originals = [module.core_attention for module in modules]
        was_training = self.model.training
        self.model.eval()
        try:
            for module, original in zip(modules, originals, strict=True):
                scale = getattr(original, "softmax_scale", None)
                module.core_attention = CachedAttention(padding, scale)
            yield [module.core_attention for module in modules]
        finally:
            for module, original in zip(modules, originals, strict=True):
                module.core_attention = original
            if (rotary := getattr(self.model, "rotary_pos_emb", None)) is not None:
                vars(rotary).pop("forward", None)
            self.model.train(was_training)
