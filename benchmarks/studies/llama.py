"""A rollout engine for Llama's architecture in plain torch, on the trainer's weights or on the same
weights rounded.

Weights go by Megatron's names (`GPTModel`, plain layers). Rounded are the matrices of attention and
MLP, as engines do; the embedding, which is the output layer too, and the norms stay.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

INT4_GROUP = 64


class Sizes(NamedTuple):
    """Of SmolLM2-135M; a test gives smaller ones."""

    layers: int = 30
    heads: int = 9
    groups: int = 3
    hidden: int = 576
    inner: int = 1536
    vocabulary: int = 49152
    rotary_base: float = 100_000.0
    epsilon: float = 1e-5


def int8(weight: Tensor) -> Tensor:
    """Round each row to 255 steps of its largest magnitude."""
    scale = weight.abs().amax(1, keepdim=True) / 127
    return (weight / scale).round().clamp(-127, 127) * scale


def fp8(weight: Tensor) -> Tensor:
    """Round to e4m3 with a scale for each row."""
    scale = weight.abs().amax(1, keepdim=True) / 448
    return (weight / scale).to(torch.float8_e4m3fn).float() * scale


def int4(weight: Tensor) -> Tensor:
    """Round groups of 64 columns to 16 steps from their smallest to their largest value."""
    groups = weight.view(weight.size(0), -1, INT4_GROUP)
    low, high = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
    scale = (high - low).clamp(min=1e-9) / 15
    return (((groups - low) / scale).round() * scale + low).view_as(weight)


ROUNDINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda weight: weight,
    "int8": int8,
    "fp8": fp8,
    "int4": int4,
}


def from_hugging_face(state: Mapping[str, Tensor], sizes: Sizes) -> dict[str, Tensor]:
    """Rename a LlamaForCausalLM's tensors: for each group its query heads, key and value; gate,
    then up.
    """
    names = {
        "input_layernorm": "input_layernorm",
        "post_attention_layernorm": "pre_mlp_layernorm",
        "self_attn.o_proj": "self_attention.linear_proj",
        "mlp.down_proj": "mlp.linear_fc2",
    }
    weights = {
        "embedding.word_embeddings.weight": state["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": state["model.norm.weight"],
    }
    for number in range(sizes.layers):
        old, new = f"model.layers.{number}.", f"decoder.layers.{number}."
        for theirs, ours in names.items():
            weights[f"{new}{ours}.weight"] = state[f"{old}{theirs}.weight"]
        parts = [
            state[f"{old}self_attn.{x}_proj.weight"].view(sizes.groups, -1, sizes.hidden)
            for x in "qkv"
        ]
        weights[f"{new}self_attention.linear_qkv.weight"] = torch.cat(parts, 1).flatten(0, 1)
        halves = [state[f"{old}mlp.{x}_proj.weight"] for x in ("gate", "up")]
        weights[f"{new}mlp.linear_fc1.weight"] = torch.cat(halves)
    return weights


def rotation(positions: Tensor, size: int, base: float) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [tokens, 1, size / 2] of the rotary embedding at positions
    [tokens].
    """
    half = size // 2
    rates = base ** (-torch.arange(half, device=positions.device, dtype=torch.float32) / half)
    angles = positions[:, None, None].float() * rates
    return angles.cos(), angles.sin()


