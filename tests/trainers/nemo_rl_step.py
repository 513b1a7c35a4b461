"""One step of NeMo-RL: its data, packing, loss processor and wrappers around the protocol's adapter."""

import importlib
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.oracle import PlainSample

from .engines import FILTERED, GROUP, Case, config_of, log_probs_of, matrices, scheduled
from .logit_table import initialize, logits_of, table_under_ddp
from .sources import functions, stand_in_for

NEMO_RL_PACKAGES = "ray requests decord torchvision PIL pynvml uvicorn fastapi zmq wandb omegaconf transformers".split()
NEMO_RL_MODULES = "models algorithms.x_token environments utils experience distributed.model_utils data.multimodal_utils".split()


def gradient(samples: list[PlainSample], case: Case) -> Tensor:
    """Their BatchedDataDict deals rows to ranks and micro-batches; LossPostProcessor and its wrappers call the loss."""
    from megatron.core import parallel_state

    from megatron_pg.integrations.nemo_rl import train_with

    stand_in_for(NEMO_RL_PACKAGES, even_if_installed=True)
    stand_in_for([f"nemo_rl.{name}" for name in NEMO_RL_MODULES], even_if_installed=True)
    interfaces = importlib.import_module("nemo_rl.algorithms.loss.interfaces")
    wrappers = importlib.import_module("nemo_rl.algorithms.loss.wrapper")
    batches = importlib.import_module("nemo_rl.distributed.batched_data_dict")
    initialize(1)
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

    def prepare(logits: Tensor, data: Any, **others: Any) -> Any:
        """As theirs: [rows, positions, vocabulary] to the log-probs of the next tokens."""
        shift = 1 if case.mutant != "windows" else 0
        width = data["input_ids"].shape[1] - 1
        targets = data["input_ids"][:, shift : shift + width]
        return {"next_token_logprobs": log_probs_of(logits[:, :width], targets)}, data

    names = {**parallel, "prepare_loss_input": prepare, "partial": partial}
    names |= {name: None for name in ("LossFunction", "PolicyConfig", "TrainingSamplingParams")}
    names |= {name: Any for name in ("MegatronModule", "BatchedDataDict", "PackedSeqParams")}
    names |= vars(wrappers)
    names["BatchedDataDict"] = batches.BatchedDataDict
    path = "NeMo-RL/nemo_rl/models/megatron/train.py"
    processor = functions(path, "LossPostProcessor", **names)["LossPostProcessor"]
    found: list[Tensor] = []

    class Policy:
        cfg = {"train_global_batch_size": len(samples)}

        def train(self, data: Any, loss_fn: Any) -> None:
            size, rank = dist.get_world_size(), dist.get_rank()
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
            model = table_under_ddp(table, per_token=True, dtype=torch.float64)

            def forward_step(iterator: Any, model: Any) -> Any:
                start, end = bounds[next(iterator)]
                batch = shard.slice(start, end)
                if not case.packed:
                    return model(batch["input_ids"]), post(batch)
                parts = zip(batch["input_ids"], batch["input_lengths"].tolist(), strict=True)
                packed = torch.cat([row[:length] for row, length in parts])[None]
                cu_seqlens = torch.nn.functional.pad(batch["input_lengths"].cumsum(0), (1, 0))
                params = SimpleNamespace(cu_seqlens_q=cu_seqlens, cu_seqlens_q_padded=None)
                return model(packed), post(batch, packed_seq_params=params)

            found.append(scheduled(model, forward_step, len(bounds)))

    policy: Any = Policy()
    train_with(policy, config_of(case), GROUP)
    types = interfaces.LossType.TOKEN_LEVEL, interfaces.LossInputType.LOGPROB
    policy.train(
        data, SimpleNamespace(loss_type=types[0], input_type=types[1], force_on_policy_ratio=False)
    )
    return found[0]
