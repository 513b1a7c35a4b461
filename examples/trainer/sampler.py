"""Sampling from the model that is being trained: batched, with a cache of keys and values, rotary positions, stop tokens.

Every core attention is exchanged for one that remembers, so the same modules, in the same sharding, generate.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Response:
    """A sampled answer, the stop token included where it came, and the log-prob of each token, nats."""

    tokens: list[int]
    log_probs: list[float]


class _RememberingAttention(nn.Module):
    """Causal core attention of the new tokens over all tokens so far; a row of the batch is padded on the left."""

    def __init__(self, padding: Tensor, softmax_scale: float | None) -> None:
        super().__init__()
        self.padding, self.softmax_scale = padding, softmax_scale
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def repeat(self, copies: int) -> None:
        """Go on with that many copies of each row."""
        if self.keys is not None and self.values is not None:
            self.keys = self.keys.repeat_interleave(copies, 0)
            self.values = self.values.repeat_interleave(copies, 0)
        self.padding = self.padding.repeat_interleave(copies, 0)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """Query [new tokens, batch, heads, dim], key and value with their own heads -> [new tokens, batch, heads * dim]."""
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        if self.keys is not None and self.values is not None:
            key, value = torch.cat((self.keys, key), dim=2), torch.cat((self.values, value), dim=2)
        self.keys, self.values = key, value
        columns = torch.arange(key.size(2), device=key.device)
        rows = columns[key.size(2) - query.size(2) :, None]
        # Padding sees itself, or its softmax would be empty and NaN.
        mask = (columns <= rows) & (columns >= self.padding[:, None, None]) | (columns == rows)
        context = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask[:, None],
            scale=self.softmax_scale,
            enable_gqa=query.size(1) != key.size(1),
        )
        return context.permute(2, 0, 1, 3).flatten(2)


class Sampler:
    """Samples answers from a GPTModel with rotary or no positions.

    Every rank of a tensor-parallel group and of a pipeline must call it alike, with the same random state, and gets
    the answers. The other ranks need not.

    Args:
        model: the GPTModel, unwrapped; under pipeline parallelism this stage of it.
        pipeline: the stages of the pipeline.
        vocab_size: true size; the padded columns of the logits are never sampled.
        stop_tokens: those that end an answer.
        max_new_tokens: longest answer, the stop token included.
    """

    def __init__(
        self,
        model: Any,
        pipeline: ProcessGroup,
        *,
        vocab_size: int,
        stop_tokens: Sequence[int],
        max_new_tokens: int,
    ) -> None:
        self._model, self._pipeline, self._vocab_size = model, pipeline, vocab_size
        self._stop_tokens, self._max_new_tokens = list(stop_tokens), max_new_tokens

    @torch.no_grad()
    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        copies: int,
        *,
        temperature: float,
        generator: torch.Generator | None,
    ) -> list[Response]:
        """Answers to each prompt, `copies` of them in a row.

        Args:
            temperature: logits are divided by it.
            generator: on the model's device; None takes the likeliest token.
        """
        if not prompts:
            return []
        device = next(self._model.parameters()).device
        longest = max(map(len, prompts))
        padding = torch.tensor([longest - len(prompt) for prompt in prompts], device=device)
        tokens = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts], device=device)
        stop = torch.tensor(self._stop_tokens, device=device)
        chosen: list[Tensor] = []
        log_probs: list[Tensor] = []
        ended = torch.zeros(len(prompts) * copies, 1, dtype=torch.bool, device=device)
        with self._remembering(padding) as attentions:
            for number in range(self._max_new_tokens):
                logits = self._logits(tokens, longest + number - tokens.size(1))
                if number == 0:  # the prompts are run once
                    logits = logits.repeat_interleave(copies, 0)
                    for attention in attentions:
                        attention.repeat(copies)
                tokens, log_prob = self._choose((logits / temperature).log_softmax(-1), generator)
                chosen.append(tokens)
                log_probs.append(log_prob)
                ended |= torch.isin(tokens, stop)
                if bool(ended.all()):
                    break
        rows = zip(torch.cat(chosen, 1).tolist(), torch.cat(log_probs, 1).tolist(), strict=True)
        return [self._until_stop(*row) for row in rows]

    def _logits(self, tokens: Tensor, start: int) -> Tensor:
        """Run the stages on [batch, new] tokens from column `start` on: float32 [batch, vocabulary] of the last.

        Stages before the last have no logits, and return zeros.
        """
        model, stage = self._model, dist.get_rank(self._pipeline)
        rotary = getattr(model, "rotary_pos_emb", None)
        if rotary is not None:
            # It goes by differences of positions alone, so those of the padded columns serve.
            rotary.forward = lambda *_, **__: rotary.get_emb(tokens.size(1), offset=start)
        if not model.pre_process:
            shape = (tokens.size(1), tokens.size(0), model.config.hidden_size)
            hidden = torch.empty(shape, dtype=model.config.pipeline_dtype, device=tokens.device)
            dist.recv(hidden, group=self._pipeline, group_src=stage - 1)
            model.set_input_tensor(hidden)
        output = model(
            input_ids=tokens,
            position_ids=torch.arange(start, start + tokens.size(1), device=tokens.device)[None],
            attention_mask=None,
            runtime_gather_output=True,
        )
        if model.post_process:
            return output[:, -1, : self._vocab_size].float()
        dist.send(output.contiguous(), group=self._pipeline, group_dst=stage + 1)
        return torch.zeros(tokens.size(0), self._vocab_size, device=tokens.device)

    def _choose(
        self, distribution: Tensor, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        """The next token of each row and its log-prob, both [batch, 1], as the last stage draws them."""
        tokens = (
            distribution.argmax(-1, keepdim=True)
            if generator is None
            else torch.multinomial(distribution.exp(), 1, generator=generator)
        )
        log_prob = distribution.gather(1, tokens)
        last = dist.get_world_size(self._pipeline) - 1
        if last:
            dist.broadcast(tokens, group=self._pipeline, group_src=last)
            dist.broadcast(log_prob, group=self._pipeline, group_src=last)
        return tokens, log_prob

    @contextlib.contextmanager
    def _remembering(self, padding: Tensor) -> Iterator[list[_RememberingAttention]]:
        """Exchange every core attention for a remembering one, and put it back."""
        owners = [module for module in self._model.modules() if hasattr(module, "core_attention")]
        originals = [owner.core_attention for owner in owners]
        rotary = getattr(self._model, "rotary_pos_emb", None)
        was_training = self._model.training
        self._model.eval()
        try:
            for owner, original in zip(owners, originals, strict=True):
                scale = getattr(original, "softmax_scale", None)
                owner.core_attention = _RememberingAttention(padding, scale)
            yield [owner.core_attention for owner in owners]
        finally:
            for owner, original in zip(owners, originals, strict=True):
                owner.core_attention = original
            if rotary is not None:
                vars(rotary).pop("forward", None)
            self._model.train(was_training)

    def _until_stop(self, tokens: list[int], log_probs: list[float]) -> Response:
        length = next((i + 1 for i, t in enumerate(tokens) if t in self._stop_tokens), len(tokens))
        return Response(tokens[:length], log_probs[:length])
