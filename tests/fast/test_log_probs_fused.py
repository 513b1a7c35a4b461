"""The output layer fused with the log-prob op, against dense float64 products and the row oracle."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor

from megatron_pg.head import HeadOptions, linear_log_probs_and_entropy, linear_token_loss
from megatron_pg.head.output_layer import WeightGradient, default_chunk_tokens
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

    def leaves(self) -> tuple[Tensor, Tensor]:
        return self.hidden.clone().requires_grad_(), self.weight.clone().requires_grad_()


def options(**changes: object) -> HeadOptions:
    return HeadOptions(temperature=TEMPERATURE, vocab_size=VOCAB_SIZE, **changes)


def close(found: Tensor | None, wanted: Tensor, rounding: float = 3e-6) -> None:
    assert found is not None
    error = (found.double() - wanted).abs().amax() / wanted.abs().amax()
    assert error <= rounding, error


def known(problem: Problem, hidden: Tensor, weight: Tensor, **settings: object) -> Tensor:
    chunk = settings.pop("chunk_tokens", None)
    fp32 = settings.pop("fp32_logits", False)
    loss, log_probs, entropy = linear_token_loss(
        hidden,
        weight,
        problem.targets,
        problem.token_loss,
        options(chunk_tokens=chunk, fp32_logits=fp32),
        **settings,
    )
    assert not log_probs.requires_grad and not entropy.requires_grad
    return loss


def downstream(problem: Problem, hidden: Tensor, weight: Tensor, **settings: object) -> Tensor:
    chunk = settings.pop("chunk_tokens", None)
    fp32 = settings.pop("fp32_logits", False)
    log_probs, entropy = linear_log_probs_and_entropy(
        hidden, weight, problem.targets, options(chunk_tokens=chunk, fp32_logits=fp32), **settings
    )
    return problem.token_loss(log_probs, entropy, slice(0, TOKENS))


def kept(problem: Problem, hidden: Tensor, weight: Tensor, **settings: object) -> Tensor:
    return downstream(problem, hidden, weight, keep_logits=True, **settings)


def recomputed(problem: Problem, hidden: Tensor, weight: Tensor, **settings: object) -> Tensor:
    return downstream(problem, hidden, weight, keep_logits=False, **settings)


MODES = [known, kept, recomputed]
every_mode = pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.__name__)


@every_mode
@pytest.mark.parametrize("chunk_tokens", [None, 1, 4, 100])
@pytest.mark.parametrize("scale", [1.0, 12.7])
def test_gradients(mode: Callable[..., Tensor], chunk_tokens: int | None, scale: float) -> None:
    problem = Problem(scale=scale)
    hidden, weight = problem.leaves()
    loss = mode(problem, hidden, weight, chunk_tokens=chunk_tokens)
    (loss * scale).backward()
    close(loss.detach(), problem.loss)
    close(hidden.grad, problem.hidden_gradient)
    close(weight.grad, problem.weight_gradient)
    assert (weight.grad[VOCAB_SIZE:] == 0).all()


@every_mode
@pytest.mark.parametrize("fp32_logits", [False, True])
def test_bfloat16(mode: Callable[..., Tensor], fp32_logits: bool) -> None:
    problem = Problem(torch.bfloat16)
    hidden, weight = problem.leaves()
    loss = mode(problem, hidden, weight, chunk_tokens=4, fp32_logits=fp32_logits)
    loss.backward()
    rounding = 0.006 if fp32_logits else 0.06
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16
    close(hidden.grad, problem.hidden_gradient, rounding)
    close(weight.grad, problem.weight_gradient, rounding)
    close(loss.detach(), problem.loss, 1e-5 if fp32_logits else 0.06)


@every_mode
@pytest.mark.parametrize("tied", [False, True])
def test_main_grad(mode: Callable[..., Tensor], tied: bool) -> None:
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
def test_main_grad_gets_the_gradient_of_the_scaled_loss(
    mode: Callable[..., Tensor], scale: float
) -> None:
    problem = Problem(scale=scale)
    hidden, weight = with_main_grad(problem)
    (mode(problem, hidden, weight, chunk_tokens=4) * scale).backward()
    close(weight.main_grad - 1, problem.weight_gradient)
    close(hidden.grad, problem.hidden_gradient)


@every_mode
@pytest.mark.parametrize("field", [None, "__fsdp_param__"])
def test_a_buffer_that_is_not_of_distributed_data_parallel_is_left_alone(
    mode: Callable[..., Tensor], field: str | None
) -> None:
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


def test_chunks_of_a_bfloat16_weight_add_up_in_float32() -> None:
    """512 ones stall at 256 in bfloat16."""
    gradient = WeightGradient(torch.zeros(2, 1, dtype=torch.bfloat16), final=False)
    for _ in range(512):
        gradient.add(torch.ones(1, 2, dtype=torch.bfloat16), torch.ones(1, 1, dtype=torch.bfloat16))
    assert gradient.finish().tolist() == [[512.0], [512.0]]


def test_the_gradient_of_bfloat16_hidden_states_is_scaled_in_float32() -> None:
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
def test_frozen_weight_and_frozen_hidden(mode: Callable[..., Tensor]) -> None:
    problem = Problem()
    for frozen in (0, 1):
        leaves = problem.leaves()
        leaves[frozen].requires_grad_(False)
        mode(problem, *leaves).backward()
        wanted = (problem.hidden_gradient, problem.weight_gradient)
        assert leaves[frozen].grad is None
        close(leaves[1 - frozen].grad, wanted[1 - frozen])


@pytest.mark.parametrize("mode", [known, kept])
def test_second_backward_is_refused(mode: Callable[..., Tensor]) -> None:
    problem = Problem()
    loss = mode(problem, *problem.leaves())
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@every_mode
def test_second_derivative_is_refused(mode: Callable[..., Tensor]) -> None:
    problem = Problem()
    hidden, weight = problem.leaves()
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        torch.autograd.grad(mode(problem, hidden, weight), hidden, create_graph=True)


@every_mode
def test_no_tokens(mode: Callable[..., Tensor]) -> None:
    problem = Problem()
    hidden, weight = torch.zeros(0, HIDDEN, requires_grad=True), problem.leaves()[1]
    problem.targets = problem.targets[:0]
    problem.advantages, problem.old_log_probs = torch.zeros(0), torch.zeros(0)
    mode(problem, hidden, weight).backward()
    assert hidden.grad.shape == (0, HIDDEN) and (weight.grad == 0).all()


@pytest.mark.parametrize("gradient_rows", [0, 3, 4, TOKENS])
def test_rows_without_gradient_are_scored_and_left_out(gradient_rows: int) -> None:
    problem = Problem()
    hidden, weight = problem.leaves()
    loss, log_probs, entropy = linear_token_loss(
        hidden,
        weight,
        problem.targets,
        problem.token_loss,
        options(chunk_tokens=4),
        gradient_rows=gradient_rows,
    )
    loss.backward()
    close(loss.detach(), problem.loss)
    close(log_probs, problem.log_probs)
    close(entropy, problem.entropy)
    wanted = problem.logits_gradient.clone()
    wanted[gradient_rows:] = 0
    torch.testing.assert_close(
        hidden.grad.double(), wanted @ problem.weight.double(), rtol=1e-5, atol=1e-6
    )
    torch.testing.assert_close(
        weight.grad.double(), wanted.T @ problem.hidden.double(), rtol=1e-5, atol=1e-6
    )


def test_known_loss_scale_goes_straight_to_main_grad() -> None:
    problem = Problem(scale=6.0)
    hidden, weight = problem.leaves()
    weight.main_grad, weight.grad_added_to_main_grad = torch.ones(weight.shape), False
    loss = known(problem, hidden, weight, chunk_tokens=4, loss_scale=torch.tensor(6.0))
    close(weight.main_grad - 1, problem.weight_gradient)
    (loss * 6).backward()
    close(weight.main_grad - 1, problem.weight_gradient)
    close(hidden.grad, problem.hidden_gradient)


def test_float64_with_a_loss_scale_of_float32() -> None:
    """As Megatron's is, whatever the model computes in."""
    problem = Problem(torch.float64, scale=6.0)
    hidden, weight = problem.leaves()
    loss = known(problem, hidden, weight, chunk_tokens=4, loss_scale=torch.tensor(6.0))
    (loss * 6).backward()
    close(loss.detach(), problem.loss, 1e-6)
    close(hidden.grad, problem.hidden_gradient, 1e-6)
    close(weight.grad, problem.weight_gradient, 1e-6)


