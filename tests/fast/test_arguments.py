"""Every rule of the flags: what is settled, what is refused, and that a refusal names the flag."""

import argparse
import copy
import dataclasses
import logging
import math
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_pg import add_critic_args
from megatron_pg.config import (
    PolicyLossConfig,
    add_planning_args,
    add_policy_loss_args,
    validate_policy_loss_args,
)
from megatron_pg.config.policy_loss import require_config
from megatron_pg.config.settings import fields_of
from megatron_pg.config.tables import OPTIONAL_SAMPLE_FIELDS
from megatron_pg.step.sample import Sample
from tests.fast import tables
from tests.fast.refusals import assert_refused

HERE = "tests.fast.test_arguments"


def custom_reducer(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    return lambda x: x.sum()


def custom_policy_loss(config, batch, log_probs):
    return -log_probs


def custom_tis(config, batch, log_probs, pg_loss):
    return pg_loss, batch.loss_mask


FIELDS = fields_of(PolicyLossConfig)
FLAGS = [field.flag for field in FIELDS.values() if field.has_flag] + ["--pg-loss-divisor"]
TOKENS = "--loss-aggregation token_mean"
REDUCER = f"--custom-pg-loss-reducer-function-path {HERE}.custom_reducer"
LOSS = f"--custom-policy-loss-path {HERE}:custom_policy_loss"
MOE = {"num_experts": 8, "moe_aux_loss_coeff": 0.01}
MOE_LOSSES = ["seq_aux_loss", "global_aux_loss"]
TWO_MOE_LOSSES = {
    **MOE,
    "moe_aux_loss_coeff": [0.0, 0.01],
    "moe_router_load_balancing_type": MOE_LOSSES,
}
MOE_FLAGS = "--num-experts 2 --moe-aux-loss-coeff 0.01"


def parse(line: str, **trainer: object) -> argparse.Namespace:
    """Parsed flags, with the trainer's own arguments that a case needs."""
    parser = add_policy_loss_args(argparse.ArgumentParser())
    args = parser.parse_args(line.split())
    vars(args).update(trainer)
    return args


# (flags, the trainer's arguments, settled aggregation, divisor, per-token flag)
SETTLED = [
    ("", {}, "sample_mean", None, False),
    ("--loss-aggregation sample_mean", {}, "sample_mean", None, False),
    ("--loss-aggregation prompt_mean", {}, "prompt_mean", None, False),
    ("--loss-aggregation constant --loss-aggregation-divisor 8", {}, "constant", 8.0, False),
    ("--pg-loss-divisor 8", {}, "constant", 8.0, False),
    ("--pg-loss-divisor 8 --loss-aggregation constant", {}, "constant", 8.0, False),
    ("--pg-loss-divisor 8 --loss-aggregation-divisor 8.0", {}, "constant", 8.0, False),
    # token_mean turns per-token mode on where nothing speaks against it
    (TOKENS, {}, "token_mean", None, True),
    (TOKENS + " --calculate-per-token-loss", {}, "token_mean", None, True),
    (TOKENS, {"num_experts": 8}, "token_mean", None, True),
    (TOKENS, {"moe_aux_loss_coeff": 0.01}, "token_mean", None, True),
    (TOKENS, {**MOE, "moe_router_load_balancing_type": "none"}, "token_mean", None, True),
    (TOKENS, {"num_experts": 8, "moe_aux_loss_coeff": [0.0, 0.0]}, "token_mean", None, True),
    (TOKENS, {"mtp_num_layers": 0}, "token_mean", None, True),
    # ... and leaves it off where something does
    (TOKENS, MOE, "token_mean", None, False),
    (TOKENS, TWO_MOE_LOSSES, "token_mean", None, False),
    (TOKENS, {"num_experts": 8, "moe_z_loss_coeff": 1e-3}, "token_mean", None, False),
    (TOKENS, {"mtp_num_layers": 1}, "token_mean", None, False),
    (TOKENS, {"use_torch_fsdp2": True}, "token_mean", None, False),
    (TOKENS, {"ddp_average_in_collective": True}, "token_mean", None, False),
    # asked for by name, per-token mode stays on beside the model's own losses
    (TOKENS + " --calculate-per-token-loss", MOE, "token_mean", None, True),
    # the flag with the sample mean, default or explicit, is the token mean
    ("--calculate-per-token-loss", {}, "token_mean", None, True),
    ("--calculate-per-token-loss --loss-aggregation sample_mean", {}, "token_mean", None, True),
    ("--calculate-per-token-loss", {"mtp_num_layers": 1}, "token_mean", None, True),
    # a custom reducer takes precedence, and its mode is what the flag says
    (REDUCER, {}, "sample_mean", None, False),
    (REDUCER + " --loss-aggregation prompt_mean", {}, "prompt_mean", None, False),
    (REDUCER + " --loss-aggregation token_mean", {}, "token_mean", None, False),
    (REDUCER + " --calculate-per-token-loss", {}, "sample_mean", None, True),
    # a layout without a window is fine where there is none to cut
    ("--qkv-format bshd", {"context_parallel_size": 1}, "sample_mean", None, False),
]


@pytest.mark.parametrize(("line", "trainer", "aggregation", "divisor", "per_token"), SETTLED)
def test_flags_are_settled_and_validating_again_changes_nothing(
    line, trainer, aggregation, divisor, per_token
):
    args = parse(line, **trainer)
    untouched = {k: v for k, v in vars(args).items() if not k.startswith(("loss_", "calculate"))}

    assert validate_policy_loss_args(args) is args

    config = PolicyLossConfig.from_args(args)
    assert (config.loss_aggregation, config.loss_aggregation_divisor) == (aggregation, divisor)
    assert config.calculate_per_token_loss is args.calculate_per_token_loss is per_token
    once = copy.deepcopy(vars(args))
    assert untouched.items() <= once.items()
    validate_policy_loss_args(args)
    assert vars(args) == once


DIVISOR = "--loss-aggregation-divisor"
CONSTANT = f"--loss-aggregation constant {DIVISOR}"
MODES = ("sample_mean", "prompt_mean", "token_mean")
CUSTOM = "--custom-pg-loss-reducer-function-path"
PER_TOKEN = "--calculate-per-token-loss"
ACCEPTED, ORIGINAL = (f"--rejection-denominator {word}" for word in ("accepted", "original"))
SECOND = {
    "use_torch_fsdp2": "--use-torch-fsdp2",
    "ddp_average_in_collective": "--ddp-average-in-collective",
}

# flags: words that the message must have, between bars
REFUSED = {
    "--loss-aggregation constant": DIVISOR,
    **{f"--pg-loss-divisor {value}": f"--pg-loss-divisor | finite number > 0 | {value}"
       for value in ("0.0", "-1.0", "nan", "inf")},
    **{f"--loss-aggregation {mode} {DIVISOR} 4":
       f"{DIVISOR} 4 | {mode} | --loss-aggregation constant" for mode in MODES},
    f"{DIVISOR} 4": f"{DIVISOR} 4 | --loss-aggregation constant",
    **{f"--pg-loss-divisor 4 --loss-aggregation {mode}":
       f"--pg-loss-divisor 4 | --loss-aggregation {mode}" for mode in MODES},
    f"--pg-loss-divisor 4 {DIVISOR} 5": f"--pg-loss-divisor 4 | {DIVISOR} 5",
    f"{REDUCER} --pg-loss-divisor 4": f"{CUSTOM} | --pg-loss-divisor 4",
    f"{REDUCER} {CONSTANT} 4": f"{CUSTOM} | {DIVISOR}",
    f"{REDUCER} {DIVISOR} 4": f"{CUSTOM} | {DIVISOR}",
    f"{REDUCER} --loss-aggregation constant": f"{CUSTOM} | --loss-aggregation constant",
    f"{PER_TOKEN} --loss-aggregation prompt_mean": f"{PER_TOKEN} | prompt_mean",
    f"{PER_TOKEN} {CONSTANT} 4": f"{PER_TOKEN} | constant",
    f"{PER_TOKEN} --pg-loss-divisor 4": f"{PER_TOKEN} | constant",
    f"{PER_TOKEN} --loss-aggregation prompt_mean {REDUCER}": f"{PER_TOKEN} | prompt_mean",
    **{f"--eps-clip-c 3 --policy-loss {name}": f"--eps-clip-c | {name}"
       for name in ("cispo", "reinforce", "sft")},
    "--policy-loss distill": "--policy-loss distill requires --distill-teacher: logits, hidden",
    "--distill-coef 0.1": "--distill-coef requires --distill-teacher",
    "--distill-teacher top_k":
        "--distill-teacher has no effect without --policy-loss distill or --distill-coef",
    "--policy-loss distill --distill-coef 1 --distill-teacher logits --distill-beta 1 "
    "--replay-sampling-set":
        "3 invalid settings | --policy-loss distill are mutually exclusive | "
        "--replay-sampling-set | a number below 1",
    "--kept-set-mass": "--kept-set-mass requires --replay-sampling-set. Add it",
    "--kept-set-mass --replay-sampling-set --fused-lm-head --pg-metrics none":
        "invalid settings | Remove one of them | --fused-lm-head | --pg-metrics none",
    "--policy-loss dis --use-tis":
        "--policy-loss dis and --use-tis are mutually exclusive",
    **{f"--ratio-anchor rollout --policy-loss {name}":
       f"--ratio-anchor rollout has no effect with --policy-loss {name}"
       for name in ("dis", "reinforce", "sft")},
    "--kl-target 0.1": "--kl-target 0.1 has no effect without --kl-loss-coef",
    "--kl-loss-coef 1 --kl-horizon 9": "--kl-horizon 9 has no effect without --kl-target. Add it",
    "--kl-loss-coef 1 --kl-target 1 --regularizer-aggregation loss --pg-loss-divisor 9":
        "--kl-target with",
    "--cispo-lower-bound": "--cispo-lower-bound | --policy-loss cispo",
    "--sapo-tau-pos 2": "--sapo-tau-pos 2.0 belongs to --policy-loss sapo | ppo",
    "--policy-loss sapo --dppo-delta 0.1 --dppo-delta-high 0.2 --eps-clip-c 3":
        "3 invalid settings | --dppo-delta 0.1 belongs to --policy-loss dppo_tv and dppo_kl | "
        "--dppo-delta-high 0.2 belongs | --eps-clip-c 3.0 belongs to --policy-loss ppo and gspo",
    "--ratio-anchor rollout --use-tis --policy-loss sft --use-unbiased-kl":
        "3 invalid settings | --use-tis are mutually | no effect with --policy-loss sft | "
        "--use-unbiased-kl has no effect without --kl-loss-coef",
    "--ratio-anchor rollout --use-tis --tis-mode mask": "--use-tis are mutually exclusive",
    "--tis-clip 5": "--tis-clip 5.0 has no effect without --use-tis. Add one or remove it",
    "--use-unbiased-kl": "--use-unbiased-kl has no effect without --kl-loss-coef. Add",
    f"--use-tis {ACCEPTED}":
        "has no effect without --use-tis --custom-tis-function-path or --use-opsm or --use-tis "
        "--tis-mode mask or",
    "--distill-beta 0.3": "--distill-beta 0.3 has no effect without --distill-divergence jsd. Add",
    "--distill-divergence jsd":
        "--distill-divergence jsd has no effect without --policy-loss distill",
    "--tis-clip 2 --tis-clip-low 3": "--tis-clip-low 3 | --tis-clip 2",
    **{f"--use-{level} --{level}-low 1.2 --{level}-high 1.1":
       f"--{level}-low 1.2 | --{level}-high 1.1"
       for level in ("geometric-rejection", "sequence-rejection")},
    f"{ACCEPTED} --use-geometric-rejection --use-sequence-rejection":
        "Remove --use-geometric-rejection or --use-sequence-rejection",
    "--kl-loss-coef 0.1 --kl-loss-gradient k2 --use-unbiased-kl":
        "--kl-loss-gradient k2 | --use-unbiased-kl",
    "--kl-loss-gradient k2": "--kl-loss-gradient k2 | --kl-loss-coef",
    "--regularizer-aggregation loss":
        "--regularizer-aggregation loss | --kl-loss-coef | --entropy-coef",
    f"--custom-tis-function-path {HERE}.custom_tis": "--custom-tis-function-path | --use-tis",
    f"{ACCEPTED} --use-opsm": f"{ORIGINAL} | --use-opsm",
    f"{ACCEPTED} --use-tis --custom-tis-function-path {HERE}.custom_tis":
        f"{ORIGINAL} | --custom-tis-function-path",
    f"{ACCEPTED} --use-geometric-rejection --use-tis --tis-mode mask":
        f"{ORIGINAL} | --use-geometric-rejection | --tis-mode mask",
    "--custom-policy-loss-path no_such.fn": "--custom-policy-loss-path | no_such",
    f"--custom-policy-loss-path {HERE}.custom_tis":
        "--custom-policy-loss-path | (config, tokens, log_probs) | pg_loss",
    f"--use-tis --custom-tis-function-path {HERE}:custom_policy_loss":
        "--custom-tis-function-path | pg_loss",
    f"{CUSTOM} {HERE}:custom_policy_loss": f"{CUSTOM} | calculate_per_token_loss",
    # Beyond float32, in which the loss is computed.
    **{f"--kl-loss-coef {value}":
       f"--kl-loss-coef must be a finite number >= 0 within float32's range, not {value}"
       for value in ("1e+300", "1e-300")},
    "--rollout-temperature 1e-50":
        "--rollout-temperature must be a finite number > 0 within float32's range",
    "--use-tis --tis-clip 1e39":
        "--tis-clip must be a finite number >= 2.06115e-09 within float32's range",
    # Bounds that no ratio meets, which lies in [e^-20, e^20].
    "--use-geometric-rejection --geometric-rejection-low 0 --geometric-rejection-high 0":
        "--geometric-rejection-high must be a number or inf >= 2.06115e-09, not 0.0",
    "--use-sequence-rejection --sequence-rejection-high 1e-9":
        "--sequence-rejection-high must be",
    "--use-sequence-rejection --sequence-rejection-low 1e9 --sequence-rejection-high inf":
        "--sequence-rejection-low must be a finite number >= 0 and <= 4.85165e+08, not "
        "1000000000.0",
    "--use-tis --tis-mode mask --tis-clip 1e-10":
        "--tis-clip must be a finite number >= 2.06115e-09",
}  # fmt: skip
# (flags, the trainer's arguments, words, error)
REFUSED_WITH_THE_TRAINERS = [
    *((f"{PER_TOKEN} {rest}", {feature: True},
       f"{PER_TOKEN} | {flag} | --loss-aggregation token_mean", ValueError)
      for rest in ("", TOKENS) for feature, flag in SECOND.items()),
    ("--divide-gradient-twice", {"grad_divisor": 4.0},
     "--divide-gradient-twice | grad_divisor 4", ValueError),
    ("--qkv-format bshd", {"context_parallel_size": 2}, "--qkv-format thd", NotImplementedError),
    ("", {"use_megatron_fsdp": True}, "--use-megatron-fsdp | --use-distributed-optimizer",
     NotImplementedError),
]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "trainer", "words", "error"),
    [
        *((line, {}, words, ValueError) for line, words in REFUSED.items()),
        *REFUSED_WITH_THE_TRAINERS,
    ],
)
def test_refusals_name_the_flag_and_leave_the_arguments_alone(line, trainer, words, error):
    args = parse(line, **trainer)
    before = repr(sorted(vars(args).items()))
    assert_refused(words, validate_policy_loss_args, args, error=error)
    assert repr(sorted(vars(args).items())) == before


