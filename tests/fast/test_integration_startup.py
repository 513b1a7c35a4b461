"""What slime's and miles' init hook refuses before the model is loaded, and the line that it
prints.
"""

import sys
import types
from typing import Any

import pytest

from megatron_pg.integrations import DIVISOR_VARIABLE, miles, slime
from megatron_pg.integrations.trainer import REDUCER
from tests.fast.refusals import assert_refused

HOOKS = {
    "slime": "rollout_data_postprocess_path",
    "miles": "custom_convert_samples_to_train_data_path",
}
PATH = "megatron_pg.integrations."
REDUCER_FIELD = "custom_pg_loss_reducer_function_path"
CHECKS = {"slime": slime.check, "miles": miles.check}


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainers are not verified, and no divisor is in the environment."""
    monkeypatch.setattr("megatron_pg.integrations.trainer.Trainer.verify", lambda *arguments: None)
    monkeypatch.delenv(DIVISOR_VARIABLE, raising=False)


def arguments(trainer: str, name: str | None = "prompt_mean", **others: Any):
    """A trainer's arguments with a hook of ours, or without any."""
    settings: dict[str, Any] = {"rank": 0, "calculate_per_token_loss": False, REDUCER_FIELD: None}
    settings |= {"context_parallel_size": 2, "qkv_format": "thd", "allgather_cp": False}
    settings |= {"global_batch_size": 64, "n_samples_per_prompt": 8}
    settings[HOOKS[trainer]] = None if name is None else f"{PATH}{trainer}.{name}"
    if trainer == "miles":
        settings |= {"train_backend": "megatron", "object_store_backend": "ray"}
        settings |= {"custom_megatron_init_path": f"{PATH}miles.check"}
    return types.SimpleNamespace(**settings | others)


@pytest.mark.parametrize("trainer", CHECKS)
@pytest.mark.parametrize(
    ("name", "formula"),
    [("prompt_mean", "1/P sum_g"), ("token_mean", "1/max(T, 1)"), ("sample_mean", "1/N sum_i")],
)
def test_one_line_says_what_is_on(trainer, name, formula, capsys):
    CHECKS[trainer](arguments(trainer, name))
    printed = capsys.readouterr().out
    assert printed.startswith(f"megatron_pg: {name} is on in {trainer}: {formula}")
    words = f"for the policy loss. KL, entropy and every metric keep the mean of {trainer}\n"
    assert printed.endswith(words)
    assert printed.count("\n") == 1
    CHECKS[trainer](arguments(trainer, name, rank=3))
    assert capsys.readouterr().out == ""
    CHECKS[trainer](arguments(trainer, name, use_kl_loss=True, regularizer_aggregation="loss"))
    assert capsys.readouterr().out.endswith("for policy loss, KL, entropy and their metrics\n")


@pytest.mark.parametrize("trainer", CHECKS)
def test_the_policy_loss_gets_its_reducer(trainer):
    args = arguments(trainer)
    for _ in range(2):
        CHECKS[trainer](args)
        assert getattr(args, REDUCER_FIELD) == REDUCER
    args = arguments(trainer, regularizer_aggregation="loss")
    CHECKS[trainer](args)
    assert getattr(args, REDUCER_FIELD) is None


CONSTANT, TOKEN_MEAN = ({REDUCER_FIELD: f"{PATH}{name}"} for name in ("constant", "token_mean"))
OF_LOSS = {"regularizer_aggregation": "loss"}
MOONCAKE = {"object_store_backend": "mooncake"}

