"""The output layer fused with the log-prob op, against dense float64 products and the row
oracle.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_pg.head import (
    HeadOptions,
    from_hidden,
    linear_log_probs_and_entropy,
    linear_token_loss,
)
from megatron_pg.head.factor_gradients import FactorGradients, multiply
from tests.distributed.launch import run_ranks
from tests.fast.log_probs_oracle import reference
from tests.fast.refusals import assert_refused

TOKENS, HIDDEN, WIDTH, VOCAB_SIZE, TEMPERATURE = 11, 6, 24, 21, 0.8


class Problem:
    """Inputs, a clipped policy loss with an entropy term, and its float64 gradients."""

    def __init__(self, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> None:
        generator = torch.Generator().manual_seed(1)
        self.hidden = (3 * torch.randn(TOKENS, HIDDEN, generator=generator)).to(dtype)
        self.weight = torch.randn(WIDTH, HIDDEN, generator=generator).to(dtype)
        self.targets = torch.randint(0, VOCAB_SIZE, (TOKENS,), generator=generator)
        self.advantages = torch.randn(TOKENS, generator=generator)
        self.factors = self.hidden.double(), self.weight.double()
        zeros = torch.zeros(TOKENS)
        self.log_probs, self.entropy, _ = self.oracle(zeros, zeros)
        self.old_log_probs = self.log_probs.float() + 0.3 * torch.randn(TOKENS, generator=generator)
        self.differentiate(scale)
        for leaf in (self.hidden, self.weight):
            leaf.requires_grad_()

    def oracle(self, to_log_probs: Tensor, to_entropy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = self.factors[0] @ self.factors[1].T
        settings = {"temperature": TEMPERATURE, "vocab_size": VOCAB_SIZE}
        return reference(logits, self.targets, to_log_probs, to_entropy, **settings)

    def token_loss(self, log_probs: Tensor, entropy: Tensor, rows: slice) -> Tensor:
        advantages = self.advantages[rows].to(log_probs)
        ratio = (log_probs - self.old_log_probs[rows].to(log_probs)).exp()
        clipped = ratio.clamp(0.8, 1.2)
        loss = -torch.minimum(ratio * advantages, clipped * advantages) - 0.1 * entropy
        return loss.sum() / 7

    def differentiate(self, scale: float) -> None:
        log_probs = self.log_probs.clone().requires_grad_()
        entropy = self.entropy.clone().requires_grad_()
        loss = self.token_loss(log_probs, entropy, slice(0, TOKENS))
        to_log_probs, to_entropy = torch.autograd.grad(loss * scale, (log_probs, entropy))
        self.loss = loss.detach()
        self.expect(self.oracle(to_log_probs, to_entropy)[2])

    def expect(self, logits_gradient: Tensor) -> None:
        hidden, weight = self.factors
        self.logits_gradient = logits_gradient
        self.hidden_gradient, self.weight_gradient = (
            logits_gradient @ weight,
            logits_gradient.T @ hidden,
        )

    def with_main_grad(self, value: float = 1.0) -> Problem:
        """As DistributedDataParallel leaves the weight."""
        self.weight.main_grad = torch.full(self.weight.shape, value)
        self.weight.grad_added_to_main_grad = False
        return self

    def fused(self, head: HeadOptions, **settings: object) -> tuple[Tensor, Tensor, Tensor]:
        factors = self.hidden, self.weight
        return linear_token_loss(*factors, self.targets, self.token_loss, head, **settings)

    def check_gradients(self, rounding: float = 3e-6, *, before: float | None = None) -> None:
        """Of the weight in `main_grad` where that held `before`."""
        of_weight = self.weight.grad if before is None else self.weight.main_grad - before
        close(self.hidden.grad, self.hidden_gradient, rounding)
        close(of_weight, self.weight_gradient, rounding)


def options(**changes: object) -> HeadOptions:
    return HeadOptions(temperature=TEMPERATURE, vocab_size=VOCAB_SIZE, **changes)


def close(found: Tensor | None, wanted: Tensor, rounding: float = 3e-6) -> None:
    assert found is not None
    error = (found.double() - wanted).abs().amax() / wanted.abs().amax()
    assert error <= rounding, error


def known(problem: Problem, defer: bool = False, **head: object) -> Tensor:
    loss, log_probs, entropy = problem.fused(options(**head), defer=defer)
    assert not log_probs.requires_grad and not entropy.requires_grad
    return loss


def downstream(problem: Problem, keep_logits: bool, **head: object) -> Tensor:
    log_probs, entropy = linear_log_probs_and_entropy(
        problem.hidden, problem.weight, problem.targets, options(**head), keep_logits=keep_logits
    )
    return problem.token_loss(log_probs, entropy, slice(0, TOKENS))


deferred = functools.partial(known, defer=True)
kept = functools.partial(downstream, keep_logits=True)
recomputed = functools.partial(downstream, keep_logits=False)
MODES = {"known": known, "deferred": deferred, "kept": kept, "recomputed": recomputed}
every_mode = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)


@every_mode
@pytest.mark.parametrize("chunk_tokens", [None, 1, 4, 100])
@pytest.mark.parametrize("scale", [1.0, 12.7])
def test_gradients(mode, chunk_tokens, scale):
    problem = Problem(scale=scale)
    loss = mode(problem, chunk_tokens=chunk_tokens)
    (loss * scale).backward()
    close(loss.detach(), problem.loss)
    problem.check_gradients()
    assert (problem.weight.grad[VOCAB_SIZE:] == 0).all()


@every_mode
@pytest.mark.parametrize("fp32_logits", [False, True])
def test_bfloat16(mode, fp32_logits):
    problem = Problem(torch.bfloat16)
    loss = mode(problem, chunk_tokens=4, fp32_logits=fp32_logits)
    loss.backward()
    assert problem.hidden.grad.dtype == problem.weight.grad.dtype == torch.bfloat16
    problem.check_gradients(0.006 if fp32_logits else 0.06)
    close(loss.detach(), problem.loss, 1e-5 if fp32_logits else 0.06)


@every_mode
@pytest.mark.parametrize("tied", [False, True])
def test_main_grad(mode, tied):
    """The gradient is added to `main_grad`; DistributedDataParallel gets a stand-in."""
    problem = Problem(torch.bfloat16).with_main_grad(0.5)
    weight = problem.weight
    weight.zero_out_wgrad = tied
    mode(problem, chunk_tokens=4, fp32_logits=True).backward()
    close(weight.main_grad - 0.5, problem.weight_gradient, 0.006)
    assert weight.grad_added_to_main_grad and weight.grad.shape == weight.shape
    if tied:
        assert (weight.grad == 0).all()


@every_mode
@pytest.mark.parametrize("field", [None, "__fsdp_param__"])
def test_a_buffer_that_is_not_of_distributed_data_parallel_is_left_alone(mode, field):
    """Who else keeps a `main_grad` does not look whether a layer has added to it."""
    problem = Problem().with_main_grad()
    if field is None:
        del problem.weight.grad_added_to_main_grad
    else:
        setattr(problem.weight, field, True)
    mode(problem, chunk_tokens=4).backward()
    assert (problem.weight.main_grad == 1).all()
    problem.check_gradients()


def test_chunks_of_a_bfloat16_weight_add_up_in_float32():
    """512 ones stall at 256 in bfloat16."""
    hidden, weight = torch.ones(512, 1).bfloat16(), torch.zeros(2, 1).bfloat16().requires_grad_()
    targets, one_row = torch.zeros(512, dtype=torch.int64), HeadOptions(chunk_tokens=1)
    loss, _, _ = linear_token_loss(hidden, weight, targets, lambda p, *_: 2 * p.sum(), one_row)
    loss.backward()
    assert weight.grad.tolist() == [[512.0], [-512.0]]


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("of", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("into", [torch.bfloat16, torch.float32])
def test_a_device_multiplies_into_every_dtype(of, into, add):
    """As a teacher's float32 weight beside a bfloat16 student: of CUDA's own product with another
    dtype out there is one.
    """
    with FakeTensorMode():
        left, right = (torch.empty(shape, dtype=of, device="cuda") for shape in ((4, 8), (8, 3)))
        out = torch.empty(4, 3, dtype=into, device="cuda")
        multiply(left, right, out, add=add)
        assert out.dtype == into


def test_the_gradient_of_bfloat16_hidden_states_is_scaled_in_float32():
    """1.003 is 1 in bfloat16."""
    gradients, scale = [], torch.tensor(1.003)
    for incoming in (torch.tensor(1.0), scale):
        problem = Problem(torch.bfloat16)
        known(problem, chunk_tokens=4, fp32_logits=True).backward(incoming)
        gradients.append(problem.hidden.grad)
    assert torch.equal(gradients[1], (gradients[0].float() * scale).bfloat16())
    assert not torch.equal(gradients[0], gradients[1])


@every_mode
@pytest.mark.parametrize(("frozen", "learns"), [("hidden", "weight"), ("weight", "hidden")])
def test_a_frozen_factor(mode, frozen, learns):
    problem = Problem()
    getattr(problem, frozen).requires_grad_(False)
    mode(problem).backward()
    assert getattr(problem, frozen).grad is None
    close(getattr(problem, learns).grad, getattr(problem, f"{learns}_gradient"))


@pytest.mark.parametrize("mode", [known, kept])
def test_second_backward_is_refused(mode):
    loss = mode(Problem())
    loss.backward(retain_graph=True)
    assert_refused("allows one backward", loss.backward, error=RuntimeError)


@every_mode
def test_second_derivative_is_refused(mode):
    problem = Problem()
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        torch.autograd.grad(mode(problem), problem.hidden, create_graph=True)


@every_mode
def test_no_tokens(mode):
    problem = Problem()
    problem.hidden = torch.zeros(0, HIDDEN, requires_grad=True)
    problem.targets = problem.targets[:0]
    problem.advantages, problem.old_log_probs = torch.zeros(0), torch.zeros(0)
    mode(problem).backward()
    assert problem.hidden.grad.shape == (0, HIDDEN) and (problem.weight.grad == 0).all()


@pytest.mark.parametrize("defer", [False, True])
@pytest.mark.parametrize("gradient_rows", [0, 3, 4, TOKENS])
def test_rows_without_gradient_are_scored_and_left_out(gradient_rows, defer):
    problem = Problem()
    found = problem.fused(options(chunk_tokens=4), gradient_rows=gradient_rows, defer=defer)
    found[0].backward()
    wanted = problem.loss, problem.log_probs, problem.entropy
    for value, expected in zip(found, wanted, strict=True):
        close(value.detach(), expected)
    problem.logits_gradient[gradient_rows:] = 0
    problem.expect(problem.logits_gradient)
    for name in ("hidden", "weight"):
        gradient, expected = getattr(problem, name).grad, getattr(problem, f"{name}_gradient")
        torch.testing.assert_close(gradient.double(), expected, rtol=1e-5, atol=1e-6)


SEQUENCES = (3, 0, 5, 0, 1, 2)


def loss_of_sequences(problem: Problem) -> Callable[[Tensor, Tensor, slice], Tensor]:
    """A function of whole sequences, those of `SEQUENCES`, and of none of their tokens alone."""
    ids = torch.arange(len(SEQUENCES)).repeat_interleave(torch.tensor(SEQUENCES))

    def token_loss(log_probs: Tensor, entropy: Tensor, rows: slice) -> Tensor:
        ratios = log_probs - problem.old_log_probs[rows].to(log_probs)
        total = torch.zeros(0).to(log_probs).sum()
        for place, length in enumerate(SEQUENCES):
            here = ids[rows] == place
            if here.any():
                mean, spread = ratios[here].sum() / length, entropy[here].sum()
                total = total - problem.advantages[place].to(mean) * mean.exp() - 0.1 * spread**2
        return total

    return token_loss


SCALE = torch.tensor(6.0)
"""Float32, as Megatron's loss scale is, whatever the model computes in."""