@pytest.mark.parametrize("loss_scale", [None, torch.tensor(6.0)])
def test_a_chunk_whose_loss_is_a_constant_has_no_gradient(loss_scale: Tensor | None) -> None:
    """The second chunk of three here."""
    problem = Problem(scale=6.0)
    right = problem.token_loss

    def token_loss(log_probs: Tensor, entropy: Tensor, rows: slice) -> Tensor:
        return torch.tensor(2.0) if rows.start == 4 else right(log_probs, entropy, rows)

    hidden, weight = problem.leaves()
    problem.token_loss = token_loss  # type: ignore[method-assign]
    loss = known(problem, hidden, weight, chunk_tokens=4, loss_scale=loss_scale)
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


@pytest.mark.parametrize("promised", [6.0, -6.0])
def test_a_scale_that_differs_by_rounding_is_the_promised_one(promised: float) -> None:
    problem = Problem(scale=promised)
    hidden, weight = with_main_grad(problem)
    scale = torch.tensor(promised)
    loss = known(problem, hidden, weight, loss_scale=scale)
    loss.backward(torch.nextafter(scale, torch.tensor(7.0)))
    close(weight.main_grad - 1, problem.weight_gradient)
    close(hidden.grad, problem.hidden_gradient)


@pytest.mark.parametrize("arrives", [3.0, 6.01, float("nan")])
@pytest.mark.parametrize("frozen", [None, "hidden", "weight"])
def test_a_loss_scale_that_was_not_promised_is_visible(arrives: float, frozen: str | None) -> None:
    """In every gradient there is, and so in the norm of the step's."""
    problem = Problem()
    hidden, weight = with_main_grad(problem)
    hidden.requires_grad_(frozen != "hidden")
    weight.requires_grad_(frozen != "weight")
    loss = known(problem, hidden, weight, loss_scale=torch.tensor(6.0))
    (loss * arrives).backward()
    if frozen != "hidden":
        assert hidden.grad[0].isnan().all()
    if frozen != "weight":
        assert weight.main_grad.isnan().any()


