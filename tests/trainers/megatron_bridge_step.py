"""One step of NeMo-Automodel's engine of pull request 2556, which ran the contract that Megatron-Bridge plans, around `datum_loss`."""

import contextlib
import importlib
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.oracle import PlainSample
from tests.random_steps import package_samples

from .engines import Case, config_of
from .logit_table import initialize, logits_of, share_of, table_under_ddp
from .sources import stand_in_for

AUTOMODEL_MODULES = "components.datasets.utils components.distributed.utils components.training.utils components.utils.model_utils"


def gradient(samples: list[PlainSample], case: Case) -> Tensor:
    """Their weights, denominators, cut by datums and backward; collation is the test's, without padding or with."""
    from megatron_pg import step_totals
    from megatron_pg.integrations.megatron_bridge import datum_loss
    from megatron_pg.megatron.trainer_globals import data_parallel_group

    stand_in_for([f"nemo_automodel.{name}" for name in AUTOMODEL_MODULES], even_if_installed=True)
    training = "nemo_automodel.components.training."
    engine = importlib.import_module(training + "engine")
    importlib.import_module("nemo_automodel.components.distributed.utils").get_sync_ctx = (
        lambda *others: contextlib.nullcontext()
    )
    importlib.import_module("nemo_automodel.components.utils.model_utils").filter_forward_kwargs = (
        lambda model, batch: batch
    )
    utils = importlib.import_module(training + "utils")
    for name in ("grad_accumulation", "final_backward"):
        setattr(utils, f"prepare_for_{name}", lambda *others, **named: None)
    utils.prepare_after_first_microbatch = lambda: None

    def collate(datums: list[Any], packed: bool, **others: Any) -> dict[str, Tensor]:
        names = {"input_ids": [d.input_ids for d in datums]}
        names["labels"] = [d.loss_fn_inputs["target_tokens"] for d in datums]
        pad = torch.nn.utils.rnn.pad_sequence
        return {
            name: torch.cat(rows)[None] if packed else pad(rows, batch_first=True)
            for name, rows in names.items()
        }

    engine.collate_datums = collate

    class Engine(engine.Engine):  # type: ignore[misc]
        """On a CPU, under Megatron's DDP in the place of FSDP."""

        device = torch.device("cpu")

        def _dp_group(self, *, include_cp: bool = False) -> Any:
            return data_parallel_group()

        @property
        def _dp_only_size(self) -> int:
            return int(data_parallel_group().size())

        def _set_moe_scale(self, num_microbatches: int) -> None: ...

        def _shard_batch_for_cp(self, batch: Any) -> Any:
            return contextlib.nullcontext, batch, None

    initialize(1)
    made = package_samples(samples)[share_of(samples, 1)]
    group = data_parallel_group()
    datums = []
    for sample in made:
        # Weights of more than the mask, and other than 1: the loss undoes them.
        weights = (torch.arange(sample.total_length) >= sample.prompt_length - 1) * 0.5
        targets = sample.tokens.roll(-1 if case.mutant != "windows" else 0)
        datums.append(engine.Datum(sample.tokens, {"target_tokens": targets, "weights": weights}))
    totals = step_totals(made, data_parallel_group=group)
    loss_fn = datum_loss(config_of(case), totals, datums, made, group)
    model = table_under_ddp(logits_of(samples), per_token=False)
    theirs: Any = Engine.__new__(Engine)
    theirs.__dict__ |= {"model_parts": [model], "pp": None, "device_mesh": None}
    theirs.config = SimpleNamespace(pack_datums=case.packed, defer_fsdp_grad_sync=True)
    if case.mutant == "scale":
        # The weights change after the loss is made, as if nothing undid their sum.
        for datum in datums:
            datum.loss_fn_inputs["weights"] = datum.loss_fn_inputs["weights"].cumsum(0)
    theirs.forward_backward([datums[at : at + 2] for at in range(0, len(datums), 2)], loss_fn)
    model.finish_grad_sync()
    (parameter,) = model.parameters()
    gradient: Tensor = parameter.main_grad.detach().clone()
    return gradient