def problem_of_sequences() -> Problem:
    """The loss of whole sequences, with its gradients in float64 from all rows together."""
    problem = Problem(torch.float64)
    problem.token_loss = loss_of_sequences(problem)  # type: ignore[method-assign]
    problem.differentiate(6.0)
    return problem


@pytest.mark.parametrize("defer", [False, True])
@pytest.mark.parametrize("piece_sizes", [SEQUENCES, (3, 5, 1, 2), (0, 8, 3), (3, 8, 0), (11,)])
@pytest.mark.parametrize("chunk_tokens", [None, 1, 2, 4])
def test_pieces_of_whole_sequences(chunk_tokens, piece_sizes, defer):
    """Held in one chunk, or of up to eight chunks whose logits are made twice."""
    problem, head = problem_of_sequences(), options(chunk_tokens=chunk_tokens)
    loss, log_probs, entropy = problem.fused(head, piece_sizes=piece_sizes, defer=defer)
    loss.backward(SCALE)
    close(loss.detach(), problem.loss, 1e-6)
    close(log_probs, problem.log_probs, 1e-13)
    close(entropy, problem.entropy, 1e-13)
    problem.check_gradients(1e-13)


@pytest.mark.parametrize("piece_sizes", [None, (2, 6, 3), (4, 7)])
def test_mutant_a_piece_that_ends_inside_a_sequence_would_be_seen(piece_sizes):
    problem = problem_of_sequences()
    problem.fused(options(chunk_tokens=4), piece_sizes=piece_sizes)[0].backward(SCALE)
    for name in ("hidden", "weight"):
        with pytest.raises(AssertionError):
            close(getattr(problem, name).grad, getattr(problem, f"{name}_gradient"), 1e-3)


