"""Answers sampled from the model that is being trained, in its own sharding; train_grpo.py and
trainer/ share it.

Every core attention is exchanged for one that remembers keys and values, so the same modules train
and generate.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from megatron_pg.rollout_files import RewardedSample


class Response(NamedTuple):
    """A sampled answer, the stop token included where it came, and the log-prob of each token,
    nats.
    """

    tokens: list[int]
    log_probs: list[float]


def answer_sample(prompt: Sequence[int], answer: Sequence[int], **fields: Any) -> RewardedSample:
    """Make the sample of a prompt and an answer of which every token counts."""
    mask = [1] * len(answer)
    return RewardedSample([*prompt, *answer], len(answer), mask, **fields)


class CachedAttention(nn.Module):
    """Causal core attention of the new tokens over all tokens so far; a row of the batch is padded
    on the left.
    """

    def __init__(self, padding: Tensor, softmax_scale: float | None) -> None:
        super().__init__()
        self.padding, self.softmax_scale = padding, softmax_scale  # padding: [batch]
        self.cached: list[Tensor] = []

    def repeat(self, copies: int) -> None:
        """Go on with that many copies of each row."""
        self.cached = [tensor.repeat_interleave(copies, 0) for tensor in self.cached]
        self.padding = self.padding.repeat_interleave(copies, 0)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """[new tokens, batch, heads, dim] each -> [new tokens, batch, heads * dim]."""
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        if self.cached:
            pairs = zip(self.cached, (key, value), strict=True)
            key, value = (torch.cat(pair, 2) for pair in pairs)
        self.cached = [key, value]
        columns = torch.arange(key.size(2), device=query.device)
        rows = columns[-query.size(2) :, None]
        # Padding sees itself, or its softmax would be empty and NaN.
        mask = (columns <= rows) & (columns >= self.padding[:, None, None]) | (columns == rows)
        options = {"scale": self.softmax_scale, "enable_gqa": query.size(1) != key.size(1)}
        context = scaled_dot_product_attention(query, key, value, mask[:, None], **options)
        return context.permute(2, 0, 1, 3).flatten(2)


@dataclass(frozen=True)
class Sampler:
    """Samples answers. The ranks of a tensor-parallel group and of a pipeline call it alike, with
    the same random state.
    """

    model: Any
    """The GPTModel, unwrapped; under pipeline parallelism this stage of it."""
    pipeline: dist.ProcessGroup
    vocab_size: int
    """True size: the padded columns of the logits are never sampled."""
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
        """Answer each prompt, `copies` times in a row. Without a generator the likeliest tokens are
        taken.
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
                if total == longest and copies > 1:  # the prompts are run once
                    logits, padding = (x.repeat_interleave(copies, 0) for x in (logits, padding))
                    for attention in attentions:
                        attention.repeat(copies)
                tokens, log_prob = self._choose((logits / temperature).log_softmax(-1), generator)
                chosen.append(tokens)
                log_probs.append(log_prob)
                if bool(torch.isin(torch.cat(chosen, 1), stop).any(1).all()):
                    break
        both = zip(torch.cat(chosen, 1).tolist(), torch.cat(log_probs, 1).tolist(), strict=True)
        return [self._until_stop(*row) for row in both]

    def _logits(self, tokens: Tensor, padding: Tensor, start: int) -> Tensor:
        """Run the stages on [batch, new] tokens from column `start` on: float32 [batch,
        vocabulary], zeros before the last.
        """
        model, stage = self.model, dist.get_rank(self.pipeline)
        if (rotary := getattr(model, "rotary_pos_emb", None)) is not None:
            # It goes by differences of positions alone, so those of the padded columns serve.
            rotary.forward = lambda *_, **__: rotary.get_emb(tokens.size(1), offset=start)
        if not model.pre_process:
            shape = (tokens.size(1), tokens.size(0), model.config.hidden_size)
            hidden = torch.empty(shape, dtype=model.config.pipeline_dtype, device=tokens.device)
            dist.recv(hidden, group=self.pipeline, group_src=stage - 1)
            model.set_input_tensor(hidden)
        columns = torch.arange(start, start + tokens.size(1), device=tokens.device)
        output = model(
            input_ids=tokens,
            position_ids=(columns - padding[:, None]).clamp(min=0),
            attention_mask=None,
            runtime_gather_output=True,
        )
        if model.post_process:
            return output[:, -1, : self.vocab_size].float()
        dist.send(output.contiguous(), group=self.pipeline, group_dst=stage + 1)
        return torch.zeros(tokens.size(0), self.vocab_size, device=tokens.device)

    def _choose(
        self, distribution: Tensor, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        """The next token of each row and its log-prob, both [batch, 1], as the last stage draws
        them.
        """
        if generator is None:
            tokens = distribution.argmax(-1, keepdim=True)
        else:
            tokens = torch.multinomial(distribution.exp(), 1, generator=generator)
        log_prob = distribution.gather(1, tokens)
        if last := dist.get_world_size(self.pipeline) - 1:
            for drawn in (tokens, log_prob):
                dist.broadcast(drawn, group=self.pipeline, group_src=last)
        return tokens, log_prob

    @contextlib.contextmanager
    def _cached_attentions(self, padding: Tensor) -> Iterator[list[CachedAttention]]:
        """Exchange every core attention, and put it back."""
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

    def _until_stop(self, tokens: list[int], log_probs: list[float]) -> Response:
        length = next((i + 1 for i, t in enumerate(tokens) if t in self.stop_tokens), len(tokens))
        return Response(tokens[:length], log_probs[:length])
