"""The output layer fused with the log-prob op, against dense float64 products and the row oracle."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable
from types import SimpleNamespace

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
from megatron_pg.head.output_layer import default_chunk_tokens
from tests.distributed.launch import run_ranks
from tests.fast.log_probs_oracle import reference

TOKENS, HIDDEN, WIDTH, VOCAB_SIZE, TEMPERATURE = 11, 6, 24, 21, 0.8


class Problem:
    """Inputs, a clipped policy loss with an entropy term, and its float64 gradients."""

    def __init__(self, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> None:
        generator = torch.Generator().manual_seed(1)
        self.hidden = (3 * torch.randn(TOKENS, HIDDEN, generator=generator)).to(dtype)
        self.weight = torch.randn(WIDTH, HIDDEN, generator=generator).to(dtype)
        self.targets = torch.randint(0, VOCAB_SIZE, (TOKENS,), generator=generator)
        self.advantages = torch.randn(TOKENS, generator=generator)
        self.logits = self.hidden.double() @ self.weight.double().T
        zeros = torch.zeros(TOKENS)
        self.log_probs, self.entropy, _ = self.oracle(zeros, zeros)
        self.old_log_probs = self.log_probs.float() + 0.3 * torch.randn(TOKENS, generator=generator)
        self._differentiate(scale)

    def oracle(self, to_log_probs: Tensor, to_entropy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return reference(
            self.logits,
            self.targets,
            to_log_probs,
            to_entropy,
            temperature=TEMPERATURE,
            vocab_size=VOCAB_SIZE,
        )

    def token_loss(self, log_probs: Tensor, entropy: Tensor, rows: slice) -> Tensor:
        advantages = self.advantages[rows].to(log_probs)
        ratio = (log_probs - self.old_log_probs[rows].to(log_probs)).exp()
        clipped = ratio.clamp(0.8, 1.2)
        loss = -torch.minimum(ratio * advantages, clipped * advantages) - 0.1 * entropy
        return loss.sum() / 7

    def _differentiate(self, scale: float) -> None:
        log_probs = self.log_probs.clone().requires_grad_()
        entropy = self.entropy.clone().requires_grad_()
        loss = self.token_loss(log_probs, entropy, slice(0, TOKENS))
        to_log_probs, to_entropy = torch.autograd.grad(loss * scale, (log_probs, entropy))
        self.loss = loss.detach()
        self.logits_gradient = self.oracle(to_log_probs, to_entropy)[2]
        self.hidden_gradient = self.logits_gradient @ self.weight.double()
        self.weight_gradient = self.logits_gradient.T @ self.hidden.double()

    def fused(
        self, hidden: Tensor, weight: Tensor, head: HeadOptions, **settings: object
    ) -> tuple[Tensor, Tensor, Tensor]:
        return linear_token_loss(hidden, weight, self.targets, self.token_loss, head, **settings)

    def check_gradients(
        self, hidden: Tensor, weight_gradient: Tensor | None, rounding: float = 3e-6
    ) -> None:
        close(hidden.grad, self.hidden_gradient, rounding)
        close(weight_gradient, self.weight_gradient, rounding)

    def leaves(self) -> tuple[Tensor, Tensor]:
        return self.hidden.clone().requires_grad_(), self.weight.clone().requires_grad_()


def options(**changes: object) -> HeadOptions:
    return HeadOptions(temperature=TEMPERATURE, vocab_size=VOCAB_SIZE, **changes)


def close(found: Tensor | None, wanted: Tensor, rounding: float = 3e-6) -> None:
    assert found is not None
    error = (found.double() - wanted).abs().amax() / wanted.abs().amax()
    assert error <= rounding, error


OF_HEAD = ("chunk_tokens", "fp32_logits", "tensor_parallel_group")


def head_of(settings: dict[str, object]) -> HeadOptions:
    """The settings that are the head's, taken out of all."""
    return options(**{name: settings.pop(name) for name in OF_HEAD if name in settings})