@pytest.mark.parametrize("mode", [known, deferred])
def test_a_chunk_whose_loss_is_a_constant_has_no_gradient(mode):
    problem = Problem(scale=6.0)
    right = problem.token_loss

    def token_loss(log_probs: Tensor, entropy: Tensor, rows: slice) -> Tensor:
        return torch.tensor(2.0) if rows.start == 4 else right(log_probs, entropy, rows)

    problem.token_loss = token_loss  # type: ignore[method-assign]
    loss = mode(problem, chunk_tokens=4)
    (loss * 6).backward()
    others = slice(0, 4), slice(8, TOKENS)
    parts = [right(problem.log_probs[rows], problem.entropy[rows], rows) for rows in others]
    close(loss.detach(), sum(parts) + 2)
    problem.logits_gradient[4:8] = 0
    problem.expect(problem.logits_gradient)
    problem.check_gradients()
    assert (problem.hidden.grad[4:8] == 0).all()


def test_what_is_deferred_is_nan_until_backward_and_in_place_then():
    problem = Problem(scale=6.0).with_main_grad()
    outputs = problem.fused(options(chunk_tokens=4), defer=True)
    taken = [output.detach() for output in outputs]  # who took them before sees them too
    scaled = outputs[0] * 2
    scaled *= 3  # as a schedule does
    assert all(value.isnan().all() for value in (*taken, scaled))
    assert (problem.weight.main_grad == 1).all()
    scaled.backward()
    wanted = (problem.loss, problem.log_probs, problem.entropy)
    for value, expected in zip(taken, wanted, strict=True):
        close(value, expected)
    problem.check_gradients(before=1)


