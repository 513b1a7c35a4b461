"""What the quickstart trains on: reasoning-gym questions, answers to imitate first, and rounds of sampled answers.

One token a character. While the model samples, every core attention is exchanged for one that remembers keys and values,
so the same weights in the same tensor-parallel sharding train and generate.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import os
import random
import string
from collections.abc import Iterator, Sequence
from typing import Any

import reasoning_gym
import torch
import torch.distributed as dist
from critic import Critic
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from megatron_pg import Sample, group_advantages
from megatron_pg.megatron import ParallelGroups

TASK = "spell_backward"
WORD_LENGTHS = {"min_word_len": 3, "max_word_len": 7}
PADDING, SEPARATOR, END = range(3)
"""Tokens: what fills a batch of prompts on the left, what stands between question and answer, what ends an answer."""
Entry = dict[str, Any]
"""A question of reasoning-gym and its answer; the verifier takes it back."""
Means = dict[str, float | None]
"""Means of rollouts by name; None is that of none."""


def check_task_args(args: argparse.Namespace) -> None:
    """Raises a ValueError that names the flags, where they cannot be served."""
    if args.warm_start_corruption + args.warm_start_stutter > 1:
        raise ValueError(
            f"--warm-start-corruption {args.warm_start_corruption} and --warm-start-stutter {args.warm_start_stutter} are "
            "shares of the same answers: give numbers whose sum is at most 1"
        )
    for name in ("rollout-batch-size", "warm-start-batch-size"):
        if (size := getattr(args, name.replace("-", "_"))) > args.num_training_tasks:
            raise ValueError(
                f"--{name} {size} is more than --num-training-tasks {args.num_training_tasks}"
            )


class Tasks:
    """Distinct questions, the same for a seed.

    Args:
        num_training: questions to train on.
        num_held_out: others, to score before and after.

    Raises:
        ValueError: there are not that many.
    """

    def __init__(self, num_training: int, num_held_out: int, seed: int) -> None:
        wanted = num_training + num_held_out
        size = 10 * wanted
        self._dataset = reasoning_gym.create_dataset(TASK, seed=seed, size=size, **WORD_LENGTHS)
        distinct: dict[str, Entry] = {}
        for index in range(size):
            entry = self._dataset[index]
            # The verifier ignores case, so words that differ by case alone are the same task.
            distinct.setdefault(entry["question"].lower(), entry)
            if len(distinct) == wanted:
                break
        else:
            raise ValueError(
                f"{TASK} has {len(distinct)} distinct questions in {size}: --num-training-tasks {num_training} and "
                f"--num-held-out-tasks {num_held_out} ask for more"
            )
        entries = list(distinct.values())
        self.held_out, self._training = entries[:num_held_out], entries[num_held_out:]
        self._seed = seed
        # One token for the text that opens every question, and not fifty: most of what makes a CPU run short.
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
        """Batch `number` of training tasks, decided by the seed and that number alone; every epoch is shuffled anew."""
        epoch, index = divmod(number, len(self._training) // size)
        return self._epoch(epoch)[index * size : (index + 1) * size]

    def longest_sequence(self, max_response_length: int) -> int:
        """Tokens of a prompt and an answer, sampled or imitated, at most: a stutter adds 6, fewer than are kept for it."""
        return self._longest_prompt + max(max_response_length, self._longest_answer) + 8

    def prompt(self, entry: Entry) -> list[int]:
        """The tokens of a question, and the separator."""
        rest = entry["question"].removeprefix(self._opening)
        return [self._token[self._opening], *(self._token[each] for each in rest), SEPARATOR]

    def text(self, answer: Sequence[int]) -> str | None:
        """The text of an answer's tokens; None where it was not ended."""
        return (
            "".join(self._text.get(token, "") for token in answer[:-1])
            if END in answer[-1:]
            else None
        )

    def shown(self, sample: Sample) -> str:
        """A question without its opening, and the answer to it, as the log shows them."""
        texts = [self._text.get(token, "") for token in sample.tokens.tolist()]
        return f"{''.join(texts[1 : -sample.response_length])} -> {''.join(texts[-sample.response_length :])}"

    def reward(self, entry: Entry, answer: Sequence[int]) -> float:
        """1.0 where the task's verifier gives full marks, else 0.0: it gives partial credit, which is no reward here."""
        return float(self._dataset.score_answer(self.text(answer), entry) == 1.0)

    def imitation_batch(self, number: int, args: argparse.Namespace) -> list[Sample]:
        """Answers to imitate, of advantage 1: under `reinforce` the loss is their negative log-likelihood.

        In a share of them two letters are exchanged: a model that imitates them has the skill and uses it unreliably, which
        leaves reinforcement learning something to do. In another share a letter is said 1 to 6 times more, so that there
        are wrong answers of other lengths.
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
            answer = [*(self._token[each] for each in "".join(letters)), END]
            samples.append(
                Sample(
                    tokens=torch.tensor(self.prompt(entry) + answer),
                    response_length=len(answer),
                    loss_mask=torch.ones(len(answer)),
                    advantages=1.0,
                    group_index=index,
                    name=f"answer {index} to imitate",
                )
            )
        return samples


class CachedAttention(torch.nn.Module):
    """Attention of new tokens over all so far, in a batch that is padded on the left."""

    def __init__(self, is_real: Tensor) -> None:
        super().__init__()
        self.is_real = is_real  # [batch, longest] bool
        self.cached: list[Tensor] = []

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """[new tokens, batch, heads, dim] each -> [new tokens, batch, heads * dim]."""
        query, *new = (each.permute(1, 2, 0, 3) for each in (query, key, value))
        if self.cached:
            new = [torch.cat(both, dim=2) for both in zip(self.cached, new, strict=True)]
        self.cached = new
        columns = torch.arange(new[0].size(2), device=query.device)
        rows = columns[-query.size(2) :, None]
        # Padding sees itself, or its softmax would be empty.
        mask = ((columns <= rows) & self.is_real[:, None, : len(columns)]) | (columns == rows)
        grouped = query.size(1) != new[0].size(1)
        output = scaled_dot_product_attention(query, *new, mask[:, None], enable_gqa=grouped)
        return output.permute(2, 0, 1, 3).flatten(2)


@contextlib.contextmanager
def cached_attention(model: torch.nn.Module, is_real: Tensor) -> Iterator[None]:
    """Every core attention of the model in exchange for one that remembers, and back."""
    owners = [module for module in model.modules() if hasattr(module, "core_attention")]
    originals = [owner.core_attention for owner in owners]
    for owner in owners:
        owner.core_attention = CachedAttention(is_real)
    try:
        yield
    finally:
        for owner, original in zip(owners, originals, strict=True):
            owner.core_attention = original


class RolloutWorker:
    """Asks questions and marks the answers; every rank has one, and calls it alike.

    Tensor-parallel ranks sample alike; the others have other questions and a random state of their own each. Positions
    are learned ones: rotary embeddings would be those of the context-parallel layout.

    Args:
        args: the flags of the run.
        model: a GPTModel, wrapped or not.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        model: torch.nn.Module,
        tasks: Tasks,
        groups: ParallelGroups,
        device: torch.device,
    ) -> None:
        self.args, self.model, self.tasks, self.groups = args, model, tasks, groups
        seed = args.seed + 100_003 * dist.get_rank(groups.data_with_context)
        self.generator = torch.Generator(device).manual_seed(seed)
        self.critic: Critic | None = None

    def steps(self, number: int) -> Iterator[tuple[list[Sample], Means]]:
        """The optimizer steps of round `number`, this data-parallel rank's samples and the means over all ranks."""
        size = self.args.rollout_batch_size
        questions = self.tasks.batch(number, size)
        samples, rewards = self.collect(questions, self.args.n_samples_per_prompt, number * size)
        length = len(samples) // self.args.steps_per_round
        parts = [slice(start, start + length) for start in range(0, len(samples), length)]
        of_steps = [samples[part] for part in parts]  # whole prompt groups
        if self.critic:
            # All by the critic as it is: later steps of the round see it trained.
            of_steps = [self.critic.with_estimates(samples[part], rewards[part]) for part in parts]
        for part, of_step in zip(parts, of_steps, strict=True):
            yield of_step, self.means(of_step, rewards[part])

    def held_out_reward(self) -> float:
        """The share of the held-out questions answered rightly, one sampled answer each."""
        return float(self.means(*self.collect(self.tasks.held_out, 1))["reward"] or 0.0)

    def collect(
        self, questions: Sequence[Entry], samples_per_prompt: int, first_group: int = 0
    ) -> tuple[list[Sample], list[float]]:
        """The answers to this data-parallel rank's share of the questions, and their rewards.

        Its context-parallel ranks ask a part each, and then all hold all of it: they must pack the same micro-batches.

        Args:
            first_group: `group_index` of `questions[0]`; they count up from there.
        """
        groups, tasks = self.groups, self.tasks
        rank = groups.data_rank * groups.context_size + groups.context_rank
        mine = range(rank, len(questions), groups.data_size * groups.context_size)
        asked = [index for index in mine for _ in range(samples_per_prompt)]
        prompts = [tasks.prompt(questions[index]) for index in asked]
        answers = self.sample(prompts)
        tokens = [answer for answer, _ in answers]
        rewards = [tasks.reward(questions[i], each) for i, each in zip(asked, tokens, strict=True)]
        method = "grpo" if self.args.advantage == "gae" else self.args.advantage
        advantages = group_advantages(rewards, asked, method=method).advantages.tolist()
        # Numbers, of which every rank makes the samples: a tensor takes a millisecond to pickle and to load.
        gathered: list[Any] = [None] * groups.context_size
        rows = list(zip(asked, prompts, answers, rewards, advantages, strict=True))
        dist.all_gather_object(gathered, rows, group=groups.context)
        rows = list(itertools.chain(*gathered))
        samples = [
            Sample(
                tokens=torch.tensor(prompt + answer),
                response_length=len(answer),
                loss_mask=torch.ones(len(answer)),
                advantages=advantage,
                old_log_probs=torch.tensor(log_probs),
                rollout_log_probs=torch.tensor(log_probs),
                group_index=first_group + index,
                name=f"answer to question {first_group + index}",
            )
            for index, prompt, (answer, log_probs), _, advantage in rows
        ]
        return samples, [reward for *_, reward, _ in rows]

    def means(self, samples: Sequence[Sample], rewards: Sequence[float]) -> Means:
        """Mean reward, and mean response length of all, right and wrong answers, over all data-parallel ranks."""
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

    @torch.no_grad()
    def sample(self, prompts: Sequence[Sequence[int]]) -> list[tuple[list[int], list[float]]]:
        """(tokens, their log-probs in nats) of one answer to each prompt, which `END` or the greatest length ends."""
        if not prompts:
            return []
        longest = max(map(len, prompts))
        rows = [[PADDING] * (longest - len(prompt)) + [*prompt] for prompt in prompts]
        new = torch.tensor(rows, device=self.generator.device)
        is_real = pad(new != PADDING, (0, self.args.max_response_len), value=True)
        positions = (is_real.cumsum(1) - 1).clamp(min=0)
        has_ended = torch.zeros_like(is_real[:, :1])
        tokens, log_probs = [], []
        with cached_attention(self.model, is_real):
            for total in range(longest, longest + self.args.max_response_len):
                logits = self.model(
                    input_ids=new,
                    position_ids=positions[:, total - new.size(1) : total],
                    attention_mask=None,
                    runtime_gather_output=True,
                )[:, -1, : self.tasks.vocabulary_size]
                scores = torch.log_softmax(logits.float() / self.args.rollout_temperature, dim=-1)
                new = torch.multinomial(scores.exp(), 1, generator=self.generator)
                tokens.append(new)
                log_probs.append(scores.gather(1, new))
                has_ended |= new == END
                if bool(has_ended.all()):
                    break
        both = (torch.cat(each, dim=1).tolist() for each in (tokens, log_probs))
        return [_until_end(*row) for row in zip(*both, strict=True)]


def _until_end(tokens: list[int], log_probs: list[float]) -> tuple[list[int], list[float]]:
    length = tokens.index(END) + 1 if END in tokens else len(tokens)
    return tokens[:length], log_probs[:length]
