"""An output layer with a scale and a soft-cap through the fused head, against dense float64."""

import dataclasses

import pytest
import torch
from torch import Tensor

from megatron_pg.head import (
    Divergence,
    HeadOptions,
    LogitTransform,
    Ragged,
    WholeTeacher,
    linear_log_probs_and_entropy,
    linear_token_loss,
    rows_torch,
)
from megatron_pg.head.vocabulary_shard import LogitRows
from tests.distributed.launch import run_ranks
from tests.fast.log_probs_oracle import close

TOKENS, HIDDEN, WIDTH, VOCAB_SIZE, TEMPERATURE = 9, 6, 24, 21, 0.8
TRANSFORMS = {
    "scale": LogitTransform(scale=0.3),
    "soft-cap": LogitTransform(softcap=5.0),
    "both": LogitTransform(scale=1.7, softcap=5.0),
}
every_transform = pytest.mark.parametrize("name", TRANSFORMS)


def problem() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden = 3 * torch.randn(TOKENS, HIDDEN, generator=generator)
    weight = torch.randn(WIDTH, HIDDEN, generator=generator)
    targets = torch.randint(0, VOCAB_SIZE, (TOKENS,), generator=generator)
    return hidden, weight, targets, torch.randn(2, TOKENS, generator=generator)


def dense(transform: LogitTransform) -> tuple[Tensor, ...]:
    """Log-probs, entropy and the gradients of both factors, in float64, one row at a time."""
    hidden, weight, targets, incoming = (
        x.double() if x.is_floating_point() else x for x in problem()
    )
    hidden.requires_grad_()
    weight.requires_grad_()
    log_probs, entropies = [], []
    for row in range(TOKENS):
        logits = (weight[:VOCAB_SIZE] * hidden[row]).sum(1) * transform.scale
        if transform.softcap is not None:
            logits = transform.softcap * torch.tanh(logits / transform.softcap)
        log_p = torch.log_softmax(logits / TEMPERATURE, 0)
        log_probs.append(log_p[targets[row]])
        entropies.append(-(log_p.exp() * log_p).sum())
    vectors = torch.stack(log_probs), torch.stack(entropies)
    total = sum((vector * each).sum() for vector, each in zip(vectors, incoming, strict=True))
    return *(vector.detach() for vector in vectors), *torch.autograd.grad(total, (hidden, weight))


def settings(transform: LogitTransform, **others: object) -> HeadOptions:
    return HeadOptions(
        temperature=TEMPERATURE, vocab_size=VOCAB_SIZE, transform=transform, **others
    )


def through_the_head(transform: LogitTransform, mode: str, **others: object) -> tuple[Tensor, ...]:
    hidden, weight, targets, incoming = problem()
    hidden.requires_grad_()
    weight.requires_grad_()
    options = settings(transform, **others)
    if mode == "known":

        def token_loss(log_probs: Tensor, entropy: Tensor, rows: slice) -> Tensor:
            return (log_probs * incoming[0, rows] + entropy * incoming[1, rows]).sum()

        loss, log_probs, entropy = linear_token_loss(hidden, weight, targets, token_loss, options)
    else:
        keep = mode == "kept"
        log_probs, entropy = linear_log_probs_and_entropy(
            hidden, weight, targets, options, keep_logits=keep
        )
        loss = (log_probs * incoming[0] + entropy * incoming[1]).sum()
    return log_probs.detach(), entropy.detach(), *torch.autograd.grad(loss, (hidden, weight))


@every_transform
@pytest.mark.parametrize("mode", ["known", "kept", "recomputed"])
@pytest.mark.parametrize("chunk_tokens", [None, 4])
def test_values_and_gradients(name, mode, chunk_tokens):
    found = through_the_head(TRANSFORMS[name], mode, chunk_tokens=chunk_tokens)
    for value, wanted in zip(found, dense(TRANSFORMS[name]), strict=True):
        close(value, wanted, 3e-6)


@every_transform
def test_mutant_without_the_transform_it_would_be_seen(name):
    found, wanted = through_the_head(LogitTransform(), "known"), dense(TRANSFORMS[name])
    for value, expected in zip(found, wanted, strict=True):
        assert (value - expected).abs().max() > 0.1 * expected.abs().max()


def test_mutant_without_its_derivative_it_would_be_seen(monkeypatch):
    """Mutant: the gradient of the capped logits, not of the product."""
    write = rows_torch.write_gradient

    def broken(rows: LogitRows, *others: object) -> None:
        logits = rows_torch.capped(rows.logits.float(), rows.softcap)
        write(dataclasses.replace(rows, logits=logits, softcap=None), *others)

    monkeypatch.setattr(rows_torch, "write_gradient", broken)
    transform = TRANSFORMS["soft-cap"]
    found, wanted = through_the_head(transform, "known"), dense(transform)
    assert (found[2] - wanted[2]).abs().max() > 0.1 * wanted[2].abs().max()


def shard_on_rank(name: str) -> tuple[Tensor, ...]:
    """Log-probs, entropy, this rank's part of the gradient of the hidden states, the gradient of
    its rows.
    """
    hidden, weight, targets, incoming = problem()
    group = torch.distributed.group.WORLD
    own = weight.chunk(2)[group.rank()].clone().requires_grad_()
    hidden.requires_grad_()
    options = settings(TRANSFORMS[name], tensor_parallel_group=group)
    vectors = linear_log_probs_and_entropy(hidden, own, targets, options)
    total = sum((vector * each).sum() for vector, each in zip(vectors, incoming, strict=True))
    gradients = torch.autograd.grad(total, (hidden, own))
    return *(vector.detach() for vector in vectors), *gradients


@every_transform
def test_shards(name):
    (*vectors, first, top), (*_, second, bottom) = run_ranks(shard_on_rank, 2, name)
    found = *vectors, first + second, torch.cat([top, bottom])
    for value, wanted in zip(found, dense(TRANSFORMS[name]), strict=True):
        close(value, wanted, 3e-6)


def test_what_takes_no_transform_says_so():
    hidden, weight, targets, _ = problem()
    factors, options = (hidden, weight, targets), settings(TRANSFORMS["both"])
    kept = Ragged(targets, torch.arange(TOKENS + 1))
    with pytest.raises(NotImplementedError, match="kept sets and a soft-cap"):
        linear_log_probs_and_entropy(*factors, options, kept=kept)
    teacher = WholeTeacher(Divergence(), logits=hidden @ weight.T)
    with pytest.raises(NotImplementedError, match="supports no logit scale or soft-cap"):
        linear_token_loss(*factors, lambda p, *_: p.sum(), options, scorer=teacher)
