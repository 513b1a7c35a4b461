"""The import paths for other trainers: what is exact at their call site is, and the rest is
refused.
"""

import argparse
import functools
import subprocess
import sys
import types
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from megatron_pg import integrations
from megatron_pg.config.custom import load_custom_function
from tests import oracle
from tests.cut_steps import CUTS, Cut, assert_same
from tests.fast.refusals import assert_refused
from tests.oracle import PlainSample
from tests.random_steps import lengths, loss_masks, plain_sample, random_losses, random_step
from tests.token_layout import token_layout

DIVISOR = 4.0
MODES = {"sample_mean": False, "constant": False, "token_mean": True}
"""The aggregations offered, and the trainer's --calculate-per-token-loss that each needs."""


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The divisor is set, and no test before this one has left Megatron's globals behind."""
    monkeypatch.setenv(integrations.DIVISOR_VARIABLE, str(DIVISOR))
    monkeypatch.delitem(sys.modules, "megatron.core.parallel_state", raising=False)
    monkeypatch.delitem(sys.modules, "megatron.training.global_vars", raising=False)


class Trainer:
    """The call site: a micro-batch's reducer by path, the trainer's scale, and what Megatron does
    to it.

    Its own words for the sizes, its own arithmetic; mutants override a method.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, aggregation: str) -> None:
        self.monkeypatch, self.per_token = monkeypatch, MODES[aggregation]
        self.path = f"megatron_pg.integrations.{aggregation}"

    def scaled(self, loss: Tensor, microbatches: int, rollouts: int, dp: int, cp: int) -> Tensor:
        if self.per_token:
            return loss * cp
        return loss * microbatches / rollouts * dp * cp

    def num_tokens(self, micro_batch: Sequence[PlainSample]) -> int:
        if not self.per_token:
            return 1
        return sum(max(sum(sample.loss_mask), 1) for sample in micro_batch)

    def set_place(self, rank: int, size: int) -> None:
        """Megatron's parallel state as this rank sees it."""
        state = types.ModuleType("megatron.core.parallel_state")
        state.model_parallel_is_initialized = lambda: True  # type: ignore[attr-defined]
        state.get_context_parallel_rank = lambda: rank  # type: ignore[attr-defined]
        state.get_context_parallel_world_size = lambda: size  # type: ignore[attr-defined]
        self.monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", state)

    def reducer(self, micro_batch: Sequence[PlainSample]) -> Callable[[Tensor], Tensor]:
        function = load_custom_function("custom_pg_loss_reducer_function_path", self.path)
        return function(*lengths(micro_batch), loss_masks(micro_batch), self.per_token)

    def rank_loss(
        self, micro_batch: Sequence[PlainSample], losses: Sequence[Tensor], rank: int, size: int
    ) -> Tensor:
        """The inner sum of one context-parallel rank."""
        self.set_place(rank, size)
        reducer = self.reducer(micro_batch)
        flat = torch.cat([torch.zeros(0, dtype=torch.float64), *losses])
        layout = token_layout(*lengths(micro_batch), size)
        return reducer(flat[[row.response for row in layout[rank] if row.response is not None]])

    def objective(self, step: list[PlainSample], losses: list[Tensor], cut: Cut) -> Tensor:
        """What the gradients of the whole job add up to."""
        dp, cp = cut.dp_size, cut.cp_size
        rollouts = len(oracle.rollouts(step))
        total, tokens = torch.zeros((), dtype=torch.float64), 0
        for micro_batches in cut.ranks:
            for indices in micro_batches:
                samples = [step[index] for index in indices]
                for rank in range(cp):
                    loss = self.rank_loss(samples, [losses[i] for i in indices], rank, cp)
                    loss = self.scaled(loss, len(micro_batches), rollouts, dp, cp)
                    n = self.num_tokens(samples)
                    # Megatron: per-token mode sums, and divides by all n at the end; the other
                    # divides by n and by the micro-batches, and averages over data- and
                    # context-parallel ranks.
                    tokens += n
                    share = 1 if self.per_token else n * len(micro_batches) * dp * cp
                    total = total + loss / share
        return total / tokens if self.per_token else total


def one_sample_rollouts(seed: int, *, fully_masked: bool) -> list[PlainSample]:
    step = [
        plain_sample(sample.loss_mask, prompt_length=sample.prompt_length, group=0)
        for sample in random_step(seed)
    ]
    return step if fully_masked else [sample for sample in step if sum(sample.loss_mask)]


