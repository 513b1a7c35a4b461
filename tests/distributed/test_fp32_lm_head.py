"""`--fp32-lm-head` without the fused head: Megatron's own output layer with float32 logits."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_pg.config.versions import derives_multi_token_labels, has_hybrid_model
from megatron_pg.head import factor_gradients, from_hidden
from megatron_pg.megatron import ParallelGroups, output_layer, set_fp32_lm_head
from megatron_pg.megatron.groups import unwrapped

from .compare import assert_case
from .launch import run_ranks
from .models import ModelOptions, Sharding
from .one_step import Outcome, build, run_schedule, train_step
from .reference import reference_steps
from .steps import Run

needs_hybrid = pytest.mark.skipif(
    not has_hybrid_model(), reason="this version of Megatron-Core has no HybridModel"
)
RUNS = [Run("prompt_mean", fp32_lm_head=True), Run(cut="empty", fp32_lm_head=True)]
"""The second has a micro-batch without a token."""
DENSE = ModelOptions(dtype=torch.float64)
TIED = replace(DENSE, tied_embeddings=True)
BIASED = replace(DENSE, output_bias=True)
CASES = {
    "TP2, bias": BIASED,
    "TP2+SP tied": TIED,
    "PP2 tied, bias": replace(TIED, output_bias=True),
    "DP2 tied, distributed optimizer, overlapped reduction": (
        replace(TIED, distributed_optimizer=True, overlap_grad_reduce=True)
    ),
    "TP2+SP hybrid, bias": replace(BIASED, hybrid=True),
}


def steps(sharding: Sharding, options: ModelOptions) -> list[Outcome | None]:
    """Two steps on one model; afterwards the layer is Megatron's again."""
    chunks = build(sharding, options)
    outcomes = [train_step(chunks, sharding, run) for run in RUNS]
    is_last = ParallelGroups.from_model(chunks).is_last_pipeline_stage
    assert set_fp32_lm_head(chunks, False) == is_last and not set_fp32_lm_head(chunks, False)
    return outcomes


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[needs_hybrid] * ("hybrid" in case)) for case in CASES]
)
def test_gradients_and_metrics_equal_the_unsharded_reference(case) -> None:
    """In float64, where the layer multiplies in float64: what is sent, summed and added up, not its
    precision.
    """
    plain = replace(CASES[case], distributed_optimizer=False, overlap_grad_reduce=False)
    references = {plain.unsharded: run_ranks(reference_steps, 1, plain, RUNS)[0]}
    assert_case(case, CASES[case], steps, RUNS, references)


def gradients_beside_prediction() -> list[dict[str, Tensor]]:
    """A rank's by Megatron's output layer, by ours, and by ours of a weight that nothing says is
    looked up too (a mutant).
    """
    sharding, found = Sharding(pipeline=2), []
    for head in ("Megatron's", "ours", "mutant"):
        if head == "mutant":
            output_layer._share_main_grad = lambda module: None
        chunks = build(sharding, replace(TIED, mtp_num_layers=2))
        chunks[0].zero_grad_buffer()
        run_schedule(chunks, sharding, replace(RUNS[0], fp32_lm_head=head != "Megatron's"))
        parameters = chunks[0].module.named_parameters()
        found.append({name: each.main_grad.clone() for name, each in parameters})
    return found


@pytest.mark.skipif(
    not derives_multi_token_labels(), reason="needs multi-token prediction without labels, of 0.19"
)
def test_a_tied_weight_in_which_prediction_looks_tokens_up() -> None:
    """On the last of two stages, where both are; the all-reduce with the first brings the sum to
    both.
    """
    name = "embedding.word_embeddings.weight"
    for expected, found, mutant in run_ranks(gradients_beside_prediction, 2):
        for each in expected:
            torch.testing.assert_close(found[each], expected[each], rtol=1e-10, atol=1e-14)
        assert (mutant[name] - expected[name]).abs().max() > 0.01 * expected[name].abs().max()


def in_the_operands_dtype(left: Tensor, right: Tensor, out: Tensor, *, add: bool = False) -> None:
    product = left @ right
    out.add_(product) if add else out.copy_(product)