def known(problem: Problem, hidden: Tensor, weight: Tensor, **settings: object) -> Tensor:
    head = head_of(settings)
    loss, log_probs, entropy = problem.fused(hidden, weight, head, **settings)
    assert not log_probs.requires_grad and not entropy.requires_grad
    return loss


def deferred(problem: Problem, hidden: Tensor, weight: Tensor, **settings: object) -> Tensor:
    return known(problem, hidden, weight, defer=True, **settings)


def downstream(problem: Problem, hidden: Tensor, weight: Tensor, **settings: object) -> Tensor:
    head = head_of(settings)
    log_probs, entropy = linear_log_probs_and_entropy(
        hidden, weight, problem.targets, head, **settings
    )
    return problem.token_loss(log_probs, entropy, slice(0, TOKENS))


def kept(problem: Problem, hidden: Tensor, weight: Tensor, **settings: object) -> Tensor:
    return downstream(problem, hidden, weight, keep_logits=True, **settings)


def recomputed(problem: Problem, hidden: Tensor, weight: Tensor, **settings: object) -> Tensor:
    return downstream(problem, hidden, weight, keep_logits=False, **settings)


MODES = [known, deferred, kept, recomputed]
every_mode = pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.__name__)


@every_mode
@pytest.mark.parametrize("chunk_tokens", [None, 1, 4, 100])
@pytest.mark.parametrize("scale", [1.0, 12.7])
def test_gradients(mode, chunk_tokens, scale):
    problem = Problem(scale=scale)
    hidden, weight = problem.leaves()
    loss = mode(problem, hidden, weight, chunk_tokens=chunk_tokens)
    (loss * scale).backward()
    close(loss.detach(), problem.loss)
    problem.check_gradients(hidden, weight.grad)
    assert (weight.grad[VOCAB_SIZE:] == 0).all()


@every_mode
@pytest.mark.parametrize("fp32_logits", [False, True])
def test_bfloat16(mode, fp32_logits):
    problem = Problem(torch.bfloat16)
    hidden, weight = problem.leaves()
    loss = mode(problem, hidden, weight, chunk_tokens=4, fp32_logits=fp32_logits)
    loss.backward()
    rounding = 0.006 if fp32_logits else 0.06
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16
    problem.check_gradients(hidden, weight.grad, rounding)
    close(loss.detach(), problem.loss, 1e-5 if fp32_logits else 0.06)


@every_mode
@pytest.mark.parametrize("tied", [False, True])
def test_main_grad(mode, tied):
    """The gradient is added to `main_grad`; DistributedDataParallel gets a stand-in."""
    problem = Problem(torch.bfloat16)
    hidden, weight = problem.leaves()
    weight.main_grad = torch.full(weight.shape, 0.5)
    weight.grad_added_to_main_grad = False
    weight.zero_out_wgrad = tied
    mode(problem, hidden, weight, chunk_tokens=4, fp32_logits=True).backward()
    close(weight.main_grad - 0.5, problem.weight_gradient, 0.006)
    assert weight.grad_added_to_main_grad and weight.grad.shape == weight.shape
    if tied:
        assert (weight.grad == 0).all()


@every_mode
@pytest.mark.parametrize("scale", [0.3, -6.0])
def test_main_grad_gets_the_gradient_of_the_scaled_loss(mode, scale):
    problem = Problem(scale=scale)
    hidden, weight = with_main_grad(problem)
    (mode(problem, hidden, weight, chunk_tokens=4) * scale).backward()
    problem.check_gradients(hidden, weight.main_grad - 1)


@every_mode
@pytest.mark.parametrize("field", [None, "__fsdp_param__"])
def test_a_buffer_that_is_not_of_distributed_data_parallel_is_left_alone(mode, field):
    """Who else keeps a `main_grad` does not look whether a layer has added to it."""
    problem = Problem()
    hidden, weight = problem.leaves()
    weight.main_grad = torch.ones(weight.shape)
    if field is not None:
        weight.grad_added_to_main_grad = False
        setattr(weight, field, True)
    mode(problem, hidden, weight, chunk_tokens=4).backward()
    assert (weight.main_grad == 1).all()
    close(weight.grad, problem.weight_gradient)


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
    """As a teacher's float32 weight beside a bfloat16 student: of CUDA's own product with another dtype out there is one."""
    with FakeTensorMode():
        left, right = (torch.empty(shape, dtype=of, device="cuda") for shape in ((4, 8), (8, 3)))
        out = torch.empty(4, 3, dtype=into, device="cuda")
        multiply(left, right, out, add=add)
        assert out.dtype == into