@pytest.mark.parametrize("retried", [False, True])
def test_main_grad_that_is_zeroed_before_backward_gets_the_whole_gradient(retried):
    """A forward pass that has no backward, or broke off, has added nothing."""
    problem = Problem(scale=6.0).with_main_grad()
    loss = deferred(problem, chunk_tokens=4)
    if retried:
        loss = deferred(problem, chunk_tokens=4)
    assert (problem.weight.main_grad == 1).all() and problem.weight.grad is None
    problem.weight.main_grad.zero_()
    loss.backward(SCALE)
    problem.check_gradients(before=0)


@every_mode
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_the_head(mode, reentrant):
    """Its second forward adds nothing of its own; backward of the first fills in what the first
    returned.
    """
    problem = Problem(scale=6.0).with_main_grad()
    leaf, one = problem.hidden, torch.tensor(6.0, requires_grad=True)

    def head(hidden: Tensor) -> Tensor:
        problem.hidden = hidden
        # The product keeps its factors for backward, which is why the head is run again.
        return mode(problem, chunk_tokens=4) * one.detach().requires_grad_()

    torch.utils.checkpoint.checkpoint(head, leaf, use_reentrant=reentrant).backward()
    problem.hidden = leaf
    problem.check_gradients(before=1)


def test_a_second_backward_of_what_is_deferred_adds_as_much_again():
    problem = Problem(scale=6.0).with_main_grad()
    loss = deferred(problem)
    loss.backward(retain_graph=True)
    (5 * loss).backward()
    problem.check_gradients(before=1)


def test_what_is_deferred_is_freed_with_its_graph():
    problem = Problem()
    problem.hidden = problem.hidden * 1.0
    alive = weakref.ref(problem.hidden)
    loss = deferred(problem)
    gc.disable()
    try:
        del problem.hidden, loss
        assert alive() is None
    finally:
        gc.enable()


def test_float16_with_the_loss_scale():
    """The scale is in the gradients before they are rounded: without it these would all be 0."""
    scale, tiny = 2.0**14, 2.0**-22
    problem = Problem(torch.float16, scale=scale).with_main_grad(0.0)
    right = problem.token_loss
    problem.token_loss = lambda *arguments: tiny * right(*arguments)  # type: ignore[method-assign]
    deferred(problem, fp32_logits=True).backward(torch.tensor(scale))
    problem.expect(problem.logits_gradient * tiny)
    problem.check_gradients(0.01, before=0)


