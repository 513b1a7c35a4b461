"""Studies of what a loss that is right is worth in training; docs/records/study_plans.md has their
plans, written before the runs.
"""

import sys
from pathlib import Path

# The task of the quickstart, and the interval of its study.
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