def test_the_gradient_of_bfloat16_hidden_states_is_scaled_in_float32():
    """1.003 is 1 in bfloat16."""
    problem, scale = Problem(torch.bfloat16), torch.tensor(1.003)
    gradients = []
    for incoming in (torch.tensor(1.0), scale):
        hidden, weight = problem.leaves()
        known(problem, hidden, weight, chunk_tokens=4, fp32_logits=True).backward(incoming)
        gradients.append(hidden.grad)
    assert torch.equal(gradients[1], (gradients[0].float() * scale).bfloat16())
    assert not torch.equal(gradients[0], gradients[1])


@every_mode
def test_frozen_weight_and_frozen_hidden(mode):
    problem = Problem()
    for frozen in (0, 1):
        leaves = problem.leaves()
        leaves[frozen].requires_grad_(False)
        mode(problem, *leaves).backward()
        wanted = (problem.hidden_gradient, problem.weight_gradient)
        assert leaves[frozen].grad is None
        close(leaves[1 - frozen].grad, wanted[1 - frozen])


@pytest.mark.parametrize("mode", [known, kept])
def test_second_backward_is_refused(mode):
    problem = Problem()
    loss = mode(problem, *problem.leaves())
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@every_mode
def test_second_derivative_is_refused(mode):
    problem = Problem()
    hidden, weight = problem.leaves()
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        torch.autograd.grad(mode(problem, hidden, weight), hidden, create_graph=True)


@every_mode
def test_no_tokens(mode):
    problem = Problem()
    hidden, weight = torch.zeros(0, HIDDEN, requires_grad=True), problem.leaves()[1]
    problem.targets = problem.targets[:0]
    problem.advantages, problem.old_log_probs = torch.zeros(0), torch.zeros(0)
    mode(problem, hidden, weight).backward()
    assert hidden.grad.shape == (0, HIDDEN) and (weight.grad == 0).all()


@pytest.mark.parametrize("defer", [False, True])
@pytest.mark.parametrize("gradient_rows", [0, 3, 4, TOKENS])
def test_rows_without_gradient_are_scored_and_left_out(gradient_rows, defer):
    problem = Problem()
    hidden, weight = problem.leaves()
    head = options(chunk_tokens=4)
    loss, log_probs, entropy = problem.fused(
        hidden, weight, head, gradient_rows=gradient_rows, defer=defer
    )
    loss.backward()
    close(loss.detach(), problem.loss)
    close(log_probs, problem.log_probs)
    close(entropy, problem.entropy)
    wanted = problem.logits_gradient.clone()
    wanted[gradient_rows:] = 0
    torch.testing.assert_close(
        (hidden.grad.double(), weight.grad.double()),
        (wanted @ problem.weight.double(), wanted.T @ problem.hidden.double()),
        rtol=1e-5,
        atol=1e-6,
    )


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


def of_sequences() -> tuple[Problem, Tensor]:
    """The loss of whole sequences, with its gradients in float64 from all rows together."""
    problem = Problem(torch.float64, scale=6.0)
    problem.token_loss = loss_of_sequences(problem)  # type: ignore[method-assign]
    problem._differentiate(6.0)
    return problem, torch.tensor(6.0)


