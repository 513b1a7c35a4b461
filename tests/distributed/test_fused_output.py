"""One step of GPTModel, DDP and schedule through the fused head, against the unsharded model."""

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_pg import PolicyLossConfig, Sample, pack, step_totals
from megatron_pg.check import model as builder
from megatron_pg.config.versions import derives_multi_token_labels, has_hybrid_model
from megatron_pg.head import from_hidden
from megatron_pg.loss import micro_batch
from megatron_pg.loss.resolved import GradientScope, ResolvedLoss, resolve
from megatron_pg.megatron import (
    ParallelGroups,
    PolicyStep,
    compute_hidden_states,
    compute_log_probs,
    policy_step,
)
from megatron_pg.megatron.fused_head import OutputRows, active_rows
from megatron_pg.megatron.output_layer import take_output_processor
from tests.random_steps import package_samples, uneven_totals

from .compare import assert_case, assert_equal, compare, gradient_tolerance
from .launch import refusal, run_ranks
from .models import ModelOptions, Sharding
from .one_step import Outcome, build, fused_head, fused_heads, run_schedule, run_steps, train_step
from .reference import references_of
from .steps import AGGREGATIONS, Run
from .test_objective_settings import SettingsRun

RUNS = [
    Run(aggregation, cut="empty" if place < 2 else "uniform", regularized=bool(place % 2))
    for place, aggregation in enumerate(AGGREGATIONS)
]
# In float64: what float32 rounds away could hide a wrong coefficient of a small term.
DENSE = ModelOptions(dtype=torch.float64)
TIED = replace(DENSE, tied_embeddings=True)
PER_TOKEN = replace(DENSE, calculate_per_token_loss=True)
MODES = {"one pass": 5, "recomputed": 1, "kept": 1000}
"""Rows of a chunk, by what the logits of all rows together are where the loss may look at any: more
than four, or one."""
CASES = {
    "CP2, per token": PER_TOKEN,
    "TP2": DENSE,
    "TP2+SP CP2": DENSE,
    "PP2 tied": TIED,
    "PP2 VPP2 tied, per token": replace(TIED, calculate_per_token_loss=True, num_layers=4),
    "DP2 tied": TIED,
    "DP2, distributed optimizer, overlapped reduction": (
        replace(DENSE, distributed_optimizer=True, overlap_grad_reduce=True)
    ),
}
if has_hybrid_model():
    CASES["TP2+SP CP2 hybrid"] = replace(DENSE, hybrid=True)
CP2, TP2, DP2 = map(Sharding.named, ("CP2", "TP2", "DP2"))
LOSS_SCALE = 1024.0
"""A power of two, as loss scales are: dividing by it is exact."""
References = dict[ModelOptions, list[Outcome]]


def steps(sharding: Sharding, options: ModelOptions, mode: str) -> list[Outcome | None]:
    if mode != "one pass":
        # The losses of this file are sums over tokens: have them treated as if they were not.
        scope = GradientScope("micro_batch", False)
        policy_step.resolve = lambda config: replace(resolve(config), scope=scope)
    return run_steps(sharding, options, RUNS, fused_heads(MODES[mode]))


@pytest.fixture(scope="module")
def references() -> References:
    return references_of(CASES.values(), RUNS)


@pytest.mark.parametrize(
    ("case", "mode"),
    [(case, "one pass") for case in CASES] + [("TP2", "recomputed"), ("DP2 tied", "kept")],
)
def test_gradients_and_metrics_equal_the_unsharded_reference(case, mode, references) -> None:
    assert_case(case, CASES[case], steps, RUNS, references, mode)


SEQUENCE_SETTINGS = {
    **{name: {"objective": name} for name in ("gspo", "gmpo")},
    "opsm": {"opsm": "on"},
    "everything": {
        **{"objective": "gspo", "tis": "token", "rejection": "geometric", "opsm": "on"},
        **{"kl": "k3", "entropy": "on", "metrics": "with_entropy"},
    },
    "tis_sequence": {"tis": "sequence"},
}
SEQUENCE_RUNS = [
    SettingsRun(choices=tuple(choices.items()), cut="empty")
    for choices in SEQUENCE_SETTINGS.values()
]
SEQUENCE_CASES = {
    "one process": (PER_TOKEN, (1, 5, 1000)),
    "CP2": (DENSE, (1, 1000)),
    "CP4, per token": (PER_TOKEN, (5,)),
    "TP2": (DENSE, (1, 5)),
}
"""And the rows of a chunk: at 1 four rows at most are held, and of longer sequences the logits are
made twice; at 1000 all sequences of a micro-batch are one chunk."""


