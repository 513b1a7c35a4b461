"""What slime's and miles' init hook refuses before the model is loaded, and the line that it prints."""

import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_pg.integrations import DIVISOR_VARIABLE, miles, slime
from megatron_pg.integrations.trainer import fingerprint, source_of
from tests.fast.refusals import assert_refused, refusal

HOOKS = {
    "slime": "rollout_data_postprocess_path",
    "miles": "custom_convert_samples_to_train_data_path",
}
PATH = "megatron_pg.integrations."
REDUCER = "custom_pg_loss_reducer_function_path"
CHECKS = {"slime": slime.check, "miles": miles.check}


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainers are known versions, and no divisor is in the environment."""
    monkeypatch.setattr("megatron_pg.integrations.trainer._accepted", {"slime", "miles"})
    monkeypatch.delenv(DIVISOR_VARIABLE, raising=False)


def arguments(trainer: str, name: str | None = "prompt_mean", **others: Any):
    """A trainer's arguments with a hook of ours, or without any."""
    settings: dict[str, Any] = {"rank": 0, "calculate_per_token_loss": False, REDUCER: None}
    settings |= {"context_parallel_size": 2, "qkv_format": "thd", "allgather_cp": False}
    settings |= {"global_batch_size": 64, "n_samples_per_prompt": 8}
    settings[HOOKS[trainer]] = None if name is None else f"{PATH}{trainer}.{name}"
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
    assert printed.endswith("for policy loss, KL, entropy and their metrics\n")
    assert printed.count("\n") == 1
    CHECKS[trainer](arguments(trainer, name, rank=3))
    assert capsys.readouterr().out == ""


def refused(trainer: str, message: str, *name: str | None, **others: Any) -> None:
    with pytest.raises(ValueError, match=message):
        CHECKS[trainer](arguments(trainer, *name, **others))


CONSTANT, TOKEN_MEAN = ({REDUCER: f"{PATH}{name}"} for name in ("constant", "token_mean"))
COMMON: dict[str, tuple[str | None, dict[str, Any], str]] = {
    # name: (the hook's function, settings, the error)
    "per token": ("prompt_mean", {"calculate_per_token_loss": True}, "--calculate-per-token-loss divides"),
    "a reducer as well": (
        "prompt_mean", CONSTANT, f"--custom-pg-loss-reducer-function-path {PATH}constant divides a second time"
    ),
    "a divisor for a mean": ("prompt_mean", {"loss_aggregation_divisor": 4096}, "loss_aggregation_divisor 4096 is of constant"),
    "a divisor below one": ("constant", {"loss_aggregation_divisor": 0.5}, "the divisor is 0.5.*divides by 1 at least"),
    "another aggregation": ("prompt_mean", {"loss_aggregation": "token_mean"}, "loss_aggregation token_mean in the settings"),
    "half a group a step": ("prompt_mean", {"global_batch_size": 60}, "60 is no multiple of --n-samples-per-prompt 8"),
    "another layout": ("prompt_mean", {"qkv_format": "bshd"}, "--qkv-format bshd with --context-parallel-size"),
    "another order": ("prompt_mean", {"allgather_cp": True}, "--allgather-cp has another order"),
    "nothing": (None, {}, "nothing of megatron_pg is on.*integrations.(slime|miles).prompt_mean"),
    "no such function": ("promt_mean", {}, "promt_mean: no such function; there are sample_mean"),
    "a reducer without a divisor": (None, CONSTANT, "constant has no divisor"),
    "a reducer of tokens": (None, TOKEN_MEAN, "token_mean without --calculate-per-token-loss"),
}  # fmt: skip
OF_MILES: dict[str, tuple[str, dict[str, Any], str]] = {
    "fsdp": ("prompt_mean", {"train_backend": "fsdp"}, "--train-backend fsdp does not read rollout_mask_sums"),
    "a dynamic batch": ("prompt_mean", {"use_dynamic_global_batch_size": True}, "--use-dynamic-global-batch-size"),
    "adapters": ("prompt_mean", {"multi_lora": True}, "multi-LoRA"),
    "replicas": ("prompt_mean", {"indep_dp": True}, "--indep-dp"),
    "images": ("prompt_mean", {"multimodal_keys": {"image": "images"}}, "multimodal inputs"),
    "another scale": ("prompt_mean", {"true_on_policy_mode": True}, "--true-on-policy-mode"),
    "whole numbers": ("prompt_mean", {"object_store_backend": "mooncake"}, "--object-store-backend mooncake"),
    "a divisor that is no whole number": (
        "constant", {"object_store_backend": "mooncake", "loss_aggregation_divisor": 8192.5}, "mooncake"
    ),
    "a divisor of letters": (
        "constant", {"loss_aggregation_divisor": "many"}, "loss-aggregation-divisor is 'many': expected a finite"
    ),
    "a divisor of nan": ("constant", {"loss_aggregation_divisor": "nan"}, "finite"),
    "all that is wrong": (
        "prompt_mean", {"calculate_per_token_loss": True, "train_backend": "fsdp"},
        "(?s)--calculate-per-token-loss.*--train-backend fsdp",
    ),
}  # fmt: skip


