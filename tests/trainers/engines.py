"""One step through the loss protocol inside real engines, and the gradient of every logit in plain float64 loops.

Each engine is a function `(samples, case) -> gradient of the table of logits`, which every rank of the world calls. The
engine's own code, from a checkout, cuts the rows, calls the loss and scales it; the table stands for the model.
"""

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_pg import PolicyLossConfig
from megatron_pg.megatron.cpu.runtime import enable_cpu_runtime
from tests import oracle
from tests.oracle import PlainSample

from . import logit_table
from .sources import TRAINERS

FOLDERS = {
    "nemo_rl": "NeMo-RL",
}
"""The folder under TRAINERS of each engine; its step is in a module of its own here, `gradient(samples, case)`."""
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
    context: int = 1
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


def fields_of(case: Case) -> dict[str, Any]:
    return {
        "loss_aggregation": case.aggregation,
        "loss_aggregation_divisor": DIVISOR if case.aggregation == "constant" else None,
        "eps_clip": logit_table.CLIP,
        "eps_clip_high": logit_table.CLIP_HIGH,
        "kl_loss_coef": logit_table.KL_COEF,
        "kl_loss_type": "low_var_kl",
    }


def config_of(case: Case) -> PolicyLossConfig:
    return PolicyLossConfig(**fields_of(case))


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


def gradients(samples: list[PlainSample], cases: list[Case]) -> list[Tensor]:
    enable_cpu_runtime()
    made = []
    for case in cases:
        if str(TRAINERS / FOLDERS[case.engine]) not in sys.path:
            sys.path.insert(0, str(TRAINERS / FOLDERS[case.engine]))
        step = importlib.import_module(f"tests.trainers.{case.engine}_step")
        made.append(step.gradient(samples, case))
    return made