def check(
    trainer: Trainer, step: list[PlainSample], cut: str, expected: Callable[..., Tensor]
) -> None:
    """Hold the trainer's gradients against those of `expected(step, losses)`."""
    losses = random_losses(step)
    found = trainer.objective(step, losses, CUTS[cut](len(step)))
    assert_same(found, expected(step, losses), losses)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("aggregation", MODES)
def test_exact_at_the_call_site(monkeypatch, aggregation, cut):
    step = one_sample_rollouts(3, fully_masked=not MODES[aggregation])
    expected = functools.partial(oracle.aggregate, aggregation=aggregation, divisor=DIVISOR)
    check(Trainer(monkeypatch, aggregation), step, cut, expected)


def test_constant_is_exact_for_rollouts_of_several_samples(monkeypatch):
    step = random_step(5)
    assert len(oracle.rollouts(step)) < len(step)
    expected = functools.partial(oracle.constant, divisor=DIVISOR)
    check(Trainer(monkeypatch, "constant"), step, "dp_2_two_micro_batches_cp_2", expected)


def test_a_sample_without_tokens_counts_one_in_the_trainers_token_mean(monkeypatch):
    step = one_sample_rollouts(3, fully_masked=True)
    active = oracle.active_tokens(step, range(len(step)))
    empty = sum(1 for sample in step if not sum(sample.loss_mask))
    assert empty > 0
    share = active / (active + empty)
    trainer = Trainer(monkeypatch, "token_mean")
    check(trainer, step, "cp_2", lambda *step: oracle.token_mean(*step) * share)


class ForgetsContextParallel(Trainer):
    """Reads no parallel state; every rank takes the whole sequence for its own."""

    def rank_loss(self, micro_batch, losses, rank, size):
        return super().rank_loss(micro_batch, losses, 0, 1)


class SwapsTheMode(Trainer):
    def reducer(self, micro_batch):
        return integrations.token_mean(*lengths(micro_batch), loss_masks(micro_batch), True)


@pytest.mark.parametrize("mutant", [ForgetsContextParallel, SwapsTheMode])
def test_the_comparison_rejects_mutants(monkeypatch, mutant):
    trainer, step = mutant(monkeypatch, "sample_mean"), one_sample_rollouts(3, fully_masked=True)
    with pytest.raises(AssertionError):
        check(trainer, step, "cp_2", oracle.sample_mean)


def call(name: str, per_token: bool) -> Tensor:
    function = getattr(integrations, name)
    return function([5], [3], [torch.tensor([1, 0, 1])], per_token)(torch.ones(3))


def set_megatron_args(monkeypatch: pytest.MonkeyPatch, **values: object) -> None:
    module = types.ModuleType("megatron.training.global_vars")
    module.get_args = lambda: argparse.Namespace(**values)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", module)


# (aggregation, per token, divisor in the environment, Megatron's arguments, words of the refusal);
# startup's table has the rest of the divisors
REFUSED = [
    ("sample_mean", True, "4", {}, "--calculate-per-token-loss"),
    ("constant", True, "4", {}, "--calculate-per-token-loss"),
    ("token_mean", False, "4", {}, "add --calculate-per-token-loss"),
    ("prompt_mean", False, "4", {}, "prompt group"),
    ("prompt_mean", True, "4", {}, "prompt group"),
    *(("constant", False, text, {}, f"DIVISOR is {text!r}: expected a finite number")
      for text in ("0", "-1", "nan", "inf", "many", "")),
    ("constant", False, "4", {"loss_aggregation_divisor": 8.0}, "two divisors"),
    ("constant", False, "4", {"qkv_format": "bshd"}, "--qkv-format thd"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "per_token", "divisor", "args", "words"), REFUSED)
def test_refusals_say_why(monkeypatch, name, per_token, divisor, args, words):
    monkeypatch.setenv(integrations.DIVISOR_VARIABLE, divisor)
    set_megatron_args(monkeypatch, **args)
    Trainer(monkeypatch, "constant").set_place(0, 2)
    error = NotImplementedError if "qkv_format" in args else ValueError
    assert_refused(words, call, name, per_token, error=error)


def test_the_divisor_and_the_layout_of_megatrons_global_args(monkeypatch):
    """Without context parallelism, under which the layout would be refused."""
    monkeypatch.delenv(integrations.DIVISOR_VARIABLE)
    set_megatron_args(monkeypatch, loss_aggregation_divisor=8.0, qkv_format="bshd")
    torch.testing.assert_close(call("constant", False), torch.tensor(0.25))


def test_importing_needs_no_megatron():
    script = (
        "import sys; sys.modules['megatron'] = None\n"
        "from megatron_pg import integrations; import torch\n"
        "print(float(integrations.sample_mean([5], [3], [torch.tensor([1, 0, 1])])(torch.ones(3))))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "1.0"
