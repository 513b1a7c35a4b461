"""A small rollout file."""

import json
import random
from pathlib import Path
from typing import Any

VOCABULARY = 32


def write_rollouts(path: Path, num_groups: int) -> Path:
    """Prompt groups of two to four answers of different lengths, one row in twenty bad, a reward each."""
    generator = random.Random(1)
    with path.open("w") as file:
        for group in range(num_groups):
            prompt = [generator.randrange(VOCABULARY) for _ in range(generator.randint(1, 4))]
            for _ in range(generator.randint(2, 4)):
                file.write(json.dumps(_row(generator, group, prompt)) + "\n")
    return path


def _row(generator: random.Random, group: int, prompt: list[int]) -> dict[str, Any]:
    length = generator.randint(1, 12)
    highest = 2 * VOCABULARY if generator.random() < 0.05 else VOCABULARY
    return {
        "prompt_ids": prompt,
        "response_ids": [generator.randrange(highest) for _ in range(length)],
        "log_probs": [-3.5 + 0.1 * generator.random() for _ in range(length)],
        "reward": float(generator.randint(0, 2)),
        "group_index": group,
    }
