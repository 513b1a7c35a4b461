"""Rollouts of a run: a rollout file a step, and the page of all of them, for train_grpo.py and
trainer/.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron_pg import PolicyLossConfig
from megatron_pg.explain.rollout_page import write_rollout_page
from megatron_pg.rollout_files import RewardedSample, RolloutFiles

TOKEN_COLUMNS = {"old_log_probs": "log_probs", "rollout_log_probs": "rollout_log_probs"}
TOKEN_COLUMNS |= {name: name for name in ("ref_log_probs", "new_log_probs", "advantages")}
"""Fields of a sample with a number for each token, and their columns."""


def rollout_row(sample: RewardedSample) -> dict[str, Any]:
    """The row of a rollout file (docs/rollout_files.md); numbers have six decimals."""
    prompt, response = sample.tokens.split([sample.prompt_length, sample.response_length])
    row: dict[str, Any] = {"prompt_ids": prompt.tolist(), "response_ids": response.tolist()}
    row |= {"loss_mask": sample.loss_mask.int().tolist(), "reward": sample.reward}
    row["group_index"] = sample.group_index
    for field, column in TOKEN_COLUMNS.items():
        if (values := getattr(sample, field)) is not None:
            row[column] = [round(value, 6) for value in values.tolist()]
    return row


SHOWN_PROMPTS = 8
"""Prompts of a step, on each data-parallel rank, whose answers are logged."""


class RolloutLog:
    """The folder `rollouts` of a run, cut back to where a resumed run goes on."""

    def __init__(self, folder: Path, step: int) -> None:
        self._folder = folder
        for path in folder.glob("rollouts/step_*.jsonl"):
            if int(path.stem.removeprefix("step_")) > step:
                path.unlink()

    def write(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write the file of a step."""
        if lines := [json.dumps(row) + "\n" for row in rows]:
            path = self._folder / f"rollouts/step_{step:06d}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(lines))

    def write_page(
        self, config: PolicyLossConfig, title: str, tokenizer: str | None = None
    ) -> None:
        """Write rollouts.html; texts are those of a tokenizer, or of tokens.json."""
        if not (self._folder / "rollouts").is_dir():  # no step was taken
            return
        files = RolloutFiles([self._folder / "rollouts"])
        texts = tokenizer or self._folder / "tokens.json"
        write_rollout_page(
            self._folder / "rollouts.html", files, config, title=title, tokenizer=texts
        )
