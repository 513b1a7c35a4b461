"""The loss traced and compiled, as a GPU runs it: the numbers of the formulas, for any size,
without compiling again.

On a CPU here, by the trace itself, or with a compiler that generates no code; tests/gpu has the
kernels.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from megatron_pg.config import PolicyLossConfig
from megatron_pg.loss import compiled, micro_batch
from megatron_pg.loss.metrics import MicroBatchMetrics
from megatron_pg.loss.micro_batch import MicroBatchLoss
from megatron_pg.loss.resolved import ResolvedLoss, resolve
from megatron_pg.loss.sequence import sequence_sum_names, sums_of_rank
from megatron_pg.step.batch import PackedBatch, pack
from megatron_pg.step.sample import Sample
from megatron_pg.step.totals import step_totals
from tests.fast.one_step import loss_of
from tests.fast.sequences import (
    CORRECTIONS,
    flat_log_probs,
    package_batch,
    random_sequences,
    tokens_and_sums,
)

OBJECTIVES = ("ppo", "gspo", "sapo", "dppo_kl", "gmpo")
"""One of each kind; tests/gpu has all."""
SETTINGS: dict[str, dict[str, Any]] = {
    **{name: {"policy_loss": name} for name in OBJECTIVES},
    "gspo_by_turn": {"policy_loss": "gspo", "sequence_unit": "turn"},
    "gspo_by_turn_with_corrections": {
        "policy_loss": "gspo",
        "sequence_unit": "turn",
        **CORRECTIONS,
    },
    "without_metrics": {"pg_metrics": "none"},
    "corrections": CORRECTIONS,
    "gspo_with_corrections": {"policy_loss": "gspo", **CORRECTIONS},
    "constant": {"loss_aggregation": "constant", "loss_aggregation_divisor": 7.0},
    "corrections_and_terms_by_the_loss": {
        "loss_aggregation": "token_mean",
        "regularizer_aggregation": "loss",
        **CORRECTIONS,
    },
}


@pytest.fixture(autouse=True)
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trace runs as it is, on a CPU too."""
    monkeypatch.setattr(compiled, "DEVICES", {"cpu"})
    monkeypatch.setattr(compiled, "_programs", {})
    monkeypatch.setattr(torch, "compile", lambda graph, **_: graph)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch, traced: None) -> Iterator[Callable[[], int]]:
    """How many graphs torch.compile has built; it runs their operators and generates no code."""
    # Megatron on a CPU, in an earlier test of the process, replaces torch.compile and turns
    # compiling off.
    monkeypatch.setattr(torch, "compile", torch._dynamo.optimize("aot_eager"))
    with torch.compiler.set_stance("default"):
        yield lambda: int(counters["stats"]["unique_graphs"])


Found = tuple[Tensor, Tensor, Tensor | None, MicroBatchMetrics]


def evaluated(
    config: PolicyLossConfig,
    seed: int = 1,
    dtype: torch.dtype = torch.float32,
    batch: PackedBatch | None = None,
    scale: float = 1.0,
) -> Found:
    """Loss, gradients to log-probs and entropy, and metrics of random samples."""
    sequences = random_sequences(seed, spread=0.5)
    batch = package_batch(sequences) if batch is None else batch
    log_probs = flat_log_probs(sequences, dtype).detach()[batch.window.response_indices]
    log_probs.requires_grad_()
    entropy = log_probs.detach().square().requires_grad_()
    loss, metrics = loss_of(config, batch, log_probs, entropy)
    (scale * loss).backward()
    assert log_probs.grad is not None
    return loss.detach(), log_probs.grad, entropy.grad, metrics


def by_operators(*given: Any, **named: Any) -> Found:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(compiled, "DEVICES", set())
        return evaluated(*given, **named)


def assert_same(found: Found, expected: Found, rounding: float) -> None:
    (*tensors, metrics), (*wanted_tensors, wanted) = found, expected
    assert list(metrics) == list(wanted)
    assert_close([*tensors, metrics.pairs], [*wanted_tensors, wanted.pairs], rounding)
    assert_close([metrics.maxima, metrics.is_nan], [wanted.maxima, wanted.is_nan], 0.0)