@pytest.mark.parametrize("defer", [False, True])
@pytest.mark.parametrize("piece_sizes", [SEQUENCES, (3, 5, 1, 2), (0, 8, 3), (3, 8, 0), (11,)])
@pytest.mark.parametrize("chunk_tokens", [None, 1, 2, 4])
def test_pieces_of_whole_sequences(chunk_tokens, piece_sizes, defer):
    """Held in one chunk, or of up to eight chunks whose logits are made twice."""
    problem, scale = of_sequences()
    hidden, weight = problem.leaves()
    head, pieces = options(chunk_tokens=chunk_tokens), {"piece_sizes": piece_sizes, "defer": defer}
    loss, log_probs, entropy = problem.fused(hidden, weight, head, **pieces)
    loss.backward(scale)
    found = (loss.detach(), log_probs, entropy, hidden.grad, weight.grad)
    wanted = (problem.loss, problem.log_probs, problem.entropy)
    wanted += (problem.hidden_gradient, problem.weight_gradient)
    for each, expected in zip(found, wanted, strict=True):
        close(each, expected, 1e-6 if expected is problem.loss else 1e-13)


@pytest.mark.parametrize("piece_sizes", [None, (2, 6, 3), (4, 7)])
def test_a_piece_that_ends_inside_a_sequence_would_be_seen(piece_sizes):
    problem, scale = of_sequences()
    hidden, weight = problem.leaves()
    loss, _, _ = problem.fused(hidden, weight, options(chunk_tokens=4), piece_sizes=piece_sizes)
    loss.backward(scale)
    for found, wanted in (
        (hidden.grad, problem.hidden_gradient),
        (weight.grad, problem.weight_gradient),
    ):
        assert (found - wanted).abs().amax() > 1e-3 * wanted.abs().amax()


def test_float64_with_a_loss_scale_of_float32():
    """As Megatron's is, whatever the model computes in."""
    problem = Problem(torch.float64, scale=6.0)
    hidden, weight = problem.leaves()
    loss = deferred(problem, hidden, weight, chunk_tokens=4)
    loss.backward(torch.tensor(6.0))
    close(loss.detach(), problem.loss, 1e-6)
    problem.check_gradients(hidden, weight.grad, 1e-6)


@pytest.mark.parametrize("mode", [known, deferred])
def test_a_chunk_whose_loss_is_a_constant_has_no_gradient(mode):
    """The second chunk of three here."""
    problem = Problem(scale=6.0)
    right = problem.token_loss

    def token_loss(log_probs: Tensor, entropy: Tensor, rows: slice) -> Tensor:
        return torch.tensor(2.0) if rows.start == 4 else right(log_probs, entropy, rows)

    hidden, weight = problem.leaves()
    problem.token_loss = token_loss  # type: ignore[method-assign]
    loss = mode(problem, hidden, weight, chunk_tokens=4)
    (loss * 6).backward()
    parts = [
        right(problem.log_probs[rows], problem.entropy[rows], rows)
        for rows in (slice(0, 4), slice(8, TOKENS))
    ]
    close(loss.detach(), sum(parts) + 2)
    wanted = problem.logits_gradient.clone()
    wanted[4:8] = 0
    close(hidden.grad, wanted @ problem.weight.double())
    close(weight.grad, wanted.T @ problem.hidden.double())
    assert (hidden.grad[4:8] == 0).all()


def with_main_grad(problem: Problem) -> tuple[Tensor, Tensor]:
    hidden, weight = problem.leaves()
    weight.main_grad, weight.grad_added_to_main_grad = torch.ones(weight.shape), False
    return hidden, weight


def test_what_is_deferred_is_nan_until_backward_and_in_place_then():
    problem = Problem(scale=6.0)
    hidden, weight = with_main_grad(problem)
    outputs = problem.fused(hidden, weight, options(chunk_tokens=4), defer=True)
    taken = [each.detach() for each in outputs]  # who took them before sees them too
    scaled = outputs[0] * 2
    scaled *= 3  # as a schedule does
    assert all(each.isnan().all() for each in (*taken, scaled))
    assert (weight.main_grad == 1).all()
    scaled.backward()
    wanted = (problem.loss, problem.log_probs, problem.entropy)
    for each, expected in zip(taken, wanted, strict=True):
        close(each, expected)
    problem.check_gradients(hidden, weight.main_grad - 1)


