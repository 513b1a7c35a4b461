"""Megatron-Core's side: a step's policy loss and its log-probs in the schedules, process groups, running on a CPU.

What is named here is imported when it is first used, so that `megatron_pg.megatron.scale_contract` and the reading of a
trainer's globals work where Megatron-Core is not installed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from megatron_pg.config.versions import megatron_core_version

if TYPE_CHECKING:
    from megatron_pg.megatron.cpu.layer_spec import torch_block_spec
    from megatron_pg.megatron.cpu.runtime import enable_cpu_runtime
    from megatron_pg.megatron.groups import ParallelGroups
    from megatron_pg.megatron.hidden_states import compute_hidden_states
    from megatron_pg.megatron.log_probs import ScoredSamples, compute_log_probs
    from megatron_pg.megatron.output_layer import set_fp32_lm_head
    from megatron_pg.megatron.policy_step import PolicyStep, packed_seq_params
    from megatron_pg.megatron.value_head import ValueHead, add_value_head
    from megatron_pg.megatron.value_step import ValueStep, compute_values

__all__ = [
    "ParallelGroups",
    "PolicyStep",
    "ScoredSamples",
    "ValueHead",
    "ValueStep",
    "add_value_head",
    "compute_hidden_states",
    "compute_log_probs",
    "compute_values",
    "enable_cpu_runtime",
    "packed_seq_params",
    "set_fp32_lm_head",
    "torch_block_spec",
]

_PLACES = {
    "ParallelGroups": "groups",
    "PolicyStep": "policy_step",
    "ScoredSamples": "log_probs",
    "ValueHead": "value_head",
    "ValueStep": "value_step",
    "add_value_head": "value_head",
    "compute_hidden_states": "hidden_states",
    "compute_log_probs": "log_probs",
    "compute_values": "value_step",
    "enable_cpu_runtime": "cpu.runtime",
    "packed_seq_params": "policy_step",
    "set_fp32_lm_head": "output_layer",
    "torch_block_spec": "cpu.layer_spec",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    megatron_core_version()  # says what to install where there is none
    return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
