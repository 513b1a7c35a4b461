"""The divisors that make a trainer's sample mean every aggregation: arithmetic, groups, and both
hooks.
"""

import itertools
import pickle
import random
import sys
import types
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_pg.integrations import miles, slime, trainer
from megatron_pg.integrations.reducers import HOOKS
from megatron_pg.integrations.rollout_mask_sums import Rollout, rollout_mask_sums
from megatron_pg.loss.aggregation import AGGREGATIONS
from megatron_pg.step.totals import BareSample
from tests import oracle
from tests.cut_steps import gradients
from tests.fast.refusals import assert_refused
from tests.oracle import PlainSample
from tests.random_steps import plain_sample, random_losses

DIVISOR = 3.0
ROLLOUTS_PER_GROUP, ROLLOUTS_PER_STEP = 4, 8


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No divisor is set, no test before this one has left Megatron's globals behind; trainers are
    not verified.
    """
    monkeypatch.delenv("MEGATRON_PG_LOSS_AGGREGATION_DIVISOR", raising=False)
    monkeypatch.delitem(sys.modules, "megatron.core.parallel_state", raising=False)
    monkeypatch.setattr(trainer.Trainer, "verify", lambda *arguments: None)


def ragged(seed: int, *, num_groups: int = 4) -> list[PlainSample]:
    """Rollouts in groups; one group has none but masked samples, one rollout is three samples, one
    has no token.
    """
    rng = random.Random(seed)
    step = []
    for rollout in range(num_groups * ROLLOUTS_PER_GROUP):
        group = rollout // ROLLOUTS_PER_GROUP
        for _ in range(3 if rollout == 5 else 1):
            masked = group == 2 or rollout == 1
            mask = [int(not masked and rng.random() < 0.7) for _ in range(rng.randint(3, 12))]
            step.append(plain_sample(mask, prompt_length=1 + group, group=group, rollout=rollout))
    return step


def assert_is(
    aggregation: str, step: list[PlainSample], sums: Tensor, tolerance: float, clamp: float = 1
) -> None:
    """What the trainer's reducer, its scale and Megatron make of the sums is the aggregation."""
    losses, total = random_losses(step), torch.zeros((), dtype=torch.float64)
    for sample, loss, denominator in zip(step, losses, sums, strict=True):
        mask = torch.tensor(sample.loss_mask)
        if mask.any():
            total = total + (loss * mask).sum() / torch.clamp_min(denominator, clamp)
        else:
            total = total + 0 * loss.sum()
    found = gradients(total / len(oracle.rollouts(step)), losses)
    expected = gradients(oracle.aggregate(step, losses, aggregation, DIVISOR), losses)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=0)


def divisor_of(aggregation: str) -> dict[str, float]:
    return {"loss_aggregation_divisor": DIVISOR} if aggregation == "constant" else {}


def half_of(sample: PlainSample) -> int:
    """The optimizer step that trains on a sample."""
    return (sample.rollout_id or 0) // ROLLOUTS_PER_STEP


def assert_halves(
    aggregation: str, step: list[PlainSample], sums: Tensor, tolerance: float, clamp: float = 1
) -> None:
    for half in (0, 1):
        places = [n for n, sample in enumerate(step) if half_of(sample) == half]
        assert_is(aggregation, [step[n] for n in places], sums[places].double(), tolerance, clamp)


def bare(step: Sequence[PlainSample]) -> list[BareSample]:
    rows = [(sum(s.loss_mask), s.group_index, s.rollout_id) for s in step]
    return [BareSample(*row, f"sample {number}") for number, row in enumerate(rows)]


def sums_of(aggregation: str, *steps: list[BareSample], rollouts: int, **others: Any) -> Tensor:
    ends = [0, *itertools.accumulate(map(len, steps))]
    indices = [range(*pair) for pair in itertools.pairwise(ends)]
    divisor = DIVISOR if aggregation == "constant" else None
    cut = Rollout([*itertools.chain(*steps)], indices, [rollouts] * len(steps), divisor)
    return rollout_mask_sums(AGGREGATIONS[aggregation], lambda: cut, trainer="slime", **others)


