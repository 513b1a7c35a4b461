"""Which tests run in which of the two lanes.

Python 3.12 has all of them. Python 3.11, whose Megatron-Core is an old one beside the same torch, has those that one
of the two versions could fail: `tests/distributed` but what is `in_one_lane`, and of `tests/fast` what is
`in_both_lanes` (`ci/test.sh`).
"""

import sys

import pytest

in_one_lane = pytest.mark.skipif(
    sys.version_info < (3, 12),
    reason="is about no version of Python or Megatron-Core: in the other lane",
)
"""Of `tests/distributed`: launchers and killed runs, the package's own objectives and sums over ranks, and what the
tests themselves would see."""
in_both_lanes = pytest.mark.in_both_lanes
"""Of `tests/fast`: what asks for the version, reads Megatron-Core, parses flags, or does without Megatron-Core."""