@pytest.fixture(scope="module")
def on_sequences() -> list[Outcome]:
    """By the logits of the whole micro-batch."""
    return run_ranks(run_steps, 1, Sharding(), DENSE, SEQUENCE_RUNS)[0]


@pytest.mark.parametrize("case", SEQUENCE_CASES)
def test_losses_of_whole_sequences(case, on_sequences) -> None:
    options, chunk_sizes = SEQUENCE_CASES[case]
    expected, heads = {options.unsharded: on_sequences}, fused_heads(*chunk_sizes)
    assert_case(case, options, run_steps, SEQUENCE_SETTINGS, expected, SEQUENCE_RUNS, heads)


def steps_with_borders_inside_sequences() -> list[Outcome | None]:
    """Mutant: every part of a micro-batch leaves its last row to the next one."""
    right = OutputRows.of_whole_samples

    def shifted(rows: OutputRows, size: int) -> list[int]:
        sizes = right(rows, size)
        for part in range(len(sizes) - 1):
            sizes[part + 1] += int(sizes[part] > 0)
            sizes[part] -= int(sizes[part] > 0)
        return sizes

    OutputRows.of_whole_samples = shifted
    return run_steps(CP2, DENSE, SEQUENCE_RUNS, [fused_head])


def test_mutant_a_border_inside_a_sequence_would_be_seen(on_sequences) -> None:
    found = run_ranks(steps_with_borders_inside_sequences, 2)[0]
    for name, outcome, expected in zip(SEQUENCE_SETTINGS, found, on_sequences, strict=True):
        of_data_alone = name == "tis_sequence"
        comparison = compare(outcome, expected, gradient_tolerance(DENSE))
        assert comparison.passed == of_data_alone, f"{name}: {comparison}"
        assert of_data_alone or comparison.gradient_error > 1e-3


def steps_after_the_optimizer(sharding: Sharding, has_hooks: bool) -> list[Outcome | None]:
    """A rank has the optimizer's part of each parameter, and `--overlap-param-gather` the rest when
    its module is called.

    Bucket by bucket, and at once: in a small model the output layer shares a bucket with layers
    that are called.
    """
    builder.distributed.DistributedDataParallelConfig = functools.partial(
        builder.distributed.DistributedDataParallelConfig,
        overlap_param_gather=True,
        align_param_gather=True,
        bucket_size=1,
    )
    options = replace(DENSE, distributed_optimizer=True, overlap_grad_reduce=True)
    (chunk,) = build(sharding, options)
    if not has_hooks:  # the mutant
        chunk.module.output_layer._forward_pre_hooks.clear()
    outcomes = []
    for run in RUNS[:2]:
        for bucket in (bucket for buffer in chunk.buffers for bucket in buffer.buckets):
            parts = bucket.param_data.chunk(sharding.data)
            for rank in {*range(sharding.data)} - {torch.distributed.get_rank()}:
                parts[rank].fill_(0.5)
        outcomes.append(train_step([chunk], sharding, run, head=fused_head))
    return outcomes


@pytest.mark.parametrize("has_hooks", [True, False])
def test_the_weight_is_waited_for_where_its_gather_overlaps(has_hooks, references) -> None:
    found = run_ranks(steps_after_the_optimizer, 2, DP2, has_hooks)[0]
    for outcome, expected in zip(found, references[DENSE.unsharded], strict=False):
        assert compare(outcome, expected, gradient_tolerance(DENSE)).passed == has_hooks


