"""One optimizer step of ROLL on its own unmodified functions, and the gradient of every logit.

`MegatronTrainStrategy.train_step` counts the step's totals, cuts micro-batches, slices them over context parallelism,
calls the worker's `loss_func` (RLVR's, which gathers log-probs and entropy) and scales; Megatron's schedule and DDP do
the rest. Of the strategy only `__init__`, the model and the optimizer are not ROLL's.
"""

import itertools
from dataclasses import dataclass
from types import MethodType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megatron_pg.integrations import roll_weights
from megatron_pg.megatron.cpu.runtime import enable_cpu_runtime
from tests.oracle import PlainSample

from . import logit_table
from .logit_table import Cut, initialize, logits_of, share_of, table_under_ddp
from .sources import find_roll

CLIP_C, DIVISOR = 1.4, 8.0
WIDTH = 16
"""Tokens of a padded sequence."""


@dataclass(frozen=True)
class Case(Cut):
    """One step: the aggregation, and how it is cut."""

    aggregation: str
    filtered: bool = False
    """Whether ROLL's filter of tokens by the ratio of training to rollout engine is on."""


def rollout_log_probs(samples: list[PlainSample]) -> list[list[float]]:
    """Those of the rollout engine: every fourth token of the step is far from the trainer's."""
    offsets = itertools.cycle([2.0, 0.0, 0.0, 0.0])
    return [[number - next(offsets) for number in sample.old_log_probs] for sample in samples]


def padded(samples: list[PlainSample], rows: list[list[float]], dtype: torch.dtype) -> Tensor:
    """Rows over the response tokens as [samples, WIDTH - 1], the entry for token p at column p - 1."""
    matrix = torch.zeros(len(samples), WIDTH - 1, dtype=dtype)
    for line, sample, row in zip(matrix, samples, rows, strict=True):
        start = sample.prompt_length - 1
        line[start : start + len(row)] = torch.tensor(row, dtype=dtype)
    return matrix


def batch_of(samples: list[PlainSample], infer: list[list[float]]) -> Any:
    from roll.distributed.scheduler.protocol import DataProto

    ids, attention = (torch.zeros(len(samples), WIDTH, dtype=torch.int64) for _ in range(2))
    prompts = torch.zeros(len(samples), 4, dtype=torch.int64)
    for i, sample in enumerate(samples):
        ids[i, : len(sample.tokens)] = torch.tensor(sample.tokens)
        attention[i, : len(sample.tokens)] = 1
        prompts[i] = sample.group_index  # the tests' token ids are all different
    masks = padded(samples, [[float(m) for m in s.loss_mask] for s in samples], torch.int64)
    response_mask = torch.nn.functional.pad(masks, (1, 0))
    advantages = padded(samples, [s.advantages for s in samples], torch.float32)
    rows = {
        name: [getattr(s, name) for s in samples] for name in ("old_log_probs", "ref_log_probs")
    }
    rows["infer_logprobs"] = infer
    tensors = {name: padded(samples, values, torch.float32) for name, values in rows.items()}
    tensors |= {"input_ids": ids, "attention_mask": attention, "prompts": prompts}
    tensors |= {"response_mask": response_mask, "advantages": advantages * masks}
    keys = {"loss_mask_keys": ["response_mask", "final_response_mask"]}
    return DataProto.from_dict(tensors, meta_info=keys)


def pipeline_config(case: Case) -> Any:
    bounds = {"ratio_enabled": True, "ratio_low": 0.5, "ratio_high": 2.0, "diff_enabled": False}
    token_filter = SimpleNamespace(enabled=True, agg_type="token", **bounds)
    filters, off = [token_filter] if case.filtered else [], SimpleNamespace(enabled=False)
    unused = "difficulty_loss_weight length_loss_weight enable_old_logprobs_recompute".split()
    return SimpleNamespace(
        **dict.fromkeys(unused, False),
        **dict.fromkeys(("pg_clip", "pg_clip_low"), logit_table.CLIP),
        **dict.fromkeys(("dual_clip_loss", "use_pg_clip_range"), True),
        pg_clip_high=logit_table.CLIP_HIGH,
        loss_agg_mode="seq-mean-token-mean",
        train_infer_correction=SimpleNamespace(is_weight=off, filters=filters),
        importance_sampling="token",
        use_kl_loss=case.with_terms,
        kl_loss_coef=logit_table.KL_COEF,
        rl_loss_coef=1.0,
        entropy_loss_coef=logit_table.ENTROPY_COEF if case.with_terms else 0.0,
        num_return_sequences_in_group=logit_table.ROLLOUTS_PER_PROMPT,
        actor_train=SimpleNamespace(apply_loss_scale=True),
        ppo_epochs=1,
    )


