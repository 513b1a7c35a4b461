"""``megatron-pg check``: flags that are refused, the samples of its step, rows and the two reports.
Nothing is trained here.
"""

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_pg.check import main
from megatron_pg.check.cases import not_checked
from megatron_pg.check.compare import CheckRow
from megatron_pg.check.job import Launch
from megatron_pg.check.options import (
    LEAN_PERIOD,
    CheckOptions,
    has_gradient_accumulation_fusion,
    parse_options,
)
from megatron_pg.check.report import (
    Beside,
    Checked,
    as_json,
    as_json_list,
    as_text,
    summary,
    verdict,
)
from megatron_pg.check.samples import cut, cut_evenly, make_even_samples, make_samples
from megatron_pg.config.versions import UnsupportedMegatronError
from tests.fast.refusals import assert_refused, assert_words

RIGHT = CheckRow(
    *("loss only", "prompt_mean", False, "fp32", -1.5, 1.0),
    reference_loss=-1.5,
    gradient_error=1e-7,
    worst_parameter="table",
    worst_ratio=1.0,
    common_ratio=1.0,
    scaled_error=1e-7,
    num_parameters=4,
)
OPTIONS_OF_ONE = CheckOptions()


@pytest.mark.parametrize(("flags", "named"), [
    ("--sequence-parallel", "--sequence-parallel requires --tensor-model-parallel-size"),
    ("--context-parallel-size 0", "--context-parallel-size must be an integer >= 1, not 0"),
    ("--context-parallel-size 3", "--context-parallel-size = 3 does not divide"),
    ("--virtual-pipeline-model-parallel-size 2", "--virtual-pipeline-model-parallel-size 2"),
    ("--expert-model-parallel-size 2", "requires --num-experts"),
    ("--expert-tensor-parallel-size 2", "--expert-tensor-parallel-size 2 requires"),
    ("--gradient-accumulation-fusion", "--gradient-accumulation-fusion requires a GPU"),
    ("--cp-comm-type a2a", "--cp-comm-type a2a requires --transformer-impl"),
    ("--hybrid-model --pipeline-model-parallel-size 2", "--hybrid-model and "
                                                        "--pipeline-model-parallel-size 2"),
    ("--num-experts 3 --expert-model-parallel-size 2", "--num-experts 3 with"),
    ("--num-experts 1", "--num-experts 1 with"),
    ("--num-experts 2 --expert-model-parallel-size 2", "--expert-model-parallel-size"),
    ("--num-experts 2 --tensor-model-parallel-size 2", "requires --sequence-parallel"),
    ("--transformer-impl transformer_engine", "transformer_engine requires --device cuda"),
])  # fmt: skip
def test_flags_that_cannot_be_served(flags, named, capsys):
    assert main(["--device", "cpu", *flags.split()]) == 2
    captured = capsys.readouterr()
    assert named in captured.err and captured.out == ""


def test_unknown_flag_is_refused_by_name(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--context-parallel", "2"])  # an abbreviation that a longer flag may take tomorrow
    assert ended.value.code == 2
    assert "--context-parallel" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without a GPU")
def test_cuda_without_a_gpu_is_refused(capsys):
    assert main(["--device", "cuda"]) == 2
    assert "--device cuda: torch finds no GPU" in capsys.readouterr().err


def test_unsupported_megatron_is_refused(monkeypatch, capsys):
    def refuse(*_: object) -> None:
        raise UnsupportedMegatronError("megatron-core 0.9.0 is installed")

    monkeypatch.setattr("megatron_pg.check.prepare", refuse)
    assert main(["--device", "cpu"]) == 2
    assert capsys.readouterr().err == "megatron-pg check: megatron-core 0.9.0 is installed\n"


def test_world_size_is_a_multiple_of_the_model():
    flags = ["--device", "cpu", "--tensor-model-parallel-size", "2", "--context-parallel-size", "2"]
    parse_options(flags, world_size=8)
    with pytest.raises(
        ValueError, match=r"does not divide the 6 processes: torchrun --nproc-per-node 4"
    ):
        parse_options(flags, world_size=6)


def test_launch_is_read_from_the_environment():
    assert Launch.from_environment({}) == Launch(0, 1, 0)
    torchrun = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "a"}
    assert Launch.from_environment({**torchrun, "MASTER_PORT": "1"}) == Launch(5, 8, 1)
    assert_refused("WORLD_SIZE is 8 and MASTER_PORT not set", Launch.from_environment, torchrun)
    with pytest.raises(ValueError, match=r"srun has started 4 tasks.*RANK=\$SLURM_PROCID"):
        Launch.from_environment({"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0"})