def assert_close(
    found: Sequence[Tensor | None], expected: Sequence[Tensor | None], rounding: float
) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=rounding, atol=rounding)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_trace_has_the_numbers_of_the_formulas(name):
    """In float64, of other samples than it was traced for, and with a loss scale."""
    config = PolicyLossConfig(**SETTINGS[name])
    for seed in (1, 2):
        expected = by_operators(config, seed, torch.float64, scale=1024.0)
        found = evaluated(config, seed, torch.float64, scale=1024.0)
        assert found[0].dtype == torch.float64 and found[1].abs().sum() > 0
        assert_same(found, expected, 1e-12)
    assert compiled._programs and None not in compiled._programs.values()


@pytest.mark.parametrize(
    "settings",
    [
        {"policy_loss": "distill"},
        {"policy_loss": "gspo", "distill_coef": 0.5, **CORRECTIONS},
        {"distill_coef": 0.5, "loss_aggregation": "token_mean", "grad_divisor": 3.0},
    ],
    ids=str,
)
def test_a_divergence_has_its_gradient(settings):
    config = PolicyLossConfig(distill_teacher="logits", **settings)
    found = []
    for devices in ({"cpu"}, set[str]()):
        compiled.DEVICES = devices
        sequences = random_sequences(1, spread=0.5)
        batch = package_batch(sequences)
        channels = {"teacher_logits": torch.zeros(len(batch.window), 2)}
        batch = replace(batch, side_channels=channels)
        log_probs = flat_log_probs(sequences).detach()[batch.window.response_indices]
        inputs = [f(log_probs).requires_grad_() for f in (torch.clone, torch.square, torch.exp)]
        loss, metrics = MicroBatchLoss(resolve(config), batch, step_totals(batch.samples))(*inputs)
        gradients = torch.autograd.grad(loss, inputs, allow_unused=True)
        found.append((loss, *gradients, metrics.pairs))
    assert found[0][3] is not None and found[0][3].abs().sum() > 0
    assert len(compiled._programs) == 1 + (settings.get("policy_loss") == "gspo")
    assert_close(*found, 1e-12)


@pytest.mark.parametrize("first", [torch.float32, torch.float64], ids=str)
def test_each_dtype_has_a_program_of_its_own(first):
    """A float32 program would round a float64 loss, or give its gradient in float32."""
    other = torch.float64 if first == torch.float32 else torch.float32
    for dtype in (first, other):
        loss, gradient, *rest = evaluated(PolicyLossConfig(), dtype=dtype)
        expected = by_operators(PolicyLossConfig(), dtype=dtype)
        assert loss.dtype == gradient.dtype == dtype
        rounding = 1e-12 if dtype == torch.float64 else 1e-6
        assert_same((loss, gradient, *rest), expected, rounding)
    assert len(compiled._programs) == 2


CHANGING = {"policy_loss": "gspo", "grad_divisor": 1.5, "kl_loss_coef": 0.1}
BY_TURN = {"policy_loss": "gspo", "sequence_unit": "turn"}


@pytest.mark.parametrize("settings", [{}, CHANGING, BY_TURN], ids=str)
def test_no_size_no_divisor_and_no_beta_compiles_again(settings, counted, monkeypatch):
    """Nor does the first micro-batch, of fewer tokens than the zeros that are compiled."""
    before = counted()
    for index, size in enumerate((7, 1, 3, 21)):
        batch = package_batch((random_sequences(1, spread=0.5) * 3)[:size])
        config = PolicyLossConfig(**settings)
        if config.grad_divisor:
            config = replace(config, grad_divisor=1.5 + index, kl_loss_coef=0.1 + index)
        gradients = []
        for devices in ({"cpu"}, set[str]()):
            monkeypatch.setattr(compiled, "DEVICES", devices)
            log_probs = torch.full(batch.loss_mask.shape, -1.0).requires_grad_()
            gradients += torch.autograd.grad(loss_of(config, batch, log_probs)[0], log_probs)
        torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-8)
        assert counted() - before == len(compiled._programs) == 1 + bool(settings)


