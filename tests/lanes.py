"""Tests that one of the two lanes is enough for."""

from __future__ import annotations

import sys

import pytest

in_one_lane = pytest.mark.skipif(
    sys.version_info < (3, 12),
    reason="takes long, and is about no version of Python or Megatron-Core: in the other lane",
)
