"""One optimizer step of verl on its own unmodified functions, and the gradient of every logit.

verl's `MegatronEngineWithLMHead.forward_backward_batch` cuts the batch into micro-batches, packs
and slices them over context parallelism, computes log-probs and entropy from logits, gathers, calls
`ppo_loss`, scales, and hands all to Megatron's schedule, DDP and finalize_model_grads. Of the
engine only `__init__` and the model are not verl's: the model is a table with a row of logits for
each token of the step, every token having an id of its own, so that the gradient of the table is
the gradient of every logit.
"""

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from megatron_pg.megatron.cpu.runtime import enable_cpu_runtime
from tests.oracle import PlainSample

from . import logit_table
from .logit_table import initialize, logits_of, share_of, table_under_ddp
from .sources import find_verl

CLIP_C = 3.0
OFF = (
    *("dynamic_context_parallel", "pad_bshd_to_minibatch_max", "use_fused_kernels"),
    *("pad_to_length", "entropy_from_logits_with_chunking"),
)
"""Settings of verl's engine that are not used."""


@dataclass(frozen=True)
class Case:
    """One step: how it is cut and which of verl's settings it has."""

    loss_mode: str
    per_token: bool = False
    loss_agg_mode: str = "seq-mean-token-mean"
    loss_scale_factor: int | None = None
    context: int = 1
    micro_batch_size: int = 2
    with_terms: bool = True
    """Whether KL and entropy are in the loss."""
    breakage: str = ""
    """A mutant's name; see `broken`."""

    @property
    def estimator(self) -> str:
        return "megatron_pg_prompt_mean_grpo" if "prompt_mean" in self.loss_mode else "grpo"


def verl_advantages(samples: list[PlainSample], case: Case) -> Tensor:
    """[samples, response] by verl's compute_advantage, as its trainers call it on the driver."""
    from omegaconf import OmegaConf
    from verl import DataProto
    from verl.trainer.ppo.ray_trainer import compute_advantage

    masks = torch.nested.nested_tensor(
        [torch.tensor(s.loss_mask) for s in samples], layout=torch.jagged
    ).to_padded_tensor(0)
    rewards = torch.zeros(masks.shape)
    rewards[:, 0] = torch.rand(len(samples), generator=torch.Generator().manual_seed(5))
    prompts = len(samples) // logit_table.ROLLOUTS_PER_PROMPT
    actor = {"policy_loss": {"loss_mode": case.loss_mode}, "ppo_mini_batch_size": prompts}
    algorithm = {"adv_estimator": case.estimator, "gamma": 1.0, "lam": 1.0}
    workers = {"actor": actor, "rollout": {"n": logit_table.ROLLOUTS_PER_PROMPT}}
    config = OmegaConf.create({"algorithm": algorithm, "actor_rollout_ref": workers})
    uids = np.array([f"prompt-{s.group_index}" for s in samples], dtype=object)
    tensors = {"token_level_rewards": rewards, "response_mask": masks}
    data = DataProto.from_dict(tensors, non_tensors={"uid": uids})
    data = compute_advantage(data, case.estimator, config=config.algorithm)
    return data.batch["advantages"]


def batch_of(samples: list[PlainSample], advantages: Tensor, num_samples: int, case: Case) -> Any:
    from verl.utils import tensordict_utils as tu

    def nested(rows: list[Any], dtype: torch.dtype | None = None) -> Tensor:
        tensors = [torch.as_tensor(row, dtype=dtype) for row in rows]
        return torch.nested.as_nested_tensor(tensors, layout=torch.jagged)

    rows = zip(advantages, samples, strict=True)
    tensors = {
        "input_ids": nested([s.tokens for s in samples]),
        "prompts": nested([s.tokens[: s.prompt_length] for s in samples]),
        "responses": nested([s.tokens[s.prompt_length :] for s in samples]),
        **{name: nested([s.loss_mask for s in samples]) for name in ("response_mask", "loss_mask")},
        "old_log_probs": nested([s.old_log_probs for s in samples], torch.float32),
        "ref_log_prob": nested([s.ref_log_probs for s in samples], torch.float32),
        "advantages": nested([row[: s.response_length] for row, s in rows]),
        "temperature": torch.ones(len(samples)),
    }
    settings = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": case.micro_batch_size}
    settings |= {"global_batch_size": num_samples, "calculate_entropy": case.with_terms}
    return tu.get_tensordict(tensors, settings)