def test_mutant_a_divisor_of_the_first_step_would_be_seen(monkeypatch):
    """The mutant reads the divisor off the config, where a trace keeps that of the step it was made
    in.
    """
    right = micro_batch.policy_loss

    def baked(resolved: ResolvedLoss, tokens: Any, weights: Any, *others: Any) -> Any:
        terms, divisor = right(resolved, tokens, weights, *others), resolved.config.grad_divisor
        assert divisor is not None
        return replace(terms, loss=terms.loss * weights.gradient_divisor / divisor)

    gradients = []
    for mutant in (right, baked):
        monkeypatch.setattr(micro_batch, "policy_loss", mutant)
        monkeypatch.setattr(compiled, "_programs", {})
        evaluated(PolicyLossConfig(grad_divisor=2.0))
        gradients.append(evaluated(PolicyLossConfig(grad_divisor=5.0))[1])
    monkeypatch.setattr(micro_batch, "policy_loss", right)
    expected = by_operators(PolicyLossConfig(grad_divisor=5.0))[1]
    torch.testing.assert_close(gradients[0], expected, rtol=1e-6, atol=1e-8)
    assert not torch.allclose(gradients[1].float(), expected, rtol=1e-2)


def test_sums_over_sequences_are_those_of_the_context_parallel_group(monkeypatch):
    """Every rank's part is added up between the two traces; without that a rank's own sums are
    others.
    """
    config = PolicyLossConfig(policy_loss="gspo")
    sequences = random_sequences(1, spread=0.5)
    whole = package_batch(sequences)
    expected = by_operators(config, batch=whole)[0]
    tokens, _ = tokens_and_sums(config, whole, flat_log_probs(sequences, torch.float32))
    of_group = sums_of_rank(config, sequence_sum_names(config), tokens, len(sequences))

    def over_group(sums: Tensor, group: object) -> Tensor:
        sums[:, : of_group.shape[1]] = of_group
        return sums

    def found() -> Tensor:
        parts = [package_batch(sequences, cp_rank=rank, cp_size=2) for rank in range(2)]
        return sum((evaluated(config, batch=part)[0] for part in parts), torch.zeros(()))

    alone = found()
    monkeypatch.setattr(micro_batch, "add_over_group", over_group)
    torch.testing.assert_close(found(), expected, rtol=1e-5, atol=1e-7)
    assert (alone - expected).abs() > 1e-3


def all_reduces(monkeypatch: pytest.MonkeyPatch, *, programs: int) -> list[list[torch.Size]]:
    """The sizes of what each of two context-parallel ranks adds up, of a sample of which one of
    them has no response token.
    """
    monkeypatch.setattr(compiled, "_programs", {})
    monkeypatch.setattr(compiled, "MAX_PROGRAMS", programs)
    sample = Sample([1] * 12, 2, [1, 1], advantages=[1.0] * 2, old_log_probs=[-1.0] * 2)
    found: list[list[torch.Size]] = [[], []]
    for rank, sizes in enumerate(found):

        def over_group(sums: Tensor, group: object, sizes: list[torch.Size] = sizes) -> Tensor:
            sizes.append(sums.shape)
            return sums

        monkeypatch.setattr(micro_batch, "add_over_group", over_group)
        part = pack([sample], cp_rank=rank, cp_size=2)
        assert len(part.window) == (2, 0)[rank]
        log_probs = torch.full((len(part.window),), -1.0, requires_grad=True)
        loss_of(PolicyLossConfig(policy_loss="gspo"), part, log_probs)
    return found


