"""A step of samples and a model that is a table of their logits, for the tests on trainers' own
code.

Every token of the step has an id of its own, and the model a row of logits for each id: the
gradient of the table is the gradient of every logit.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_pg.megatron.cpu.runtime import enable_cpu_runtime
from tests.oracle import Objective, PlainSample

ROLLOUTS_PER_PROMPT = 3
LENGTHS = [
    *((2, [1, 1, 1, 0, 0, 1]), (3, [1, 1, 1]), (2, [0, 0]), (1, [1])),
    *((4, [1, 1, 0, 1, 1, 1, 1, 1]), (2, [1, 0, 1, 1]), (3, [1] * 7), (1, [1, 1, 1])),
    *((2, [0, 1, 1, 1]), (2, [1, 1]), (3, [1, 0, 1, 1]), (2, [1])),
]
"""Tool tokens inside, a sample without active tokens, micro-batches of an even number of tokens:
see `test_the_floor`."""
KL_COEF, ENTROPY_COEF, CLIP, CLIP_HIGH = 0.02, 0.02, 0.2, 0.28
TOLERANCE = 1e-6


def difference(found: Tensor | str, reference: Tensor) -> float:
    """The largest difference over the largest of the reference."""
    assert isinstance(found, Tensor), found
    return ((found.double() - reference).abs().max() / reference.abs().max()).item()


def step_of(lengths: list[tuple[int, list[int]]]) -> list[PlainSample]:
    """Samples by prompt length and mask, three to a prompt group, with a token id for each position
    of the step.
    """
    generator = torch.Generator().manual_seed(7)
    samples, next_id = [], 1
    for number, (prompt, mask) in enumerate(lengths):
        total = prompt + len(mask)
        old, ref = ((-4.5 + torch.rand(len(mask), generator=generator)).tolist() for _ in range(2))
        tokens, group = list(range(next_id, next_id + total)), number // ROLLOUTS_PER_PROMPT
        fields = {"old_log_probs": old, "ref_log_probs": ref, "group_index": group}
        samples.append(PlainSample(tokens, len(mask), mask, advantages=[], **fields))
        next_id += total
    return samples


def vocabulary(samples: list[PlainSample]) -> int:
    return max(sample.tokens[-1] for sample in samples) + 1


def logits_of(samples: list[PlainSample]) -> Tensor:
    """The table [token id, vocabulary]; row 0 is that of padding."""
    size = vocabulary(samples)
    return torch.randn(size, size, generator=torch.Generator().manual_seed(3))


def objective(aggregation: str, divisor: float, **others: float) -> Objective:
    """The settings that the trainers' steps have, as the oracle holds them."""
    return Objective(
        loss_aggregation=aggregation,
        loss_aggregation_divisor=divisor if aggregation == "constant" else None,
        eps_clip=CLIP,
        eps_clip_high=CLIP_HIGH,
        kl_loss_type="low_var_kl",
        **others,
    )


def gradient(samples: list[PlainSample], loss: Callable[[list[Tensor]], Tensor]) -> Tensor:
    """The gradient of the table, in float64, of a loss of each sample's logits."""
    table = logits_of(samples).double().requires_grad_()
    return torch.autograd.grad(loss([table[s.tokens] for s in samples]), table)[0]


def table_under_ddp(logits: Tensor, per_token: bool, context: int = 1) -> Any:
    """The table of logits as a Megatron model under Megatron's DDP."""
    from megatron.core import distributed
    from megatron.core.enums import ModelType
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import MegatronModule

    class Table(MegatronModule):
        def __init__(self, config: TransformerConfig) -> None:
            super().__init__(config)
            self.model_type, self.vp_stage = ModelType.encoder_or_decoder, None
            self.pre_process = self.post_process = True
            self.share_embeddings_and_output_weights = False
            self.weight = torch.nn.Parameter(logits.clone())

        def set_input_tensor(self, input_tensor: Any) -> None: ...

        def forward(self, input_ids: Tensor, **ignored: Any) -> Tensor:
            return self.weight[input_ids]

    sizes = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1}
    sizes |= {"context_parallel_size": context, "calculate_per_token_loss": per_token}
    config = TransformerConfig(use_cpu_initialization=True, **sizes)
    config.finalize_model_grads_func = distributed.finalize_model_grads
    ddp_config = distributed.DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    return distributed.DistributedDataParallel(config, ddp_config, Table(config))


def share_of(samples: list[PlainSample], context: int) -> slice:
    """The samples of this data-parallel rank, of which each has as many."""
    share = len(samples) * context // dist.get_world_size()
    rank = dist.get_rank() // context
    return slice(rank * share, (rank + 1) * share)


def initialize(context: int) -> None:
    """Megatron's process groups, data parallel beside context parallel; those that are there are
    kept.

    gloo never gives a group's threads back, and each of them wakes a hundred times a second.
    """
    from megatron.core import parallel_state

    enable_cpu_runtime()
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if parallel_state.model_parallel_is_initialized():
        if parallel_state.get_context_parallel_world_size() == context:
            return
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(context_parallel_size=context)