def seen_steps(
    sharding: Sharding, options: ModelOptions, mutant: str = ""
) -> list[SimpleNamespace]:
    """What one rank's output layer in bfloat16 took and gave in each step, in float64.

    `hidden`, `logits` and what came in backward, `to_hidden` and `to_logits`, are lists of
    [sequence, columns] by micro-batch; `weight`, `bias` and `main_grads` of both are of this rank's
    columns; `dtypes` are of what left the layer, and Float16Module.
    """
    if mutant:
        module = from_hidden if mutant == "logits" else factor_gradients
        module.multiply = in_the_operands_dtype
    chunks = build(sharding, options)
    layer = unwrapped(chunks[0]).output_layer
    parts: dict[str, list[Tensor]] = {}
    dtypes = set()

    def keep(name: str) -> Any:
        return lambda tensor: parts[name].append(tensor.detach().flatten(0, 1).double())

    def watch(_: Any, arguments: Any, __: Any, output: Any) -> None:
        for name, tensor in (("hidden", arguments[0]), ("logits", output[0])):
            keep(name)(tensor)
            tensor.register_hook(keep(f"to_{name}"))
        dtypes.add(output[0].dtype)

    layer.register_forward_hook(watch, with_kwargs=True)
    chunks[0].register_forward_hook(lambda *given: dtypes.add(given[-1].dtype))
    found = []
    for run in RUNS:
        chunks[0].zero_grad_buffer()
        parts = {name: [] for name in ("hidden", "logits", "to_hidden", "to_logits")}
        run_schedule(chunks, sharding, run)
        own = {"weight": layer.weight.detach().double(), "bias": layer.bias.detach().double()}
        grads = layer.weight.main_grad.double(), layer.bias.main_grad.double()
        found.append(SimpleNamespace(**parts, **own, main_grads=grads, dtypes=dtypes))
    return found


FLOAT32, BFLOAT16 = 2.0**-18, 2.0**-7
"""Of the sum of the magnitudes of the terms: the second where sums are rounded to it, by each rank
and over both."""


def products(
    hidden: Tensor, weight: Tensor, bias: Tensor, slopes: Tensor, to_logits: Tensor
) -> tuple[Tensor, ...]:
    """Logits, and the gradients of weight, bias and hidden states, token by token."""
    to_weight, to_bias = torch.zeros_like(weight), torch.zeros_like(bias)
    for row, slope, to_row in zip(hidden, slopes, to_logits, strict=True):
        to_weight += torch.outer(slope, row)
        to_bias += to_row
    logits = [bias + (row * weight).sum(1) for row in hidden]
    to_hidden = [(slope[:, None] * weight).sum(0) for slope in slopes]
    return torch.stack(logits), to_weight, to_bias, torch.stack(to_hidden)


def wrong(ranks: list[list[SimpleNamespace]], sequence_parallel: bool) -> set[str]:
    """What is farther than roundings from the loops over the tokens that both ranks saw."""
    far = set()

    def check(name: str, values: Tensor, sums: Tensor, allowed: float) -> None:
        """Against sums, and those of magnitudes."""
        if ((values - sums[0]).abs() > allowed * sums[1]).any():
            far.add(name)

    for step in zip(*ranks, strict=True):
        assert all(seen.dtypes == {torch.float32} for seen in step)
        to_weight, to_bias = [0.0] * len(step), [0.0] * len(step)
        for place, whole in enumerate(zip(*(seen.hidden for seen in step), strict=True)):
            hidden, to_hidden = torch.cat(whole) if sequence_parallel else whole[0], 0.0
            for rank, seen in enumerate(step):
                slopes = seen.to_logits[place].bfloat16().double()  # the one rounding
                factors = (hidden, seen.weight, seen.bias, slopes, seen.to_logits[place])
                sums = zip(products(*factors), products(*map(torch.abs, factors)), strict=True)
                logits, of_weight, of_bias, of_hidden = map(torch.stack, sums)
                check("logits", seen.logits[place], logits, FLOAT32)
                to_weight[rank] += of_weight
                to_bias[rank] += of_bias
                to_hidden += of_hidden
            parts = [seen.to_hidden[place] for seen in step]
            for part in [torch.cat(parts)] if sequence_parallel else parts:
                check("hidden", part, to_hidden, BFLOAT16)
        for rank, seen in enumerate(step):
            assert to_weight[rank][1].any() and to_bias[rank][1].any()
            check("weight", seen.main_grads[0], to_weight[rank], FLOAT32)
            check("bias", seen.main_grads[1], to_bias[rank], BFLOAT16)
    return far


NARROW = ModelOptions(dtype=torch.bfloat16, output_bias=True)


@pytest.mark.parametrize(
    "name", ["TP2", pytest.param("TP2+SP hybrid", marks=needs_hybrid), "TP2+SP"]
)
def test_logits_and_gradients_in_bfloat16_equal_the_loops(name) -> None:
    sharding, options = Sharding.named(name), replace(NARROW, hybrid="hybrid" in name)
    assert not wrong(run_ranks(seen_steps, 2, sharding, options), sharding.sequence_parallel)


@pytest.mark.parametrize("mutant", ["logits", "weight"])
def test_mutant_a_product_in_bfloat16_would_be_seen(mutant: str) -> None:
    found = run_ranks(seen_steps, 2, Sharding(tensor=2), NARROW, mutant)
    assert wrong(found, False) == {mutant}
