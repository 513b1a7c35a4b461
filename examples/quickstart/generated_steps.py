"""Steps from online generation: rounds of tasks, answered by the policy as it is, cut into optimizer steps."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_pg import PolicyLossConfig, Sample
from megatron_pg.megatron.groups import ParallelGroups

from .generation import Sampler
from .model import Policy, build_chunks
from .rollouts import RolloutWorker, rollout_means, to_samples
from .tasks import TaskSet
from .tokenizer import CharacterTokenizer
from .training_step import TrainingStep
from .warm_start import warm_start_batches


class GeneratedSteps:
    """A `SampleStream` of answers to reasoning-gym tasks; it also has the supervised batches of the warm start.

    Args:
        args: validated.
        config: the policy loss; a KL term needs a reference policy.
        groups: this rank's.
        device: the model's.

    Raises:
        ValueError: a prompt and its response do not fit --max-position-embeddings.
    """

    title = "GRPO"

    def __init__(
        self,
        args: argparse.Namespace,
        config: PolicyLossConfig,
        groups: ParallelGroups,
        device: torch.device,
    ) -> None:
        self._args, self._config, self._groups, self._device = args, config, groups, device
        self._tasks = TaskSet.generate(args.num_training_tasks, args.num_held_out_tasks, args.seed)
        self._tokenizer = CharacterTokenizer([self._tasks.question_opening])
        self.vocabulary_size = self._tokenizer.vocabulary_size
        rollouts = args.rollout_batch_size * args.n_samples_per_prompt
        self.steps_per_round = int(rollouts // args.global_batch_size)
        self._max_response_length = int(args.max_response_len or self._tasks.max_answer_length + 1)
        self._check_sequence_length()

    def attach(self, policy: Policy) -> None:
        """Generate with this policy."""
        reference = None
        if self._config.kl_loss_coef > 0:
            (model,) = build_chunks(self._args, self._device, self.vocabulary_size)
            reference = self._sampler(model)
        self._policy = policy
        self._worker = RolloutWorker(
            self._tasks, self._tokenizer, self._sampler(policy.model), reference, self._groups
        )

    def warm_start_batches(self, first_step: int) -> Iterator[list[Sample]]:
        """Supervised batches without end from number `first_step` on, this data-parallel rank's part of each."""
        args = self._args
        batches = warm_start_batches(
            self._tasks,
            self._tokenizer,
            batch_size=args.warm_start_batch_size,
            corruption=args.warm_start_corruption,
            stutter=args.warm_start_stutter,
            seed=args.seed,
            start=first_step,
        )
        for batch in batches:
            yield batch[self._groups.data_rank :: self._groups.data_size]

    def remember_reference(self) -> None:
        """Make the policy as it is the reference of the KL term."""
        if self._worker.reference is not None:
            self._worker.reference.model.load_state_dict(self._policy.model.module.state_dict())

    def score_held_out(self) -> float:
        """Share of the held-out tasks answered rightly."""
        return self._worker.score_held_out()

    def steps(self, first_step: int) -> Iterator[TrainingStep]:
        """The steps that remain; `first_step` begins a round."""
        args = self._args
        first_round = first_step // self.steps_per_round
        batches = self._tasks.training_batches(args.rollout_batch_size, args.seed, first_round)
        size = args.global_batch_size // self._groups.data_size
        for number in range(first_round, args.train_iters // self.steps_per_round):
            rollouts = self._worker.collect(
                next(batches), args.n_samples_per_prompt, number * args.rollout_batch_size
            )
            for start in range(0, len(rollouts), size):
                # At the boundaries of prompt groups.
                answers = rollouts[start : start + size]
                yield TrainingStep(
                    to_samples(answers),
                    rollout_means(answers, self._groups, self._device),
                    may_stop=start + size >= len(rollouts),
                )

    @property
    def reference(self) -> Any | None:
        """The model of the KL term."""
        reference = self._worker.reference
        return None if reference is None else reference.model

    def rank_state(self) -> dict[str, Any]:
        return {"sampler": self._worker.sampler.generator.get_state()}

    def restore(self, ranks: Sequence[dict[str, Any]]) -> None:
        """Go on with the random state of every rank, of which there must be as many."""
        self._worker.sampler.generator.set_state(ranks[dist.get_rank()]["sampler"])

    def _sampler(self, model: Any) -> Sampler:
        """Tensor-parallel ranks sample alike, all others each with a random state of their own."""
        rank = dist.get_rank(self._groups.data_with_context)
        return Sampler(
            model,
            vocabulary_size=self.vocabulary_size,
            max_new_tokens=self._max_response_length,
            padding=self._tokenizer.padding,
            end=self._tokenizer.end,
            temperature=self._config.rollout_temperature,
            seed=self._args.seed + 100_003 * rank,
            device=self._device,
        )

    def _check_sequence_length(self) -> None:
        tasks = (*self._tasks.training, *self._tasks.held_out)
        question = max((task.question for task in tasks), key=len)
        longest = len(self._tokenizer.encode_prompt(question))
        needed = longest + self._max_response_length
        if needed > self._args.max_position_embeddings:
            raise ValueError(
                f"--max-position-embeddings is {self._args.max_position_embeddings}: prompts of up to {longest} tokens "
                f"and responses of up to {self._max_response_length} need {needed}"
            )
