"""A rank of four that comes never, dies or has no samples: all others are told which, and none waits for ever.

`python -m benchmarks.faults` has more cases and ranks.
"""

import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmarks.faults import Told, run_case

from .launch import fork_server

NAMED = r"AbsentRankError: rank 2 of the 4 of group \w+ \(rank 2 of the job\) did not come to an exchange, or ended in it: .*"
CASES = {
    # Four samples of each rank, of one prompt.
    "has no samples": r"N = 12, P = 3, T = 12",
    "is late": r"N = 16",
    "has a sample that is too long": r"ValueError: data-parallel rank 2: the long sample takes 65 tokens.*",
    "never comes": NAMED,
    "dies in the plan": NAMED,
    "dies in the reduction": NAMED,
    "samples never come, error": r"ValueError: data-parallel rank 2: 2 of 4 samples have come.*",
    # The engines of all ranks stop there, and that of rank 2 two samples earlier.
    "samples never come, next_step": r"N = 14, P = 4, T = 14, late: \(0, 1, 2, 3\)",
}
WAIT = 2.0
TIMEOUTS = {"never comes": 6.0}
LONG = 600.0
"""The timeout of the process groups of all other cases, in seconds."""


@pytest.fixture(scope="module")
def told() -> dict[str, list[Told]]:
    """What the ranks of all cases are told, at the same time: they wait rather than work."""
    context = fork_server()
    with ThreadPoolExecutor(len(CASES)) as pool:
        jobs = {
            name: pool.submit(run_case, context, name, 4, WAIT, TIMEOUTS.get(name, LONG))
            for name in CASES
        }
        return {name: job.result() for name, job in jobs.items()}


@pytest.mark.parametrize("name", CASES)
def test_all_ranks_are_told(told, name) -> None:
    assert sorted(one.rank for one in told[name]) == [0, 1, 3]
    for one in told[name]:
        assert re.fullmatch(CASES[name], one.words, re.DOTALL), one


def test_torch_alone_names_no_rank() -> None:
    """The case that the names are for, without them."""
    plain = run_case(fork_server(), "dies in the reduction", 4, WAIT, LONG, plain=True)
    assert len(plain) == 3 and not any("rank 2" in one.words for one in plain)
