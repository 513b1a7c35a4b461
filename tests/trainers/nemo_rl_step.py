"""One step of NeMo-RL, the gradient of every logit, and that of plain float64 loops.

Its data, packing, log-probs, loss processor and wrappers are its own; a table of logits
stands for the model.
"""

import importlib
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_pg import PolicyLossConfig
from megatron_pg.megatron.cpu.runtime import enable_cpu_runtime
from tests import oracle
from tests.oracle import PlainSample

from . import logit_table
from .logit_table import initialize, logits_of, table_under_ddp
from .sources import TRAINERS, functions, stand_in_for

NEMO_RL_PACKAGES = (
    "ray requests decord torchvision PIL pynvml uvicorn fastapi zmq wandb omegaconf transformers"
).split()
NEMO_RL_MODULES = (
    "models algorithms.x_token environments utils experience distributed.model_utils "
    "data.multimodal_utils"
).split()

LOG_PROBS = (
    "get_next_token_logprobs_from_logits from_parallel_logits_to_logprobs "
    "_get_tokens_on_this_cp_rank "
    "allgather_cp_sharded_tensor AllGatherCPTensor DistributedLogprob "
    "_compute_distributed_log_softmax "
    "_compute_distributed_log_softmax_with_grad"
)


def pinless() -> Any:
    """torch whose tensors are not pinned, as there is no GPU to pin them for."""
    made = types.ModuleType("torch")
    made.__dict__.update(vars(torch))
    made.tensor = lambda *values, pin_memory=False, **named: torch.tensor(*values, **named)
    return made


DIVISOR = 8.0
MASKS = [
    *([1, 1, 1, 0, 0, 1], [1, 1, 1], [1, 1], [1]),
    *([1, 1, 0, 1, 1, 1, 1, 1], [1, 0, 1, 1], [1] * 7, [1, 1, 1]),
]
FILTERED = 2
"""A sample that a filter takes out of the loss; it counts in N."""
GROUP, WIDTH = 4, 14


@dataclass(frozen=True)
class Case:
    aggregation: str
    packed: bool = True
    context: int = 1
    mutant: str = ""
    """`scale`: what NeMo-RL multiplies by is left out. `windows`: log-probs are those of the next
    token."""