def test_row_passes_on_agreement_only():
    assert RIGHT.passed
    wrong = {"gradient_error": (1.1e-6, math.inf), "replica_error": (2e-6,)}
    wrong |= {"loss": (-1.5001, math.nan, math.inf), "checksum": (0.99, 2.0, math.nan)}
    for name, values in wrong.items():
        assert not any(replace(RIGHT, **{name: value}).passed for value in values)


def test_tolerance_is_that_of_the_dtype():
    for model in ("end to end", "loss only"):
        assert replace(RIGHT, model=model).tolerance == 1e-6
        assert replace(RIGHT, model=model, dtype="bf16").tolerance == 2e-2


def test_reports_hold_every_row_and_json_no_nan():
    rows = [RIGHT, replace(RIGHT, gradient_error=math.inf, common_ratio=math.nan)]
    options = CheckOptions(context_parallel_size=2, fused_lm_head=True)
    parsed = json.loads(as_json(rows, options, 2), parse_constant=pytest.fail)
    assert parsed["passed"] is False
    assert [row["passed"] for row in parsed["rows"]] == [True, False]
    assert parsed["rows"][1]["gradient_error"] is None
    assert parsed["rows"][0]["tolerance"] == 1e-6
    assert parsed["options"]["context_parallel_size"] == 2
    assert parsed["not_checked"]["loss-only rows"] == "--fused-lm-head"
    packages = {"torch", "megatron-core", "transformer-engine", "apex", "triton"}
    assert packages <= set(parsed["versions"])
    text = as_text(rows, options, 2)
    words = "2 processes on cpu: TP 1, PP 1, CP 2, DP 1 | not finite in table"
    assert_words(f"{words} | not checked here: loss-only rows (--fused-lm-head)", text)
    # The verdict, then the failed row and what is wrong in it, then the table.
    verdict_line, failed, diagnosis, empty, *_ = text.splitlines()
    assert verdict_line == "FAIL: 1 of 2 rows" and failed.endswith("FAIL") and not empty
    assert diagnosis.strip().startswith("not finite in table")
    assert as_text([RIGHT], options, 2).startswith("PASS: every gradient is the unsharded one (1 ")


def test_what_is_not_provable_is_in_the_verdict_and_listed():
    own, beside = replace(OPTIONS_OF_ONE, dtype="bf16"), Beside(unproven=["a.up", "b.up"])
    verdict_line, *_ = lines = as_text([RIGHT], own, 2, beside).splitlines()
    assert verdict_line.endswith("(1 rows), but 2 are not provable in bf16")
    assert "not provable in bf16: b.up" in lines
    assert json.loads(as_json([RIGHT], own, 2, beside))["not_provable"] == ["a.up", "b.up"]


def test_what_the_flags_do_not_use_is_not_listed():
    assert not_checked(OPTIONS_OF_ONE) == {}
    experts = replace(OPTIONS_OF_ONE, num_experts=2)
    assert not_checked(experts)["router losses and bias"] == "needs --num-experts 3 or more"
    own = replace(OPTIONS_OF_ONE, model_provider="my_project.models:provider")
    assert [*not_checked(own)] == ["router and multi-token prediction losses of your model"]


