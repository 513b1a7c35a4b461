"""log_probs_and_entropy with the vocabulary split over gloo ranks, against the unsharded oracle."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_pg.head import log_probs_and_entropy
from tests.fast.log_probs_oracle import peaked_logits, reference

TOKENS, WIDTH, VOCAB_SIZE, TEMPERATURE = 7, 32, 21, 0.8
MASK = torch.tensor([True, True, False, True, True, True, False])


def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    logits, targets = peaked_logits(TOKENS, WIDTH, seed=3)
    logits[2, 1] = float("nan")
    logits[3, :8] = -float("inf")  # a whole shard without mass
    logits[4] -= 1e4  # beside which a shard of padding alone must not count as logits of 0
    targets = torch.tensor([0, 7, 8, 20, 16, 15, 4])
    generator = torch.Generator().manual_seed(5)
    return logits, targets, *torch.randn(2, TOKENS, generator=generator).unbind()


def gathers_of(group: dist.ProcessGroup, call) -> tuple[object, list[tuple[int, ...]]]:
    """What `call` returns, and the shapes it handed to collectives."""
    shapes: list[tuple[int, ...]] = []
    original = dist.all_gather_into_tensor

    def counted(out: Tensor, local: Tensor, **options: object) -> object:
        shapes.append(tuple(local.shape))
        return original(out, local, **options)

    dist.all_gather_into_tensor = counted
    try:
        return call(), shapes
    finally:
        dist.all_gather_into_tensor = original


def shard_main(rank: int, size: int, folder: str) -> None:
    logits, targets, *gradients = inputs()
    width = WIDTH // size
    leaf = logits[:, rank * width : (rank + 1) * width].clone().requires_grad_()
    (log_probs, entropy), shapes = gathers_of(
        dist.group.WORLD,
        lambda: log_probs_and_entropy(
            leaf,
            targets,
            tensor_parallel_group=dist.group.WORLD,
            temperature=TEMPERATURE,
            row_mask=MASK,
            vocab_size=VOCAB_SIZE,
            with_entropy=True,
        ),
    )
    torch.autograd.backward([log_probs, entropy], gradients)
    torch.save((log_probs.detach(), entropy.detach(), leaf.grad, shapes), f"{folder}/{rank}.pt")


def process_main(main: Callable[[int, int, str], None], rank: int, size: int, folder: str) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=size
        )
        main(rank, size, folder)
        dist.destroy_process_group()
    except Exception:
        Path(folder, f"{rank}.txt").write_text(traceback.format_exc())
        raise


def run_processes(main: Callable[[int, int, str], None], size: int, folder: Path) -> list:
    """Runs `main(rank, size, folder)` on `size` gloo ranks; returns what each saved as `<rank>.pt`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    processes = [
        context.Process(target=process_main, args=(main, rank, size, str(folder)))
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=120)
        if process.is_alive():
            process.kill()
    errors = [path.read_text() for path in folder.glob("*.txt")]
    assert not errors and all(process.exitcode == 0 for process in processes), errors
    return [torch.load(folder / f"{rank}.pt") for rank in range(size)]


@pytest.mark.parametrize("size", [2, 4])
def test_shards_equal_the_whole_vocabulary(size: int, tmp_path: Path) -> None:
    shards = run_processes(shard_main, size, tmp_path)
    logits, targets, *gradients = inputs()
    log_probs, entropy, gradient = reference(
        logits,
        targets,
        *gradients,
        temperature=TEMPERATURE,
        row_mask=MASK,
        vocab_size=VOCAB_SIZE,
    )
    gradient.nan_to_num_(nan=0.0)  # of the oracle's exp at -inf; the limit is 0
    for found_log_probs, found_entropy, _, shapes in shards:
        torch.testing.assert_close(found_log_probs.double(), log_probs, rtol=2e-6, atol=2e-6)
        torch.testing.assert_close(found_entropy.double(), entropy, rtol=2e-6, atol=2e-6)
        assert torch.equal(found_log_probs, shards[0][0]), "ranks must agree bit for bit"
        assert torch.equal(found_entropy, shards[0][1]), "ranks must agree bit for bit"
        assert shapes == [(TOKENS, 4)], "one all-gather of the statistics and nothing else"
    found_gradient = torch.cat([shard[2] for shard in shards], 1)
    torch.testing.assert_close(found_gradient.double(), gradient, rtol=5e-6, atol=2e-6)
    assert (found_gradient[~MASK] == 0).all() and (found_gradient[:, VOCAB_SIZE:] == 0).all()


def test_a_shard_alone_would_be_seen() -> None:
    """Mutant: each rank normalises over its own columns."""
    logits, targets, *gradients = inputs()
    wanted = reference(logits, targets, *gradients, row_mask=MASK)[0]
    shard, local = logits[:, : WIDTH // 2], targets.clamp(max=WIDTH // 2 - 1)
    alone, _ = log_probs_and_entropy(shard, local, row_mask=MASK)
    same_target = MASK & (targets == local) & wanted.isfinite()
    assert same_target.any()
    assert not torch.isclose(alone[same_target].double(), wanted[same_target], rtol=1e-3).any()
