"""What the quickstart trains on: reasoning-gym questions, answers to imitate first, and rounds of
sampled answers.

One token a character.
"""

import functools
import itertools
import os
import random
import string
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import reasoning_gym
import torch
import torch.distributed as dist
from other_models import Critic
from sampler import Sampler, answer_sample

from megatron_pg import Sample, group_advantages, whiten
from megatron_pg.megatron import ParallelGroups
from megatron_pg.step.agreement import gather

TASK = "spell_backward"
TITLE = f"{TASK} (reasoning-gym)"
WORD_LENGTHS = {"min_word_len": 3, "max_word_len": 7}
PADDING, SEPARATOR, END = range(3)
"""Tokens that are no text: the second stands between question and answer, the third ends an
answer."""
Entry = dict[str, Any]
"""A question of reasoning-gym and its answer; the verifier takes it back."""
Means = dict[str, float | None]
"""Means of rollouts by name; None is that of none."""


def check_task_args(args: Namespace) -> None:
    """Raises a ValueError that names the flags, where they cannot be served."""
    if args.warm_start_corruption + args.warm_start_stutter > 1:
        raise ValueError(
            f"--warm-start-corruption {args.warm_start_corruption} and --warm-start-stutter "
            f"{args.warm_start_stutter} are "
            "shares of the same answers: give numbers whose sum is at most 1"
        )
    for name in ("rollout-batch-size", "warm-start-batch-size"):
        if (size := getattr(args, name.replace("-", "_"))) > args.num_training_tasks:
            most = f"--num-training-tasks {args.num_training_tasks}"
            raise ValueError(f"--{name} {size} is more than {most}")