def scaled_steps(sharding: Sharding, options: ModelOptions) -> list[Outcome | None]:
    """Under an optimizer's loss scale, with a buffer of the package's own for no micro-batch; in
    chunks of two sizes.
    """
    has_own_buffer: list[bool] = []
    plain = from_hidden.FactorGradients

    def recorded(*arguments: Any, final: bool) -> Any:
        has_own_buffer.append(not final)
        return plain(*arguments, final=final)

    from_hidden.FactorGradients = recorded
    chunks = build(sharding, options)
    chunks[0].config.grad_scale_func = lambda loss: torch.tensor([LOSS_SCALE]) * loss
    outcomes = [
        train_step(chunks, sharding, run, head=head)
        for head in fused_heads(5, 1000)
        for run in RUNS
    ]
    for outcome in outcomes:
        for gradient in outcome.gradients.values() if outcome is not None else ():
            gradient /= LOSS_SCALE
    if ParallelGroups.from_model(chunks).is_last_pipeline_stage:
        assert has_own_buffer and not any(has_own_buffer)
    return outcomes


@pytest.mark.parametrize("case", ["CP2, per token", "TP2+SP CP2", "PP2 tied"])
def test_with_a_loss_scale_straight_to_main_grad(case, references) -> None:
    assert_case(case, CASES[case], scaled_steps, RUNS, references)


def steps_with_a_lost_scale(sharding: Sharding) -> list[Outcome | None]:
    """Mutant: backward makes the gradient of the local loss, whatever gradient the schedule
    brings.
    """
    whole = from_hidden._coefficients
    from_hidden._coefficients = lambda *given: whole(*given[:3], None)
    return steps(sharding, DENSE, "one pass")


@pytest.mark.parametrize("sharding", [CP2, DP2], ids=str)
def test_mutant_a_wrong_scale_would_be_seen(sharding, references) -> None:
    """In the gradient of the output layer, and through the hidden states in every other."""
    found = run_ranks(steps_with_a_lost_scale, 2, sharding)[0]
    for outcome, expected in zip(found, references[DENSE.unsharded], strict=True):
        assert not compare(outcome, expected, gradient_tolerance(DENSE)).passed
        for name, gradient in expected.gradients.items():
            assert not torch.allclose(outcome.gradients[name], gradient, rtol=0.1), name


def steps_with_frozen_weights(frozen: str, head: Any) -> list[Outcome | None]:
    """Through the fused head, or through Megatron's own layer in float32."""
    chunks = build(TP2, DENSE)
    for name, parameter in chunks[0].named_parameters():
        parameter.requires_grad_((frozen == "output layer") != ("output_layer" in name))
    runs = [replace(run, fp32_lm_head=head is None) for run in RUNS]
    return [train_step(chunks, TP2, run, head=head) for run in runs]


@pytest.mark.parametrize("head", [fused_head, None], ids=["fused", "fp32"])
@pytest.mark.parametrize("frozen", ["output layer", "all but the output layer"])
def test_frozen_weights(frozen, head, references) -> None:
    """Frozen after DDP has made its buffers, whose gradients then stay 0."""
    found = run_ranks(steps_with_frozen_weights, 2, frozen, head)[0]
    for outcome, expected in zip(found, references[DENSE.unsharded], strict=True):
        for name, gradient in outcome.gradients.items():
            if (frozen == "output layer") == ("output_layer" in name):
                assert (gradient == 0).all(), name
                outcome.gradients[name] = expected.gradients[name]
    assert_equal(found, references[DENSE.unsharded], RUNS, gradient_tolerance(DENSE))


def main_grads(chunks: list) -> torch.Tensor:
    parameters = [parameter for chunk in chunks for parameter in chunk.module.parameters()]
    return torch.cat([parameter.main_grad.flatten() for parameter in parameters])


def steps_between_evaluations(sharding: Sharding, options: ModelOptions) -> list[Outcome | None]:
    chunks = build(sharding, options)
    outcomes = []
    for run in RUNS:
        outcomes.append(train_step(chunks, sharding, run, head=fused_head))
        before = main_grads(chunks)
        for mode in ("no_grad", "eval", "train"):
            for chunk in chunks:
                chunk.train(mode == "train")
            with torch.set_grad_enabled(mode != "no_grad"):
                _, metrics = run_schedule(chunks, sharding, run, fused_head, forward_only=True)
            assert torch.equal(before, main_grads(chunks)), mode
            # With gradients on, values wait for a backward that never comes, and that shows.
            for of_micro_batch in metrics:
                missing = torch.stack(list(of_micro_batch.values())).isnan()
                assert missing.all() if mode != "no_grad" else not missing.any()
            if ParallelGroups.from_model(chunks).is_last_pipeline_stage:
                assert all("loss" in of_micro_batch for of_micro_batch in metrics)
    return outcomes