@pytest.mark.parametrize("retried", [False, True])
def test_main_grad_that_is_zeroed_before_backward_gets_the_whole_gradient(retried):
    """A forward pass that has no backward, or broke off, has added nothing."""
    problem = Problem(scale=6.0)
    hidden, weight = with_main_grad(problem)
    loss = deferred(problem, hidden, weight, chunk_tokens=4)
    if retried:
        loss = deferred(problem, hidden, weight, chunk_tokens=4)
    assert (weight.main_grad == 1).all() and weight.grad is None
    weight.main_grad.zero_()
    loss.backward(torch.tensor(6.0))
    problem.check_gradients(hidden, weight.main_grad)


@every_mode
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_the_head(mode, reentrant):
    """Its second forward adds nothing of its own; backward of the first fills in what the first returned."""
    problem = Problem(scale=6.0)
    hidden, weight = with_main_grad(problem)
    one = torch.tensor(6.0, requires_grad=True)

    def head(hidden: Tensor) -> Tensor:
        # The product keeps its factors for backward, which is why the head is run again.
        return mode(problem, hidden, weight, chunk_tokens=4) * one.detach().requires_grad_()

    torch.utils.checkpoint.checkpoint(head, hidden, use_reentrant=reentrant).backward()
    problem.check_gradients(hidden, weight.main_grad - 1)


def test_a_second_backward_of_what_is_deferred_adds_as_much_again():
    problem = Problem()
    hidden, weight = with_main_grad(problem)
    loss = deferred(problem, hidden, weight)
    loss.backward(retain_graph=True)
    (5 * loss).backward()
    close(weight.main_grad - 1, 6 * problem.weight_gradient)
    close(hidden.grad, 6 * problem.hidden_gradient)


def test_what_is_deferred_is_freed_with_its_graph():
    problem = Problem()
    hidden, weight = problem.leaves()
    states = hidden * 1.0
    alive = weakref.ref(states)
    loss = deferred(problem, states, weight)
    gc.disable()
    try:
        del states, loss
        assert alive() is None
    finally:
        gc.enable()


def test_float16_with_the_loss_scale():
    """The scale is in the gradients before they are rounded: without it these would all be 0."""
    scale = 2.0**14
    problem = Problem(torch.float16, scale=scale)
    hidden, weight = problem.leaves()
    weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(weight.shape), False
    tiny, right = 2.0**-22, problem.token_loss
    problem.token_loss = lambda *arguments: tiny * right(*arguments)  # type: ignore[method-assign]
    deferred(problem, hidden, weight, fp32_logits=True).backward(torch.tensor(scale))
    close(hidden.grad, problem.hidden_gradient * tiny, 0.01)
    close(weight.main_grad, problem.weight_gradient * tiny, 0.01)


@pytest.mark.parametrize("without", ["gradients on", "a factor that needs one"])
def test_without_a_backward_to_come_the_value_is_there_at_once(without):
    problem = Problem()
    hidden, weight = with_main_grad(problem)
    if without != "gradients on":
        hidden, weight = hidden.detach(), weight.detach()
    with torch.set_grad_enabled(without != "gradients on"):
        loss = deferred(problem, hidden, weight)
    close(loss, problem.loss)
    assert not loss.requires_grad
    with_main_grad_unchanged = getattr(weight, "main_grad", torch.ones(1))
    assert (with_main_grad_unchanged == 1).all()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"hidden": torch.zeros(2, 3, 4)}, ValueError, "hidden must be"),
        ({"hidden": torch.zeros(3, 5)}, ValueError, "hidden must be"),
        ({"hidden": torch.zeros(3, 4).bfloat16()}, ValueError, "share one float dtype"),
        ({"targets": torch.zeros(2, dtype=torch.int64)}, ValueError, "targets must be"),
        ({"options": HeadOptions(chunk_tokens=0)}, ValueError, "chunk_tokens"),
        ({"options": HeadOptions(temperature=0.0)}, ValueError, "temperature"),
        ({"gradient_rows": 4}, ValueError, "gradient_rows"),
        ({"piece_sizes": [1, 1]}, ValueError, "piece_sizes add up to 2 and there are 3 tokens"),
        (
            {"hidden": torch.zeros(3, 4).half(), "weight": torch.zeros(8, 4).half()},
            NotImplementedError,
            "float16",
        ),
    ],
)
def test_bad_input(change, error, message):
    arguments: dict[str, object] = {
        "hidden": torch.zeros(3, 4),
        "weight": torch.zeros(8, 4),
        "targets": torch.zeros(3, dtype=torch.int64),
        "token_loss": lambda log_probs, entropy, rows: log_probs.sum(),
    }
    with pytest.raises(error, match=message):
        linear_token_loss(**{**arguments, **change})


