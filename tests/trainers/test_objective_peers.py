"""Our objectives beside the real `_compute_loss` of TRL's trainer: loss and gradient.

pip install trl==1.16.0
python -m pytest -s tests/trainers/test_objective_peers.py
"""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_pg import PolicyLossConfig
from tests.fast.objectives_oracle import Sequence1
from tests.fast.one_step import loss_of
from tests.fast.sequences import flat_log_probs, package_batch, random_sequences

from .logit_table import difference

CONSTANT = {"loss_aggregation": "constant", "loss_aggregation_divisor": 1.0}
TOKEN_MEAN = {"loss_aggregation": "token_mean"}
CLIP = {"eps_clip": 0.05, "eps_clip_high": 0.1}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "luspo": ("sequence", {"policy_loss": "gspo", **CLIP, **CONSTANT}),
    "vespo": ("token", {"policy_loss": "vespo", **TOKEN_MEAN}),
    "cispo": ("token", {"policy_loss": "cispo", "eps_clip_high": 0.1, **TOKEN_MEAN}),
}
"""By TRL's loss type its level of importance sampling, and our settings."""


def sequences() -> list[Sequence1]:
    """One advantage a sequence, as TRL has it; responses with active tokens alone count in TRL's
    mean over sequences.
    """
    drawn = [s for s in random_sequences(3, active_rate=1.0) if s.active()]
    values = (1.5, -0.5, 0.75, -2.0, 0.25)
    pairs = zip(drawn, values, strict=True)
    return [dataclasses.replace(s, advantages=[v] * len(s.loss_mask)) for s, v in pairs]


def padded(rows: list[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def theirs(loss_type: str, level: str, drawn: list[Sequence1]) -> tuple[Tensor, Tensor]:
    """The loss of `GRPOTrainer._compute_loss`, given log-probs, and its gradient."""
    module = pytest.importorskip(
        "trl.trainer.grpo_trainer", reason="needs TRL: pip install trl==1.16.0"
    )
    log_probs = flat_log_probs(drawn)
    lengths = [len(s.loss_mask) for s in drawn]
    rows = padded(list(log_probs.split(lengths)))
    mask = padded([torch.ones(length) for length in lengths])
    ids = torch.zeros_like(mask, dtype=torch.int64)
    trainer = SimpleNamespace(
        **{"loss_type": loss_type, "importance_sampling_level": level, "beta": 0.0},
        # Of cispo epsilon_high is the bound itself.
        **{"epsilon_low": 0.05, "epsilon_high": 1.1 if loss_type == "cispo" else 0.1},
        **{"aux_loss_enabled": False, "use_vllm": False, "off_policy_mask_threshold": None},
        **{"top_entropy_quantile": 1.0, "_entropy_bonus_enabled": False},
        **{"current_gradient_accumulation_steps": 1, "model": SimpleNamespace(training=True)},
        args=SimpleNamespace(
            **{"delta": None, "steps_per_generation": 1},
            **{"vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0},
            vespo_lambda_neg=2.0,
        ),
        accelerator=SimpleNamespace(
            num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x
        ),
        _metrics={"train": dict.fromkeys(METRICS, [])},
        _get_per_token_logps_and_entropies=lambda *_, **__: (rows, torch.zeros_like(rows), None),
        get_gamma_weights=module.GRPOTrainer.get_gamma_weights,
    )
    inputs = {
        **dict.fromkeys(("prompt_ids", "completion_ids"), ids),
        **dict.fromkeys(("prompt_mask", "completion_mask"), mask),
        "advantages": torch.tensor([s.advantages[0] for s in drawn], dtype=torch.float64),
        "old_per_token_logps": padded([torch.tensor(s.old_log_probs).double() for s in drawn]),
        "num_items_in_batch": mask.sum(),
    }
    loss = module.GRPOTrainer._compute_loss(trainer, None, inputs)
    return loss.detach(), torch.autograd.grad(loss, log_probs)[0]


METRICS = (
    *("entropy", "vespo/phi_seq_mean", "cispo_clip_ratio"),
    *(
        f"clip_ratio/{name}"
        for name in ("low_mean", "high_mean", "region_mean", "low_min", "high_max")
    ),
)


@pytest.mark.parametrize("loss_type", CASES)
def test_loss_and_gradient_are_those_of_trl(loss_type: str) -> None:
    level, settings = CASES[loss_type]
    drawn = sequences()
    wanted = theirs(loss_type, level, drawn)
    log_probs = flat_log_probs(drawn)
    loss, _ = loss_of(PolicyLossConfig(**settings), package_batch(drawn), log_probs)
    found = loss.detach(), torch.autograd.grad(loss, log_probs)[0]
    errors = [difference(*pair) for pair in zip(found, wanted, strict=True)]
    print(f"TRL {loss_type}: loss {errors[0]:.1e}, gradient {errors[1]:.1e}")
    assert max(errors) < 1e-12
