"""Ids that two ranks or two files number alike are refused, with both samples named, and may be
made distinct.
"""

import dataclasses
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_pg import PolicyLossConfig, Sample, pack, step_totals
from megatron_pg.cli import main as cli
from megatron_pg.config.planning import PlanningConfig
from megatron_pg.loss.padded import padded_totals
from megatron_pg.megatron import PolicyStep
from megatron_pg.rollout_files import RolloutFiles, RowError, StepCollector, with_group_advantages
from megatron_pg.step import ids as ids_module
from megatron_pg.step import plan_step, with_distinct_ids
from megatron_pg.step import values as values_module
from megatron_pg.step.counts import StepCounts
from megatron_pg.step.ids import check_ids
from megatron_pg.step.totals import BareSample, StepTotals, sample_counts, totals_of_counts
from megatron_pg.step.values import hash_of_tokens
from tests.distributed.launch import run_ranks
from tests.fast import one_step
from tests.fast.refusals import assert_refused, assert_words, refusal

plan = partial(plan_step, max_tokens_per_microbatch=64)


def sample(
    prompt: Sequence[int], group: int | None, rollout: int | None = None, **others: Any
) -> Sample:
    return Sample([*prompt, 1, 2], 2, [1, 1], group_index=group, rollout_id=rollout, **others)


def of_rank(rank: int) -> list[Sample]:
    """Two prompts, two answers each; every rank has prompts of its own and numbers them from 0."""
    return [
        sample([10 * rank + prompt, 7], prompt, name=f"answer {prompt}{answer}")
        for prompt in range(2)
        for answer in range(2)
    ]


def totals(ranks: Sequence[Sequence[Any]], **keywords: Any) -> StepTotals:
    return totals_of_counts([sample_counts(each) for each in ranks], 0, **keywords)


def two_ranks() -> tuple[list[str], int | None, list[float]]:
    rank = dist.get_rank()
    mine, group = of_rank(rank), {"data_parallel_group": dist.group.WORLD}
    said = [refusal(step_totals, mine, **group), refusal(plan, mine, **group)]
    allowed = plan(mine, allow_different_prompts=True, **group)
    assert allowed.totals.num_prompt_groups == 2
    distinct = [with_distinct_ids(each, rank) for each in mine]
    counted = step_totals(distinct, **group)
    return said, counted.num_prompt_groups, counted.group_denominators(distinct).tolist()


def test_two_ranks_that_number_their_groups_from_0_are_refused_by_name():
    words = "group_index 0 is given to answer 00 (number 0 of data-parallel rank 0)"
    words += " | and to answer 00 (number 0 of data-parallel rank 1)"
    words += " | --distinct-ids rank | --allow-different-prompts-in-group"
    for said, num_groups, denominators in run_ranks(two_ranks, 2):
        for message in said:
            assert_words(words, message)
        assert num_groups == 4 and denominators == [4.0] * 4


def test_samples_without_a_group_have_any_prompts():
    assert totals([[sample([5], None)], [sample([6], None)]]).num_rollouts == 2


def step_of_groups(sizes: dict[int, int]) -> list[Sample]:
    return [
        sample([abs(group)], group, name=f"{number} to {group}", old_log_probs=[-1.0, -1.0])
        for group, size in sizes.items()
        for number in range(size)
    ]


def planned_totals(samples: Sequence[Sample], **keywords: Any) -> StepTotals:
    return plan(samples, **keywords).totals


ODD = step_of_groups({3: 8, -7: 8, 9: 5})
HALVES = [[*ODD[:4], *ODD[8:12]], [*ODD[4:8], *ODD[12:16]]]
COUNTS = (step_totals, planned_totals)


def test_prompt_groups_of_the_size_that_is_given():
    """Without a collector too: step_totals and plan_step know what a whole group is, where they are
    told.
    """
    words = "samples_per_group is 8 and prompt group 9 has 5 (the first is 0 to 9"
    for count in COUNTS:
        message = refusal(count, ODD, samples_per_group=8)
        assert_words(f"{words} | counts the rollouts | --keep-prompt-groups", message)
        assert "mean" not in message, "of every aggregation"
        assert "group 3" not in message
        assert count(ODD[:16], samples_per_group=8).num_prompt_groups == 2
        assert count(ODD, samples_per_group=None).num_prompt_groups == 3
    # Over ranks, and in rollouts: one of three samples counts once.
    assert totals(HALVES, samples_per_group=8).num_prompt_groups == 2
    turns = [sample([5], 0, 0) for _ in range(3)] + [sample([5], 0, 1)]
    assert totals([turns], samples_per_group=2).num_prompt_groups == 1


