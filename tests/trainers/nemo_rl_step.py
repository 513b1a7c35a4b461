"""One step of NeMo-RL: its data, packing, log-probs, loss processor and wrappers around the protocol's adapter."""

import importlib
import types
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.oracle import PlainSample

from .engines import FILTERED, GROUP, Case, config_of, matrices, scheduled
from .logit_table import initialize, logits_of, table_under_ddp
from .sources import functions, stand_in_for

NEMO_RL_PACKAGES = "ray requests decord torchvision PIL pynvml uvicorn fastapi zmq wandb omegaconf transformers".split()
NEMO_RL_MODULES = "models algorithms.x_token environments utils experience distributed.model_utils data.multimodal_utils".split()

LOG_PROBS = (
    "get_next_token_logprobs_from_logits from_parallel_logits_to_logprobs _get_tokens_on_this_cp_rank "
    "allgather_cp_sharded_tensor AllGatherCPTensor DistributedLogprob _compute_distributed_log_softmax "
    "_compute_distributed_log_softmax_with_grad"
)


def pinless() -> Any:
    """torch whose tensors are not pinned, as there is no GPU to pin them for."""
    made = types.ModuleType("torch")
    made.__dict__.update(vars(torch))
    made.tensor = lambda *values, pin_memory=False, **named: torch.tensor(*values, **named)
    return made


def gradient(samples: list[PlainSample], case: Case) -> Tensor:
    """Their BatchedDataDict deals rows to ranks and micro-batches; LossPostProcessor and its wrappers call the loss."""
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