@pytest.mark.parametrize("aggregation", oracle.AGGREGATIONS)
def test_the_sample_mean_becomes_the_aggregation(aggregation: str) -> None:
    step = ragged(1)
    sums = sums_of(aggregation, bare(step), rollouts=len(oracle.rollouts(step)))
    assert_is(aggregation, step, sums, 1e-12)


def test_mutant_a_divisor_of_one_half_per_mille_more_is_seen() -> None:
    step = ragged(1)
    sums = sums_of("prompt_mean", bare(step), rollouts=len(oracle.rollouts(step)))
    with pytest.raises(AssertionError):
        assert_is("prompt_mean", step, sums * 1.0005, 1e-5)


def group(index: int | None, num_tokens: Sequence[int], first: int = 0) -> list[BareSample]:
    """A rollout for each number of active tokens, counted from the first one's id."""
    return [BareSample(n, index, first + number) for number, n in enumerate(num_tokens)]


def test_steps_that_cannot_have_the_aggregation_are_refused_by_number() -> None:
    step, words = group(7, (1, 1, 1, 0)) + group(8, (9,) * 4, 10), "0.75 | regularizer_aggregation"
    words = f"prompt group 7 has 3 active tokens | {words}"
    assert_refused(words, sums_of, "prompt_mean", step, rollouts=8)
    words = "token_mean: the step has 1 active tokens"
    assert_refused(words, sums_of, "token_mean", group(None, (1, 0, 0, 0)), rollouts=4)
    steps = [group(n, (9, 9), 10 * n) + group(n + 1, (9, 9), 100 * n) for n in (1, 2)]
    words = "1 prompt groups in several | 2 (steps 0 and 1)"
    assert_refused(words, sums_of, "prompt_mean", *steps, rollouts=4)
    sums_of("token_mean", *steps, rollouts=4)


def test_a_divisor_of_exactly_one_is_kept() -> None:
    """49 / 49 comes out below 1 where the quotient is taken first."""
    assert sums_of("prompt_mean", group(0, [1] * 49), rollouts=49).tolist() == [1.0] * 49


def test_masked_groups_below_one_are_not_refused() -> None:
    step = group(0, [0] * 8) + group(1, [9], 9)
    assert sums_of("prompt_mean", step, rollouts=9)[-1].item() == 9 * 2 / 9


def test_a_step_of_fewer_tokens_than_rollouts_has_no_token_mean() -> None:
    with pytest.raises(ValueError, match=r"token_mean: the step has 1 active tokens"):
        sums_of("token_mean", [BareSample(int(n == 0), None, n) for n in range(4)], rollouts=4)