@pytest.mark.parametrize("without", ["gradients on", "a factor that needs one"])
def test_without_a_backward_to_come_the_value_is_there_at_once(without):
    problem = Problem().with_main_grad()
    if without != "gradients on":
        for leaf in (problem.hidden, problem.weight):
            leaf.requires_grad_(False)
    with torch.set_grad_enabled(without != "gradients on"):
        loss = deferred(problem)
    close(loss, problem.loss)
    assert not loss.requires_grad and (problem.weight.main_grad == 1).all()


HALF = torch.zeros(3, 4).half()


@pytest.mark.parametrize(("change", "error", "message"), [
    ({"hidden": torch.zeros(2, 3, 4)}, ValueError, "hidden must be"),
    ({"hidden": torch.zeros(3, 5)}, ValueError, "hidden must be"),
    ({"hidden": torch.zeros(3, 4).bfloat16()}, ValueError, "share one float dtype"),
    ({"targets": torch.zeros(2, dtype=torch.int64)}, ValueError, "targets must be"),
    ({"options": HeadOptions(chunk_tokens=0)}, ValueError, "chunk_tokens"),
    ({"options": HeadOptions(temperature=0.0)}, ValueError, "temperature"),
    ({"gradient_rows": 4}, ValueError, "gradient_rows"),
    ({"piece_sizes": [1, 1]}, ValueError, "piece_sizes add up to 2 instead of 3 tokens"),
    ({"hidden": HALF, "weight": HALF}, NotImplementedError, "float16"),
])  # fmt: skip
def test_bad_input(change, error, message):
    arguments: dict[str, object] = {
        "hidden": torch.zeros(3, 4),
        "weight": torch.zeros(8, 4),
        "targets": torch.zeros(3, dtype=torch.int64),
        "token_loss": lambda log_probs, entropy, rows: log_probs.sum(),
    }
    assert_refused(message, linear_token_loss, error=error, **{**arguments, **change})


def shard_on_rank() -> list[tuple[Tensor, Tensor | None, Tensor | None]]:
    rank, width = dist.get_rank(), WIDTH // dist.get_world_size()
    results = []
    for mode in MODES.values():
        problem = Problem()
        shard = problem.weight.detach()[rank * width : (rank + 1) * width]
        problem.weight = shard.clone().requires_grad_()
        loss = mode(problem, chunk_tokens=4, tensor_parallel_group=dist.group.WORLD)
        loss.backward()
        results.append((loss.detach(), problem.hidden.grad, problem.weight.grad))
    return results


def test_vocabulary_over_two_ranks():
    problem = Problem()
    ranks = run_ranks(shard_on_rank, 2)
    for results in zip(*ranks, strict=True):
        for loss, _, _ in results:
            close(loss, problem.loss)
        close(sum(hidden for _, hidden, _ in results), problem.hidden_gradient)
        close(torch.cat([weight for _, _, weight in results]), problem.weight_gradient)


@pytest.mark.parametrize("mode", [known, deferred])
def test_mutant_a_wrong_coefficient_would_be_seen(mode):
    """Mutant: coefficients of another scale than the loss."""
    problem = Problem()
    right = problem.token_loss
    problem.token_loss = lambda log_probs, entropy, rows: 1.001 * right(log_probs, entropy, rows)
    mode(problem).backward()
    with pytest.raises(AssertionError):
        close(problem.hidden.grad, problem.hidden_gradient)


@every_mode
def test_mutant_a_lost_scale_would_be_seen(mode, monkeypatch):
    """Mutant: backward makes the gradient of the loss, whatever gradient arrives."""
    plain = from_hidden._coefficients, FactorGradients.finish
    monkeypatch.setattr(from_hidden, "_coefficients", lambda *given: plain[0](*given[:3], None))
    monkeypatch.setattr(FactorGradients, "finish", lambda found, *_: plain[1](found))
    problem = Problem(scale=6.0).with_main_grad()
    (mode(problem, chunk_tokens=4) * 6).backward()
    if mode in (kept, recomputed):  # the scale is in the gradients of log-probs and entropy
        return close(problem.hidden.grad, problem.hidden_gradient)
    for found, wanted in (
        (problem.hidden.grad, problem.hidden_gradient),
        (problem.weight.main_grad - 1, problem.weight_gradient),
    ):
        with pytest.raises(AssertionError):
            close(found, wanted)
