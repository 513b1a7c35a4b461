"""Our divergences beside those of TRL, Liger and verl, each from its own package: values,
gradients, what a token weighs.

pip install trl==1.16.0 liger-kernel==0.8.5 verl==0.9.1
python -m pytest -s tests/trainers/test_distillation_peers.py
"""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from megatron_pg.head import Divergence, TopKTeacher, WholeTeacher, linear_token_loss

from .logit_table import difference
from .sources import find_verl

VOCABULARY, TEMPERATURE = 37, 1.0
MICRO_BATCHES = (5, 18)
"""Tokens of each micro-batch of the step."""
TOKENS = sum(MICRO_BATCHES)
DIVERGENCES = {
    0.0: Divergence("forward_kl"),
    1.0: Divergence("reverse_kl"),
    0.3: Divergence("jsd", 0.3),
}
"""Ours by the beta of TRL and Liger, at whose ends are the two KL divergences."""
NEEDS_TRL = "needs TRL: pip install trl==1.16.0"
Found = tuple[Tensor, Tensor, Tensor]
"""Of some rows the divergences, and the gradients of hidden states and weight of a loss."""


class Models:
    """Student and teacher of the same rows, in float64."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(4)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.hidden, self.weight = normal(TOKENS, 6), normal(VOCABULARY, 6)
        self.leaves = [self.hidden.requires_grad_(), self.weight.requires_grad_()]
        self.teacher_hidden, self.teacher_weight = normal(TOKENS, 9), normal(VOCABULARY, 9) / 2
        self.targets = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)

    def logits(self, rows: slice = slice(None)) -> tuple[Tensor, Tensor]:
        student = self.hidden[rows] @ self.weight.T
        return student, self.teacher_hidden[rows] @ self.teacher_weight.T

    def gradients(self, loss: Tensor) -> tuple[Tensor, Tensor]:
        return torch.autograd.grad(loss, self.leaves, retain_graph=True)

    def ours(self, divergence: Divergence, k: int | None = None) -> Found:
        """The step's token mean: every token weighs one over the step's tokens."""
        if k is None:
            states = {"hidden": self.teacher_hidden, "weight": self.teacher_weight}
            teacher = WholeTeacher(divergence, **states)
        else:
            log_q, ids = self.logits()[1].log_softmax(1).topk(k)
            teacher = TopKTeacher(divergence, ids, log_q)

        def loss(log_probs: Tensor, entropy: Tensor, found: Tensor, rows: slice) -> Tensor:
            return found.sum() / TOKENS

        total, _, _, values = linear_token_loss(*self.leaves, self.targets, loss, scorer=teacher)
        return values, *self.gradients(total)


def trl(models: Models, beta: float, rows: slice, tokens: int | None = None) -> Tensor:
    """`GKDTrainer.generalized_jsd_loss`, from logits."""
    gkd = pytest.importorskip("trl.experimental.gkd", reason=NEEDS_TRL)
    both = (each[None] for each in models.logits(rows))
    options = {"labels": models.targets[rows][None], "beta": beta, "num_items_in_batch": tokens}
    return gkd.GKDTrainer.generalized_jsd_loss(*both, **options)


def trl_chunked(models: Models, beta: float, rows: slice, tokens: int | None = None) -> Tensor:
    """`DistillationTrainer`'s, from hidden states; its statistics are float32."""
    trainer = pytest.importorskip("trl.trainer.distillation_trainer", reason=NEEDS_TRL)
    hidden = (each[rows][None] for each in (models.hidden, models.teacher_hidden))
    given = (*hidden, models.weight, models.teacher_weight, torch.ones(1, rows.stop - rows.start))
    return trainer._chunked_divergence_loss(*given, beta, num_items_in_batch=tokens)[0]


def liger(models: Models, beta: float, rows: slice, tokens: int | None = None) -> Tensor:
    """`LigerFusedLinearJSDLoss`, from hidden states, which is not told of other micro-batches."""
    reason = "needs Liger: pip install liger-kernel==0.8.5"
    module = pytest.importorskip("liger_kernel.chunked_loss", reason=reason)
    settings = {"weight_hard_loss": 0.0, "weight_soft_loss": 1.0, "compiled": False}
    loss = module.LigerFusedLinearJSDLoss(beta=beta, **settings)
    teacher = models.teacher_hidden[rows], models.teacher_weight
    return loss(models.hidden[rows], models.weight, *teacher, models.targets[rows])