def test_a_loss_scale_that_was_not_promised_is_visible_without_main_grad() -> None:
    problem = Problem()
    hidden, weight = problem.leaves()
    known(problem, hidden, weight, loss_scale=torch.tensor(6.0)).backward()
    assert hidden.grad.isnan().any() and weight.grad.isnan().any()


def test_a_promise_is_kept_apart_from_what_becomes_of_the_callers_tensor() -> None:
    problem = Problem()
    hidden, weight = with_main_grad(problem)
    scale = torch.tensor(6.0)
    loss = known(problem, hidden, weight, loss_scale=scale)
    scale.mul_(2)
    loss.backward(scale)
    assert hidden.grad.isnan().any() and weight.main_grad.isnan().any()


@pytest.mark.parametrize("failing", [0, 4])
def test_an_error_after_some_chunks_is_visible_in_main_grad(failing: int) -> None:
    """A micro-batch that is tried again would be counted in part twice."""
    problem = Problem()
    hidden, weight = with_main_grad(problem)
    right = problem.token_loss

    def token_loss(log_probs: Tensor, entropy: Tensor, rows: slice) -> Tensor:
        if rows.start == failing:
            raise torch.OutOfMemoryError("no room")
        return right(log_probs, entropy, rows)

    problem.token_loss = token_loss  # type: ignore[method-assign]
    with pytest.raises(torch.OutOfMemoryError):
        known(problem, hidden, weight, chunk_tokens=4, loss_scale=torch.tensor(6.0))
    assert weight.main_grad.isnan().any() == (failing > 0)


@pytest.mark.parametrize("zeroed", [False, True])
def test_main_grad_that_is_zeroed_before_backward_is_visible(zeroed: bool) -> None:
    problem = Problem(scale=6.0)
    hidden, weight = with_main_grad(problem)
    loss = known(problem, hidden, weight, chunk_tokens=4, loss_scale=torch.tensor(6.0))
    if zeroed:
        weight.main_grad.zero_()
    else:
        weight.main_grad += 1  # what other micro-batches do between
    loss.backward(torch.tensor(6.0))
    assert weight.main_grad.isnan().any() == zeroed and hidden.grad.isnan().any() == zeroed


@pytest.mark.parametrize("zeroed", [False, True])
def test_rows_without_a_gradient_do_not_hide_that_main_grad_is_zeroed(zeroed: bool) -> None:
    """Columns of padding and a token of probability 0, in a buffer that starts from 0."""
    problem = Problem()
    problem.hidden[:, 0] = 1.0
    problem.weight[0] = 0.0
    problem.weight[0, 0] = -1e4
    problem.targets.clamp_(min=1)
    hidden, weight = problem.leaves()
    weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(weight.shape), False
    loss = known(problem, hidden, weight, chunk_tokens=4, loss_scale=torch.tensor(6.0))
    is_zero = (weight.main_grad == 0).all(1)
    assert is_zero[0] and is_zero[VOCAB_SIZE:].all() and not is_zero.all()
    if zeroed:
        weight.main_grad.zero_()
    loss.backward(torch.tensor(6.0))
    assert weight.main_grad.isnan().any() == zeroed


