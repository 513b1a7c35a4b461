"""Score centering from logits and from hidden states, against plain float64 loops."""

import functools
import math
import random
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_pg import PolicyLossConfig, Sample, pack, policy_loss_function, step_totals
from megatron_pg.head import (
    Centering,
    HeadOptions,
    linear_log_probs_and_entropy,
    log_probs_and_score,
)
from megatron_pg.head.kept import sparse_layer
from tests.distributed.launch import run_ranks
from tests.fast import centering_oracle as oracle
from tests.fast.distillation_oracle import log_softmax_of
from tests.fast.test_distillation_head import DIVERGENCES, TOKENS, WAYS, K, Problem, check
from tests.fast.test_kept_set import TEMPERATURE, VOCAB_SIZE, ragged, vocabulary

WEIGHTS = [("none", 0.0, math.inf), ("clip", 0.5, 1.6), ("clip", 0.0, 1.2), ("mask", 0.6, 1.5)]


class Centered(Problem):
    """Rows with heads of an engine: one without, one of all tokens but one, others of about K
    tokens with and without the sampled one.
    """

    scale = 0.5  # 1 minus the probability of a head keeps its digits

    def __init__(self, weights: tuple[str, float, float], *arguments: object) -> None:
        self.weights = weights
        super().__init__(DIVERGENCES[0], "logits", *arguments)

    def _divergence(self, t: int, log_p: list[Tensor]) -> Tensor:
        return oracle.centering(log_p, self.head(t, log_p), *self.weights)

    def head(self, t: int, log_p: list[Tensor]) -> dict[int, float]:
        """The engine's log-probs: the policy's, off by up to a factor of two, largest first."""
        if t == 0:
            return {}
        noise = torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(t)).double()
        log_q = (torch.stack(log_p).detach() + 0.5 * noise).log_softmax(0)
        size = VOCAB_SIZE - 1 if t == 1 else K - t % 2
        values, ids = log_q.topk(size)
        return dict(zip(ids.tolist(), values.tolist(), strict=True))

    def teacher(self, rank: int = 0, size: int = 1) -> Centering:
        logits = (self.hidden.double() @ self.weight.double().T).cpu()[:, :VOCAB_SIZE]
        log_p = (logits / TEMPERATURE).log_softmax(1)
        heads = [self.head(t, list(log_p[t].unbind())) for t in range(TOKENS)]
        ids = torch.full((TOKENS, VOCAB_SIZE), -1)
        log_probs = torch.full((TOKENS, VOCAB_SIZE), math.nan, dtype=torch.float64)
        for t, head in enumerate(heads):
            ids[t, : len(head)] = torch.tensor(list(head), dtype=torch.int64)
            log_probs[t, : len(head)] = torch.tensor(list(head.values()), dtype=torch.float64)
        device = self.hidden.device
        return Centering(ids.to(device), log_probs.to(device), *self.weights)

    def loss(self, log_probs: Tensor, entropy: Tensor, score: Tensor, rows: slice) -> Tensor:
        return super().loss(log_probs, entropy, score[0], rows)