def test_a_group_of_different_prompts_is_refused() -> None:
    step = [BareSample(9, 1, n, f"sample {n}", prompt_hash=n // 2) for n in range(4)]
    words = "sample 0 and sample 2 of prompt group 1 have different"
    assert_refused(words, sums_of, "prompt_mean", step, rollouts=4)
    sums_of("prompt_mean", step, rollouts=4, allow_different_prompts=True)


def arguments(**others: Any) -> types.SimpleNamespace:
    sizes = {"n_samples_per_prompt": ROLLOUTS_PER_GROUP, "global_batch_size": ROLLOUTS_PER_STEP}
    sizes |= {"custom_megatron_init_path": "megatron_pg.integrations.miles.check"}
    return types.SimpleNamespace(**sizes, **others)


def carried(lengths: list[Any]) -> Tensor:
    """The divisors that response lengths carry."""
    return torch.tensor([length.divisor for length in lengths], dtype=torch.float64)


def slime_data(step: list[PlainSample]) -> dict[str, Any]:
    """What slime hands its hook on one rank: two optimizer steps of micro-batches in an order of
    their own.
    """
    order = sorted(range(len(step)), key=lambda number: (half_of(step[number]), -number))
    step = [step[number] for number in order]
    cut = sum(half_of(sample) == 0 for sample in step)
    return {
        "order": order,
        "tokens": [torch.tensor(sample.tokens) for sample in step],
        "total_lengths": [len(sample.tokens) for sample in step],
        "response_lengths": [sample.response_length for sample in step],
        "loss_masks": [torch.tensor(sample.loss_mask, dtype=torch.int) for sample in step],
        "sample_indices": [sample.rollout_id for sample in step],
        "rollout_ids": [sample.rollout_id for sample in step],
        "rollout_mask_sums": torch.zeros(len(step)),
        "micro_batch_indices": [[*range(2)], [*range(2, cut)], [*range(cut, len(step))]],
        "num_microbatches": [2, 1],
        "global_batch_sizes": [ROLLOUTS_PER_STEP] * 2,
    }


@pytest.mark.parametrize("aggregation", HOOKS)
def test_slimes_hook_is_exact_in_each_of_two_steps(aggregation: str) -> None:
    step = ragged(2)
    data, args = slime_data(step), arguments(**divisor_of(aggregation))
    assert getattr(slime, aggregation)(args, 0, data) is None
    assert data["response_lengths"] == [step[n].response_length for n in data["order"]]
    in_order = [step[n] for n in data["order"]]
    assert_halves(aggregation, in_order, carried(data["response_lengths"]), 1e-12, clamp=0)
    assert args.custom_pg_loss_reducer_function_path == trainer.REDUCER
    assert not data["rollout_mask_sums"].any()


@pytest.mark.parametrize("aggregation", HOOKS)
def test_slimes_hook_for_all_terms(aggregation: str) -> None:
    step = ragged(2)
    data = slime_data(step)
    args = arguments(regularizer_aggregation="loss", **divisor_of(aggregation))
    getattr(slime, aggregation)(args, 0, data)
    assert data["rollout_mask_sums"].dtype == torch.float32
    assert_halves(aggregation, [step[n] for n in data["order"]], data["rollout_mask_sums"], 2e-7)
    assert not hasattr(args, "custom_pg_loss_reducer_function_path")


def test_slimes_older_data() -> None:
    """v0.3.0 calls rollouts groups; before it the samples of a rank are cut in their order, and
    each is a rollout.
    """
    step = ragged(2)
    data, named = slime_data(step), slime_data(step)
    named["group_ids"] = named.pop("rollout_ids")
    slime.prompt_mean(arguments(), 0, data)
    slime.prompt_mean(arguments(), 0, named)
    assert carried(named["response_lengths"]).equal(carried(data["response_lengths"]))
    one_each = [plain_sample([1] * (n + 1), prompt_length=1, group=0, rollout=n) for n in range(17)]
    older = {
        k: v
        for k, v in slime_data(one_each).items()
        if k not in ("rollout_ids", "num_microbatches")
    }
    del older["micro_batch_indices"]
    older["loss_masks"] = [torch.tensor(sample.loss_mask) for sample in one_each]
    slime.token_mean(arguments(), 0, older)
    found = [length.divisor for length in older["response_lengths"]]
    assert found == [36 / 8] * 8 + [100 / 8] * 8 + [0.0]  # the last is in no step


def test_a_slime_without_data_for_its_hook_is_refused() -> None:
    assert_refused("gives its hook no rollout data | v0.2.4", slime.prompt_mean, arguments())


def test_slimes_groups_by_a_field_of_the_rollout() -> None:
    step = ragged(2)
    by_index, by_field = slime_data(step), slime_data(step)
    by_field["round_number"] = [index // ROLLOUTS_PER_GROUP for index in by_field["sample_indices"]]
    by_field["sample_indices"] = list(range(len(step)))
    slime.prompt_mean(arguments(), 0, by_index)
    slime.prompt_mean(arguments(loss_aggregation_group_key="round_number"), 0, by_field)
    lengths = by_field["response_lengths"], by_index["response_lengths"]
    assert carried(lengths[0]).equal(carried(lengths[1]))
    args = arguments(loss_aggregation_group_key="group")
    words = "has no field group for prompt groups"
    assert_refused(words, slime.prompt_mean, args, 0, by_field)


def test_slimes_indices_that_tell_no_groups_are_refused() -> None:
    """As after a resumption with another --n-samples-per-prompt: a group would be two halves of two
    prompts.
    """
    data = slime_data(ragged(2))
    data["sample_indices"] = [index + 2 for index in data["sample_indices"]]
    assert_refused("prompt group", slime.prompt_mean, arguments(), 0, data)
    data["sample_indices"][3] = None
    words = "sample_indices of sample 3 of this rank is None"
    assert_refused(words, slime.prompt_mean, arguments(), 0, data)


@pytest.fixture
def conversion(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """As much of miles' conversion as the hook meets; it says what it was called with."""
    calls = types.SimpleNamespace(post_process="unset", extra={})

    def convert(args: Any, samples: Any, metadata: Any, **functions: Any) -> dict[str, Any]:
        calls.post_process = functions["custom_reward_post_process_func"]
        assert metadata == {} and functions["custom_convert_samples_to_train_data_func"] is None
        return {
            "loss_masks": [sample.loss_mask for sample in samples],
            "response_lengths": [sample.response_length for sample in samples],
            "rollout_ids": [sample.rollout_id for sample in samples],
            "rollout_mask_sums": [sum(sample.loss_mask) for sample in samples],
            "weight_versions": "kept",
            **calls.extra,
        }

    for name, content in {
        "miles.ray.rollout.train_data_conversion": {"convert_samples_to_train_data": convert},
        "miles.utils.misc": {"load_function": lambda path: path and f"the function {path}"},
    }.items():
        module = types.ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    return calls


def miles_samples(step: list[PlainSample]) -> list[Any]:
    return [types.SimpleNamespace(index=n, **vars(sample)) for n, sample in enumerate(step)]


@pytest.mark.parametrize("aggregation", HOOKS)
def test_miles_hook_is_exact_in_each_step(aggregation: str, conversion) -> None:
    step = ragged(3)
    divisor = divisor_of(aggregation)
    args = arguments(custom_reward_post_process_path="my.rewards", **divisor)
    data = getattr(miles, aggregation)(args, miles_samples(step))
    assert data["weight_versions"] == "kept"
    assert conversion.post_process == "the function my.rewards"
    lengths = pickle.loads(pickle.dumps(data["response_lengths"]))  # to the training processes
    assert_halves(aggregation, step, carried(lengths), 1e-12, clamp=0)
    assert data["rollout_mask_sums"] == [sum(sample.loss_mask) for sample in step]


@pytest.mark.parametrize("aggregation", HOOKS)
def test_miles_hook_for_all_terms(aggregation: str, conversion) -> None:
    step = ragged(3)
    args = arguments(regularizer_aggregation="loss", **divisor_of(aggregation))
    data = getattr(miles, aggregation)(args, miles_samples(step))
    sums = torch.tensor(data["rollout_mask_sums"], dtype=torch.float64)
    assert_halves(aggregation, step, sums, 1e-12)


def test_fewer_rollouts_than_a_step_are_refused_in_miles(conversion: types.SimpleNamespace) -> None:
    """Nine samples of seven rollouts: miles would make a step of eight samples of them."""
    samples = miles_samples(ragged(3, num_groups=2)[:9])
    words = "7 rollouts are fewer than --global-batch-size 8"
    assert_refused(words, miles.token_mean, arguments(), samples)


def test_miles_last_step_of_fewer_rollouts(conversion: types.SimpleNamespace) -> None:
    """`--allow-partial-train-step` trains on the rest as a step of its own."""
    step = ragged(3, num_groups=3)
    data = miles.token_mean(arguments(), miles_samples(step))
    rest, full = ([s for s in step if half_of(s) == half] for half in (1, 0))
    assert rest and not any(sum(sample.loss_mask) for sample in rest)
    assert data["response_lengths"][0].divisor == oracle.active_tokens(full, range(len(full))) / 8


def test_miles_samples_without_a_group_are_refused(conversion: types.SimpleNamespace) -> None:
    samples = miles_samples(ragged(3))
    samples[2].group_index = None
    words = "group_index of sample 2 (index 2) is None"
    assert_refused(words, miles.prompt_mean, arguments(), samples)
    miles.token_mean(arguments(), samples)


def test_miles_multimodal_rollouts_are_refused(conversion: types.SimpleNamespace) -> None:
    conversion.extra, words = {"multimodal_train_inputs": []}, "multimodal inputs let miles split"
    assert_refused(words, miles.token_mean, arguments(), miles_samples(ragged(3)))
