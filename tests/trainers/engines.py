"""One step through the loss protocol inside real engines, and the gradient of every logit in plain float64 loops.

Each engine is a function `(samples, case) -> gradient of the table of logits`, which every rank of the world calls. The
engine's own code, from a checkout, cuts the rows, calls the loss and scales it; the table stands for the model.
"""

import dataclasses
import importlib
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
from .logit_table import initialize, logits_of, share_of, table_under_ddp
from .sources import TRAINERS, functions, stand_in_for

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
    engine: str
    aggregation: str
    packed: bool = True
    mutant: str = ""
    """`scale`: what the engine divides by is not undone. `windows`: log-probs are those of the next token."""


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
        pg_metrics="none",
    )


def expected(case: Case, samples: list[PlainSample]) -> Tensor:
    objective = logit_table.objective(case.aggregation, DIVISOR, kl_loss_coef=logit_table.KL_COEF)
    return logit_table.gradient(samples, lambda x: oracle.policy_loss(samples, x, objective).loss)


def matrices(samples: list[PlainSample]) -> dict[str, Tensor]:
    """Rows [samples, WIDTH] as engines hold them: the value of each token at its own column."""
    made: dict[str, Tensor] = {}
    for number, sample in enumerate(samples):
        rows = {
            name: getattr(sample, name)
            for name in ("advantages", "old_log_probs", "ref_log_probs", "rollout_log_probs")
        }
        rows |= {"response_mask": MASKS[_number(sample)], "loss_mask": sample.loss_mask}
        for name, values in rows.items():
            matrix = made.setdefault(name, torch.zeros(len(samples), WIDTH))
            matrix[number, sample.prompt_length : len(sample.tokens)] = torch.tensor(values).float()
        ids = made.setdefault("tokens", torch.zeros(len(samples), WIDTH, dtype=torch.int64))
        ids[number, : len(sample.tokens)] = torch.tensor(sample.tokens)
    return made


def _number(sample: PlainSample) -> int:
    return [s.tokens for s in a_step()].index(sample.tokens)


def log_probs_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Log-probs [...] of the targets from logits [..., vocabulary]."""
    return torch.log_softmax(logits, -1).gather(-1, targets[..., None])[..., 0]


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


NEMO_RL_PACKAGES = "ray requests decord torchvision PIL pynvml uvicorn fastapi zmq wandb omegaconf transformers".split()
NEMO_RL_MODULES = "models algorithms.x_token environments utils experience distributed.model_utils data.multimodal_utils".split()


def nemo_rl_gradient(samples: list[PlainSample], case: Case) -> Tensor:
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
    policy.train(data, SimpleNamespace(loss_type=types[0], input_type=types[1]))
    return found[0]


def gradients(samples: list[PlainSample], cases: list[Case]) -> list[Tensor]:
    import sys

    enable_cpu_runtime()
    made = []
    for case in cases:
        folder, engine = ENGINES[case.engine]
        if str(TRAINERS / folder) not in sys.path:
            sys.path.insert(0, str(TRAINERS / folder))
        made.append(engine(samples, case))
    return made


ENGINES: dict[str, tuple[str, Callable[[list[PlainSample], Case], Tensor]]] = {
    "nemo_rl": ("NeMo-RL", nemo_rl_gradient),
}
"""The folder under TRAINERS, and the step, of each engine."""
