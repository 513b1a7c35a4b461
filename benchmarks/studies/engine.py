"""A rollout engine of its own for the toy models: plain torch on whole weights, the same whatever shards the trainer."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, linear, scaled_dot_product_attention

Answer = tuple[list[int], list[float]]
"""The tokens up to the end token, and their log-probs in nats."""


class Engine:
    """A GPT with learned positions, with or without experts, by the names of Megatron's whole model."""

    def __init__(self, weights: Mapping[str, Tensor], heads: int, experts_per_token: int) -> None:
        self.weights, self.heads, self.experts_per_token = weights, heads, experts_per_token
        self.num_layers = len({name for name in weights if name.endswith("linear_qkv.weight")})
        self.cached: dict[int, tuple[Tensor, Tensor]] = {}

    @torch.no_grad()
    def sample(
        self, prompts: Sequence[Sequence[int]], end: int, vocab_size: int, length: int, seed: int
    ) -> list[Answer]:
        """Answer each prompt with at most `length` tokens. A token is where the cumulative probability passes a uniform
        number, so that two engines which differ by rounding draw the same tokens but at the edges."""
        generator = torch.Generator().manual_seed(seed)
        longest = max(map(len, prompts))
        padding = torch.tensor([longest - len(prompt) for prompt in prompts])
        tokens = torch.tensor([[0] * (longest - len(prompt)) + [*prompt] for prompt in prompts])
        chosen, log_probs, self.cached = [], [], {}
        for total in range(longest, longest + length):
            logits = self._logits(tokens, padding, total - tokens.size(1))[:, :vocab_size]
            distribution = logits.log_softmax(1)
            draw = torch.rand(len(prompts), 1, generator=generator, dtype=torch.float64)
            passed = distribution.double().exp().cumsum(1) < draw
            tokens = passed.sum(1, keepdim=True).clamp(max=vocab_size - 1)
            chosen.append(tokens)
            log_probs.append(distribution.gather(1, tokens))
            if bool((torch.cat(chosen, 1) == end).any(1).all()):
                break
        rows = zip(torch.cat(chosen, 1).tolist(), torch.cat(log_probs, 1).tolist(), strict=True)
        return [_until(end, *row) for row in rows]

    @torch.no_grad()
    def score(self, tokens: Tensor, padding: Tensor) -> Tensor:
        """Log-probs [rows, length - 1] of the tokens after the first, of rows padded on the left."""
        self.cached = {}
        hidden = self._hidden(tokens, padding, 0)[:, :-1]
        logits = self._linear(self._norm(hidden, "decoder.final_layernorm"), "output_layer")
        return logits.log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]

    def _logits(self, tokens: Tensor, padding: Tensor, start: int) -> Tensor:
        hidden = self._hidden(tokens, padding, start)[:, -1]
        return self._linear(self._norm(hidden, "decoder.final_layernorm"), "output_layer")

    def _hidden(self, tokens: Tensor, padding: Tensor, start: int) -> Tensor:
        columns = torch.arange(start, start + tokens.size(1))
        positions = (columns - padding[:, None]).clamp(min=0)
        hidden = self.weights["embedding.word_embeddings.weight"][tokens]
        hidden = hidden + self.weights["embedding.position_embeddings.weight"][positions]
        keys = torch.arange(start + tokens.size(1))
        rows = columns[:, None]
        # Padding sees itself, or its softmax would be empty.
        mask = (keys <= rows) & (keys >= padding[:, None, None]) | (keys == rows)
        for number in range(self.num_layers):
            name = f"decoder.layers.{number}."
            attended = self._attention(
                number, name, self._norm(hidden, name + "input_layernorm"), mask
            )
            hidden = hidden + attended
            mlp = self._experts if f"{name}mlp.router.weight" in self.weights else self._mlp
            hidden = hidden + mlp(name + "mlp.", self._norm(hidden, name + "pre_mlp_layernorm"))
        return hidden

    def _attention(self, number: int, name: str, hidden: Tensor, mask: Tensor) -> Tensor:
        mixed = self._linear(hidden, name + "self_attention.linear_qkv")
        parts = mixed.unflatten(2, (self.heads, 3, -1)).permute(3, 0, 2, 1, 4)
        query, key, value = parts.unbind()
        if number in self.cached:
            pairs = zip(self.cached[number], (key, value), strict=True)
            key, value = (torch.cat(pair, 2) for pair in pairs)
        self.cached[number] = key, value
        context = scaled_dot_product_attention(query, key, value, mask[:, None])
        return self._linear(context.transpose(1, 2).flatten(2), name + "self_attention.linear_proj")

    def _mlp(self, name: str, hidden: Tensor) -> Tensor:
        inner = gelu(self._linear(hidden, name + "linear_fc1"))
        return self._linear(inner, name + "linear_fc2")

    def _experts(self, name: str, hidden: Tensor) -> Tensor:
        scores, experts = self._linear(hidden, name + "router").topk(self.experts_per_token)
        weights, result = scores.softmax(-1), torch.zeros_like(hidden)
        for number in range(self.weights[name + "router.weight"].size(0)):
            share = torch.where(experts == number, weights, 0.0).sum(-1, keepdim=True)
            result += share * self._mlp(f"{name}experts.local_experts.{number}.", hidden)
        return result

    def _norm(self, hidden: Tensor, name: str) -> Tensor:
        scale, offset = (self.weights[f"{name}.{part}"] for part in ("weight", "bias"))
        return layer_norm(hidden, hidden.shape[-1:], scale, offset, 1e-5)

    def _linear(self, hidden: Tensor, name: str) -> Tensor:
        return linear(hidden, self.weights[name + ".weight"], self.weights.get(name + ".bias"))


def _until(end: int, tokens: list[int], log_probs: list[float]) -> Answer:
    length = next((i + 1 for i, token in enumerate(tokens) if token == end), len(tokens))
    return tokens[:length], log_probs[:length]