def test_flags_after_two_dashes_are_the_provider_s():
    flags = ["--device", "cpu", "--model-provider", "a.b:c", "--", "--lr", "3", "--", "x"]
    options, _ = parse_options(flags)
    assert options.provider_flags == ("--lr", "3", "--", "x") and options.lr == 1e-2
    with pytest.raises(ValueError, match=r"--lr 3 after -- requires --model-provider"):
        parse_options(["--device", "cpu", "--", "--lr", "3"])


def test_the_extension_of_apex_is_looked_for_by_name(monkeypatch, tmp_path):
    """On a GPU without Transformer Engine; never on a CPU."""
    on_gpu, on_cpu = CheckOptions(device="cuda"), CheckOptions(device="cpu")
    assert not has_gradient_accumulation_fusion(on_gpu)
    (tmp_path / "fused_weight_gradient_mlp_cuda.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert has_gradient_accumulation_fusion(on_gpu)
    assert not has_gradient_accumulation_fusion(on_cpu)


def test_a_line_for_each_sharding_and_why_one_fails():
    wrong = replace(RIGHT, gradient_error=1.0, common_ratio=2.0, worst_ratio=2.0, wrong=("table",))
    of_context = replace(OPTIONS_OF_ONE, context_parallel_size=2)
    checked = [Checked(OPTIONS_OF_ONE, [RIGHT], 2.4), Checked(of_context, [RIGHT, wrong], 3.0)]
    lines = "\n".join(summary(sharding, 2) for sharding in checked).splitlines()
    assert lines[0] == "PASS      1 rows, worst 1.0e-07 of 1e-06,    2 s  TP 1, PP 1, CP 1, DP 2"
    assert lines[1].startswith("FAIL 1    2 rows") and lines[1].endswith("CP 2, DP 1")
    assert lines[2].endswith("FAIL") and "2 = CP" in lines[3]
    assert verdict(checked, 2) == "\nFAIL: 1 of 2 shardings"
    assert verdict(checked[:1], 2).endswith("in 1 shardings")
    assert [each["passed"] for each in json.loads(as_json_list(checked, 2))] == [True, False]


def test_a_report_says_what_is_known_of_the_version(monkeypatch):
    monkeypatch.setattr("megatron_pg.check.report.megatron_core_version", lambda: (0, 18, 2))
    experts = replace(OPTIONS_OF_ONE, num_experts=4)
    said = as_text([RIGHT], experts, 1)
    assert "known mistake of this megatron-core: in per-token mode the auxiliary" in said
    assert "issue 1652" in json.loads(as_json([RIGHT], experts, 1))["known_mistakes"][0]
    assert "known mistake of this megatron-core" not in as_text([RIGHT], OPTIONS_OF_ONE, 1)


@pytest.mark.parametrize("data_size", [1, 2, 5, 64])
@pytest.mark.parametrize("pipeline_size", [1, 4, 6, 8])
def test_every_micro_batch_but_one_in_the_middle_has_gradient(data_size, pipeline_size):
    options = CheckOptions(pipeline_model_parallel_size=pipeline_size)
    samples = make_samples(options, data_size)
    seen = []
    for rank in range(data_size):
        count = options.num_microbatches(rank)
        assert count >= pipeline_size + 2
        micro_batches = cut(samples[rank::data_size], count)
        active = [sum(sample.num_active_tokens for sample in each) for each in micro_batches]
        assert [place for place, tokens in enumerate(active) if not tokens] == [count // 2]
        assert len({len(each) for each in micro_batches}) > 2 or data_size * pipeline_size > 5
        long = [[s for s in each if s.total_length > 32] for each in micro_batches]
        assert sorted(map(len, long))[-3:] == [0, 1, 1], "a float32 sum goes over both long ones"
        assert all(s.num_active_tokens for each in long for s in each), "a long one is masked"
        seen += [sample.name for each in micro_batches for sample in each]
    assert sorted(seen) == sorted(sample.name for sample in samples)


@pytest.mark.parametrize(("pipeline_size", "wrong"), [(4, "over both"), (6, "is masked")])
def test_a_long_sample_at_another_place_is_seen(monkeypatch, pipeline_size, wrong):
    monkeypatch.setattr("megatron_pg.check.samples.LONG_PROMPT", 7)
    with pytest.raises(AssertionError, match=wrong):
        test_every_micro_batch_but_one_in_the_middle_has_gradient(1, pipeline_size)


@pytest.mark.parametrize("whole_tiles", [False, True])
@pytest.mark.parametrize("tensor_size", [1, 2, 3, 4, 8, 16])
def test_responses_have_ids_of_every_vocabulary_shard(tensor_size, whole_tiles):
    heads = {"fused_lm_head": True, "fp32_lm_head": True, "device": "cuda"} if whole_tiles else {}
    options = CheckOptions(tensor_model_parallel_size=tensor_size, **heads)
    assert options.padded_vocab_size % tensor_size == 0
    width = options.padded_vocab_size // tensor_size
    # QuACK takes no padding: with it all ranks but the last have none.
    assert (options.padded_vocab_size > options.vocab_size) is not (
        whole_tiles and tensor_size == 1
    )
    assert not whole_tiles or width % 128 == 0
    samples = make_samples(options, 1)
    responses = torch.cat([sample.tokens[sample.prompt_length :] for sample in samples])
    assert set((responses // width).tolist()) == set(range(tensor_size))
    assert responses.max() < options.vocab_size
    # The ids whose tokens pull the model one way.
    assert bool((responses % LEAN_PERIOD < LEAN_PERIOD // 2).all())


def test_the_step_hides_nothing():
    options = CheckOptions(context_parallel_size=2)
    samples = make_samples(options, 2)
    for rank in range(2):
        mine = samples[rank::2]
        lengths = sorted(sample.total_length for sample in mine)
        # Two span both chunks of both ranks, by more than a tile; the others are short.
        assert lengths[-1] == 131 and lengths[-2] > 120 and lengths[-3] <= 12
        assert max(sample.prompt_length for sample in mine) > 100
        assert max(sample.response_length for sample in mine) > 100
        assert not all(sample.num_active_tokens for sample in mine)
    assert samples[0].rollout_id == samples[-1].rollout_id
    prompts: dict[Any, set[Any]] = {}
    for sample in samples:
        prompt = tuple(sample.tokens[: sample.prompt_length].tolist())
        prompts.setdefault(sample.group_index, set()).add(prompt)
    # One prompt in each group, and each group on both ranks.
    assert all(len(each) == 1 for each in prompts.values())
    assert {s.group_index for s in samples[::2]} == {s.group_index for s in samples[1::2]}


@pytest.mark.parametrize("context_size", [1, 2, 4])
@pytest.mark.parametrize("expert_size", [1, 2, 4])
def test_long_samples_exceed_a_tile_of_attention(context_size, expert_size):
    sizes = {"context_parallel_size": context_size, "expert_model_parallel_size": expert_size}
    options = CheckOptions(num_experts=8, **sizes)
    lengths = sorted(sample.total_length for sample in make_samples(options, 1))
    assert 2 * options.tokens_per_chunk > 32, "a rank's chunks are one tile"
    # The last token's output is not scored.
    assert lengths[-2] - 1 > 32 + 16, "hardly a scored token sees keys of a second tile"


def test_even_samples_need_padding_where_it_is_asked_for():
    options = CheckOptions(context_parallel_size=2, tensor_model_parallel_size=2)
    assert any(s.total_length % 8 for s in make_even_samples(options, 3, is_padded=True))
    samples = make_even_samples(options, 3, is_padded=False)
    for rank in range(3):
        fills = [sample.total_length % 8 == 0 for sample in samples[rank::3]]
        assert all(fills[::2]) and not all(fills[1::2])
    for rank in range(3):
        micro_batches = cut_evenly(samples[rank::3], options.num_microbatches(rank))
        assert all(micro_batches) and sum(map(len, micro_batches)) == len(samples) // 3
