"""One step of Megatron-Lite: its loop over micro-batches and packed batches around the protocol's adapter."""

import importlib
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.oracle import PlainSample
from tests.random_steps import package_samples

from .engines import Case, config_of, log_probs_of
from .logit_table import initialize, logits_of, share_of, table_under_ddp
from .sources import TRAINERS


def gradient(samples: list[PlainSample], case: Case) -> Tensor:
    """Their loop over micro-batches, packed batches and unpacking, before Megatron's DDP; the forward step is the table."""
    from megatron.core import parallel_state

    from megatron_pg import step_totals
    from megatron_pg.integrations.megatron_lite import SAMPLES, lite_loss
    from megatron_pg.megatron.trainer_globals import data_parallel_group

    initialize(case.context)
    context = {"cp_size": case.context, "cp_group": parallel_state.get_context_parallel_group()}
    sys.path.append(str(TRAINERS / "Megatron-Lite/experimental/lite"))
    loop = importlib.import_module("megatron.lite.primitive.train_step").run_microbatch_loop
    contracts = importlib.import_module("megatron.lite.runtime.contracts.data")
    thd = importlib.import_module("megatron.lite.primitive.parallel.thd")
    made = package_samples(samples)[share_of(samples, case.context)]
    group = data_parallel_group()
    totals = step_totals(made, data_parallel_group=group)
    parts = [made[at : at + 2] for at in range(0, len(made), 2)]

    def batch_of(part: list[Any]) -> Any:
        labels = torch.cat(
            [sample.tokens.roll(-1 if case.mutant != "windows" else 0) for sample in part]
        )
        return contracts.PackedBatch(
            input_ids=torch.cat([sample.tokens for sample in part]),
            labels=labels,
            seq_lens=torch.tensor([sample.total_length for sample in part]),
            extras={SAMPLES: part},
        )

    def unpack(batch: Any, output: Tensor) -> Any:
        meta = thd.thd_pack_meta(batch.seq_lens, tp_size=1, **context)
        return thd.unpack_thd_to_nested(output, meta)

    def forward_step(model: Any, batch: Any) -> dict[str, Tensor]:
        lengths = batch.seq_lens.tolist()
        ids, labels = (
            torch.nested.as_nested_tensor(list(values.split(lengths)), layout=torch.jagged)
            for values in (batch.input_ids, batch.labels)
        )
        rank = parallel_state.get_context_parallel_rank()
        packed = thd.pack_nested_thd(ids, labels=labels, cp_rank=rank, **context)
        return {"log_probs": log_probs_of(model(packed.input_ids), packed.labels)}

    model = table_under_ddp(logits_of(samples), per_token=False, context=case.context)
    size = 1 if case.mutant == "scale" else len(parts)
    sizes = {"num_microbatches": size, "data_parallel_size": dist.get_world_size(group)}
    loss_fn = lite_loss(config_of(case), totals, unpack, **sizes)
    batches = iter([batch_of(part) for part in parts])
    loop(model, batches, len(parts), forward_step, loss_fn=loss_fn)
    model.finish_grad_sync()
    (parameter,) = model.parameters()
    gradient: Tensor = parameter.main_grad.detach().clone()
    return gradient
