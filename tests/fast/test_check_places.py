"""Names of a few wrong ranks among thousands, and the sample of a job that a check runs on."""

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
from megatron.core.parallel_state import RankGenerator

from megatron_pg.check import places
from megatron_pg.check.options import CheckOptions, violations_of_sizes
from megatron_pg.check.places import AXES, Place, names_of, sampled_data_ranks, sampled_ranks

TP, CP, DP, PP = 4, 2, 128, 4
EVERYONE = [
    Place(rank, f"node{rank // 8}", (tensor, context, data, pipeline))
    for rank, (pipeline, data, context, tensor) in enumerate(
        itertools.product(range(PP), range(DP), range(CP), range(TP))
    )
]
"""A job of 4,096 ranks, eight on a node, in Megatron's order."""


def test_three_wrong_ranks_of_4096_are_named_one_by_one() -> None:
    assert len(EVERYONE) == 4096
    assert names_of([EVERYONE[rank] for rank in (17, 1030, 4095)], EVERYONE) == (
        "rank 17 (host node2, TP 1, CP 0, DP 2, PP 0), rank 1030 (host node128, TP 2, CP 1, DP 0, "
        "PP 1), "
        "rank 4095 (host node511, TP 3, CP 1, DP 127, PP 3)"
    )


Rule = Callable[[Place], bool]


@pytest.mark.parametrize(("is_wrong", "words"), [
    (lambda place: True, ""),
    (lambda place: place.coordinates[3] == 2, "1024 of 4096 ranks, all with PP 2"),
    (lambda place: place.coordinates[:2] == (1, 0), "512 of 4096 ranks, all with TP 1, CP 0"),
    (lambda place: place.host == "node7", "8 of 4096 ranks, all on host node7"),
    (
        lambda place: place.coordinates[0] == 3 and place.rank % 24 == 7,
        "171 of 4096 ranks, all in TP 3, CP 1, first rank 7 (host node0, TP 3, CP 1, DP "
        "0, PP 0), rank 31",
    ),
    (lambda place: place.rank % 7 == 0, "586 of 4096 ranks, first rank 0 (host node0, TP "
                                        "0, "),
])  # fmt: skip
def test_many_wrong_ranks_are_named_by_what_they_share(is_wrong: Rule, words: str) -> None:
    found = names_of([place for place in EVERYONE if is_wrong(place)], EVERYONE)
    assert found.startswith(words) and len(found) < 400
    if words.endswith(("2", "0", "7")) or not words:
        assert found == words


def test_axes_of_one_rank_are_left_out() -> None:
    pair = [Place(rank, "here", (0, rank, 0, 0)) for rank in range(2)]
    assert names_of(pair[1:], pair) == "rank 1 (host here, CP 1)"


def groups_of(options: CheckOptions, size: int, kind: str) -> set[tuple[int, ...]]:
    """Megatron's own groups of a job."""
    is_sparse = kind in ("ep", "tp-ep")
    tensor = (
        options.expert_tensor_parallel_size if is_sparse else options.tensor_model_parallel_size
    )
    expert = options.expert_model_parallel_size if is_sparse else 1
    context = 1 if is_sparse else options.context_parallel_size
    pipeline = options.pipeline_model_parallel_size
    data = size // (tensor * expert * context * pipeline)
    generator = RankGenerator(tensor, expert, data, pipeline, context, "tp-cp-ep-dp-pp")
    return {tuple(group) for group in generator.get_ranks(kind)}


@pytest.mark.parametrize(("sizes", "size", "number", "data_ranks"), [
    ((1, 1, 1, 1, 1), 8, None, range(8)),
    ((1, 1, 1, 1, 1), 8, 1, [0]),
    ((1, 1, 1, 1, 1), 4096, 3, [0, 2048, 4095]),
    ((4, 2, 4, 1, 1), 4096, 4, [0, 42, 85, 127]),
    ((2, 1, 2, 1, 1), 16, 9, range(4)),
    # Eight data-parallel ranks share experts.
    ((2, 1, 2, 16, 1), 256, 2, [*range(8), *range(56, 64)]),
    ((2, 2, 1, 4, 2), 64, 2, [0, 1, 14, 15]),
])  # fmt: skip
def test_a_sample_is_a_job_whose_groups_are_the_jobs(sizes, size, number, data_ranks) -> None:
    """But for the data-parallel ones, of which the sample has a part. Megatron's own rank generator
    says which they are.
    """
    tensor, context, pipeline, expert, expert_tensor = sizes
    options = CheckOptions(
        tensor_model_parallel_size=tensor,
        context_parallel_size=context,
        pipeline_model_parallel_size=pipeline,
        expert_model_parallel_size=expert,
        expert_tensor_parallel_size=expert_tensor,
        sample_groups=number,
    )
    assert list(sampled_data_ranks(options, size)) == list(data_ranks)
    ranks = sampled_ranks(options, size)
    assert ranks == sorted(set(ranks))
    kinds = ("tp", "cp", "pp", "tp-cp-pp", "ep", "tp-ep")
    for kind in kinds if expert > 1 else kinds[:4]:
        sampled = groups_of(options, len(ranks), kind)
        assert {tuple(ranks[place] for place in group) for group in sampled} <= groups_of(
            options, size, kind
        ), kind
    # The mutant: a sample of consecutive ranks.
    if pipeline > 1 and len(ranks) < size:
        wrong = groups_of(options, len(ranks), "pp")
        assert not wrong <= groups_of(options, size, "pp")


def test_a_place_in_a_sample_is_named_as_in_the_job(monkeypatch) -> None:
    options = CheckOptions(tensor_model_parallel_size=2, sample_groups=2)
    monkeypatch.setenv("RANK", "15")
    monkeypatch.setenv("WORLD_SIZE", "16")
    place = places.place_of((1, 0, 1, 0), options)
    assert (place.rank, dict(zip(AXES, place.coordinates, strict=True))["DP"]) == (15, 7)


def test_a_sample_of_all_shardings_is_refused() -> None:
    options = replace(CheckOptions(all=True), sample_groups=2)
    assert "--sample-groups" in "".join(violations_of_sizes(options, 4))
