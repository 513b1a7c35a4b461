"""The log-prob op and the fused head with the vocabulary over two GPUs, by NCCL, against dense
float64.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor

from megatron_pg import log_probs_and_entropy
from megatron_pg.head import HeadOptions, linear_log_probs_and_entropy, linear_token_loss
from tests.gpu import errors, exact_head, waits_refused
from tests.gpu.test_log_probs_cuda import ROUNDING, close, dense, head_inputs, inputs, summands

SIZE = 2
TOKENS, WIDTH, TEMPERATURE = 700, 4096, 0.7
VOCAB_SIZE = WIDTH - 93

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < SIZE, reason=f"needs {SIZE} GPUs")


def own(columns: Tensor, rank: int, dimension: int) -> Tensor:
    return columns.chunk(SIZE, dimension)[rank].contiguous()


def from_logits(rank: int) -> None:
    logits, targets, *gradients = inputs(TOKENS, WIDTH, torch.bfloat16)
    targets = targets.clamp(max=VOCAB_SIZE - 1)
    leaf = own(logits, rank, 1).requires_grad_()

    def op() -> tuple[Tensor, ...]:
        log_probs, entropy = log_probs_and_entropy(
            leaf.view_as(leaf).clone(),
            targets,
            tensor_parallel_group=dist.group.WORLD,
            temperature=TEMPERATURE,
            vocab_size=VOCAB_SIZE,
            with_entropy=True,
        )
        (gradient,) = torch.autograd.grad([log_probs, entropy], leaf, gradients)
        return log_probs, entropy, gradient

    found = twice_without_a_wait(op)
    real = logits[:, :VOCAB_SIZE]
    wanted = dense(real, targets, *gradients, TEMPERATURE)
    close(found[:2], wanted[:2])
    bound = ROUNDING[torch.bfloat16] * wanted[2].abs()
    bound += 1e-5 * summands(real, *gradients, TEMPERATURE) + 1e-12
    padding = (0, WIDTH - VOCAB_SIZE)
    wide = (torch.nn.functional.pad(columns, padding) for columns in (wanted[2], bound))
    exact, bound = (own(columns, rank, 1) for columns in wide)
    assert ((found[2].double() - exact).abs() <= bound).all()


def from_hidden_states(rank: int, mode: str) -> None:
    head_given = head_inputs(WIDTH, VOCAB_SIZE)
    hidden, weight, targets, token_loss = head_given
    scale = torch.tensor(3.3, device="cuda")
    settings = HeadOptions(
        tensor_parallel_group=dist.group.WORLD,
        temperature=TEMPERATURE,
        vocab_size=VOCAB_SIZE,
        fp32_logits=True,
        chunk_tokens=256,
    )

    def head() -> tuple[Tensor, ...]:
        leaf, part = hidden.clone().requires_grad_(), own(weight, rank, 0).requires_grad_()
        part.main_grad, part.grad_added_to_main_grad = torch.zeros_like(part).float(), False
        if mode == "deferred":
            loss, _, _ = linear_token_loss(leaf, part, targets, token_loss, settings, defer=True)
        else:
            outputs = linear_log_probs_and_entropy(
                leaf, part, targets, settings, keep_logits=mode == "kept"
            )
            loss = token_loss(*outputs, slice(None))
        loss.backward(scale)
        # This rank's part of the hidden states' gradient, which Megatron sums over the group.
        dist.all_reduce(leaf.grad)
        return loss.detach(), leaf.grad, part.main_grad

    found = twice_without_a_wait(head)
    loss, _, _, to_hidden, to_weight = exact_head(head_given, scale, TEMPERATURE, VOCAB_SIZE)
    assert max(errors(found, (loss, to_hidden, own(to_weight, rank, 0)))) <= 4e-3


def twice_without_a_wait(call: Any) -> tuple[Tensor, ...]:
    """The second time with CUDA's synchronisation check set to error; the first compiles, and makes
    NCCL's communicator.
    """
    call()
    torch.cuda.synchronize()
    with waits_refused():
        return call()


def run_rank(rank: int, store: str, case: str) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=SIZE)
    try:
        if case == "logits":
            from_logits(rank)
        else:
            from_hidden_states(rank, case)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("case", ["logits", "deferred", "kept", "recomputed"])
def test_vocabulary_over_two_gpus(case: str, tmp_path: Path) -> None:
    torch.multiprocessing.spawn(run_rank, (str(tmp_path / "store"), case), nprocs=SIZE)
