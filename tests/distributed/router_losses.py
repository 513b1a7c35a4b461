"""The oracle of routers' losses: plain loops in one process over micro-batches that need no
padding.
"""

from dataclasses import replace

import torch
from torch import Tensor

from tests import oracle

from .models import ModelOptions, Sharding, build_model, gather_gradients, initialize_groups
from .one_step import Outcome
from .reference import expected_metrics, logits_of_pack
from .steps import NUM_EXPERTS, TOPK, Run

Rows = list[Tensor]
"""[tokens, experts] logits of each layer's router, of one micro-batch."""


def balance(rows: Tensor, seen: Tensor) -> Tensor:
    """Switch Transformers' loss in plain loops: the mean probabilities of rows, and the shares of
    experts in those seen.
    """
    chosen, probs = [0.0] * NUM_EXPERTS, [torch.zeros(())] * NUM_EXPERTS
    for row in seen:
        for expert in row.topk(TOPK).indices.tolist():
            chosen[expert] += 1 / (TOPK * len(seen))
    for row in rows:
        for expert, prob in enumerate(row.softmax(0)):
            probs[expert] = probs[expert] + prob / len(rows)
    return NUM_EXPERTS * sum(f * p for f, p in zip(chosen, probs, strict=True))


def z_loss(rows: Tensor) -> Tensor:
    """ST-MoE's."""
    return sum(row.logsumexp(0) ** 2 / len(rows) for row in rows)


def of_ranks(kind: str, ranks: list[list[Rows]], all_tokens: int | None = None) -> Tensor:
    """A loss of routers over a step, from every rank's micro-batches: its mean over them, or
    weighted by tokens.

    The global loss has a micro-batch of all ranks, and the shares of all tokens until then. Empty
    micro-batches count with a loss of 0.
    """
    parts = [(rows, rows, len(ranks) * len(mine)) for mine in ranks for rows in mine]
    if kind == "global_aux_loss":
        together = [
            list(map(torch.cat, zip(*same, strict=True))) for same in zip(*ranks, strict=True)
        ]
        seen = [
            list(map(torch.cat, zip(*together[: j + 1], strict=True))) for j in range(len(together))
        ]
        parts = [(*both, len(seen)) for both in zip(together, seen, strict=True)]
    total = torch.zeros((), dtype=torch.float64)
    for rows, seen_rows, count in parts:
        if not len(rows[0]):
            continue  # an empty micro-batch
        weight = 1 / count if all_tokens is None else len(rows[0]) / all_tokens
        for layer, seen_layer in zip(rows, seen_rows, strict=True):
            value = z_loss(layer) if kind == "z_loss" else balance(layer, seen_layer)
            total = total + weight * value
    return total


def coefficients(options: ModelOptions) -> dict[str, float]:
    kinds, values = options.balancing, options.moe_aux_loss_coeff
    if isinstance(kinds, str):
        kinds, values = (kinds,), (values,)
    assert isinstance(values, tuple)
    return dict(zip(kinds, values, strict=True)) | {"z_loss": options.moe_z_loss_coeff or 0.0}


def step_with_losses_of_routers(
    options: ModelOptions, run: Run, data_size: int, multiple: int
) -> tuple[Outcome, dict[str, float]]:
    """One process: every micro-batch packed by itself without padding; the step, and each loss by
    layer, without coefficient.
    """
    initialize_groups(Sharding())
    (model,) = build_model(Sharding(), replace(options.unsharded, dtype=torch.float64))
    router_logits: Rows = []
    for module in model.modules():
        if hasattr(module, "apply_z_loss"):
            module.register_forward_hook(
                lambda router, inputs, _: router_logits.append(
                    inputs[0][:, 0].double() @ router.weight.double().T
                )
            )
    plain, logits = run.samples, {}
    ranks: list[list[Rows]] = []
    for rank in range(data_size):
        ranks.append([])
        for part in run.micro_batches(data_size, rank, multiple):
            router_logits.clear()
            of_part = logits_of_pack(model, [plain[index] for index in part])
            logits |= dict(zip(part, of_part, strict=True))
            ranks[-1].append([rows if part else rows[:0] for rows in router_logits])
    result = oracle.policy_loss(plain, [logits[i] for i in range(len(plain))], run.objective)
    all_tokens = sum(len(sample.tokens) for sample in plain)
    weighted_by = all_tokens if options.calculate_per_token_loss else None
    beside = sum(
        coefficient * of_ranks(kind, ranks, weighted_by)
        for kind, coefficient in coefficients(options).items()
    )
    reported = {
        kind: float(of_ranks(kind, ranks)) / len(ranks[0][0]) for kind in coefficients(options)
    }
    with model.no_sync():
        (result.loss + beside).backward()
    return Outcome(gather_gradients([model]) or {}, expected_metrics(run, result)), reported