@pytest.mark.parametrize("trainer", CHECKS)
@pytest.mark.parametrize("what", COMMON)
def test_refused_in_both(trainer, what):
    name, settings, message = COMMON[what]
    refused(trainer, message, name, **settings)


@pytest.mark.parametrize("what", OF_MILES)
def test_refused_in_miles(what):
    name, settings, message = OF_MILES[what]
    refused("miles", message, name, **settings)


def test_what_does_not_matter_is_not_refused():
    """At one context-parallel rank; for a token mean, which groups need not fit."""
    slime.check(arguments("slime", context_parallel_size=1, qkv_format="bshd", allgather_cp=True))
    slime.check(arguments("slime", "token_mean", global_batch_size=60))
    whole = {"object_store_backend": "mooncake", "loss_aggregation_divisor": 8192}
    miles.check(arguments("miles", "constant", **whole))


def test_constant_asks_for_one_divisor(monkeypatch, capsys):
    refused("slime", f"slime.constant has no divisor: set {DIVISOR_VARIABLE}", "constant")
    miles.check(arguments("miles", "constant", loss_aggregation_divisor="8e3"))  # as yaml reads it
    assert "L = 8000" in capsys.readouterr().out
    slime.check(arguments("slime", None, loss_aggregation_divisor=4096, **CONSTANT))
    assert "L = 4096, for the policy loss alone" in capsys.readouterr().out
    monkeypatch.setenv(DIVISOR_VARIABLE, "8192")
    slime.check(arguments("slime", "constant"))
    assert "L = 8192" in capsys.readouterr().out
    refused("slime", "two divisors.*8192.*4096", "constant", loss_aggregation_divisor=4096)
    # It must reach the rollout manager.
    refused("miles", "--train-env-vars do not arrive", "constant")


def test_a_token_mean_under_miles_fsdp_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "miles.backends.fsdp_utils.actor", types.ModuleType("actor"))
    settings = {**TOKEN_MEAN, "calculate_per_token_loss": True}
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
    source = "raise RuntimeError('the package is read and not imported')"
    (file.parent / "__init__.py").write_text(source)
    file.write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    names = ("Actor.train", "scale")
    known = {"loss.py": {name: fingerprint(source_of(file, name) or "") for name in names}}
    monkeypatch.setattr(slime, "check", replace(slime.SLIME, sources=known).check)
    monkeypatch.setattr("megatron_pg.integrations.trainer._accepted", set())
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


@pytest.mark.parametrize(("old", "new", "named"), [
    ("loss * count", "loss * count * 2", "scale"),
    ("# no comment", "# a comment", "scale"),
    ("@timer", "@torch.no_grad()", "Actor.train"),
    ("def scale", "def scaled", "scale"),
])  # fmt: skip
def test_an_unknown_version_names_the_function_and_the_command(package, old, new, named):
    package.write_text(SOURCE.replace(old, new))
    message = refusal(slime.check, arguments("slime"))
    assert message.startswith(f"unknown version of slime: {named} (slime/loss.py) not as in commit")
    assert "bash ci/trainers.sh" in message
    proven = message.rpartition('megatron_pg_proven_source: "')[2].partition('"')[0]
    slime.check(arguments("slime", megatron_pg_proven_source=proven))


def test_a_statement_that_leaves_its_branch_makes_a_version():
    inside = "def f(s, x):\n    if x:\n        s *= 2\n        s /= 3\n    return s\n"
    assert fingerprint(inside) != fingerprint(inside.replace("        s /=", "    s /="))


def test_one_proof_is_of_one_source(package):
    package.write_text(SOURCE.replace("loss * count", "loss / count"))
    args = arguments("slime", megatron_pg_proven_source="0123456789abcdef")
    assert_refused("unknown version of slime", slime.check, args)


def test_where_the_trainer_is_not_installed(monkeypatch):
    monkeypatch.setattr("megatron_pg.integrations.trainer._accepted", set())
    absent = replace(slime.SLIME, name="no_such_trainer")
    args = arguments("slime", **{HOOKS["slime"]: f"{PATH}no_such_trainer.token_mean"})
    assert_refused("no_such_trainer cannot be imported here", absent.check, args)
