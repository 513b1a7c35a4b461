"""Reasoning-gym tasks: distinct ones, a part of them held out, scored by the task's own verifier."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .errors import RunError

TASK = "spell_backward"
MIN_WORD_LENGTH, MAX_WORD_LENGTH = 3, 7


@dataclass(frozen=True)
class Task:
    """One question; `entry` is what reasoning-gym's verifier wants back."""

    question: str
    answer: str
    entry: dict[str, Any]


@dataclass(frozen=True)
class TaskSet:
    """Distinct tasks.

    Attributes:
        training: tasks to train on.
        held_out: tasks to score before and after training, none of them among `training`.
    """

    training: tuple[Task, ...]
    held_out: tuple[Task, ...]
    _dataset: Any

    @classmethod
    def generate(cls, num_training: int, num_held_out: int, seed: int) -> TaskSet:
        """The first distinct tasks that reasoning-gym generates from `seed`: held-out ones, then training ones.

        Raises:
            RunError: reasoning-gym is not installed.
            ValueError: there are not that many distinct tasks.
        """
        try:
            import reasoning_gym  # not above: a run from rollout files needs no tasks
        except ModuleNotFoundError as error:
            raise RunError(
                f"an online run takes its tasks from reasoning-gym: {error}; pip install 'megatron_pg[examples]', or "
                "give --rollout-files"
            ) from error
        wanted = num_training + num_held_out
        dataset = reasoning_gym.create_dataset(
            TASK,
            seed=seed,
            size=10 * wanted,
            min_word_len=MIN_WORD_LENGTH,
            max_word_len=MAX_WORD_LENGTH,
        )
        distinct: dict[str, Task] = {}
        for entry in (dataset[index] for index in range(10 * wanted)):
            task = Task(entry["question"], entry["answer"], entry)
            # The verifier ignores case, so words that differ by case alone are the same task.
            distinct.setdefault(task.question.lower(), task)
            if len(distinct) == wanted:
                break
        else:
            raise ValueError(
                f"{TASK} gave {len(distinct)} distinct tasks in {10 * wanted}: ask for fewer than {wanted}"
            )
        tasks = tuple(distinct.values())
        return cls(tasks[num_held_out:], tasks[:num_held_out], dataset)

    @property
    def question_opening(self) -> str:
        """The text that every question begins with."""
        return os.path.commonprefix([task.question for task in self.training])

    @property
    def max_answer_length(self) -> int:
        """Characters of the longest answer."""
        return max(len(task.answer) for task in (*self.training, *self.held_out))

    def is_right(self, task: Task, answer: str | None) -> bool:
        """Whether the verifier gives full marks: below 1.0 it gives partial credit, which is no reward here."""
        return bool(self._dataset.score_answer(answer, task.entry) == 1.0)

    def training_batches(
        self, batch_size: int, seed: int, start: int = 0
    ) -> Iterator[Sequence[Task]]:
        """Batches of training tasks without end, from batch number `start` on; each epoch shuffled anew.

        What a batch holds depends on the seed and on its number alone, so a resumed run sees the same ones.
        """
        per_epoch = len(self.training) // batch_size
        number = start
        while True:
            epoch, index = divmod(number, per_epoch)
            order = list(self.training)
            random.Random(f"{seed}-{epoch}").shuffle(order)
            while index < per_epoch:
                yield order[index * batch_size : (index + 1) * batch_size]
                index, number = index + 1, number + 1