class _Models(list[Any]):
    """ROLL's VirtualModels, as much as train_step asks for."""

    config = property(lambda self: self[0].config)

    def train(self) -> None: ...

    def get_models(self) -> list[Any]:
        return list(self)


def strategy_of(model: Any, case: Case, num_microbatches: int, gradient: list[Tensor]) -> Any:
    """ROLL's strategy around the table; its optimizer keeps the gradient."""
    from mcore_adapter.models.model_factory import PretrainedModel
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from roll.distributed.strategy.megatron_strategy import MegatronTrainStrategy

    def keep() -> tuple[bool, float, int]:
        (parameter,) = model.parameters()
        gradient.append(parameter.main_grad.detach().clone())
        return True, 0.0, 0

    strategy = MegatronTrainStrategy.__new__(MegatronTrainStrategy)
    table = model.module
    table.get_batch_on_this_cp_rank = MethodType(PretrainedModel.get_batch_on_this_cp_rank, table)
    strategy.model, strategy.models_unwrapped = _Models([model]), [table]
    strategy.enable_router_replay = strategy.use_sequence_packing = False
    sizes = SimpleNamespace(per_device_train_batch_size=case.micro_batch_size)
    config = {"name": "actor_train", "training_args": sizes, "use_dynamic_batching_in_train": False}
    strategy.worker_config = SimpleNamespace(apply_loss_scale=True, logits_in_fp32=True, **config)
    steps = {"gradient_accumulation_steps": num_microbatches}
    strategy.megatron_train_args = SimpleNamespace(cross_entropy_loss_fusion=False, **steps)
    strategy.forward_backward_func, strategy.seq_length = get_forward_backward_func(), WIDTH
    strategy.load_states = strategy.offload_states = lambda *args, **kwargs: None
    strategy.optimizer = SimpleNamespace(step=keep, zero_grad=lambda: None)
    strategy.scheduler = SimpleNamespace(step=lambda: None)
    return strategy


def roll_gradient(samples: list[PlainSample], case: Case) -> Tensor:
    """The gradient of the table [token id, vocabulary]; every rank of the world calls it, in one case after another."""
    from megatron_pg.integrations import roll

    initialize(case.context)
    mine = share_of(samples, case.context)
    # ROLL makes float32 copies of bfloat16 logits, and so of these; float32 logits it overwrites by their exponentials
    # before the entropy reads them.
    model = table_under_ddp(logits_of(samples), False, context=case.context, dtype=torch.float64)
    gradient: list[Tensor] = []
    name = case.aggregation.title().replace("_", "")  # SampleMean, ...
    worker = object.__new__(getattr(roll, f"{name}ActorWorker"))
    count = len(samples[mine]) // case.micro_batch_size
    worker.strategy = strategy_of(model, case, count, gradient)
    worker.pipeline_config, worker._logprobs_cache = pipeline_config(case), {}
    divisor = {roll_weights.DIVISOR_VARIABLE: str(DIVISOR)}
    worker.divisor = roll_weights.refuse_settings(case.aggregation, worker.pipeline_config, divisor)
    batch = batch_of(samples[mine], rollout_log_probs(samples)[mine])
    loss_func = broken(worker.loss_func, case.breakage, worker)
    worker.weighted_step(worker.strategy.train_step, batch, loss_func)
    return gradient[0]


def broken(loss_func: Any, name: str, worker: Any) -> Any:
    factors = worker.compute_sample_weights

    def of_lengths(data: Any, response_mask: Tensor) -> Tensor:
        lengths = (data.batch["old_log_probs"] != 0).sum(dim=-1).clamp(min=1)
        return factors(data, response_mask) * response_mask.sum(dim=-1) / lengths

    def window(data: Any, output: Tensor) -> Any:
        return loss_func(data, output.roll(1, dims=1))

    if name == "divisor":
        worker.compute_sample_weights = lambda *args: 1.0005 * factors(*args)
    if name == "length":
        worker.compute_sample_weights = of_lengths
    return window if name == "window" else loss_func


def gradients(samples: list[PlainSample], cases: list[Case]) -> list[Tensor]:
    import torch._dynamo

    torch._dynamo.config.disable = True  # ROLL compiles a product
    enable_cpu_runtime()
    find_roll()
    return [roll_gradient(samples, case) for case in cases]
