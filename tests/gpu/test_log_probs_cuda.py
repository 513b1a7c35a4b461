"""The log-prob op and the fused head on a GPU, against dense float64."""

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from megatron_pg import head
from megatron_pg.head import from_logits, log_probs_and_entropy, rows_torch, vocabulary_shard
from megatron_pg.head.vocabulary_shard import LogitRows, VocabularyShard
from tests.gpu import HeadInputs, errors, exact_head, waits_refused

rows_triton = pytest.importorskip("megatron_pg.head.rows_triton")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

# Half a unit in the last place of the stored gradient, and of float32 sums over a vocabulary.
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10, torch.float32: 1e-6}


def inputs(tokens: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    logits = torch.randn((tokens, width), device="cuda") * 1.5
    likely = torch.randint(0, width, (tokens, 2), device="cuda")
    logits.scatter_(1, likely, torch.tensor([16.0, 14.5], device="cuda").expand(tokens, 2))
    targets = torch.randint(0, width, (tokens,), device="cuda")
    targets[::2] = likely[::2, 1]
    return logits.to(dtype), targets, *torch.randn((2, tokens), device="cuda").unbind()


def dense(
    logits: Tensor, targets: Tensor, to_log_probs: Tensor, to_entropy: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    exact = logits.double().requires_grad_()
    log_p = (exact / temperature).log_softmax(1)
    log_probs = log_p.gather(1, targets[:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(1)
    loss = log_probs @ to_log_probs.double() + entropy @ to_entropy.double()
    return log_probs.detach(), entropy.detach(), torch.autograd.grad(loss, exact)[0]


def summands(
    logits: Tensor, to_log_probs: Tensor, to_entropy: Tensor, temperature: float
) -> Tensor:
    """What the terms of each gradient add up to in magnitude: where they cancel, digits are
    lost.
    """
    log_p = (logits.double() / temperature).log_softmax(1)
    p = log_p.exp()
    entropy = -(p * log_p).sum(1, keepdim=True)
    terms = to_log_probs.abs()[:, None] + to_entropy.abs()[:, None] * (log_p.abs() + entropy)
    return p * terms / temperature


def close(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    """Log-probs and entropy are those of float64."""
    doubles = [value.double() for value in found]
    torch.testing.assert_close(doubles, list(wanted), rtol=1e-5, atol=1e-5)


def op(logits: Tensor, targets: Tensor, gradients: tuple[Tensor, ...], **options: object):
    leaf, options = logits.clone().requires_grad_(), {"with_entropy": True, **options}
    log_probs, entropy = log_probs_and_entropy(leaf.view_as(leaf), targets, **options)
    (gradient,) = torch.autograd.grad([log_probs, entropy], leaf, list(gradients))
    return log_probs, entropy, gradient


@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.parametrize("width", [1000, 18992, 50257, 151936])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradients(dtype: torch.dtype, width: int, temperature: float) -> None:
    logits, targets, *gradients = inputs(257, width, dtype)
    found = op(logits, targets, gradients, temperature=temperature)
    wanted = dense(logits, targets, *gradients, temperature)
    close(found[:2], wanted[:2])
    bound = ROUNDING[dtype] * wanted[2].abs() + 1e-5 * summands(logits, *gradients, temperature)
    bound += 1e-7 if dtype == torch.float16 else 1e-12
    assert ((found[2].double() - wanted[2]).abs() <= bound).all()


@pytest.mark.parametrize("width", [1000, 151936])
def test_padding_and_masked_rows(width: int) -> None:
    logits, targets, *gradients = inputs(64, width, torch.bfloat16)
    real = width - 293
    targets = targets.clamp(max=real - 1)
    mask = torch.arange(64, device="cuda") % 3 != 0
    logits[:, real:] = float("nan")
    logits[~mask] = float("inf")
    found = op(logits, targets, gradients, row_mask=mask, vocab_size=real)
    wanted = dense(logits[mask][:, :real], targets[mask], *(g[mask] for g in gradients), 1.0)
    close([found[0][mask], found[1][mask]], wanted[:2])
    error = (found[2][mask][:, :real].double() - wanted[2]).abs()
    assert (error <= ROUNDING[torch.bfloat16] * wanted[2].abs() + 1e-8).all()
    assert (found[2][~mask] == 0).all() and (found[2][:, real:] == 0).all()


def test_offsets_beyond_32_bits() -> None:
    tokens, width = 16384, 151936
    logits = torch.zeros((tokens, width), dtype=torch.bfloat16, device="cuda")
    last, targets, *gradients = inputs(64, width, torch.bfloat16)
    logits[-64:] = last
    everywhere = targets.repeat(tokens // 64)
    mask = torch.arange(tokens, device="cuda") >= tokens - 64
    whole = [gradient.repeat(tokens // 64) for gradient in gradients]
    found = op(logits, everywhere, whole, row_mask=mask)
    expected = op(last, targets, gradients)
    for value, other in zip(found, expected, strict=True):
        assert torch.equal(value[-64:], other)
    assert (found[2][:-64] == 0).all()


def test_kernels_equal_the_torch_passes() -> None:
    logits, targets, *gradients = inputs(100, 3001, torch.bfloat16)
    found = op(logits, targets, gradients)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(from_logits, "row_passes", lambda logits: rows_torch)
        expected = op(logits, targets, gradients)
    torch.testing.assert_close(found[:2], expected[:2], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[2], expected[2], rtol=2.0**-7, atol=1e-8)


def test_gradient_takes_the_place_of_the_logits_and_reuse_is_refused() -> None:
    logits, targets, *gradients = inputs(64, 1000, torch.bfloat16)
    leaf = logits.clone().requires_grad_()
    produced = leaf.view_as(leaf)
    log_probs, entropy = log_probs_and_entropy(produced, targets, with_entropy=True)
    other, _ = log_probs_and_entropy(produced, targets)
    (gradient,) = torch.autograd.grad(
        [log_probs, entropy], produced, list(gradients), retain_graph=True
    )
    assert gradient.data_ptr() == produced.data_ptr()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.sum().backward()


MODES = ("known", "deferred", "kept", "recomputed", "pieces", "long pieces")


def head_inputs(columns: int = 4001, vocab_size: int = 4001) -> HeadInputs:
    torch.manual_seed(1)
    weight = (torch.randn((columns, 256), device="cuda") / 16).bfloat16()
    targets = torch.randint(0, vocab_size, (700,), device="cuda")
    hidden = (10 * weight[targets].float() + torch.randn((700, 256), device="cuda")).bfloat16()
    advantages = torch.randn(700, device="cuda")

    def token_loss(log_probs: Tensor, entropy: Tensor, rows: slice) -> Tensor:
        part = advantages[rows].to(log_probs)
        return (part * log_probs.exp() - 0.1 * entropy).sum() / 700

    return hidden, weight, targets, token_loss


def head_leaves() -> HeadInputs:
    """`head_inputs` as Megatron has them: leaves, the weight with a buffer for its gradient."""
    hidden, weight, *others = head_inputs()
    hidden.requires_grad_()
    weight.requires_grad_()
    weight.main_grad, weight.grad_added_to_main_grad = torch.zeros_like(weight).float(), False
    return hidden, weight, *others


def run_head(mode: str, scale: Tensor, **options: object) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight, targets, token_loss = head_leaves()
    settings = head.HeadOptions(chunk_tokens=64 if mode == "long pieces" else 256, **options)
    if mode in ("known", "deferred", "pieces", "long pieces"):
        sizes = [0, 300, 0, 400] if "pieces" in mode else None
        loss, _, _ = head.linear_token_loss(
            hidden, weight, targets, token_loss, settings, piece_sizes=sizes, defer=mode != "known"
        )
    else:
        outputs = head.linear_log_probs_and_entropy(
            hidden, weight, targets, settings, keep_logits=mode == "kept"
        )
        loss = token_loss(*outputs, slice(None))
    loss.backward(scale)
    return loss.detach(), hidden.grad, weight.main_grad


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fp32_logits", [False, True])
def test_fused_head(mode: str, fp32_logits: bool) -> None:
    scale = torch.tensor(3.3, device="cuda")
    found = run_head(mode, scale, fp32_logits=fp32_logits)
    loss, _, _, *gradients = exact_head(head_inputs(), scale)
    # bfloat16 logits of 10 are off by 0.03 at most; float32 ones leave the rounding of the
    # gradient.
    bound = 4e-3 if fp32_logits else 2e-2
    assert max(errors(found, (loss, *gradients))) <= bound


@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.parametrize("width", [1000, 50257, 151936])
def test_soft_cap(dtype: torch.dtype, width: int) -> None:
    """Logits far beyond the cap, near it and near 0."""
    softcap = 9.0
    logits, targets, *gradients = inputs(257, width, dtype)
    logits[::3] *= 1e-3
    shard = VocabularyShard.build(width, None, None)
    temperature = torch.tensor(0.7, device="cuda")
    rows = LogitRows(logits, targets, shard, temperature, softcap=softcap)
    statistics = rows_triton.row_statistics(rows)
    exact = logits.double().requires_grad_()
    capped = softcap * torch.tanh(exact / softcap)
    log_p = (capped / 0.7).log_softmax(1)
    log_probs = log_p.gather(1, targets[:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(1)
    loss = log_probs @ gradients[0].double() + entropy @ gradients[1].double()
    (wanted,) = torch.autograd.grad(loss, exact)
    close((statistics.log_probs, statistics.entropy), (log_probs.detach(), entropy.detach()))
    out = torch.empty_like(logits)
    rows_triton.write_gradient(rows, statistics, gradients, out)
    subnormal = torch.finfo(dtype).tiny * torch.finfo(dtype).eps / 2
    bound = ROUNDING[dtype] * wanted.abs() + 1e-5 * summands(capped.detach(), *gradients, 0.7)
    bound += subnormal
    assert ((out.double() - wanted).abs() <= bound).all()


@pytest.mark.parametrize("mode", MODES)
def test_fused_head_does_not_synchronise(mode: str) -> None:
    scale = torch.tensor(3.3, device="cuda")
    run_head(mode, scale)  # compiles the kernels
    with waits_refused():
        run_head(mode, scale)


def test_nothing_is_added_before_backward() -> None:
    hidden, weight, targets, token_loss = head_leaves()
    outputs = head.linear_token_loss(hidden, weight, targets, token_loss, defer=True)
    assert all(each.isnan().all() for each in outputs) and (weight.main_grad == 0).all()
    outputs[0].backward()
    assert not any(each.isnan().any() for each in (*outputs, weight.main_grad, hidden.grad))


def test_op_does_not_synchronise() -> None:
    logits, targets, *gradients = inputs(64, 1000, torch.bfloat16)
    op(logits, targets, gradients, temperature=torch.ones((), device="cuda"))
    with waits_refused():
        op(logits, targets, gradients, temperature=torch.ones((), device="cuda"))


def test_op_needs_no_memory_beyond_the_logits() -> None:
    logits, targets, *gradients = inputs(2048, 50000, torch.bfloat16)
    leaf = logits.requires_grad_()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    log_probs, entropy = log_probs_and_entropy(leaf.view_as(leaf), targets, with_entropy=True)
    torch.autograd.grad([log_probs, entropy], leaf, gradients)
    assert torch.cuda.max_memory_allocated() - before <= 2048 * 64


@pytest.mark.parametrize("size", [2, 8])
def test_shards_one_after_the_other(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shard and combining kernels on one GPU: what each shard sends is put together by hand."""
    logits, targets, *gradients = inputs(300, 16000, torch.bfloat16)
    wanted = dense(logits, targets, *gradients, 0.7)
    width, sent = 16000 // size, []

    def gather(gathered: Tensor, own: Tensor, group: object) -> None:
        sent.append(own.clone())
        gathered[: len(sent) * 300] = torch.cat(sent)

    stand_in = SimpleNamespace(get_world_size=lambda group: size, all_gather_into_tensor=gather)
    monkeypatch.setattr(vocabulary_shard, "dist", stand_in)
    temperature = torch.tensor(0.7, device="cuda")
    shards = [VocabularyShard(r * width, width, 16000, gather) for r in range(size)]
    parts = [logits[:, shard.start : shard.start + width].contiguous() for shard in shards]
    rows = [LogitRows(parts[r], targets, shards[r], temperature) for r in range(size)]
    statistics = [rows_triton.row_statistics(part) for part in rows][-1]
    close([statistics.log_probs, statistics.entropy], wanted[:2])
    for part in rows:
        rows_triton.write_gradient(part, statistics, gradients, part.logits)
    error = (torch.cat(parts, 1).double() - wanted[2]).abs()
    bound = ROUNDING[torch.bfloat16] * wanted[2].abs()
    assert (error <= bound + 1e-5 * summands(logits, *gradients, 0.7) + 1e-12).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_float32_logits_of_operands_that_are_not_upcast(dtype: torch.dtype) -> None:
    """Value and gradients through the op that overwrites the logits, and no float32 copy of the
    weight.
    """
    tokens, width, columns = 64, 256, 1 << 16
    torch.manual_seed(0)
    hidden = torch.randn((tokens, width), device="cuda").to(dtype).requires_grad_()
    weight = (torch.randn((columns, width), device="cuda") / 16).to(dtype).requires_grad_()
    weight.main_grad = torch.zeros(weight.shape, device="cuda")
    weight.grad_added_to_main_grad = False
    targets = torch.randint(0, columns, (tokens,), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    logits = head.float32_logits(hidden, weight)
    assert logits.dtype == torch.float32
    float32_weight = columns * width * 4
    assert torch.cuda.max_memory_allocated() - before < logits.numel() * 4 + float32_weight
    exact = [each.detach().double().requires_grad_() for each in (hidden, weight)]
    expected = exact[0] @ exact[1].t()
    size = exact[0].detach().abs() @ exact[1].detach().abs().t()
    assert ((logits.double() - expected).abs() <= 2.0**-20 * size).all()
    log_probs, _ = log_probs_and_entropy(logits, targets)
    log_probs.sum().backward()
    log_p = expected.log_softmax(1)
    log_p.gather(1, targets[:, None]).sum().backward()
    for found, right in ((weight.main_grad, exact[1].grad), (hidden.grad, exact[0].grad)):
        assert (found.double() - right).abs().max() <= 2.0**-7 * right.abs().max()