COLLIDED = [sample([5], None, 0, name="a"), sample([6], None, 0, name="b")]


def test_rollouts_of_one_rank_that_something_tells_apart_or_joins():
    assert totals([COLLIDED], allow_different_prompts=True).num_rollouts == 1
    for known in ({"group_index": 3}, {"id_source": "worker 1"}):
        pieces = [dataclasses.replace(each, **known) for each in COLLIDED]
        assert totals([pieces]).num_rollouts == 1
    turns = [sample([5], None, 0), sample([5], None, 0)]
    assert totals([turns]).num_rollouts == 1


def loss_of(counted: StepTotals, samples: Sequence[Sample], aggregation="prompt_mean") -> float:
    config, batch = PolicyLossConfig(loss_aggregation=aggregation), pack(samples)
    return float(one_step.loss_of(config, batch, torch.zeros(len(batch.window)), totals=counted)[0])


FOUR_OF_EACH = step_of_groups({97: 4, 98: 4})
CUT_STEP = FOUR_OF_EACH[:6]


def test_the_prompt_mean_of_groups_of_one_size_and_of_those_that_are_allowed():
    for counted, samples in (
        (plan(FOUR_OF_EACH).totals, FOUR_OF_EACH),
        (plan(FOUR_OF_EACH, samples_per_group=4).totals, FOUR_OF_EACH),
        (plan(CUT_STEP, allow_different_group_sizes=True).totals, CUT_STEP),
    ):
        assert loss_of(counted, samples) == 0.0
    # The other aggregations have no use for groups.
    loss_of(plan(CUT_STEP).totals, CUT_STEP, "sample_mean")


def test_every_rank_refuses_the_same_odd_group():
    """Each from the counts of all: groups that are whole over ranks are whole, and one is named
    where several differ.
    """
    step = step_of_groups({97: 4, 98: 4, 99: 3, 100: 5})
    ranks = [step[:2] + step[4:8], step[2:4]]
    for rank in range(2):
        counts = [sample_counts(each) for each in ranks]
        assert not totals_of_counts(counts, rank).odd_group
    counts = [sample_counts(step[:5]), sample_counts(step[5:])]
    found = {totals_of_counts(counts, rank).odd_group for rank in range(2)}
    assert len(found) == 1 and "99 has 3" in (one := found.pop()) and one.endswith("1 more differ")
    # In rollouts: one of three samples counts once.
    turns = [*(sample([5], 0, rollout) for rollout in (0, 0, 1)), sample([6], 1), sample([6], 1)]
    assert not totals([turns]).odd_group
    assert "group 1 has 1" in totals([turns[:-1]]).odd_group


SOURCE = "environment 3"


def test_a_rollout_that_says_where_it_is_numbered_may_lie_on_two_ranks():
    ranks = [[sample([5], 0, 0, id_source=SOURCE)] for _ in range(2)]
    assert totals(ranks).num_rollouts == 1


def test_rows_of_a_matrix_have_rollouts_and_no_prompts():
    rows = [[BareSample(3, 0, name="row 0")], [BareSample(3, 0, name="row 0")]]
    assert totals(rows).num_prompt_groups == 1
    given = padded_totals(torch.ones(2, 3), rollout_id=[0, 0], id_source="the trainer")
    assert given.counts[0].id_source == "the trainer"


PIECES = [sample([5], 0, 0, name="a"), sample([5, 1, 2], 0, 0, name="a, turn 2")]
STRANGERS = [sample([6], 0, 1, name="c"), sample([6, 1], 0, 1, name="c, turn 2")]


def test_rollouts_of_several_samples_share_a_prompt():
    """Of a conversation that is trained on in pieces, each piece has a prompt of its own, and one
    of them the first.
    """
    others = [sample([5, 2, 2], 0, 1, name="b, turn 2"), sample([5], 0, 1, name="b")]
    assert totals([[*PIECES, *others]]).num_rollouts == 2
    assert totals([[*PIECES, sample([5], 0)], others]).num_rollouts == 3
    assert totals([[*PIECES, *STRANGERS]], allow_different_prompts=True).num_rollouts == 2


