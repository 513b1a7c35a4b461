"""What slime's and miles' init hook refuses before the model is loaded, and the line that it prints."""

from __future__ import annotations

import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_pg.integrations import DIVISOR_VARIABLE, miles, slime, source_fingerprints
from megatron_pg.integrations.source_fingerprints import fingerprint, source_of

HOOKS = {
    "slime": "rollout_data_postprocess_path",
    "miles": "custom_convert_samples_to_train_data_path",
}
CHECKS = {"slime": slime.check, "miles": miles.check}


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainers are known versions, and no divisor is in the environment."""
    monkeypatch.setattr(source_fingerprints, "_accepted", {"slime", "miles"})
    monkeypatch.delenv(DIVISOR_VARIABLE, raising=False)


def arguments(
    trainer: str, name: str | None = "prompt_mean", **others: Any
) -> types.SimpleNamespace:
    """A trainer's arguments with a hook of ours, or without any."""
    settings: dict[str, Any] = {
        "rank": 0,
        "calculate_per_token_loss": False,
        "custom_pg_loss_reducer_function_path": None,
        "context_parallel_size": 2,
        "qkv_format": "thd",
        "allgather_cp": False,
        "global_batch_size": 64,
        "n_samples_per_prompt": 8,
        HOOKS[trainer]: None if name is None else f"megatron_pg.integrations.{trainer}.{name}",
    }
    if trainer == "miles":
        settings |= {"train_backend": "megatron", "object_store_backend": "ray"}
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
    assert (
        printed.endswith("for policy loss, KL, entropy and their metrics\n")
        and printed.count("\n") == 1
    )
    CHECKS[trainer](arguments(trainer, name, rank=3))
    assert capsys.readouterr().out == ""


def refused(trainer: str, message: str, *name: str | None, **others: Any) -> None:
    with pytest.raises(ValueError, match=message):
        CHECKS[trainer](arguments(trainer, *name, **others))


COMMON: dict[str, tuple[dict[str, Any], str]] = {
    "per token": ({"calculate_per_token_loss": True}, "--calculate-per-token-loss divides"),
    "a reducer as well": (
        {"custom_pg_loss_reducer_function_path": "megatron_pg.integrations.constant"},
        "--custom-pg-loss-reducer-function-path megatron_pg.integrations.constant divides a second time",
    ),
    "a divisor for a mean": (
        {"loss_aggregation_divisor": 4096},
        "loss_aggregation_divisor 4096 is of constant",
    ),
    "another aggregation": (
        {"loss_aggregation": "token_mean"},
        "loss_aggregation token_mean in the settings",
    ),
    "half a group a step": (
        {"global_batch_size": 60},
        "60 is no multiple of --n-samples-per-prompt 8",
    ),
    "another layout": ({"qkv_format": "bshd"}, "--qkv-format bshd with --context-parallel-size"),
    "another order": ({"allgather_cp": True}, "--allgather-cp has another order"),
}
OF_MILES: dict[str, tuple[dict[str, Any], str]] = {
    "fsdp": ({"train_backend": "fsdp"}, "--train-backend fsdp does not read rollout_mask_sums"),
    "a dynamic batch": ({"use_dynamic_global_batch_size": True}, "--use-dynamic-global-batch-size"),
    "adapters": ({"multi_lora": True}, "multi-LoRA"),
    "replicas": ({"indep_dp": True}, "--indep-dp"),
    "images": ({"multimodal_keys": {"image": "images"}}, "multimodal inputs"),
    "another scale": ({"true_on_policy_mode": True}, "--true-on-policy-mode"),
    "whole numbers": ({"object_store_backend": "mooncake"}, "--object-store-backend mooncake"),
}


@pytest.mark.parametrize("trainer", CHECKS)
@pytest.mark.parametrize("what", COMMON)
def test_refused_in_both(trainer, what):
    settings, message = COMMON[what]
    refused(trainer, message, **settings)


@pytest.mark.parametrize("what", OF_MILES)
def test_refused_in_miles(what):
    settings, message = OF_MILES[what]
    refused("miles", message, **settings)


def test_all_that_is_wrong_is_in_one_error():
    both = {"calculate_per_token_loss": True, "train_backend": "fsdp"}
    refused("miles", "(?s)--calculate-per-token-loss.*--train-backend fsdp", **both)


def test_what_does_not_matter_at_one_context_parallel_rank():
    slime.check(arguments("slime", context_parallel_size=1, qkv_format="bshd", allgather_cp=True))


def test_groups_need_not_fit_a_token_mean():
    slime.check(arguments("slime", "token_mean", global_batch_size=60))


def test_constant_asks_for_one_divisor(monkeypatch, capsys):
    refused("slime", f"slime.constant has no divisor: set {DIVISOR_VARIABLE}", "constant")
    monkeypatch.setenv(DIVISOR_VARIABLE, "8192")
    slime.check(arguments("slime", "constant"))
    assert "L = 8192" in capsys.readouterr().out
    refused("slime", "two divisors.*8192.*4096", "constant", loss_aggregation_divisor=4096)


def test_a_divisor_that_yaml_reads_as_text(capsys):
    miles.check(arguments("miles", "constant", loss_aggregation_divisor="8e3"))
    assert "L = 8000" in capsys.readouterr().out
    message = "loss-aggregation-divisor is 'many': expected a finite"
    refused("miles", message, "constant", loss_aggregation_divisor="many")
    refused("miles", "finite", "constant", loss_aggregation_divisor="nan")