def test_a_gradient_of_zero_is_not_taken_for_one_that_was_zeroed() -> None:
    problem = Problem()
    hidden, weight = problem.leaves()
    weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(weight.shape), False
    problem.token_loss = lambda log_probs, entropy, rows: (log_probs * 0.0).sum()
    known(problem, hidden, weight, loss_scale=torch.tensor(6.0)).backward(torch.tensor(6.0))
    assert (weight.main_grad == 0).all() and (hidden.grad == 0).all()


def test_a_graph_that_has_no_backward_is_visible() -> None:
    problem = Problem()
    hidden, weight = with_main_grad(problem)
    loss = known(problem, hidden, weight, loss_scale=torch.tensor(6.0))
    assert not weight.main_grad.isnan().any()
    with pytest.warns(RuntimeWarning, match="freed without backward"):
        del loss
    assert weight.main_grad.isnan().any()


def test_checkpointing_the_head_is_visible() -> None:
    """Its second forward adds the gradient of the weight a second time."""
    problem = Problem()
    hidden, weight = with_main_grad(problem)
    one = torch.tensor(1.0, requires_grad=True)

    def head(hidden: Tensor) -> Tensor:
        # The product keeps its factors for backward, which is why the head is run again.
        return known(problem, hidden, weight, loss_scale=one.detach()) * one

    loss = torch.utils.checkpoint.checkpoint(head, hidden, use_reentrant=False)
    with pytest.warns(RuntimeWarning, match="freed without backward"):
        loss.backward()
    assert weight.main_grad.isnan().any()


@pytest.mark.filterwarnings("error")
def test_nothing_is_awaited_where_nothing_was_added() -> None:
    problem = Problem()
    hidden, weight = with_main_grad(problem)
    known(problem, hidden, weight, loss_scale=torch.tensor(6.0), gradient_rows=0)
    known(problem, hidden, weight)
    kept(problem, hidden, weight)
    assert (weight.main_grad == 1).all()


def test_float16_with_the_loss_scale() -> None:
    """The scale is in the gradients before they are rounded: without it these would all be 0."""
    scale = 2.0**14
    problem = Problem(torch.float16, scale=scale)
    hidden, weight = problem.leaves()
    weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(weight.shape), False
    tiny = 2.0**-22

    def token_loss(log_probs: Tensor, entropy: Tensor, rows: slice) -> Tensor:
        return tiny * problem.token_loss(log_probs, entropy, rows)

    loss, _, _ = linear_token_loss(
        hidden,
        weight,
        problem.targets,
        token_loss,
        options(fp32_logits=True),
        loss_scale=torch.tensor(scale),
    )
    loss.backward(torch.tensor(scale))
    close(hidden.grad, problem.hidden_gradient * tiny, 0.01)
    close(weight.main_grad, problem.weight_gradient * tiny, 0.01)


def test_without_gradients_nothing_is_multiplied_twice() -> None:
    problem = Problem()
    hidden, weight = problem.leaves()
    weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(weight.shape), False
    with torch.no_grad():
        loss = known(problem, hidden, weight, loss_scale=torch.tensor(1.0))
    close(loss, problem.loss)
    assert (weight.main_grad == 0).all()


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
        (
            {"hidden": torch.zeros(3, 4).half(), "weight": torch.zeros(8, 4).half()},
            NotImplementedError,
            "float16",
        ),
    ],
)
def test_bad_input(change: dict[str, object], error: type[Exception], message: str) -> None:
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
    for mode in ("known", "kept", "recomputed"):
        hidden, whole = problem.leaves()
        weight = whole.detach()[rank * width : (rank + 1) * width].clone().requires_grad_()
        settings = options(chunk_tokens=4, tensor_parallel_group=dist.group.WORLD)
        if mode == "known":
            loss, _, _ = linear_token_loss(
                hidden, weight, problem.targets, problem.token_loss, settings
            )
        else:
            log_probs, entropy = linear_log_probs_and_entropy(
                hidden, weight, problem.targets, settings, keep_logits=mode == "kept"
            )
            loss = problem.token_loss(log_probs, entropy, slice(0, TOKENS))
        loss.backward()
        results.append((loss.detach(), hidden.grad, weight.grad))
    return results


def test_vocabulary_over_two_ranks() -> None:
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
def test_default_chunks_are_equal_and_within_the_budget(
    monkeypatch: pytest.MonkeyPatch, memory: int | None, columns: int, tokens: int
) -> None:
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


def test_a_wrong_coefficient_would_be_seen() -> None:
    """Mutant: coefficients of another scale than the loss."""
    problem = Problem()
    hidden, weight = problem.leaves()
    right = problem.token_loss
    problem.token_loss = lambda log_probs, entropy, rows: 1.001 * right(log_probs, entropy, rows)
    known(problem, hidden, weight).backward()
    with pytest.raises(AssertionError):
        close(hidden.grad, problem.hidden_gradient)