PROMPT_MEAN = PolicyLossConfig(loss_aggregation="prompt_mean")
ALONE = SimpleNamespace(data_size=1, context_size=1)
TWICE = "rollout_id 0 is given to a (number 0 of data-parallel rank 0) and to b ("
NOT_SAMPLES = {
    "a dict": ({"tokens": [1, 2]}, "found a dict"),
    "a list of dicts": ([sample([5], 0), {"tokens": [1, 2]}], "number 1 is a dict"),
    "a generator": ((each for each in [sample([5], 0)]), "found a generator"),
    "one sample": (sample([5], 0), "found a Sample"),
}
NO_COUNTS = (-1, 2**40, -(2**63))
# case: (call, words of the refusal)
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    **{
        f"two ranks that number their rollouts from 0, allowed {allowed}": (
            partial(totals, [[sample([5], None, 0, name=name)] for name in ("a", "b")],
                    allow_different_prompts=allowed),
            f"{TWICE} | --distinct-ids rank | id_source",
        )
        for allowed in (False, True)
    },
    # Two workers of a rank that each number from 0: nothing says that different prompts are of one
    # rollout.
    "rollouts that collide on one rank": (lambda: totals([COLLIDED]),
                                          f"{TWICE} | group_index | id_source"),
    "a rollout whose source one rank does not say": (
        lambda: totals([[sample([5], 0, 0, id_source=source)] for source in (SOURCE, None)]),
        f"({SOURCE}) and to sample 0 of data-parallel rank 1",
    ),
    "rows of a matrix": (lambda: totals([[BareSample(3, 0, 0, "row 0")]] * 2), "rollout_id 0"),
    "rollouts of strangers": (lambda: totals([[*PIECES, *STRANGERS]]),
                              "is given to a (number 0 of data-parallel rank 0) and to c ("),
    **{
        f"{case}, {count.__name__}": (partial(count, samples, samples_per_group=size), words)
        for count in COUNTS
        for case, samples, size, words in (
            ("a sample without a group", [*ODD[:16], sample([1], None)], 8,
             "sample 16 of data-parallel rank 0 has no group_index"),
            ("a size of 0", ODD, 0, "samples_per_group is"),
            ("a size of 1.5", ODD, 1.5, "samples_per_group is"),
        )
    },
    "half of a group": (lambda: totals(HALVES[:1], samples_per_group=8), "prompt group 3 has 4"),
    # Without a size given too: of groups of 4, the second is cut after two.
    "a prompt mean of groups of different sizes": (
        lambda: loss_of(plan(CUT_STEP).totals, CUT_STEP),
        "prompt group 98 has 2 rollouts in the step (the first is 0 to 98 (number  | and most "
        "groups have 4 | --allow-different-group-sizes | --keep-prompt-groups",
    ),
    "a prompt mean of groups of different sizes, on every pipeline stage": (
        lambda: PolicyStep(PROMPT_MEAN, plan(CUT_STEP), groups=ALONE), "prompt group 98 has 2"
    ),
    **{
        f"{case}, {name}": (partial(call, given), f"expected a list of Sample | {words}")
        for name, call in (("plan", plan), ("pack", pack))
        for case, (given, words) in NOT_SAMPLES.items()
    },
    **{
        f"a group {group} made distinct": (
            partial(with_distinct_ids, sample([5], group, name="answer 7"), 1),
            f"answer 7: group_index is {group} | --distinct-ids",
        )
        for group in NO_COUNTS
    },
    "a rank beyond those that ids can carry": (
        lambda: with_distinct_ids(sample([5], 3, 4), 2**23), "is 3, expected 0 or more"
    ),
    "distinct files without files": (lambda: PlanningConfig(64, distinct_ids="file"), "Add files"),
    "distinct ranks with files": (
        lambda: PlanningConfig(64, distinct_ids="rank", rollout_files=("a.jsonl",)),
        "go to different ranks | Choose file",
    ),
    "distinct nodes": (lambda: PlanningConfig(64, distinct_ids="node"), "one of rank, file"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    call, words = REFUSED[case]
    assert_refused(words, call)


# Files.


def write(path: Path, first_prompt: int, first_group: float = 0, rollouts: bool = False) -> str:
    rows: list[dict[str, Any]] = [
        {"prompt_ids": [first_prompt + index // 2], "response_ids": [1, 2]}
        | {"reward": float(index % 2), "group_index": first_group + index // 2}
        | ({"rollout_id": index} if rollouts else {})
        for index in range(4)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def step_of(paths: Sequence[str], **keywords: Any) -> list[Sample]:
    collected = StepCollector(RolloutFiles(paths, **keywords), docs_per_step=100).collect()
    assert collected is not None
    return list(collected.samples)


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    return [write(tmp_path / "monday.jsonl", 10), write(tmp_path / "tuesday.jsonl", 20)]


def test_two_files_that_number_their_groups_from_0_are_refused_by_name(files, capsys):
    samples = step_of(files)
    said = [refusal(step_totals, samples), refusal(with_group_advantages, samples)]
    assert cli(["explain", "--rollout-files", *files, "--policy-loss", "reinforce"]) == 2
    said.append(capsys.readouterr().err)
    words = "group_index 0 is given to monday.jsonl row 0 (file 1 of --rollout-files)"
    for message in said:
        assert_words(f"{words} | tuesday.jsonl row 0 (file 2 of | --distinct-ids file", message)


@pytest.mark.parametrize(
    ("distinct", "flag", "count"),
    [(True, "--distinct-ids file", 4), (False, "--allow-different-prompts-in-group", 2)],
)
def test_groups_of_two_files_are_distinct_or_allowed(files, capsys, distinct, flag, count):
    samples = step_of(files, distinct_ids=distinct)
    allowed = {"allow_different_prompts": not distinct}
    assert step_totals(samples, **allowed).num_prompt_groups == count
    _, groups = with_group_advantages(samples, **allowed)
    assert groups.num_groups == count and not groups.zero_advantage_groups
    line = ["--policy-loss", "reinforce", "--json", *flag.split()]
    assert cli(["explain", "--rollout-files", *files, *line]) == 0
    assert json.loads(capsys.readouterr().out)["step"]["num_prompt_groups"] == count


def test_rollouts_of_two_files_are_refused_and_made_distinct(tmp_path):
    """Here the prompts tell nothing: each merged rollout has one of each file."""
    monday, tuesday = tmp_path / "monday.jsonl", tmp_path / "tuesday.jsonl"
    paths = [write(monday, 10, rollouts=True), write(tuesday, 20, rollouts=True)]
    words = "rollout_id 0 is given to monday.jsonl row 0 (file 1"
    assert_refused(words, step_totals, step_of(paths))
    counted = step_totals(step_of(paths, distinct_ids=True))
    assert (counted.num_rollouts, counted.num_prompt_groups) == (8, 4)


def test_the_rows_of_one_rollout_are_dealt_over_ranks(tmp_path):
    path = tmp_path / "turns.jsonl"
    row = {"prompt_ids": [1], "response_ids": [2], "reward": 1.0, "group_index": 0, "rollout_id": 0}
    path.write_text(2 * (json.dumps(row) + "\n"))
    dealt = partial(RolloutFiles, [path], data_parallel_size=2)
    ranks = [dealt(data_parallel_rank=rank).pull(1) for rank in range(2)]
    assert totals(ranks).num_rollouts == 1


@pytest.mark.parametrize(("group", "words"), [
    *((group, "row 0: group_index is  | --distinct-ids file") for group in NO_COUNTS),
    (1.5, "an integer of 64 bits"),
])  # fmt: skip
def test_ids_of_a_file_that_do_not_count_from_0_cannot_be_made_distinct(tmp_path, group, words):
    path = write(tmp_path / "a.jsonl", 10, first_group=group)
    source = RolloutFiles([path], distinct_ids=True)
    assert_refused(words, source.pull, 1, error=RowError)


def test_distinct_ids_are_those_of_the_group_and_of_the_rollout():
    given = dataclasses.replace(sample([5], 3), rollout_id=4)
    found = with_distinct_ids(given, 2)
    assert (found.group_index, found.rollout_id) == (2 * 2**40 + 3, 2 * 2**40 + 4)


def test_distinct_ids_that_fit_the_source_of_the_samples():
    PlanningConfig(64, distinct_ids="rank")
    PlanningConfig(64, distinct_ids="file", rollout_files=("a.jsonl",))


steps = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), min_size=2, max_size=12)
"""Of each sample its prompt and its rank."""


def ranks_of(
    step: list[tuple[int, int]], group_of: Callable[[int, int], int]
) -> list[list[Sample]]:
    ranks: list[list[Sample]] = [[] for _ in range(3)]
    for prompt, rank in step:
        # Equally long, of the same first token.
        ranks[rank].append(sample([7, prompt], group_of(prompt, rank)))
    return ranks


def check_colliding(check: Callable[..., None], step: list[tuple[int, int]]) -> None:
    """Every group id stands for two prompts, where the step has both."""
    by_group: dict[int, set[int]] = {}
    for prompt, _ in step:
        by_group.setdefault(prompt % 2, set()).add(prompt)
    ranks = [sample_counts(each) for each in ranks_of(step, lambda prompt, rank: prompt % 2)]
    if max(map(len, by_group.values())) > 1:
        assert_refused("whose prompts have different tokens", check, ranks)
    else:
        check(ranks)


@settings(max_examples=50)
@given(step=steps)
def test_unique_ids_pass_and_ids_of_two_prompts_do_not(step):
    check_ids([sample_counts(each) for each in ranks_of(step, lambda prompt, rank: prompt)])
    check_colliding(check_ids, step)


@settings(max_examples=30)
@given(step=steps, data=st.data())
def test_distinct_ids_of_any_numbering_pass(step, data):
    numbering = data.draw(st.permutations(range(4)))
    ranks = ranks_of(step, lambda prompt, rank: numbering[(prompt + rank) % 4])
    distinct = [[with_distinct_ids(each, rank) for each in of] for rank, of in enumerate(ranks)]
    assert totals(distinct).num_prompt_groups == len(set(step))


WEAKER_HASHES = {
    "length alone": lambda sample: sample.prompt_length,
    "first token alone": lambda sample: int(sample.tokens[0]),
}


@pytest.mark.parametrize("mutant", WEAKER_HASHES.values(), ids=WEAKER_HASHES)
def test_mutant_a_weaker_hash_lets_ids_of_two_prompts_pass(monkeypatch, mutant):
    monkeypatch.setattr(Sample, "prompt_hash", property(mutant))
    with pytest.raises(pytest.fail.Exception):
        check_colliding(check_ids, [(0, 0), (2, 1)])


@pytest.mark.parametrize("count", [0, 1, 2, 1022, 1023, 1024, 5000])
def test_the_hash_of_a_prompt_is_that_of_plain_integers(count):
    tokens = [(token * 7919) % 150_000 - 1 for token in range(count)]
    first, *keys = values_module._keys(8192).tolist()
    assert len({first, *keys}) == 8192 and all(key % 2 for key in (first, *keys))
    expected = first * count + sum(key * token for key, token in zip(keys, tokens, strict=False))
    assert hash_of_tokens(torch.tensor(tokens, dtype=torch.int64)) == expected % 2**64


def test_prompts_that_differ_anywhere_have_different_hashes():
    tokens = list(range(12))
    prompts = [[*tokens[:i], 99, *tokens[i + 1 :]] for i in range(12)]
    prompts += [tokens, [*tokens, 0], [0, *tokens], tokens[1:], tokens[:-1], tokens[::-1]]
    assert len({hash_of_tokens(torch.tensor(prompt)) for prompt in prompts}) == len(prompts)


def test_mutant_a_check_within_ranks_lets_two_of_them_collide(monkeypatch):
    def of_each_rank(everyone: Sequence[Any], **keywords: Any) -> None:
        for each in everyone:
            check_ids([each], **keywords)

    with pytest.raises(pytest.fail.Exception):
        check_colliding(of_each_rank, [(0, 0), (2, 1)])


def test_mutant_a_check_against_the_last_alone_lets_rollouts_of_pieces_pass(monkeypatch):
    """The prompt that all have in common, and not one that each has with the next."""
    chain = [
        sample([prompt], 0, rollout)
        for rollout, prompts in enumerate(((1, 2), (2, 3), (3, 4)))
        for prompt in prompts
    ]

    def with_the_next(counts: StepCounts) -> None:
        for place in (0, 2):
            check_prompts(StepCounts.of([counts[place : place + 4]]))

    check_prompts = ids_module._check_prompts
    assert_refused("whose prompts", totals, [chain])
    monkeypatch.setattr(ids_module, "_check_prompts", with_the_next)
    totals([chain])