class Tasks:
    """Distinct questions, the same for a seed: some to train on, and others to score before and
    after.
    """

    def __init__(self, num_training: int, num_held_out: int, seed: int) -> None:
        wanted = num_training + num_held_out
        size = 10 * wanted
        self._dataset = reasoning_gym.create_dataset(TASK, seed=seed, size=size, **WORD_LENGTHS)
        distinct: dict[str, Entry] = {}
        for entry in self._dataset:
            # The verifier ignores case, so words that differ by case alone are the same task.
            distinct.setdefault(entry["question"].lower(), entry)
            if len(distinct) == wanted:
                break
        else:
            raise ValueError(
                f"{TASK} has {len(distinct)} distinct questions in {size}: --num-training-tasks "
                f"{num_training} and "
                f"--num-held-out-tasks {num_held_out} ask for more"
            )
        entries = list(distinct.values())
        self.held_out, self._training = entries[:num_held_out], entries[num_held_out:]
        self._seed = seed
        # One token for the text that opens every question, and not fifty: it makes a CPU run short.
        self._opening = os.path.commonprefix([entry["question"] for entry in entries])
        texts = [self._opening, *string.ascii_letters, *string.digits, *string.punctuation, " "]
        self._text = dict(enumerate(texts, END + 1))
        self._token = {text: token for token, text in self._text.items()}
        self.vocabulary_size = END + 1 + len(texts)
        self._longest_prompt = max(len(self.prompt(entry)) for entry in entries)
        self._longest_answer = max(len(entry["answer"]) for entry in entries) + 1

    @functools.lru_cache(maxsize=1)  # noqa: B019
    def _epoch(self, number: int) -> list[Entry]:
        return random.Random(f"{self._seed}-{number}").sample(self._training, len(self._training))

    def batch(self, number: int, size: int) -> list[Entry]:
        """Batch `number` of training tasks, decided by the seed and that number alone; every epoch
        is shuffled anew.
        """
        epoch, index = divmod(number, len(self._training) // size)
        return self._epoch(epoch)[index * size : (index + 1) * size]

    def longest_sequence(self, max_response_length: int) -> int:
        """Tokens of a prompt and an answer, sampled or imitated, at most: a stutter adds 6, fewer
        than are kept for it.
        """
        return self._longest_prompt + max(max_response_length, self._longest_answer) + 8

    def prompt(self, entry: Entry) -> list[int]:
        """The tokens of a question, and the separator."""
        rest = entry["question"].removeprefix(self._opening)
        return [self._token[self._opening], *(self._token[letter] for letter in rest), SEPARATOR]

    def text(self, answer: Sequence[int]) -> str | None:
        """The text of an answer's tokens; None where it was not ended."""
        texts = (self._text.get(token, "") for token in answer[:-1])
        return "".join(texts) if END in answer[-1:] else None

    @property
    def texts(self) -> dict[int, str]:
        """The texts of the tokens, for people: the separator is a line's end, the end of an answer
        a small square.
        """
        return self._text | {SEPARATOR: "\n", END: "▪"}

    def shown(self, sample: Any) -> str:
        """A question without its opening, the answer to it and the reward, as the log shows
        them.
        """
        length = sample.response_length
        shown = [self._text.get(token, "") for token in sample.tokens.tolist()[1:]]
        return f"{''.join(shown[:-length])} -> {''.join(shown[-length:])}  reward {sample.reward:g}"

    def reward(self, entry: Entry, answer: Sequence[int]) -> float:
        """1.0 where the task's verifier gives full marks, else 0.0: it gives partial credit, which
        is no reward here.
        """
        return float(self._dataset.score_answer(self.text(answer), entry) == 1.0)

    def imitation_batch(self, number: int, args: Namespace) -> list[Sample]:
        """Answers to imitate, of advantage 1: under `reinforce` the loss is their negative
        log-likelihood.

        In a share of them two letters are exchanged: a model that imitates them has the skill and
        uses it unreliably, which leaves reinforcement learning something to do. In another share a
        letter is said 1 to 6 times more, so that there are wrong answers of other lengths.
        """
        corruption, stutter = args.warm_start_corruption, args.warm_start_stutter
        generator = random.Random(f"warm start {self._seed}-{number}")
        samples = []
        for index, entry in enumerate(self.batch(number, args.warm_start_batch_size)):
            letters, draw = list(entry["answer"]), generator.random()
            if draw < corruption:
                first, second = generator.sample(range(len(letters)), 2)
                letters[first], letters[second] = letters[second], letters[first]
            elif draw < corruption + stutter:
                letters[generator.randrange(len(letters))] *= generator.randint(2, 7)
            answer = [*(self._token[letter] for letter in "".join(letters)), END]
            fields = {"group_index": index, "name": f"answer {index} to imitate"}
            samples.append(answer_sample(self.prompt(entry), answer, advantages=1.0, **fields))
        return samples


class RolloutWorker:
    """Asks a GPTModel questions and marks the answers; every rank has one, and calls it alike.

    Tensor-parallel ranks sample alike; the others have other questions and a random state of their
    own each.
    """

    def __init__(self, args: Namespace, model: torch.nn.Module, tasks: Tasks) -> None:
        self.args, self.tasks, self.groups = args, tasks, ParallelGroups.from_parallel_state()
        size, pipeline = tasks.vocabulary_size, self.groups.pipeline
        self.sampler = Sampler(model, pipeline, size, [END], args.max_response_len)
        seed = args.seed + 100_003 * dist.get_rank(self.groups.data_with_context)
        self.generator = torch.Generator(args.device).manual_seed(seed)
        self.critic: Critic | None = None

    def steps(self, number: int) -> Iterator[tuple[list[Sample], Means]]:
        """The optimizer steps of round `number`, this data-parallel rank's samples and the means
        over all ranks.
        """
        size = self.args.rollout_batch_size
        questions = self.tasks.batch(number, size)
        samples, rewards = self.collect(questions, self.args.n_samples_per_prompt, number * size)
        length = len(samples) // self.args.steps_per_round  # whole prompt groups
        parts = [slice(start, start + length) for start in range(0, len(samples), length)]
        steps = [(samples[part], rewards[part]) for part in parts]
        # A critic is as it is before the round, for all steps.
        estimated = self.critic.with_estimates if self.critic else self.with_advantages
        steps = [(estimated(*step), step[1]) for step in steps]
        for step in steps:
            yield step[0], self.means(*step)

    def with_advantages(self, samples: Sequence[Sample], rewards: Sequence[float]) -> list[Sample]:
        """The samples of a step with the advantages of `--advantage`, of the rewards on all
        data-parallel ranks.
        """
        args, groups = self.args, self.groups
        mine = [
            (sample.group_index, reward) for sample, reward in zip(samples, rewards, strict=True)
        ]
        ranks = gather(mine, groups.data)
        indices, step_rewards = zip(*itertools.chain(*ranks), strict=True)
        found = group_advantages(step_rewards, indices, method=args.advantage).advantages
        values: Any = found.split(list(map(len, ranks)))[groups.data_rank].tolist()
        if args.whiten_advantages:
            rows = [sample.loss_mask * value for sample, value in zip(samples, values, strict=True)]
            masks = [sample.loss_mask for sample in samples]
            values = whiten(rows, masks, data_parallel_group=groups.data)
        pairs = zip(samples, values, strict=True)
        return [replace(sample, advantages=value) for sample, value in pairs]

    def held_out_reward(self) -> float:
        """The share of the held-out questions answered rightly, one sampled answer each."""
        return float(self.means(*self.collect(self.tasks.held_out, 1))["reward"] or 0.0)

    def collect(
        self, questions: Sequence[Entry], samples_per_prompt: int, first_group: int = 0
    ) -> tuple[list[Sample], list[float]]:
        """The answers to this data-parallel rank's share of the questions, and their rewards.

        Its context-parallel ranks ask a part each, and then all hold all of it: they must pack the
        same micro-batches.
        """
        groups, tasks = self.groups, self.tasks
        rank = groups.data_rank * groups.context_size + groups.context_rank
        mine = range(rank, len(questions), groups.data_size * groups.context_size)
        asked = [index for index in mine for _ in range(samples_per_prompt)]
        prompts = [tasks.prompt(questions[index]) for index in asked]
        settings = {"temperature": self.args.rollout_temperature, "generator": self.generator}
        answers = self.sampler.sample(prompts, 1, **settings)
        pairs = zip(asked, answers, strict=True)
        rewards = [tasks.reward(questions[index], answer.tokens) for index, answer in pairs]
        # Numbers, of which every rank makes the samples: a tensor takes a millisecond to pickle and
        # to load.
        rows = list(zip(asked, prompts, answers, rewards, strict=True))
        rows = list(itertools.chain(*gather(rows, groups.context)))
        samples = [
            answer_sample(
                prompt,
                answer.tokens,
                old_log_probs=answer.log_probs,
                rollout_log_probs=answer.log_probs,
                group_index=first_group + index,
                name=f"answer to question {first_group + index}",
                reward=reward,
            )
            for index, prompt, answer, reward in rows
        ]
        return samples, [reward for *_, reward in rows]

    def means(self, samples: Sequence[Sample], rewards: Sequence[float]) -> Means:
        """Mean reward, and mean response length of all, right and wrong answers, over all
        data-parallel ranks.
        """
        counts = torch.zeros(2, 2, dtype=torch.int64)  # [wrong, right] x [answers, their tokens]
        for sample, reward in zip(samples, rewards, strict=True):
            counts[int(reward)] += torch.tensor([1, sample.response_length])
        counts = counts.to(self.generator.device)
        dist.all_reduce(counts, group=self.groups.data)
        (wrong, wrong_tokens), (right, right_tokens) = counts.tolist()
        return {
            "reward": right / (right + wrong),
            "response_length": (right_tokens + wrong_tokens) / (right + wrong),
            "response_length_right": right_tokens / right if right else None,
            "response_length_wrong": wrong_tokens / wrong if wrong else None,
        }