# trainers: case: (the hook's function, settings, words of the refusal)
REFUSED: dict[str, dict[str, tuple[str | None, dict[str, Any], str]]] = {
    "slime miles": {
        "per token": ("prompt_mean", {"calculate_per_token_loss": True},
                      "--calculate-per-token-loss divides"),
        "a reducer as well": ("prompt_mean", CONSTANT,
                              f"--custom-pg-loss-reducer-function-path {PATH}constant divides a "
                              "second time"),
        "a divisor for a mean": ("prompt_mean", {"loss_aggregation_divisor": 4096},
                                 "loss_aggregation_divisor requires constant"),
        "a divisor below one": ("constant", {"loss_aggregation_divisor": 0.5, **OF_LOSS},
                                "the divisor is 0.5 | divides by at least 1"),
        "a KL term": ("constant", {"loss_aggregation_divisor": 4, "use_kl_loss": True,
                                   "kl_loss_coef": 0.1}, "regularizer_aggregation: sample_mean"),
        "an entropy term": ("token_mean", {"entropy_coef": 0.1}, "regularizer_aggregation: loss"),
        "no such choice": ("token_mean", {"regularizer_aggregation": "own"},
                           "regularizer_aggregation is 'own'"),
        "another aggregation": ("prompt_mean", {"loss_aggregation": "token_mean"},
                                "the settings have loss_aggregation token_mean"),
        "half a group a step": ("prompt_mean", {"global_batch_size": 60},
                                "60 is not a multiple of --n-samples-per-prompt 8"),
        "another layout": ("prompt_mean", {"qkv_format": "bshd"},
                           "--qkv-format bshd with --context-parallel-size"),
        "another order": ("prompt_mean", {"allgather_cp": True},
                          "--allgather-cp orders tokens differently"),
        "nothing": (None, {},
                    "no megatron_pg aggregation is active | integrations.TRAINER.prompt_mean"),
        "no such function": ("promt_mean", {},
                             "promt_mean: unknown function, expected sample_mean"),
        "a reducer without a divisor": (None, CONSTANT, "constant has no divisor"),
        "a reducer of tokens": (None, TOKEN_MEAN, "token_mean without --calculate-per-token-loss"),
    },
    "slime": {
        "a hook without a divisor": ("constant", {},
                                     f"slime.constant has no divisor: set {DIVISOR_VARIABLE}"),
        "two divisors": ("constant", {"loss_aggregation_divisor": 4096},
                         "two divisors | 8192 | 4096"),
    },
    "miles": {
        "a divisor that does not reach the rollout manager": (
            "constant", {}, "does not get --train-env-vars"
        ),
        "fsdp": ("prompt_mean", {"train_backend": "fsdp"},
                 "--train-backend fsdp does not read rollout_mask_sums"),
        "a token mean under fsdp": (None, {**TOKEN_MEAN, "calculate_per_token_loss": True},
                                    "--train-backend fsdp: its training loop drops"),
        "a dynamic batch": ("prompt_mean", {"use_dynamic_global_batch_size": True},
                            "--use-dynamic-global-batch-size"),
        "adapters": ("prompt_mean", {"multi_lora": True}, "multi-LoRA"),
        "replicas": ("prompt_mean", {"indep_dp": True}, "--indep-dp"),
        "images": ("prompt_mean", {"multimodal_keys": {"image": "images"}}, "multimodal inputs"),
        "another scale": ("prompt_mean", {"true_on_policy_mode": True}, "--true-on-policy-mode"),
        "whole numbers": ("prompt_mean", MOONCAKE, "--object-store-backend mooncake"),
        "a divisor that is no whole number": (
            "constant", {**MOONCAKE, **OF_LOSS, "loss_aggregation_divisor": 8192.5}, "mooncake"
        ),
        "a critic on the same divisors": ("token_mean", {"use_critic": True, **OF_LOSS},
                                          "a critic: its value loss reads the same"),
        "nobody reads the divisors": ("token_mean", {"custom_megatron_init_path": "my.init"},
                                      "lets the training processes read | miles.check"),
        "a divisor of letters": ("constant", {"loss_aggregation_divisor": "many"},
                                 "loss-aggregation-divisor is 'many': expected a finite"),
        "all that is wrong": (
            "prompt_mean", {"calculate_per_token_loss": True, "train_backend": "fsdp"},
            "--calculate-per-token-loss | --train-backend fsdp",
        ),
    },
}  # fmt: skip
CASES = [
    (trainer, case, *row)
    for trainers, rows in REFUSED.items()
    for case, row in rows.items()
    for trainer in trainers.split()
]


@pytest.mark.parametrize(("trainer", "case", "name", "settings", "words"), CASES)
def test_refused_at_startup(trainer, case, name, settings, words, monkeypatch):
    if case in ("two divisors", "a divisor that does not reach the rollout manager"):
        monkeypatch.setenv(DIVISOR_VARIABLE, "8192")
    if case == "a token mean under fsdp":
        actor = "miles.backends.fsdp_utils.actor"
        monkeypatch.setitem(sys.modules, actor, types.ModuleType("actor"))
    words = words.replace("TRAINER", trainer)
    assert_refused(words, CHECKS[trainer], arguments(trainer, name, **settings))


def test_what_does_not_matter_is_not_refused():
    """At one context-parallel rank; for a token mean, which groups need not fit."""
    slime.check(arguments("slime", context_parallel_size=1, qkv_format="bshd", allgather_cp=True))
    slime.check(arguments("slime", "token_mean", global_batch_size=60))
    slime.check(arguments("slime", use_kl_loss=True, kl_loss_coef=0, entropy_coef=0.0))
    slime.check(arguments("slime", "sample_mean", use_kl_loss=True, kl_loss_coef=0.1))
    whole = {"object_store_backend": "mooncake", "loss_aggregation_divisor": 8192}
    miles.check(arguments("miles", "constant", **whole, **OF_LOSS))


def test_constant_asks_for_one_divisor(monkeypatch, capsys):
    miles.check(arguments("miles", "constant", loss_aggregation_divisor="8e3"))  # as yaml reads it
    assert "L = 8000" in capsys.readouterr().out
    slime.check(arguments("slime", None, loss_aggregation_divisor=4096, **CONSTANT))
    assert "L = 4096, for the policy loss. KL" in capsys.readouterr().out
    monkeypatch.setenv(DIVISOR_VARIABLE, "8192")
    slime.check(arguments("slime", "constant"))
    assert "L = 8192" in capsys.readouterr().out


@pytest.mark.parametrize("trainer", CHECKS)
def test_a_hook_of_ones_own(trainer, capsys):
    args = arguments(trainer, None, **{REDUCER_FIELD: REDUCER})
    setattr(args, HOOKS[trainer], "my.hook")
    CHECKS[trainer](args)
    assert capsys.readouterr().out.endswith("if your own hook ends with a call of it\n")