class OverSets(Centered):
    """The same over sets that tokens were sampled from: one row without a set, one with the target
    only, others with about half of the vocabulary.
    """

    def _expect(self) -> None:
        self.kept = []
        for t, target in enumerate(self.targets.tolist()):
            rng = random.Random(t)
            others = rng.sample([v for v in range(VOCAB_SIZE) if v != target], 5 + t % 6)
            self.kept.append([*others, target] if t > 1 else [target] * t)
            rng.shuffle(self.kept[-1])
        self.sets = ragged(self.kept)
        hidden = self.hidden.double().clone().requires_grad_()
        weight = self.weight.double().clone().requires_grad_()
        logits = (hidden @ weight.T)[:, :VOCAB_SIZE]
        logits.retain_grad()
        outputs = []
        for t, target in enumerate(self.targets.tolist()):
            ids = self.kept[t] or range(VOCAB_SIZE)
            of_set = log_softmax_of([logits[t, v] for v in ids], TEMPERATURE)
            log_p = [torch.tensor(-math.inf, dtype=torch.float64)] * VOCAB_SIZE
            for v, value in zip(ids, of_set, strict=True):
                log_p[v] = value
            entropy = -sum(torch.exp(value) * value for value in of_set)
            outputs.append(torch.stack([log_p[target], entropy, self._divergence(t, log_p)]))
        outputs = torch.stack(outputs, 1)
        (self.coefficients.double() * outputs)[:, self.mask].sum().backward()
        self.wanted = outputs.detach().unbind()
        self.wanted_gradients = [logits.grad, hidden.grad, weight.grad]

    def head(self, t: int, log_p: list[Tensor]) -> dict[int, float]:
        kept = self.kept[t] or range(VOCAB_SIZE)
        is_dropped = torch.tensor([v not in kept for v in range(VOCAB_SIZE)])
        restricted = torch.stack(log_p).detach().masked_fill(is_dropped, -math.inf).log_softmax(0)
        head = super().head(t, list(restricted))
        return {v: log_q for v, log_q in head.items() if v in kept}

    def from_logits(self, rank: int = 0, size: int = 1) -> tuple[list[Tensor], list[Tensor]]:
        logits = (self.hidden @ self.weight.T).chunk(size, 1)[rank].clone()
        logits[2] = float("nan")  # masked
        logits.requires_grad_()
        settings = {"row_mask": self.mask, "kept": self.sets, **vocabulary(size)}
        found = log_probs_and_score(logits, self.targets, self.teacher(rank, size), **settings)
        self.loss(*found, slice(None)).backward()
        return [each.detach() for each in found], [logits.grad]

    def from_hidden(
        self, rank: int = 0, size: int = 1, pair: float = 3.0, keeps: bool | None = None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Through the fused head, where one pair costs as much as `pair` columns."""
        weight = self.weight.chunk(size)[rank].clone().requires_grad_()
        factors = self.hidden.clone().requires_grad_(), weight
        options = HeadOptions(**vocabulary(size), chunk_tokens=4)
        settings = {"kept": self.sets, "centering": self.teacher(rank, size), "keep_logits": keeps}
        with mock.patch.multiple(sparse_layer, _COLUMNS_OF_A_PAIR=pair, _LEAST_DENSE_ROWS=1):
            self.num_sparse = len(sparse_layer.split_rows(self.sets, len(weight), None)[0])
            found = linear_log_probs_and_entropy(*factors, self.targets, options, **settings)
        self.loss(*found, slice(None)).backward()
        return [each.detach() for each in found], [each.grad for each in factors]


SET_WAYS = {
    "logits": OverSets.from_logits,
    "sparse": functools.partial(OverSets.from_hidden, pair=1e-9),
    "both": OverSets.from_hidden,
    "dense": functools.partial(OverSets.from_hidden, pair=1e9),
    "dense, kept": functools.partial(OverSets.from_hidden, pair=1e9, keeps=True),
}


def first_scores(ranks: list) -> list:
    return [([*values[:2], values[2][0]], gradients) for values, gradients in ranks]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
def test_values_and_gradients(way: str, weights: tuple[str, float, float]) -> None:
    problem = Centered(weights)
    check(problem, way, first_scores([WAYS[way](problem)]), 1e-12)


@pytest.mark.parametrize("way", SET_WAYS)
@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
def test_values_and_gradients_over_sets(way: str, weights: tuple[str, float, float]) -> None:
    problem = OverSets(weights)
    check(problem, way, first_scores([SET_WAYS[way](problem)]), 1e-12)
    if way != "logits":
        assert problem.num_sparse == {"sparse": TOKENS - 1, "both": 6}.get(way, 0)


def test_a_mutant_that_takes_other_pairs_of_a_set_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = sparse_layer.PairRows.columns_of

    def rolled(self: sparse_layer.PairRows, ids: Tensor) -> tuple[Tensor, Tensor]:
        columns, is_here = honest(self, ids)
        return (columns + is_here.int()).clamp(max=len(self.ids) - 1), is_here

    monkeypatch.setattr(sparse_layer.PairRows, "columns_of", rolled)
    with pytest.raises(AssertionError):
        problem = OverSets(WEIGHTS[0])
        check(problem, "sparse", first_scores([SET_WAYS["sparse"](problem)]), 1e-12)


@pytest.mark.parametrize("way", WAYS)
def test_mutant_without_the_tail(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant takes rho for 0, as if the head were all."""
    honest = Centering._centers

    def without_tail(self: Centering, p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
        return q.double() if self.weights == "none" else honest(self, p, q)[0], p.double().sum(1)

    monkeypatch.setattr(Centering, "_centers", without_tail)
    with pytest.raises(AssertionError):
        problem = Centered(WEIGHTS[0])
        check(problem, way, first_scores([WAYS[way](problem)]), 1e-12)


PROBLEMS = {"whole vocabulary": (Centered, WAYS), "sets": (OverSets, SET_WAYS)}


def on_rank(name: str, kinds: list[tuple[str, tuple[str, float, float]]]) -> list:
    problem, ways = PROBLEMS[name]
    rank, size = dist.get_rank(), dist.get_world_size()
    return [ways[way](problem(weights), rank, size) for way, weights in kinds]


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("size", [2, 4])
def test_shards_equal_the_whole_vocabulary(size: int, name: str) -> None:
    """The last of four has only columns of padding."""
    problem, ways = PROBLEMS[name]
    kinds = [(way, WEIGHTS[number % len(WEIGHTS)]) for number, way in enumerate(ways)]
    ranks = run_ranks(on_rank, size, name, kinds)
    for (way, weights), *found in zip(kinds, *ranks, strict=True):
        check(problem(weights), way, first_scores(found), 1e-12)


def test_no_mean_gradient_under_the_sampler() -> None:
    """By enumeration of a vocabulary of six: for an A that is constant, the mean over q of the
    gradient of `-weight A log p(y) + A C` is 0, for a q whose tail is a multiple of p's. Without C
    it is not.
    """
    logits = torch.tensor([0.3, -0.2, 1.1, 0.0, -1.0, 0.5], dtype=torch.float64, requires_grad=True)
    log_p = logits.log_softmax(0)
    p = log_p.detach().exp()
    q = torch.tensor([0.25, 0.05, 0.30, 0.0, 0.0, 0.0], dtype=torch.float64)
    q[3:] = p[3:] * (1 - q.sum()) / p[3:].sum()
    head = {v: math.log(q[v]) for v in range(3)}
    for kind, low, high in WEIGHTS:
        mean = torch.zeros((), dtype=torch.float64)
        for v in range(6):
            ratio = float(p[v] / q[v])
            weight = {"none": 1.0, "clip": min(max(ratio, low), high)}.get(
                kind, ratio if low <= ratio <= high else 0.0
            )
            mean = mean - q[v] * weight * log_p[v]
        (without,) = torch.autograd.grad(mean, logits, retain_graph=True)
        ids, values = (
            torch.tensor([list(head)]),
            torch.tensor([list(head.values())], dtype=torch.float64),
        )
        scorer = Centering(ids, values, kind, low, high)
        (gradient,) = torch.autograd.grad(of_logits(logits, scorer)[0], logits)
        assert without.abs().max() > 1e-3, kind
        torch.testing.assert_close(gradient, -without, rtol=0, atol=1e-12)


def masked_sum(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    masks = torch.cat(loss_masks)
    return lambda x: (x * masks).sum()


@pytest.mark.parametrize("kind", ["truncate", "mask"])
@pytest.mark.parametrize("reducer", [None, f"{__name__}.masked_sum"])
def test_no_mean_gradient_through_a_reducer(kind: str, reducer: str | None) -> None:
    """The same through `policy_loss_function`, with q as weights of the samples: also a dropped
    token keeps its centering term.
    """
    p = torch.tensor([0.3, -0.2, 1.1, 0.0, -1.0, 0.5]).softmax(0)
    q = torch.tensor([0.25, 0.05, 0.40, 0.1, 0.1, 0.1])
    config = PolicyLossConfig(
        policy_loss="reinforce", score_centering=True, use_tis=True, tis_mode=kind,
        tis_clip_low=0.8, tis_clip=1.2, loss_aggregation="token_mean",
        loss_weight_denominator="mask", custom_pg_loss_reducer_function_path=reducer,
    )  # fmt: skip
    top_k = [list(range(6))], [q.log().tolist()]
    fields = {"old_log_probs": p.log(), "rollout_log_probs": q.log(), "loss_weights": q}
    samples = []
    for v in range(6):
        of_token = {name: values[v : v + 1] for name, values in fields.items()}
        samples.append(Sample([0, v], 1, [1], 1.0, sampler_top_k=top_k, **of_token))
    logits = p.log().requires_grad_()
    loss, metrics = policy_loss_function(
        config, pack(samples), logits.expand(12, 6), totals=step_totals(samples)
    )
    (gradient,) = torch.autograd.grad(loss, logits)
    assert gradient.abs().max() < 1e-6
    assert kind == "truncate" or metrics["rejected_fraction"][0] > 0


def of_logits(logits: Tensor, scorer: Centering) -> Tensor:
    from megatron_pg.head import log_probs_and_score

    _, _, score = log_probs_and_score(logits[None], torch.tensor([0]), scorer)
    return score[:, 0]


@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
def test_nothing_is_taken_off_if_both_distributions_agree(
    weights: tuple[str, float, float],
) -> None:
    logits = torch.randn(9, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    log_q, ids = logits.log_softmax(0).topk(4)
    logits.requires_grad_()
    value, mass, _, drift, norm = of_logits(logits, Centering(ids[None], log_q[None], *weights))
    (gradient,) = torch.autograd.grad(value, logits)
    assert value.abs() < 1e-12 and drift.abs() < 1e-12 and norm < 1e-12
    assert gradient.abs().max() < 1e-12
    torch.testing.assert_close(mass, log_q.exp().sum())
