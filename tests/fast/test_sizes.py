"""ci/sizes.py: what may grow without a reason, and what asks for one."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "ci"))
import sizes


def test_growth_beyond_two_percent_is_named() -> None:
    before = {"megatron_pg": 1000, "tests": 1000, "public names": 100, "flags": 10}
    after = {"megatron_pg": 1021, "tests": 1020, "public names": 90, "flags": 20}
    assert sizes.growth(after, before) == {"megatron_pg": "1000 -> 1021"}


@pytest.mark.parametrize(
    "body", ["tests: add cases", "tests: add cases\n\nGrowth: of new losses\n"]
)
def test_a_record_that_grows_needs_a_reason(monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    def git(*arguments: str) -> str:
        if arguments[0] == "log":
            return f"abc\n{body}"
        return json.dumps({"tests": 1000 if arguments[1].startswith("abc~1") else 1100})

    monkeypatch.setattr(sizes, "git", git)
    found = sizes.unexplained()
    assert found == ({} if "Growth" in body else {"tests": "1000 -> 1100"})
