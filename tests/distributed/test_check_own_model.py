"""`megatron-pg check --model-provider`: sound models pass, and faults from public reports are found
at their axis and named by their parameter.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megatron_pg.check import report
from megatron_pg.check.compare import STEPS
from megatron_pg.check.diagnosis import diagnoses
from megatron_pg.check.job import CannotCheckError
from megatron_pg.check.options import parse_options
from megatron_pg.config import versions

from .launch import run_ranks

ROOT = Path(__file__).parents[2]
MODELS = "tests.distributed.own_models"
TP2 = "--tensor-model-parallel-size 2"
SP, CP2 = f"{TP2} --sequence-parallel", "--context-parallel-size 2"
PP2, EP2 = "--pipeline-model-parallel-size 2", "--expert-model-parallel-size 2"
ROWS = (
    *("first weights", "noise", "pack", "pack reversed", "log-probs"),
    *("gradient", "fused head", "update"),
)

Rows = list[tuple[str, bool, str]]
"""What a row compares, whether it passes, and its diagnosis."""


def checked(names: list[str], flags: str) -> list[Rows | str]:
    """The rows of each model, or why it cannot be checked; every rank calls it."""
    from megatron_pg.check.own_model import run_own_check

    found: list[Rows | str] = []
    for name in names:
        words = ["--device", "cpu", "--model-provider", f"{MODELS}:{name}", *flags.split()]
        options, _ = parse_options(words, world_size=dist.get_world_size())
        try:
            own = run_own_check(options)
        except CannotCheckError as error:
            found.append(str(error))
            continue
        said = diagnoses(own.rows, options, dist.get_world_size())
        found.append([(row.what, row.passed, w) for row, w in zip(own.rows, said, strict=True)])
    return found


def check_of(names: list[str], flags: str) -> list[Any]:
    ranks = run_ranks(checked, 2, names, flags)
    assert ranks[0] == ranks[1], "the ranks find different things"
    return ranks[0]


def is_known(name: str, flags: str) -> bool:
    """True if the installed megatron-core builds the model, and is right about it."""
    if name == "hybrid":
        return versions.has_hybrid_model()
    # Latent attention in torch layers. Experts at TP 2 are wrong before (pull request 5916).
    is_recent = (
        "latent" in name or name == "unreduced_router" or (name == "experts" and SP in flags)
    )
    return not is_recent or versions.megatron_core_version() >= (0, 19)


SOUND = {
    SP: ["gpt", "adapter", "row_adapter", "experts"],
    TP2: ["capped_layer", "hybrid", "convolution", "repaired_latent", "lora"],
    f"{SP} --overlap-grad-reduce": ["joined_norm", "hybrid", "lora"],
    CP2: ["gpt", "experts"],
    PP2: ["gpt", "tied", "adapter"],
    f"{PP2} --virtual-pipeline-model-parallel-size 2": ["gpt"],
    EP2: ["experts"],
    "--use-distributed-optimizer": ["frozen_output", "running_state"],
    f"--dtype bf16 {SP}": ["gpt", "wide", "adapter"],
}


@pytest.mark.parametrize(
    "flags", [pytest.param(each, marks=() if each == SP else pytest.mark.full) for each in SOUND]
)
def test_sound_models_pass(flags: str) -> None:
    names = [name for name in SOUND[flags] if is_known(name, flags)]
    for name, rows in zip(names, check_of(names, flags), strict=True):
        assert isinstance(rows, list) and all(passed for _, passed, _ in rows), (name, rows)
        assert [what for what, *_ in rows if what != "frozen"] == [*ROWS, "gradient"], name
        has_frozen = name in ("adapter", "frozen_output", "lora")
        assert ("frozen" in {what for what, *_ in rows}) == has_frozen


PARTIAL = "each TP rank holds a partial sum"
FAULTS: dict[str, tuple[str, str, str]] = {
    # model: (flags, what of its first failed row, words beside it)
    "unreduced_row_adapter": (
        TP2,
        "log-probs",
        "differs is decoder.layers.0.mlp.linear_fc2.adapter",
    ),
    "unreduced_adapter": (SP, "gradient", f"decoder.layers.1.mlp.adapter.down: {PARTIAL}"),
    "other_adapters": (SP, "first weights", "tensor-parallel ranks: decoder.layers.0.mlp.adapter"),
    "unmarked_norm": (SP, "gradient", f"decoder.layers.2.pre_mlp_layernorm.weight: {PARTIAL}"),
    "unmarked_wide_norm": (
        *(f"--dtype bf16 {SP}", "gradient"),
        f"decoder.layers.2.pre_mlp_layernorm.weight: {PARTIAL}",
    ),
    "unmarked_joined_norm": (
        *(SP, "gradient"),
        f"decoder.layers.2.mlp.linear_fc1.layer_norm_weight: {PARTIAL}",
    ),
    "half_again": (
        *(f"--dtype bf16 {SP}", "gradient"),
        "the gradient of decoder.layers.1.self_attention.q_layernorm.weight",
    ),
    "unreduced_router": (SP, "gradient", f"decoder.layers.3.mlp.router.weight: {PARTIAL}"),
    "doubled_gradient": (
        *(SP, "gradient"),
        "decoder.layers.1.input_layernorm.weight: 2 times the expected: 2 = TP",
    ),
    "latent": (SP, "gradient", "decoder.layers.3.self_attention.linear_kv_down_proj.weight"),
    "updated_on_one_rank": (SP, "update", "decoder.final_layernorm.weight: missing on rank 1"),
    "lost_cap": (TP2, "fused head", "the gradient of"),
    "leaking_convolution": ("", "pack", "a leak between packed samples"),
    "leaking_state": ("", "pack", "a leak between packed samples"),
    "leaking_attention": ("", "pack", "a leak between packed samples"),
    "lost_tie": (PP2, "gradient", "embedding.word_embeddings.weight: each PP rank holds a partial"),
    "restarting_positions": (CP2, "log-probs", "layers.0.self_attention.core_attention"),
}
IN_CI = ("unreduced_adapter", "unreduced_row_adapter", "leaking_attention")


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=() if each in IN_CI else pytest.mark.full) for each in FAULTS]
)
def test_a_fault_is_found_and_named(name: str) -> None:
    flags, what, words = FAULTS[name]
    if not is_known(name, flags):
        pytest.skip("the model needs megatron-core 0.19")
    (rows,) = check_of([name], flags)
    assert isinstance(rows, list), rows
    failed = [(kind, said) for kind, passed, said in rows if not passed]
    assert failed and failed[0][0] == what, failed
    assert all(words in said for kind, said in failed if kind == what), failed
    assert all(said for _, said in failed)


REFUSED = {
    "old_signature": "define provider(pre_process, post_process, vp_stage=None, config=None",
    "nothing_of_this_name": "has no attribute 'nothing_of_this_name'",
    "returns_a_list": "returned a list: return one model",
    "with_dropout": "hidden_dropout=0.1",
    "without_packs": "does not run a packed sequence",
    "padded_vocabulary": "pads the vocabulary to the tensor-parallel size",
    "own_sizes": "tensor_model_parallel_size=2 instead of 1",
}


def test_what_cannot_be_checked_is_answered_in_a_sentence() -> None:
    said = check_of([*REFUSED], TP2)
    for (name, words), text in zip(REFUSED.items(), said, strict=True):
        assert isinstance(text, str) and words in text, (name, text)


def command(name: str, *flags: str) -> subprocess.CompletedProcess[str]:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    words = (f"{MODELS}:{name}", "--device", "cpu", *flags)
    call = [sys.executable, *launcher, "-m", "megatron_pg", "check", "--model-provider", *words]
    return subprocess.run(call, cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.mark.full
def test_the_command_prints_the_verdict_first_and_passes_flags_on() -> None:
    done = command("of_flags", *TP2.split(), "--", "--layers", "2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("PASS: every gradient is the unsharded one (9 rows)")
    assert "the unsharded model has 19,648 parameters" in done.stderr
    found = json.loads(command("of_flags", "--json", "--", "--layers", "2").stdout)
    assert found["passed"] and found["options"]["provider_flags"] == ["--layers", "2"]


@pytest.mark.full
def test_an_error_on_one_rank_ends_all() -> None:
    done = command("fails_on_one_rank")
    assert done.returncode == 1 and done.stdout == ""
    assert "rank 1 failed: OSError: no such tokenizer here" in done.stderr


@pytest.mark.parametrize(
    ("unit", "limit"), [(1e-6, 1e-5), (0.03, 0.3), (0.058, 0.4), (0.09, 0.45), (0.2, 1.0), (0.6, 6)]
)
def test_a_factor_that_ten_units_would_hide_is_found_by_five(unit: float, limit: float) -> None:
    """Of a gradient whose norm is 1; the last one is nothing but rounding."""
    from megatron_pg.check.own_model import narrowed

    assert STEPS * narrowed(unit, norm=1.0) == pytest.approx(limit)


def test_a_kind_is_a_parameter_of_all_layers_and_experts() -> None:
    from megatron_pg.check.own_model import kind_of

    one, other = ("decoder.layers.{}.mlp.linear_fc1.weight[{}]".format(*n) for n in ("12", "34"))
    assert kind_of(one) == kind_of(other) == "decoder.layers.*.mlp.linear_fc1.weight[*]"
    assert kind_of("weight[0,3]") == "weight[*,*]"


def test_only_mistakes_that_the_layout_can_meet_are_listed() -> None:
    version = (0, 19, 2)
    some = [*report.mistakes_in(version, frozenset({"TP", "latent attention"}))]
    assert any("multi-latent" in mistake for mistake in some)
    assert not any("experts" in mistake for mistake in some)
    assert len([*report.mistakes_in(version)]) > len(some)