def actor_config(case: Case) -> Any:
    from verl.workers.config import McoreActorConfig, McoreEngineConfig, PolicyLossConfig

    return McoreActorConfig(
        rollout_n=logit_table.ROLLOUTS_PER_PROMPT,
        ppo_micro_batch_size_per_gpu=case.micro_batch_size,
        clip_ratio=logit_table.CLIP,
        clip_ratio_low=logit_table.CLIP,
        clip_ratio_high=logit_table.CLIP_HIGH,
        clip_ratio_c=CLIP_C,
        loss_agg_mode=case.loss_agg_mode,
        loss_scale_factor=case.loss_scale_factor,
        policy_loss=PolicyLossConfig(loss_mode=case.loss_mode),
        megatron=McoreEngineConfig(context_parallel_size=case.context),
        use_kl_loss=case.with_terms,
        kl_loss_coef=logit_table.KL_COEF,
        entropy_coeff=logit_table.ENTROPY_COEF if case.with_terms else 0.0,
    )


def engine_of(chunks: list[Any], context: int, with_mtp: bool = False) -> Any:
    """verl's engine around a model that is there already."""
    from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

    class Engine(MegatronEngineWithLMHead):
        def _routed_num_tokens(self, data: Any) -> Tensor:
            # A view of the batch's offsets, which verl copies to the GPU before it is reduced in
            # place.
            return super()._routed_num_tokens(data).clone()

    engine = Engine.__new__(Engine)
    engine.module, engine.tf_config, engine.enable_routing_replay = chunks, chunks[0].config, False
    engine.engine_config = SimpleNamespace(
        context_parallel_size=context, use_remove_padding=True, **dict.fromkeys(OFF, False)
    )
    engine.model_config = SimpleNamespace(
        mtp=SimpleNamespace(enable=with_mtp, enable_train=with_mtp, detach_encoder=False),
        hf_config=SimpleNamespace(architectures=["LlamaForCausalLM"]),
        tokenizer=SimpleNamespace(pad_token_id=0),
    )
    return engine


def verl_gradient(samples: list[PlainSample], case: Case) -> Tensor:
    """The gradient of the table [token id, vocabulary]; every rank of the world calls it, in one
    case after another.
    """
    from verl.workers.utils.losses import ppo_loss

    initialize(case.context)
    mine = share_of(samples, case.context)
    with broken(case.breakage):
        advantages = verl_advantages(samples, case)
        data = batch_of(samples[mine], advantages[mine], len(samples), case)

        model = table_under_ddp(logits_of(samples), case.per_token)

        engine = engine_of([model], case.context)
        model.zero_grad_buffer()
        loss = functools.partial(ppo_loss, config=actor_config(case))
        engine.forward_backward_batch(data, loss)
        (parameter,) = model.parameters()
        return parameter.main_grad.detach().clone()


def gradients(samples: list[PlainSample], cases: list[Case]) -> list[Tensor | str]:
    """What `verl_gradient` gives for each case on this rank, or the error that it raises."""
    enable_cpu_runtime()
    find_verl()
    import megatron_pg.integrations.verl_plugin  # noqa: F401  what the entry point does

    found: list[Tensor | str] = []
    for case in cases:
        try:
            found.append(verl_gradient(samples, case))
        except ValueError as error:
            found.append(str(error))
    return found


@contextlib.contextmanager
def broken(name: str) -> Iterator[None]:
    """A mistake that the comparison must see: of the divisor, of the mask, or of the window."""
    import verl.models.mcore.model_forward as forward

    from megatron_pg.integrations import verl as ours

    weights, gather = ours.sample_factors, forward.postprocess_thd_engine

    def of_lengths(aggregation: str, mask: Tensor, *args: Any) -> Tensor:
        return weights(aggregation, torch.ones_like(mask), *args)

    def turned(*args: Any, **kwargs: Any) -> Tensor:
        rows = [row.roll(1) for row in gather(*args, **kwargs).unbind()]
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)

    mutants = {
        "divisor": (ours, "sample_factors", lambda *args: 1.0005 * weights(*args)),
        "length": (ours, "sample_factors", of_lengths),
        "window": (forward, "postprocess_thd_engine", turned),
    }
    if not name:
        yield
        return
    with mock.patch.object(*mutants[name]):
        yield