def a_step() -> list[PlainSample]:
    """Two prompt groups of four, each with a prompt of its own length."""
    generator = torch.Generator().manual_seed(7)
    samples, next_id = [], 8
    for number, mask in enumerate(MASKS):
        prompt = list(range(1 + 4 * (number // GROUP), 4 + 5 * (number // GROUP)))
        old, ref, rollout = (-4.5 + torch.rand(3, len(mask), generator=generator)).tolist()
        advantages = torch.randn(1, generator=generator).tolist() * len(mask)
        kept = [0] * len(mask) if number == FILTERED else mask
        tokens = prompt + list(range(next_id, next_id + len(mask)))
        fields = {"ref_log_probs": ref, "rollout_log_probs": rollout}
        group = number // GROUP
        samples.append(
            PlainSample(tokens, len(mask), kept, advantages, old, group_index=group, **fields)
        )
        next_id += len(mask)
    return samples


def config_of(case: Case) -> PolicyLossConfig:
    return PolicyLossConfig(
        loss_aggregation=case.aggregation,
        loss_aggregation_divisor=DIVISOR if case.aggregation == "constant" else None,
        eps_clip=logit_table.CLIP,
        eps_clip_high=logit_table.CLIP_HIGH,
        kl_loss_coef=logit_table.KL_COEF,
        kl_loss_type="low_var_kl",
    )


def expected(case: Case, samples: list[PlainSample]) -> Tensor:
    objective = logit_table.objective(case.aggregation, DIVISOR, kl_loss_coef=logit_table.KL_COEF)
    return logit_table.gradient(samples, lambda x: oracle.policy_loss(samples, x, objective).loss)


def matrices(samples: list[PlainSample]) -> dict[str, Tensor]:
    """Rows [samples, WIDTH] as NeMo-RL holds them: the value of each token at its own column."""
    made: dict[str, Tensor] = {}
    for number, sample in enumerate(samples):
        rows = {
            name: getattr(sample, name)
            for name in ("advantages", "old_log_probs", "ref_log_probs", "rollout_log_probs")
        }
        rows |= {"response_mask": MASKS[number], "loss_mask": sample.loss_mask}
        for name, values in rows.items():
            matrix = made.setdefault(name, torch.zeros(len(samples), WIDTH))
            matrix[number, sample.prompt_length : len(sample.tokens)] = torch.tensor(values).float()
        ids = made.setdefault("tokens", torch.zeros(len(samples), WIDTH, dtype=torch.int64))
        ids[number, : len(sample.tokens)] = torch.tensor(sample.tokens)
    return made


def scheduled(model: Any, forward_step: Callable[..., Any], count: int) -> Tensor:
    """The table's gradient after Megatron's own schedule and DDP."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(range(count)),
        model=[model],
        num_microbatches=count,
        seq_length=WIDTH,
        micro_batch_size=1,
        forward_only=False,
    )
    (parameter,) = model.parameters()
    gradient: Tensor = parameter.main_grad.detach().clone()
    return gradient


def gradient(samples: list[PlainSample], case: Case) -> Tensor:
    """Their BatchedDataDict deals rows to ranks and micro-batches; LossPostProcessor and its
    wrappers call the loss.
    """
    from megatron.core import parallel_state
    from megatron.core.packed_seq_params import PackedSeqParams
    from torch.distributed.tensor import DTensor

    from megatron_pg.integrations.nemo_rl import train_with

    stand_in_for(NEMO_RL_PACKAGES, even_if_installed=True)
    stand_in_for([f"nemo_rl.{name}" for name in NEMO_RL_MODULES], even_if_installed=True)
    interfaces = importlib.import_module("nemo_rl.algorithms.loss.interfaces")
    wrappers = importlib.import_module("nemo_rl.algorithms.loss.wrapper")
    batches = importlib.import_module("nemo_rl.distributed.batched_data_dict")
    initialize(case.context)
    table = logits_of(samples)
    rows = matrices(samples)
    lengths = torch.tensor([len(sample.tokens) for sample in samples])
    is_kept = [float(number != FILTERED) for number in range(len(samples))]
    data = batches.BatchedDataDict(
        input_ids=rows["tokens"],
        input_lengths=lengths,
        token_mask=rows["response_mask"],
        sample_mask=torch.tensor(is_kept),
        advantages=rows["advantages"],
        prev_logprobs=rows["old_log_probs"],
        reference_policy_logprobs=rows["ref_log_probs"],
        generation_logprobs=rows["rollout_log_probs"],
    )
    parallel = {
        name: getattr(parallel_state, name)
        for name in vars(parallel_state)
        if name.startswith("get_")
    }

    names: dict[str, Any] = {**parallel, "partial": partial}
    names |= {name: None for name in ("LossFunction", "PolicyConfig")}
    names |= {"MegatronModule": Any, "BatchedDataDict": batches.BatchedDataDict}
    names |= {"PackedSeqParams": PackedSeqParams, "DTensor": DTensor}
    names |= {"TrainingSamplingParams": Any, "need_top_k_or_top_p_filtering": lambda params: False}
    names |= {"torch": pinless(), "LossInputType": interfaces.LossInputType}
    names |= {"_round_up_to_multiple": lambda size, of: -(-size // of) * of}
    path = "NeMo-RL/nemo_rl/distributed/model_utils.py"
    names |= functions(path, *LOG_PROBS.split(), **names)
    if case.mutant == "windows":
        score = names["get_next_token_logprobs_from_logits"]
        names["get_next_token_logprobs_from_logits"] = lambda input_ids, **named: score(
            input_ids.roll(1, -1), **named
        )
    path = "NeMo-RL/nemo_rl/algorithms/loss/utils.py"
    names |= functions(path, "prepare_loss_input", **names)
    names |= vars(wrappers)
    path = "NeMo-RL/nemo_rl/models/megatron/data.py"
    pack = functions(path, "_pack_sequences_for_megatron", **names)["_pack_sequences_for_megatron"]
    path = "NeMo-RL/nemo_rl/models/megatron/train.py"
    processor = functions(path, "LossPostProcessor", **names)["LossPostProcessor"]
    found: list[Tensor] = []

    class Policy:
        cfg = {"train_global_batch_size": len(samples)}

        def train(self, data: Any, loss_fn: Any) -> None:
            size, rank = dist.get_world_size() // case.context, dist.get_rank() // case.context
            packing = {
                "max_tokens_per_microbatch": 24,
                "input_key": "input_ids",
                "input_lengths_key": "input_lengths",
                "algorithm": "modified_first_fit_decreasing",
                "sequence_length_pad_multiple": 1,
            }
            if case.packed:
                shards, _ = data.shard_by_batch_size(
                    size, batch_size=len(samples), sequence_packing_args=packing
                )
                shard = shards[rank].get_batch(0)
                bounds = shard.micro_batch_indices[0]
            else:
                shard = data.shard_by_batch_size(size, batch_size=len(samples))[rank]
                bounds = [[at, at + 2] for at in range(0, shard.size, 2)]
            post = processor(
                loss_fn=loss_fn,
                cfg={"sequence_packing": {"enabled": case.packed}},
                num_microbatches=len(bounds) if case.mutant != "scale" else 1,
            )
            model = table_under_ddp(table, per_token=True, context=case.context)

            def forward_step(iterator: Any, model: Any) -> Any:
                start, end = bounds[next(iterator)]
                batch = shard.slice(start, end)
                if not case.packed:
                    return model(batch["input_ids"]), post(batch)
                packed = pack(
                    batch["input_ids"],
                    batch["input_lengths"],
                    pad_individual_seqs_to_multiple_of=2 * case.context if case.context > 1 else 1,
                    cp_rank=parallel_state.get_context_parallel_rank(),
                    cp_size=case.context,
                )
                return model(packed[1]), post(batch, packed_seq_params=packed[2])

            found.append(scheduled(model, forward_step, len(bounds)))

    policy: Any = Policy()
    train_with(policy, config_of(case), GROUP)
    types = interfaces.LossType.TOKEN_LEVEL, interfaces.LossInputType.LOGPROB
    policy.train(
        data, SimpleNamespace(loss_type=types[0], input_type=types[1], force_on_policy_ratio=False)
    )
    return found[0]


def gradients(samples: list[PlainSample], cases: list[Case]) -> list[Tensor]:
    enable_cpu_runtime()
    if str(TRAINERS / "NeMo-RL") not in sys.path:
        sys.path.insert(0, str(TRAINERS / "NeMo-RL"))
    return [gradient(samples, case) for case in cases]
