"""Supervised samples for the warm start: answers to imitate, through the same loss machinery.

With `reinforce` and advantage 1 the policy loss -A log_prob is the supervised negative log-likelihood.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch

from megatron_pg import Sample

from .tasks import TaskSet
from .tokenizer import CharacterTokenizer


def warm_start_batches(
    task_set: TaskSet,
    tokenizer: CharacterTokenizer,
    *,
    batch_size: int,
    corruption: float,
    stutter: float,
    seed: int,
    start: int,
) -> Iterator[list[Sample]]:
    """Batches of supervised samples without end, from batch number `start` on, the same for a seed.

    Args:
        corruption: share of the answers in which two letters are exchanged. A model that imitates them has the
            skill and uses it unreliably, which leaves reinforcement learning something to do.
        stutter: share of the answers in which a letter is repeated. Those are longer, so that aggregations that weigh
            long answers differently have something to differ on.
    """
    for number, tasks in enumerate(task_set.training_batches(batch_size, seed, start), start):
        generator = random.Random(f"warm start {seed}-{number}")
        samples = []
        for index, task in enumerate(tasks):
            answer = task.answer
            draw = generator.random()
            if draw < corruption:
                answer = exchange_two_letters(answer, generator)
            elif draw < corruption + stutter:
                answer = repeat_a_letter(answer, generator)
            prompt, response = (
                tokenizer.encode_prompt(task.question),
                tokenizer.encode_answer(answer),
            )
            samples.append(
                Sample(
                    tokens=torch.tensor(prompt + response),
                    response_length=len(response),
                    loss_mask=torch.ones(len(response)),
                    advantages=1.0,
                    group_index=index,
                    name=f"warm-start sample {index}",
                )
            )
        yield samples


def repeat_a_letter(text: str, generator: random.Random) -> str:
    """`text` with one character 1 to 6 times more."""
    position = generator.randrange(len(text))
    return text[:position] + text[position] * generator.randint(1, 6) + text[position:]


def exchange_two_letters(text: str, generator: random.Random) -> str:
    """`text` with the characters of two distinct positions exchanged."""
    first, second = generator.sample(range(len(text)), 2)
    letters = list(text)
    letters[first], letters[second] = letters[second], letters[first]
    return "".join(letters)