def verl_values(models: Models, k: int) -> Tensor:
    """`compute_forward_kl_topk` of verl's FSDP engine, without its clamps."""
    if (missing := find_verl()) is not None:
        pytest.skip(missing)
    from verl.trainer.distillation.fsdp.losses import compute_forward_kl_topk

    student, teacher = models.logits()
    log_q, ids = teacher.log_softmax(1).topk(k)
    jagged = {"layout": torch.jagged}
    given = [torch.nested.nested_tensor([each], **jagged) for each in (log_q, ids)]
    loss = SimpleNamespace(log_prob_min_clamp=None, use_chunked_topk=False)
    config = SimpleNamespace(distillation_loss=loss)
    return compute_forward_kl_topk(student[None], *given, config, "thd")["distillation_losses"][0]


def errors(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> list[float]:
    return [difference(*pair) for pair in zip(found, wanted, strict=True)]


PEERS: dict[str, tuple[Callable[..., Tensor], float]] = {
    "TRL, from logits": (trl, 1e-12),
    "TRL, from hidden states": (trl_chunked, 1e-5),
    "Liger": (liger, 1e-5),
}
"""The mean over the tokens of some rows, or their sum over a number of tokens; and the tolerance:
statistics of the second, and values of the third, are float32."""


@pytest.mark.parametrize("beta", DIVERGENCES)
@pytest.mark.parametrize("name", PEERS)
def test_values_and_gradients_are_the_same(name: str, beta: float) -> None:
    (mean, tolerance), models = PEERS[name], Models()
    rows = (slice(row, row + 1) for row in range(TOKENS))
    values = torch.stack([mean(models, beta, each).detach() for each in rows])
    of_mean = models.gradients(mean(models, beta, slice(0, TOKENS)))
    found = errors((values, *of_mean), models.ours(DIVERGENCES[beta]))
    print(f"{name}, beta {beta}: divergence {found[0]:.1e}, gradients {max(found[1:]):.1e}")
    assert max(found) < tolerance


@pytest.mark.parametrize("name", PEERS)
def test_what_a_token_of_each_micro_batch_weighs(name: str) -> None:
    """Means of micro-batches, averaged over them as gradient accumulation does, weigh a token by
    its micro-batch.
    """
    (mean, tolerance), models = PEERS[name], Models()
    _, wanted, _ = models.ours(DIVERGENCES[1.0])
    rows = [slice(0, MICRO_BATCHES[0]), slice(MICRO_BATCHES[0], TOKENS)]
    of_means, _ = models.gradients(sum(mean(models, 1.0, each) for each in rows) / len(rows))
    for each, size in zip(rows, MICRO_BATCHES, strict=True):
        factor = TOKENS / (len(rows) * size)
        print(f"{name}: a token among {size} of {TOKENS} weighs {factor:.3f} times as much")
        assert errors((of_means[each],), (factor * wanted[each],))[0] < tolerance
    if name != "Liger":
        told = sum(mean(models, 1.0, each, tokens=TOKENS) for each in rows)
        assert errors((models.gradients(told)[0],), (wanted,))[0] < tolerance


@pytest.mark.parametrize("k", [VOCABULARY, 5])
def test_verl_leaves_out_the_rest(k: int) -> None:
    """Ours counts what is left beside the teacher's k tokens as one token of both; with none left
    the two agree.
    """
    models = Models()
    values = verl_values(models, k)
    of_theirs = (values.detach(), *models.gradients(values.sum() / TOKENS))
    ours = models.ours(Divergence("forward_kl"), k)
    apart = errors(of_theirs, ours)
    print(f"verl, k {k}: divergence {apart[0]:.1e}, gradients {max(apart[1:]):.1e}")
    if k == VOCABULARY:
        assert max(apart) < 1e-5
        return
    student, teacher = models.logits()
    ids = teacher.topk(k).indices
    p, q = (1 - each.softmax(1).gather(1, ids).sum(1) for each in (student, teacher))
    rest = q * (q / p).log()
    with_rest = values + rest
    found = (with_rest.detach(), *models.gradients(with_rest.sum() / TOKENS))
    assert max(errors(found, ours)) < 1e-5 < 1e-2 < min(apart)