@pytest.mark.parametrize("case", ["CP2, per token", "PP2 tied"])
def test_evaluation_leaves_no_gradient(case, references) -> None:
    assert_case(case, CASES[case], steps_between_evaluations, RUNS, references)


def unscaled(sharding: Sharding) -> list[Outcome | None]:
    """Mutant: coefficients are those of the loss before its entropy and KL terms."""
    whole, called = micro_batch.policy_loss, micro_batch.MicroBatchLoss.__call__

    def without_regularizers(resolved: ResolvedLoss, *arguments: Any) -> Any:
        config = replace(resolved.config, kl_loss_coef=0.0, entropy_coef=0.0)
        return whole(resolve(config), *arguments)

    def right_value(loss: Any, *arguments: Any) -> Any:
        micro_batch.policy_loss = whole
        value = called(loss, *arguments)
        micro_batch.policy_loss = without_regularizers
        return value

    micro_batch.policy_loss = without_regularizers
    micro_batch.MicroBatchLoss.__call__ = right_value
    return steps(sharding, DENSE, "one pass")


def test_mutant_coefficients_of_another_loss_would_be_seen(references) -> None:
    found = run_ranks(unscaled, 2, CP2)[0]
    for run, outcome, expected in zip(RUNS, found, references[DENSE.unsharded], strict=True):
        assert compare(outcome, expected).passed == (not run.regularized)


def refusals() -> tuple[str, str]:
    """A model that calls its output layer twice, which is to take the loss of one micro-batch; and
    a response token that the model's table has and its vocabulary has not, on which REINFORCE would
    train.
    """
    (chunk,) = build(Sharding(), DENSE)
    layer, once = chunk.module.output_layer, chunk.module.forward
    chunk.module.forward = lambda **inputs: (once(**inputs), once(**inputs))[1]
    task = ([chunk], Sharding(), RUNS[0])
    twice = refusal(RuntimeError, train_step, *task, head=fused_head)
    assert "_forward_impl" not in vars(layer)
    sample = Sample([1, 2, 14], 1, [1], 1.0, name="the sample")
    step = PolicyStep(
        PolicyLossConfig(policy_loss="reinforce", fused_lm_head=True),
        totals=uneven_totals([sample]),
        num_microbatches=1,
        model=[chunk],
        vocab_size=14,
    )
    with torch.no_grad():
        head = step.head(pack([sample]))
    hidden = torch.zeros(3, 1, layer.weight.shape[1], dtype=layer.weight.dtype)
    processor = head.model_arguments["output_processor"]
    return twice, refusal(ValueError, processor, hidden, layer.weight)


def test_calls_and_tokens_that_are_not_expected_are_refused() -> None:
    ((twice, outside),) = run_ranks(refusals, 1)
    assert "was called 2 instead of 1 times in a forward" in twice
    assert outside.startswith("the sample: response token id 14 is outside the vocabulary of 14")


CUSTOM_LOSS = {"custom_policy_loss_path": "module.loss"}
SCOPES: dict[str, list[dict[str, Any]]] = {
    "token": [
        *({}, {"policy_loss": "cispo"}, {"entropy_coef": 0.1}, {"use_tis": True}),
        *({"policy_loss": name} for name in ("sapo", "dppo_tv", "dppo_kl")),
        {"ratio_anchor": "rollout"},
    ],
    "sequence": [
        *({"policy_loss": "gspo"}, {"policy_loss": "gmpo"}, {"use_opsm": True}),
        *({"use_geometric_rejection": True}, {"use_tis": True, "tis_level": "sequence"}),
    ],
    "micro_batch": [
        *(CUSTOM_LOSS, {"use_opsm": True, **CUSTOM_LOSS}),
        {"use_tis": True, "custom_tis_function_path": "module.weights"},
        {"custom_pg_loss_reducer_function_path": "module.reducer"},
    ],
}


@pytest.mark.parametrize("expected", SCOPES)
def test_what_a_gradient_waits_for(expected) -> None:
    for setting in SCOPES[expected]:
        assert resolve(PolicyLossConfig(**setting)).scope.tokens == expected, setting