def test_every_rank_joins_one_all_reduce_of_one_size(monkeypatch):
    """One that has no token runs by operators, as one that may not compile any more; another size
    would hang them all.
    """
    for programs in range(3):
        ((of_first,), (of_second,)) = all_reduces(monkeypatch, programs=programs)
        assert of_first == of_second

    def of_own_size(config: PolicyLossConfig, names: Any, tokens: Any, size: int) -> Tensor:
        whole = sums_of_rank(config, names, tokens, size)
        return whole if len(tokens.log_probs) else whole[:, :1]

    monkeypatch.setattr(micro_batch, "sums_of_rank", of_own_size)
    ((of_first,), (of_second,)) = all_reduces(monkeypatch, programs=2)
    assert of_first != of_second


def test_nan_stays_visible_and_masked_nan_out():
    batch = package_batch(random_sequences(1))
    log_probs = torch.full(batch.loss_mask.shape, -1.0)
    log_probs[~batch.loss_mask] = torch.nan
    first = int(batch.loss_mask.nonzero()[0])
    for is_nan in (False, True):
        log_probs[first] = torch.nan if is_nan else -1.0
        leaf = log_probs.clone().requires_grad_()
        loss, metrics = loss_of(PolicyLossConfig(), batch, leaf)
        loss.backward()
        assert bool(loss.isnan()) == is_nan and metrics.is_nan is not None and leaf.grad is not None
        assert metrics.is_nan.nonzero().flatten().tolist() == [first] * is_nan
        assert leaf.grad.isnan().nonzero().flatten().tolist() == [first] * is_nan


def doubled(config, batch, log_probs):
    return -2.0 * batch.advantages * log_probs


def test_what_is_not_compiled_runs_by_operators_and_says_so(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    custom = PolicyLossConfig(custom_policy_loss_path=f"{__name__}:doubled")
    for _ in range(2):
        assert_same(evaluated(custom), by_operators(custom), 0.0)
    assert not compiled._programs and caplog.text.count("custom functions") == 1

    def broken(graph: object, **_: object) -> None:
        raise RuntimeError("no compiler here\nat all")

    monkeypatch.setattr(torch, "compile", broken)
    for _ in range(2):
        config = PolicyLossConfig()
        assert_same(evaluated(config), by_operators(config), 0.0)
    assert caplog.text.count("(RuntimeError: no compiler here)") == 1
    monkeypatch.setattr(compiled, "MAX_PROGRAMS", 1)
    compiled._warn_about_program_limit.cache_clear()
    for coefficient in (0.1, 0.2, 0.1, 0.3):
        config = PolicyLossConfig(entropy_coef=coefficient)
        assert_same(evaluated(config), by_operators(config), 0.0)
        assert len(compiled._programs) == 1
    assert caplog.text.count("compiled for 1 settings") == 1


@pytest.mark.parametrize("tokens", (0, 1))
def test_a_window_of_one_token_or_none_is_connected(tokens):
    batch = package_batch(random_sequences(1)[1:2] * tokens)
    assert len(batch.window) == tokens
    leaf = torch.full((tokens,), -1.0, requires_grad=True)
    loss, metrics = loss_of(PolicyLossConfig(), batch, leaf)
    loss.backward()
    assert leaf.grad is not None and metrics.maxima is not None and not compiled._programs


@pytest.mark.parametrize("settings", [{}, {"pg_metrics": "none"}], ids=str)
def test_no_output_is_the_loss_itself(settings):
    """A compiler returns equal outputs as one tensor, and an output beside the loss has no
    gradient.
    """
    batch = package_batch(random_sequences(1))
    resolved = resolve(PolicyLossConfig(**settings))
    loss = MicroBatchLoss(resolved, batch, step_totals(batch.samples))
    log_probs = torch.full(batch.loss_mask.shape, -1.0).requires_grad_()
    tensors = loss._inputs(log_probs, None, None)
    first, *others = loss._loss_and_metrics(tensors)
    storages = {each.untyped_storage().data_ptr() for each in others if each is not None}
    assert first.untyped_storage().data_ptr() not in storages