@pytest.mark.parametrize("trainer", CHECKS)
def test_a_divisor_below_one_meets_their_clamp(trainer):
    message = "the divisor is 0.5.*divides by 1 at least"
    refused(trainer, message, "constant", loss_aggregation_divisor=0.5)


def test_the_divisor_of_miles_must_reach_the_rollout_manager(monkeypatch):
    monkeypatch.setenv(DIVISOR_VARIABLE, "8192")
    refused("miles", "--train-env-vars do not arrive", "constant")
    monkeypatch.delenv(DIVISOR_VARIABLE)
    miles.check(arguments("miles", "constant", loss_aggregation_divisor=8192))


def test_a_whole_divisor_goes_through_mooncake():
    settings = {"object_store_backend": "mooncake", "loss_aggregation_divisor": 8192}
    miles.check(arguments("miles", "constant", **settings))
    refused("miles", "mooncake", "constant", **settings | {"loss_aggregation_divisor": 8192.5})


@pytest.mark.parametrize("trainer", CHECKS)
def test_a_check_of_nothing_is_refused(trainer):
    message = f"nothing of megatron_pg is on.*integrations.{trainer}.prompt_mean"
    refused(trainer, message, None)


def test_a_hook_that_is_not_there_is_refused():
    refused("slime", "slime.promt_mean: no such function; there are sample_mean", "promt_mean")


def test_reducers_are_checked_too(capsys):
    path = "megatron_pg.integrations."
    by_path = {
        name: {"custom_pg_loss_reducer_function_path": f"{path}{name}"}
        for name in ("constant", "token_mean")
    }
    refused("slime", "constant has no divisor", None, **by_path["constant"])
    message = "token_mean without --calculate-per-token-loss"
    refused("miles", message, None, **by_path["token_mean"])
    settings = {
        "custom_pg_loss_reducer_function_path": f"{path}constant",
        "loss_aggregation_divisor": 4096,
    }
    slime.check(arguments("slime", None, **settings))
    assert "L = 4096, for the policy loss alone" in capsys.readouterr().out


def test_a_token_mean_under_miles_fsdp_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "miles.backends.fsdp_utils.actor", types.ModuleType("actor"))
    path = "megatron_pg.integrations.token_mean"
    settings = {"custom_pg_loss_reducer_function_path": path, "calculate_per_token_loss": True}
    refused("miles", "--train-backend fsdp: its training loop drops", None, **settings)


SOURCE = '''
class Actor:
    @timer
    def train(self, data):
        """What it does."""
        return data  # in place


def scale(loss, count):
    """Scaled."""
    text = "# no comment"
    return loss * count, text
'''


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package named slime of two functions, which are what was proven."""
    file = tmp_path / "slime" / "loss.py"
    file.parent.mkdir()
    (file.parent / "__init__.py").write_text(
        "raise RuntimeError('the package is read and not imported')"
    )
    file.write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    names = ("Actor.train", "scale")
    known = {"loss.py": {name: fingerprint(source_of(file, name) or "") for name in names}}
    monkeypatch.setattr(slime, "check", replace(slime.SLIME, sources=known).check)
    monkeypatch.setattr(source_fingerprints, "_accepted", set())
    return file


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("in place", "by reference"),
        ("What it does.", "Other words."),
        ("    return loss * count", "\n    return loss * count"),
    ],
    ids=["comment", "docstring", "empty line"],
)
def test_words_and_empty_lines_do_not_make_a_version(package, old, new):
    package.write_text(SOURCE.replace(old, new))
    slime.check(arguments("slime"))


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("loss * count", "loss * count * 2", "scale"),
        ("# no comment", "# a comment", "scale"),
        ("@timer", "@torch.no_grad()", "Actor.train"),
        ("def scale", "def scaled", "scale"),
    ],
)
def test_an_unknown_version_names_the_function_and_the_command(package, old, new, named):
    package.write_text(SOURCE.replace(old, new))
    with pytest.raises(ValueError) as error:
        slime.check(arguments("slime"))
    message = str(error.value)
    assert message.startswith(f"unknown version of slime: {named} (slime/loss.py) not as in commit")
    assert "bash ci/trainers.sh" in message
    proven = message.rpartition('megatron_pg_proven_source: "')[2].partition('"')[0]
    slime.check(arguments("slime", megatron_pg_proven_source=proven))


def test_a_statement_that_leaves_its_branch_makes_a_version():
    inside = "def f(s, x):\n    if x:\n        s *= 2\n        s /= 3\n    return s\n"
    assert fingerprint(inside) != fingerprint(inside.replace("        s /=", "    s /="))


def test_one_proof_is_of_one_source(package):
    package.write_text(SOURCE.replace("loss * count", "loss / count"))
    with pytest.raises(ValueError, match="unknown version of slime"):
        slime.check(arguments("slime", megatron_pg_proven_source="0123456789abcdef"))


def test_where_the_trainer_is_not_installed(monkeypatch):
    monkeypatch.setattr(source_fingerprints, "_accepted", set())
    absent = replace(slime.SLIME, name="no_such_trainer")
    args = arguments(
        "slime", rollout_data_postprocess_path="megatron_pg.integrations.no_such_trainer.token_mean"
    )
    with pytest.raises(ValueError, match="no_such_trainer cannot be imported here"):
        absent.check(args)