def test_tokens_without_advantage_come_last() -> None:
    def sample(advantages: list[float], loss_mask: list[int]) -> Sample:
        length, zeros = len(advantages), [0.0] * len(advantages)
        return Sample(range(length + 2), length, loss_mask, advantages, old_log_probs=zeros)

    batch = pack([sample([0.0, 1.0, 2.0], [1, 0, 1]), sample([-1.0, 0.0], [1, 1])])
    in_order = ([0, 2, 3, 4], 4)
    for packed, expected, *settings in (
        (batch, ([2, 3, 0, 4], 2), {}),
        (batch, in_order, {"entropy_coef": 0.1}, {"kl_loss_coef": 0.1}, {"policy_loss": "sft"}),
        # A token without gradient may still have a part in its sequence's.
        (batch, in_order, {"use_opsm": True}, {"use_tis": True, "tis_level": "geometric"}),
        (pack([]), ([], 0), {}),
    ):
        for setting in settings:
            rows, count = active_rows(packed, resolve(PolicyLossConfig(**setting)).scope)
            assert (rows.tolist(), count) == expected, setting


def scores_beside_multi_token_prediction() -> float:
    """The largest difference between log-probs of logits and of the fused head, on a pipeline
    rank.
    """
    chunks = build(Sharding(pipeline=2), replace(DENSE, mtp_num_layers=2))
    samples = package_samples(RUNS[0].samples)
    of_logits, fused = (
        compute_log_probs(
            chunks, samples, PolicyLossConfig(fused_lm_head=is_fused), max_tokens_per_microbatch=64
        ).log_probs
        for is_fused in (False, True)
    )
    return float((torch.cat(of_logits) - torch.cat(fused)).abs().max())


@pytest.mark.skipif(
    not derives_multi_token_labels(), reason="multi-token prediction without labels: 0.19 and later"
)
def test_the_last_product_of_multi_token_prediction_is_the_policy_s() -> None:
    differences = run_ranks(scores_beside_multi_token_prediction, 2)
    assert max(differences) < 1e-6  # float32, as they are returned


def refusals_of_layers() -> list[str]:
    """What is said of an output layer that gathers its logits, and of one with a bias."""
    (chunk,) = build(TP2, DENSE)
    layer, said = chunk.module.output_layer, []
    for name, value in (("gather_output", True), ("bias", torch.nn.Parameter(torch.zeros(1)))):
        before = getattr(layer, name)
        setattr(layer, name, value)
        said.append(refusal(NotImplementedError, take_output_processor, [chunk]))
        teacher = functools.partial(compute_hidden_states, max_tokens_per_microbatch=8)
        said.append(refusal(NotImplementedError, teacher, [chunk], []))
        setattr(layer, name, before)
    take_output_processor([chunk])
    return said


def refusals_of_gathered_logits() -> list[str]:
    """What a loss and a scoring of logits, which are shards, say of a model that gathers them."""
    (chunk,) = build(TP2, DENSE)
    chunk.module.output_layer.gather_output = True
    config, samples = PolicyLossConfig(), package_samples(RUNS[0].samples)
    step = functools.partial(PolicyStep, config, model=[chunk], totals=step_totals(samples))
    score = functools.partial(compute_log_probs, [chunk], samples, config)
    return [
        refusal(NotImplementedError, step, num_microbatches=1),
        refusal(NotImplementedError, score, max_tokens_per_microbatch=64),
    ]


def test_a_model_that_gathers_its_logits_is_refused() -> None:
    for said in run_ranks(refusals_of_gathered_logits, 2):
        assert [words.endswith("build it with parallel_output=True") for words in said] == [
            True
        ] * 2


def test_an_output_layer_that_is_more_than_a_product_is_refused() -> None:
    for said in run_ranks(refusals_of_layers, 2):
        gathered, gathered_teacher, biased, biased_teacher = said
        assert gathered.startswith(
            "--fused-lm-head requires a model that does not gather its logits"
        )
        assert gathered_teacher.startswith(
            "compute_hidden_states requires a model that does not gather its"
        )
        assert biased.startswith("--fused-lm-head requires an output layer without bias")
        assert biased_teacher.startswith(
            "compute_hidden_states requires an output layer without bias"
        )
        for of_teacher in (gathered_teacher, biased_teacher):
            assert of_teacher.endswith("give the teacher by --distill-teacher logits or top_k")
