"""The Megatron-Core part: policy loss and log-probs in the schedules, process groups, and a CPU
runtime.

Names are imported on first use, so that `scale_contract` and `trainer_globals` work without
Megatron-Core.
"""

from typing import TYPE_CHECKING

from megatron_pg.config.versions import exports_of_megatron

if TYPE_CHECKING:
    from megatron_pg.megatron.cpu.layer_spec import hybrid_stack_spec, torch_block_spec
    from megatron_pg.megatron.cpu.runtime import enable_cpu_runtime
    from megatron_pg.megatron.experts import padding_mask
    from megatron_pg.megatron.groups import ParallelGroups
    from megatron_pg.megatron.output_layer import set_fp32_lm_head
    from megatron_pg.megatron.policy_step import PolicyStep, packed_seq_params
    from megatron_pg.megatron.scoring import ScoredSamples, compute_hidden_states, compute_log_probs

__all__ = [
    "ParallelGroups",
    "PolicyStep",
    "ScoredSamples",
    "compute_hidden_states",
    "compute_log_probs",
    "enable_cpu_runtime",
    "hybrid_stack_spec",
    "packed_seq_params",
    "padding_mask",
    "set_fp32_lm_head",
    "torch_block_spec",
]

__getattr__, __dir__ = exports_of_megatron(
    __name__,
    {
        "megatron_pg.megatron.cpu.layer_spec": ("hybrid_stack_spec", "torch_block_spec"),
        "megatron_pg.megatron.cpu.runtime": ("enable_cpu_runtime",),
        "megatron_pg.megatron.experts": ("padding_mask",),
        "megatron_pg.megatron.groups": ("ParallelGroups",),
        "megatron_pg.megatron.output_layer": ("set_fp32_lm_head",),
        "megatron_pg.megatron.policy_step": ("PolicyStep", "packed_seq_params"),
        "megatron_pg.megatron.scoring": (
            "ScoredSamples",
            "compute_hidden_states",
            "compute_log_probs",
        ),
    },
)
