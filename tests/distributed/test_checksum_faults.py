"""The aggregation checksum of a real step sees data that is wrong, and every rank names what it knows of it."""

from __future__ import annotations

from tests.lanes import in_one_lane

from .checksum_faults import AGGREGATIONS_OF_MODE, FAULTS, messages_of_faults
from .launch import run_ranks

pytestmark = in_one_lane

WORDS = {
    # fault -> what every rank says, and what data-parallel ranks 0 and 1 add
    "fed twice": (
        "trained on twice and another never",
        "",
        "twice: sample 4, sample 5; never trained on: sample 6, sample 7.",
    ),
    "exchanged": (
        "exchanged between ranks",
        "counted on another rank: sample 4 (rank 1), sample 5 (rank 1); never trained on: sample 0",
        "counted on another rank: sample 0 (rank 0), sample 1 (rank 0); never trained on: sample 4",
    ),
    "stale": (
        "of another step",
        "",
        "not of this step: yesterday's 4, yesterday's 5; never trained on: sample 4, sample 5.",
    ),
    "other window": ("another context-parallel rank than the one that ran it", "", ""),
    "other cut": ("another context-parallel rank than the one that ran it", "", ""),
    "dropped": ("is 0.875000, expected 1", "never trained on: sample 3.", ""),
    "duplicated": ("is 1.125000, expected 1", "", "trained on twice: sample 5."),
}


def test_wrong_data_is_seen_and_named_under_every_aggregation_in_both_loss_modes() -> None:
    """Without a further collective: the report is one all-reduce under --pg-metrics none."""
    ranks = run_ranks(messages_of_faults, 4)
    assert set(WORDS) | {"none"} == set(FAULTS)
    steps = [(name, mode) for mode, names in AGGREGATIONS_OF_MODE.items() for name in names]
    for aggregation, per_token in steps:
        said = [{f: rank[aggregation, per_token, f] for f in FAULTS} for rank in ranks]
        assert {rank["none"] for rank in said} == {("1.000000000000", 1)}
        for fault, (meaning, *names) in WORDS.items():
            for message, num_reductions in (rank[fault] for rank in said):
                assert meaning in message and num_reductions == 1, (fault, message)
            # Ranks of one context-parallel group follow each other.
            for place, rank in enumerate(said):
                named = names[place // 2]
                assert named in rank[fault][0], (fault, rank[fault][0])
                assert bool(named) == ("On data-parallel rank" in rank[fault][0])
