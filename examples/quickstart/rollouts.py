"""One round of online generation: questions, answers, rewards, advantages, samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_pg import Sample
from megatron_pg.megatron.groups import ParallelGroups
from megatron_pg.step.advantages import group_advantages
from megatron_pg.step.agreement import gather

from .generation import Response, Sampler
from .tasks import Task, TaskSet
from .tokenizer import CharacterTokenizer


@dataclass(frozen=True)
class Rollout:
    """One answer to one question.

    Attributes:
        group_index: number of the question in the run.
        prompt: its tokens.
        response: the sampled answer.
        reward: 1.0 where it is right, else 0.0.
        reference_log_probs: those of the response under the reference policy, where there is one.
    """

    group_index: int
    prompt: list[int]
    response: Response
    reward: float
    reference_log_probs: list[float] | None


@dataclass(frozen=True)
class RolloutWorker:
    """Asks questions and marks the answers.

    Attributes:
        reference: scores every answer for the KL term; None where the loss has none.
    """

    task_set: TaskSet
    tokenizer: CharacterTokenizer
    sampler: Sampler
    reference: Sampler | None
    groups: ParallelGroups

    def collect(
        self, tasks: Sequence[Task], samples_per_prompt: int, first_group: int = 0
    ) -> list[Rollout]:
        """Answers this data-parallel rank's share of `tasks`, each `samples_per_prompt` times.

        Every rank must call it with the same tasks. The context-parallel ranks divide the share among themselves and
        then all hold all of it: they must pack the same micro-batches.

        Args:
            first_group: `group_index` of `tasks[0]`; they count up from there.
        """
        groups = self.groups
        share = _part(range(len(tasks)), groups.data_rank, groups.data_size)
        mine = _part(share, groups.context_rank, groups.context_size)
        asked = [index for index in mine for _ in range(samples_per_prompt)]
        prompts = [self.tokenizer.encode_prompt(tasks[index].question) for index in asked]
        responses = self.sampler.sample(prompts)
        references: list[list[float] | None] = [None] * len(prompts)
        if self.reference is not None:
            references = [*self.reference.score(prompts, responses)]
        rollouts = [
            Rollout(
                group_index=first_group + index,
                prompt=prompt,
                response=response,
                reward=self._reward(tasks[index], response),
                reference_log_probs=reference,
            )
            for index, prompt, response, reference in zip(
                asked, prompts, responses, references, strict=True
            )
        ]
        return [rollout for part in gather(rollouts, groups.context) for rollout in part]

    def score_held_out(self) -> float:
        """Share of the held-out tasks answered rightly, one sampled answer each. Every rank must call it."""
        rollouts = self.collect(self.task_set.held_out, samples_per_prompt=1)
        reward = rollout_means(rollouts, self.groups, self.sampler.device)["reward"]
        return float(reward or 0.0)

    def _reward(self, task: Task, response: Response) -> float:
        answer = self.tokenizer.decode_answer(response.tokens)
        return float(self.task_set.is_right(task, answer))


def to_samples(rollouts: Sequence[Rollout]) -> list[Sample]:
    """What the loss needs of each answer; the sampler's log-probs are those of the policy to improve."""
    result = group_advantages(
        [rollout.reward for rollout in rollouts],
        [rollout.group_index for rollout in rollouts],
        prompts=[rollout.prompt for rollout in rollouts],
    )
    return [
        _to_sample(rollout, advantage, f"answer {index} (prompt group {rollout.group_index})")
        for index, (rollout, advantage) in enumerate(
            zip(rollouts, result.advantages.tolist(), strict=True)
        )
    ]


def _to_sample(rollout: Rollout, advantage: float, name: str) -> Sample:
    log_probs = torch.tensor(rollout.response.log_probs)
    reference = rollout.reference_log_probs
    return Sample(
        tokens=torch.tensor(rollout.prompt + rollout.response.tokens),
        response_length=len(log_probs),
        loss_mask=torch.ones(len(log_probs)),
        advantages=advantage,
        old_log_probs=log_probs,
        rollout_log_probs=log_probs,
        ref_log_probs=None if reference is None else torch.tensor(reference),
        group_index=rollout.group_index,
        name=name,
    )


def rollout_means(
    rollouts: Sequence[Rollout], groups: ParallelGroups, device: torch.device
) -> dict[str, float | None]:
    """Mean reward and response length over all data-parallel ranks, every one of which must call it.

    Returns:
        `reward`, `response_length`, and that of the right and of the wrong answers, None where there are none.
    """
    counts = [[0, 0], [0, 0]]  # answers and their tokens: wrong ones, right ones
    for rollout in rollouts:
        kind = counts[int(rollout.reward)]
        kind[0] += 1
        kind[1] += len(rollout.response.tokens)
    sums = torch.tensor(counts, device=device)
    dist.all_reduce(sums, group=groups.data)
    (wrong, wrong_tokens), (right, right_tokens) = sums.tolist()
    return {
        "reward": right / (right + wrong),
        "response_length": (right_tokens + wrong_tokens) / (right + wrong),
        "response_length_right": right_tokens / right if right else None,
        "response_length_wrong": wrong_tokens / wrong if wrong else None,
    }


def _part(items: range, index: int, number: int) -> range:
    """Part `index` of `number` nearly equal ones."""
    return items[index * len(items) // number : (index + 1) * len(items) // number]