def shard_on_rank() -> list[tuple[Tensor, Tensor | None, Tensor | None]]:
    problem, rank, width = Problem(), dist.get_rank(), WIDTH // dist.get_world_size()
    results = []
    for mode in MODES:
        hidden, whole = problem.leaves()
        weight = whole.detach()[rank * width : (rank + 1) * width].clone().requires_grad_()
        group = dist.group.WORLD
        loss = mode(problem, hidden, weight, chunk_tokens=4, tensor_parallel_group=group)
        loss.backward()
        results.append((loss.detach(), hidden.grad, weight.grad))
    return results


def test_vocabulary_over_two_ranks():
    problem = Problem()
    ranks = run_ranks(shard_on_rank, 2)
    for results in zip(*ranks, strict=True):
        for loss, _, _ in results:
            close(loss, problem.loss)
        close(sum(hidden for _, hidden, _ in results), problem.hidden_gradient)
        close(torch.cat([weight for _, _, weight in results]), problem.weight_gradient)


@pytest.mark.parametrize("tokens", [0, 1, 255, 256, 257, 4096, 10_000, 131_072])
@pytest.mark.parametrize("columns", [0, 1, 11, 32_000, 151_936, 10**10])
@pytest.mark.parametrize("memory", [None, 1 << 34, 1 << 38])
def test_default_chunks_are_equal_and_within_the_budget(monkeypatch, memory, columns, tokens):
    """As few chunks as 1.25 GiB of bfloat16 logits, or 1/64 of a small device, allow."""
    device, budget = torch.device("cpu"), 1.25 * 2**30
    if memory is not None:
        device, budget = torch.device("cuda"), min(budget, memory / 64)
        properties = SimpleNamespace(total_memory=memory)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    size = default_chunk_tokens(tokens, columns, device)
    assert size == 1 or 2 * columns * size <= budget
    fits = max(math.floor(budget / (2 * max(columns, 1))), 1)
    fewest = math.ceil(tokens / fits)
    assert math.ceil(tokens / size) == fewest
    equal = max(math.ceil(tokens / max(fewest, 1)), 1)
    multiple = math.ceil(equal / 256) * 256
    assert size == (multiple if multiple <= fits and tokens else equal)


@pytest.mark.parametrize("mode", [known, deferred])
def test_a_wrong_coefficient_would_be_seen(mode):
    """Mutant: coefficients of another scale than the loss."""
    problem = Problem()
    hidden, weight = problem.leaves()
    right = problem.token_loss
    problem.token_loss = lambda log_probs, entropy, rows: 1.001 * right(log_probs, entropy, rows)
    mode(problem, hidden, weight).backward()
    with pytest.raises(AssertionError):
        close(hidden.grad, problem.hidden_gradient)


@every_mode
def test_a_lost_scale_would_be_seen(mode, monkeypatch):
    """Mutant: backward makes the gradient of the loss, whatever gradient arrives."""
    plain = from_hidden._coefficients, FactorGradients.finish
    monkeypatch.setattr(from_hidden, "_coefficients", lambda *given: plain[0](*given[:3], None))
    monkeypatch.setattr(FactorGradients, "finish", lambda found, *_: plain[1](found))
    problem = Problem(scale=6.0)
    hidden, weight = with_main_grad(problem)
    (mode(problem, hidden, weight) * 6).backward()
    if mode in (
        kept,
        recomputed,
    ):  # theirs comes with the incoming gradients of log-probs and entropy
        return close(hidden.grad, problem.hidden_gradient)
    for found, wanted in (
        (hidden.grad, problem.hidden_gradient),
        (weight.main_grad - 1, problem.weight_gradient),
    ):
        with pytest.raises(AssertionError):
            close(found, wanted)