def parser_of_another_meaning() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tis-clip", dest="trust_region")
    return parser


# case: (call, words, error)
REFUSED_CALLS = {
    "arguments that are not validated": (
        lambda: PolicyLossConfig.from_args(parse("--pg-loss-divisor 8")),
        "validate_policy_loss_args", ValueError,
    ),
    "a field that a sample does not have": (
        lambda: validate_policy_loss_args(parse(""), sample_fields=["reference_log_probs"]),
        "sample_fields: 'reference_log_probs'", ValueError,
    ),
    "a flag of the same name and another meaning": (
        lambda: add_policy_loss_args(parser_of_another_meaning()),
        "--tis-clip | 'trust_region' | 'tis_clip'", ValueError,
    ),
    "arguments instead of a config": (
        lambda: require_config(argparse.Namespace(**vars(PolicyLossConfig()))),
        "a Namespace,  | PolicyLossConfig.from_args(args)", TypeError,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED_CALLS)
def test_bad_calls_are_refused(case):
    call, words, error = REFUSED_CALLS[case]
    assert_refused(words, call, error=error)


@pytest.mark.parametrize("flag", ["--loss-aggregation", "--policy-loss", "--kl-loss-type"])
def test_the_parser_lists_the_words_of_a_choice(flag, capsys):
    with pytest.raises(SystemExit):
        parse(f"{flag} typo")
    assert FIELDS[flag[2:].replace("-", "_")].choices[-1] in capsys.readouterr().err


OUT_OF_RANGE = {
    "loss_aggregation_divisor": [0, -1, "8", True],
    "eps_clip": [0, -0.2, 1.01, None, True, "0.2"],
    "eps_clip_high": [0, -0.2],
    "eps_clip_c": [1, 0.5],
    "sapo_tau_pos": [0, -1, None],
    "sapo_tau_neg": [0, "1"],
    **{name: [-0.1, None, "2"] for name in FIELDS if name.startswith("vespo")},
    "dppo_delta": [0, -0.1, 1.5],
    "dppo_delta_high": [0, 2],
    "kl_loss_coef": [-0.1, None],
    "kl_target": [0, -0.1],
    "kl_horizon": [0, None],
    "entropy_coef": [-0.1],
    "tis_clip": [0, -2],
    "tis_clip_low": [-0.1],
    "geometric_rejection_low": [-0.1, math.inf],
    "geometric_rejection_high": [-0.1],
    "sequence_rejection_low": [-0.1, math.inf],
    "sequence_rejection_high": [-0.1, "2"],
    "opsm_delta": [-1e-4],
    "rollout_temperature": [0, -1],
    "distill_coef": [-0.1, None],
    "distill_beta": [0.0, -0.5, 1.5, None],
    "grad_divisor": [0, -1],
    "fused_lm_head_memory_gib": [0, -1],
}
"""Of every number; a choice, a switch and a path have the same ones."""


def out_of_range(name: str) -> list[Any]:
    field = FIELDS[name]
    if field.interval is not None:
        infinite = [] if field.interval.or_infinite else [math.inf]
        return [*OUT_OF_RANGE[name], math.nan, -math.inf, *infinite]
    if field.type is bool:
        return [0, 1, "yes", None]
    return ["no such word", "", 3] if field.choices else ["", 3]


@pytest.mark.parametrize("name", FIELDS)
def test_the_config_refuses_values_out_of_range_whoever_builds_it(name):
    field = FIELDS[name]
    for value in [
        *out_of_range(name),
        *([None] if field.choices and not field.is_optional else []),
    ]:
        assert_refused(f"{field.flag} | {value!r}", PolicyLossConfig, **{name: value})


@pytest.mark.parametrize("fields", [
    {"eps_clip": 1.0, "eps_clip_high": 5, "eps_clip_c": 1.5},
    {"eps_clip_c": 3.0, "policy_loss": "gspo"},
    {"eps_clip_c": 3.0, "policy_loss": "reinforce", "custom_policy_loss_path": "a.b"},
    {"cispo_lower_bound": True, "policy_loss": "cispo"},
    {"sapo_tau_pos": 2.0, "sapo_tau_neg": 0.5, "policy_loss": "sapo"},
    {"dppo_delta": 1, "policy_loss": "dppo_kl"},
    {"dppo_delta_high": 0.2, "policy_loss": "dppo_tv", "ratio_anchor": "rollout"},
    {"ratio_anchor": "rollout", "policy_loss": "reinforce", "use_opsm": True},
    {"ratio_anchor": "rollout", "custom_policy_loss_path": "a.b"},
    {"ratio_anchor": "rollout", "use_geometric_rejection": True},
    {"use_tis": True, "tis_clip_low": 2.0, "tis_clip": 2.0, "tis_mode": "mask"},
    *(
        {f"use_{level}": True, f"{level}_low": low, f"{level}_high": high}
        for level, low, high in (
            ("geometric_rejection", 1, 1),
            ("geometric_rejection", 1.1, math.inf),
            ("sequence_rejection", 0, 0.5),
            ("sequence_rejection", 0.0, math.exp(-20)),  # that one ratio meets
            ("sequence_rejection", math.exp(20), math.inf),
        )
    ),
    {"tis_level": "sequence", "tis_mode": "mask", "use_tis": True},
    {"use_opsm": True, "opsm_delta": 0, "kl_loss_coef": 0, "entropy_coef": 0},
    {"calculate_per_token_loss": True, "loss_aggregation": "prompt_mean"},
    {"grad_divisor": 2},
    {"rejection_denominator": "accepted", "use_tis": True, "tis_mode": "mask"},
    {"rejection_denominator": "accepted", "use_tis": True, "use_geometric_rejection": True},
])  # fmt: skip
def test_the_config_takes_values_at_the_edge_of_their_range(fields):
    config = PolicyLossConfig(**fields)
    assert {name: getattr(config, name) for name in fields} == fields
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.eps_clip = 0.1


# (flags, the sample fields that they need)
REQUIRED = [
    ("", "old_log_probs"),
    ("--policy-loss gspo", "old_log_probs"),
    ("--policy-loss reinforce", ""),
    ("--policy-loss sft", ""),
    ("--policy-loss cispo", "old_log_probs"),
    ("--policy-loss sapo", "old_log_probs"),
    ("--policy-loss dis", "rollout_log_probs"),
    ("--policy-loss dis --use-opsm --ratio-anchor rollout", "rollout_log_probs"),
    ("--policy-loss dis --use-geometric-rejection", "old_log_probs rollout_log_probs"),
    ("--policy-loss vespo", "old_log_probs"),
    ("--policy-loss dppo_tv --ratio-anchor rollout", "rollout_log_probs"),
    ("--policy-loss gmpo --ratio-anchor rollout --use-opsm", "rollout_log_probs"),
    ("--policy-loss gspo --ratio-anchor rollout "
     "--use-sequence-rejection", "old_log_probs rollout_log_probs"),
    ("--policy-loss sft --ratio-anchor rollout --kl-loss-coef 1 "
     "--use-unbiased-kl", "ref_log_probs rollout_log_probs"),
    (LOSS, ""),
    ("--policy-loss reinforce --kl-loss-coef 0.1", "ref_log_probs"),
    ("--policy-loss reinforce --kl-loss-coef 0.1 --use-unbiased-kl", "old_log_probs ref_log_probs"),
    ("--policy-loss reinforce --use-opsm", "old_log_probs"),
    ("--use-tis", "old_log_probs rollout_log_probs"),
    ("--use-geometric-rejection", "old_log_probs rollout_log_probs"),
    ("--use-sequence-rejection", "old_log_probs rollout_log_probs"),
    ("--use-tis --tis-level geometric", "old_log_probs rollout_log_probs"),
    ("--policy-loss reinforce --use-tis", "old_log_probs rollout_log_probs"),
    ("--loss-aggregation prompt_mean", "old_log_probs group_index"),
    (f"--loss-aggregation prompt_mean {REDUCER}", "old_log_probs"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "needed"), REQUIRED)
def test_settings_without_the_input_they_need_are_refused(line, needed):
    needed = needed.split()
    args = validate_policy_loss_args(parse(line), sample_fields=needed)
    assert list(PolicyLossConfig.from_args(args).required_sample_fields) == needed
    for missing in needed:
        with pytest.raises(ValueError, match=f"every sample must have {missing} for --"):
            validate_policy_loss_args(parse(line), sample_fields=set(needed) - {missing})


def test_sample_fields_are_fields_of_sample():
    assert set(OPTIONAL_SAMPLE_FIELDS) <= {field.name for field in dataclasses.fields(Sample)}


# (flags, words of the one warning; none where there is nothing to say)
LOGGED = [
    ("", None),
    ("--loss-aggregation token_mean --calculate-per-token-loss", None),
    ("--loss-aggregation token_mean", None),
    ("--calculate-per-token-loss", "sample_mean becomes token_mean"),
    ("--calculate-per-token-loss --loss-aggregation sample_mean", "becomes token_mean"),
    (f"{REDUCER} --loss-aggregation prompt_mean", "replaces --loss-aggregation prompt_mean"),
    (REDUCER, "--custom-pg-loss-reducer-function-path"),
    (f"{LOSS} --policy-loss gspo", "replaces --policy-loss gspo"),
    ("--kl-loss-coef 0.1 --kl-loss-type k1", "--kl-loss-type k1"),
    ("--kl-loss-coef 0.1 --kl-loss-type k1 --use-unbiased-kl", None),
    ("--kl-loss-coef 0.1 --kl-loss-type k1 --kl-loss-gradient k2", None),
    ("--kl-loss-type k1", "--kl-loss-type k1 has no effect without --kl-loss-coef"),
    *[
        (f"--policy-loss {name} --{flag}", f"--{flag} has no effect with --policy-loss {name}")
        for name in ("reinforce", "sft", "sapo", "dppo_tv", "dppo_kl", "vespo")
        for flag in ("eps-clip 0.1", "eps-clip-high 0.3")
    ],
    ("--policy-loss cispo --eps-clip 0.1 --eps-clip-high 3", "--eps-clip 0.1 has no effect with"),
    ("--policy-loss cispo --eps-clip 0.1 --eps-clip-high 3 --cispo-lower-bound", None),
    ("--policy-loss cispo --eps-clip 0.1", None),
    ("--policy-loss gspo --eps-clip 0.1 --eps-clip-high 0.3", None),
    ("--policy-loss gmpo --eps-clip 0.1 --eps-clip-high 0.3", None),
    ("--policy-loss dppo_tv --dppo-delta 0.2 --ratio-anchor rollout", None),
    (f"--eps-clip 0.1 {LOSS}", "replaces"),
]


@pytest.mark.parametrize(("line", "words"), LOGGED)
def test_what_is_changed_or_ignored_is_said_once_and_on_rank_0_only(line, words, caplog):
    with caplog.at_level(logging.WARNING, logger="megatron_pg"):
        validate_policy_loss_args(parse(line, rank=1))
        assert not caplog.messages
        validate_policy_loss_args(parse(line, rank=0))
    assert len(caplog.messages) == (words is not None)
    if words is not None:
        assert words in caplog.messages[0]


@pytest.mark.parametrize(("of_launcher", "count"), [(None, 1), ("0", 1), ("3", 0)])
def test_arguments_whose_rank_is_none_take_the_launchers(of_launcher, count, caplog, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    if of_launcher is not None:
        monkeypatch.setenv("RANK", of_launcher)
    line = "--policy-loss sft --eps-clip 0.1"
    with caplog.at_level(logging.WARNING, logger="megatron_pg"):
        validate_policy_loss_args(parse(line, rank=None))
    assert len(caplog.messages) == count


def test_from_args_takes_validated_arguments():
    args = parse("--pg-loss-divisor 8")
    assert PolicyLossConfig.from_args(validate_policy_loss_args(args)).loss_aggregation_divisor == 8


def test_arguments_of_a_parser_without_our_flags_are_the_defaults():
    args = SimpleNamespace(kl_loss_coef=0.5, eps_clip=0.1)
    config = PolicyLossConfig.from_args(validate_policy_loss_args(args))
    assert config == PolicyLossConfig(kl_loss_coef=0.5, eps_clip=0.1)


def test_defaults_of_the_flags_are_those_of_the_config():
    assert PolicyLossConfig.from_args(validate_policy_loss_args(parse(""))) == PolicyLossConfig()


def test_a_flag_that_the_parser_has_is_left_as_it_is():
    parser = argparse.ArgumentParser()
    parser.add_argument("--eps-clip", type=float, default=0.3, help="the trainer's")
    assert add_policy_loss_args(add_policy_loss_args(parser)) is parser
    assert parser.parse_args([]).eps_clip == 0.3
    assert parser.format_help().count("policy loss:") == 1


class UsersParser(argparse.ArgumentParser):
    """A parser whose owner raises where argparse ends the process."""

    def error(self, message: str) -> None:
        raise LookupError(message)


@pytest.mark.parametrize("add", [add_policy_loss_args, add_planning_args, add_critic_args])
def test_a_guest_in_a_parser_adds_arguments_and_changes_nothing_else(add, monkeypatch, capsys):
    monkeypatch.setenv("LOCAL_RANK", "1")
    parser = add(UsersParser())
    with pytest.raises(LookupError, match="^unrecognized arguments: --lr 1$"):
        parser.parse_args(["--lr", "1"])
    with pytest.raises(SystemExit):
        parser.parse_args(["--help"])
    assert "usage: " in capsys.readouterr().out
    assert vars(parser).keys() == vars(UsersParser()).keys()
    with pytest.raises(SystemExit):
        add(argparse.ArgumentParser(prog="theirs")).parse_args(["--lr", "1"])
    said = capsys.readouterr().err
    assert said.startswith("usage: theirs") and "Did you mean" not in said


def test_help_states_the_formulas():
    text = " ".join(add_policy_loss_args(argparse.ArgumentParser()).format_help().split())
    for flag in FLAGS:
        assert flag in text
    for formula in (
        "1/N sum_i (sum_t m x / max(D_i, 1))",
        "1/max(T, 1) sum m x",
        "1/(N L) sum m x",
        "-min(r A, clip(r, 1 - eps_clip, 1 + eps_clip_high) A)",
        "k3: exp(-d) - 1 + d",
        "(default: sample_mean)",
        "(default: 0.0001)",
    ):
        assert formula in text


def test_every_field_is_documented_and_the_tables_of_the_docs_are_up_to_date():
    assert all(field.help for field in FIELDS.values())
    for page, text in map(tables.page_with, tables.TABLES):
        assert page.read_text() == text


@pytest.fixture
def megatron_parse(monkeypatch):
    """Megatron's own parser and validation, with our flags, on a small model's command line."""
    arguments = pytest.importorskip("megatron.training.arguments", exc_type=ImportError)
    # The one thing that validate_args asks of a GPU, under context parallelism.
    monkeypatch.setattr(arguments, "get_device_arch_version", lambda: 10)
    model = (
        "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 32 --lr 1e-3 "
        "--max-position-embeddings 32 --micro-batch-size 1 --tokenizer-type NullTokenizer "
        "--vocab-size 32 --train-iters 1 --no-masked-softmax-fusion --no-rope-fusion "
        "--no-gradient-accumulation-fusion --transformer-impl local "
    )

    def parse_and_validate(line: str, world_size: int = 1) -> argparse.Namespace:
        monkeypatch.setattr("sys.argv", ["train.py", *(model + line).split()])
        monkeypatch.setenv("WORLD_SIZE", str(world_size))
        args = arguments.parse_args(extra_args_provider=add_policy_loss_args)
        validate_policy_loss_args(args)
        arguments.validate_args(args)
        return args

    return parse_and_validate


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("line", "aggregation", "per_token"), [
    ("", "sample_mean", False),
    ("--loss-aggregation prompt_mean --context-parallel-size 2", "prompt_mean", False),
    ("--calculate-per-token-loss", "token_mean", True),
    (TOKENS, "token_mean", True),
    (f"{TOKENS} --ddp-average-in-collective", "token_mean", False),
    (f"{TOKENS} --num-experts 2", "token_mean", True),
    (f"{TOKENS} {MOE_FLAGS}", "token_mean", False),
    (f"{TOKENS} {MOE_FLAGS} --moe-router-load-balancing-type none", "token_mean", True),
    (f"{TOKENS} --mtp-num-layers 1 --position-embedding-type rope", "token_mean", False),
])  # fmt: skip
def test_on_the_arguments_of_megatron(megatron_parse, line, aggregation, per_token):
    args = megatron_parse(line, world_size=2)
    config = PolicyLossConfig.from_args(args)
    assert config.loss_aggregation == args.loss_aggregation == aggregation
    assert config.calculate_per_token_loss is args.calculate_per_token_loss is per_token
    once = dict(vars(args))
    validate_policy_loss_args(args)
    assert vars(args) == once


@pytest.mark.filterwarnings("ignore")
def test_our_help_renders_on_the_parser_of_megatron():
    """Action by action: megatron-core 0.19.2's ``--help`` fails on a percent sign of its own."""
    arguments = pytest.importorskip("megatron.training.arguments", exc_type=ImportError)
    parser = add_policy_loss_args(arguments.add_megatron_arguments(argparse.ArgumentParser()))
    formatter = parser._get_formatter()
    for flag in FLAGS:
        action = parser._option_string_actions[flag]
        assert action.dest == flag[2:].replace("-", "_")
        assert formatter._expand_help(action)


def test_the_settings_need_no_other_import() -> None:
    """A process that imports them first has the words of every table."""
    script = "from megatron_pg.config import PolicyLossConfig as C; print(C(kl_loss_type='k2'))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "kl_loss_type='k2'" in done.stdout, done.stderr