def rotated(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Turn [tokens, heads, dim], halves exchanged."""
    first, second = x.float().chunk(2, -1)
    cosine, sine = rotation
    turned = torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1)
    return turned.to(x.dtype)


class Response(NamedTuple):
    """A sampled response."""

    tokens: list[int]
    log_probs: list[float]
    """The log-prob that each token was sampled by."""
    top_k: tuple[Tensor, Tensor] | None
    """Ids and log-probs of the likeliest tokens, [len(tokens), k] each."""


class LlamaEngine:
    """Samples answers, and reports the log-probs that it sampled by."""

    def __init__(self, sizes: Sizes, weights: Mapping[str, Tensor], rounding: str) -> None:
        self.sizes, self.weights = sizes, {}
        for name, weight in weights.items():
            is_rounded = weight.dim() == 2 and "embedding" not in name
            rounded = ROUNDINGS[rounding](weight.float()) if is_rounded else weight
            self.weights[name] = rounded.to(weight.dtype)

    @torch.no_grad()
    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        copies: int,
        length: int,
        stop: Sequence[int],
        generator: torch.Generator | None,
        top_k: int = 0,
    ) -> list[Response]:
        """Answer each prompt `copies` times at temperature 1, or by the likeliest tokens without a
        generator. `top_k` is the number of likeliest tokens to report for each token, 0 for none.
        """
        device = self.weights["decoder.final_layernorm.weight"].device
        longest = max(map(len, prompts))
        rows = [[0] * (longest - len(prompt)) + [*prompt] for prompt in prompts]
        padding = torch.tensor([longest - len(prompt) for prompt in prompts], device=device)
        tokens = torch.tensor(rows, device=device)
        ends = torch.tensor([*stop], device=device)
        self.cached: list[tuple[Tensor, Tensor] | None] = [None] * self.sizes.layers
        chosen: list[Tensor] = []
        log_probs: list[Tensor] = []
        likeliest: list[tuple[Tensor, Tensor]] = []
        for total in range(longest, longest + length):
            logits = self._logits(tokens, padding, total - tokens.size(1))
            if total == longest and copies > 1:
                logits, padding = (x.repeat_interleave(copies, 0) for x in (logits, padding))
                self.cached = [
                    tuple(x.repeat_interleave(copies, 0) for x in pair) for pair in self.cached
                ]
            distribution = logits.float().log_softmax(-1)
            if generator is None:
                tokens = distribution.argmax(-1, keepdim=True)
            else:
                tokens = torch.multinomial(distribution.exp(), 1, generator=generator)
            chosen.append(tokens)
            log_probs.append(distribution.gather(1, tokens))
            if top_k:
                values, ids = distribution.topk(top_k)
                likeliest.append((ids.cpu(), values.clamp(max=0).cpu()))
            if bool(torch.isin(torch.cat(chosen, 1), ends).any(1).all()):
                break
        reported = [torch.stack(part, 1) for part in zip(*likeliest, strict=True)]
        pairs = zip(torch.cat(chosen, 1).tolist(), torch.cat(log_probs, 1).tolist(), strict=True)
        answers = []
        for row, (tokens_of_row, values_of_row) in enumerate(pairs):
            ended = (i + 1 for i, token in enumerate(tokens_of_row) if token in stop)
            count = next(ended, len(tokens_of_row))
            sets = (reported[0][row, :count], reported[1][row, :count]) if top_k else None
            values = [min(value, 0.0) for value in values_of_row[:count]]
            answers.append(Response(tokens_of_row[:count], values, sets))
        return answers

    def _logits(self, tokens: Tensor, padding: Tensor, start: int) -> Tensor:
        sizes, weights = self.sizes, self.weights
        rows, new = tokens.shape
        columns = torch.arange(start, start + new, device=tokens.device)
        positions = (columns - padding[:, None]).clamp(min=0).flatten()
        keys = torch.arange(start + new, device=tokens.device)
        places = columns[:, None]
        mask = ((keys <= places) & (keys >= padding[:, None, None]) | (keys == places))[:, None]
        hidden = weights["embedding.word_embeddings.weight"][tokens]
        turn = rotation(positions, sizes.hidden // sizes.heads, sizes.rotary_base)
        for number in range(sizes.layers):
            name = f"decoder.layers.{number}."
            x = self._norm(hidden, name + "input_layernorm")
            mixed = linear(x, weights[name + "self_attention.linear_qkv.weight"])
            per_group = sizes.heads // sizes.groups
            mixed = mixed.view(rows * new, sizes.groups, per_group + 2, -1)
            query, key, value = mixed.split([per_group, 1, 1], 2)
            query = rotated(query.flatten(1, 2), turn)
            key = rotated(key.flatten(1, 2), turn)
            query, key, value = (
                part.reshape(rows, new, -1, part.size(-1)).transpose(1, 2)
                for part in (query, key, value.flatten(1, 2))
            )
            if (cached := self.cached[number]) is not None:
                key, value = (torch.cat(pair, 2) for pair in zip(cached, (key, value), strict=True))
            self.cached[number] = key, value
            context = scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)
            context = context.transpose(1, 2).flatten(2)
            hidden = hidden + linear(context, weights[name + "self_attention.linear_proj.weight"])
            x = self._norm(hidden, name + "pre_mlp_layernorm")
            gate, up = linear(x, weights[name + "mlp.linear_fc1.weight"]).chunk(2, -1)
            hidden = hidden + linear(silu(gate) * up, weights[name + "mlp.linear_fc2.weight"])
        last = self._norm(hidden[:, -1], "decoder.final_layernorm")
        return linear(last, weights["embedding.word_embeddings.weight"])

    def _norm(self, hidden: Tensor, name: str) -> Tensor:
        weight = self.weights[name + ".weight"]
        return rms_norm(hidden, weight.shape, weight, self.sizes.epsilon)
