"""Steps from reasoning-gym tasks: the current policy responds to questions, and the task's verifier
scores.
"""

import os
import random
import string
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

import reasoning_gym
import torch
import torch.distributed as dist
from megatron.core.utils import unwrap_model

from megatron_pg import PolicyLossConfig, Sample
from megatron_pg.megatron.groups import ParallelGroups
from megatron_pg.rollout_files import RewardedSample
from megatron_pg.step.agreement import gather

from .rollouts import Step, means_of, with_advantages
from .sampler import Response, Sampler

MOST_TASKS = 16384
STORED = """
    tokens response_length loss_mask group_index name reward rollout_log_probs old_log_probs
    ref_log_probs policy_version
""".split()
"""The fields of samples that a checkpoint stores."""
Entry = dict[str, Any]
"""A question of reasoning-gym and its answer, an argument of the verifier."""


class Letters:
    """A tokenizer with one token per character, and one for the common start of all questions."""

    size = 100
    separator, end = 1, 2
    """The size of the vocabulary, and the tokens after question and response."""

    def __init__(self, questions: Sequence[str]) -> None:
        self._opening = os.path.commonprefix(questions)
        characters = string.digits + string.ascii_letters + string.punctuation + " \n"
        texts = [self._opening, *characters]
        self.texts = dict(enumerate(texts, self.end + 1)) | {self.separator: "\n", self.end: "▪"}
        self._tokens = {text: token for token, text in self.texts.items() if token > self.end}
        self.stops = [self.end]

    def prompt(self, question: str) -> list[int]:
        """Return a question's tokens and the separator."""
        rest = question.removeprefix(self._opening)
        return [self._tokens[self._opening], *map(self._tokens.__getitem__, rest), self.separator]

    def response(self, answer: str) -> list[int]:
        """Return the tokens of an answer and the end token."""
        return [*map(self._tokens.__getitem__, answer), self.end]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens."""
        return "".join(self.texts.get(token, "") for token in tokens)

    def answer(self, response: Sequence[int]) -> str | None:
        """Return a response's text, None without the end token."""
        return self.decode(response[:-1]) if response[-1] == self.end else None


class Chat:
    """The tokenizer and chat template of a Hugging Face folder."""

    size = 0  # config.json has it
    texts = None

    def __init__(self, folder: str, system_prompt: str | None, examples: Sequence[Entry]) -> None:
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self.decode = self._tokenizer.decode
        self._before = [{"role": "system", "content": system_prompt}] if system_prompt else []
        for example in examples:
            self._before.append({"role": "user", "content": example["question"]})
            self._before.append({"role": "assistant", "content": example["answer"]})
        found = {self._tokenizer.eos_token_id, self._tokenizer.convert_tokens_to_ids("<|im_end|>")}
        self.stops = sorted(token for token in found if token is not None)

    def prompt(self, question: str) -> list[int]:
        """Return the tokens of a chat that ends with the question."""
        messages = [*self._before, {"role": "user", "content": question}]
        settings = {"add_generation_prompt": True, "return_dict": False}
        return list(self._tokenizer.apply_chat_template(messages, **settings))

    def answer(self, response: Sequence[int]) -> str:
        """Return a response's text."""
        return str(self.decode(response, skip_special_tokens=True)).strip()


class Questions:
    """The distinct questions of `--task`, some held out, and their tokens."""

    def __init__(self, args: Namespace) -> None:
        given = args.task_settings or {}
        try:
            settings = {"size": MOST_TASKS, "seed": args.seed} | given
            self._dataset = reasoning_gym.create_dataset(args.task, **settings)
        except (TypeError, AssertionError) as error:  # the errors of its generators
            raise ValueError(f"--task-settings {given} of --task {args.task}: {error}") from error
        # A verifier may ignore case, so questions that differ only in case are one task.
        entries = list({entry["question"].lower(): entry for entry in self._dataset}.values())
        examples, entries = entries[: args.prompt_examples], entries[args.prompt_examples :]
        number = args.held_out_tasks
        self.held_out, self.training = entries[:number], entries[number:]
        self.text: Any = Letters([entry["question"] for entry in entries])
        if args.hf_model:
            self.text = Chat(args.hf_model, args.system_prompt, examples)
        prompts = [self.text.prompt(entry["question"]) for entry in entries[:256]]
        self.longest = max(map(len, prompts), default=0)
        # The log omits the common start and end of prompts.
        backwards = [prompt[::-1] for prompt in prompts]
        self._template = [len(os.path.commonprefix(part)) for part in (prompts, backwards)]

    def reward(self, entry: Entry, response: Sequence[int]) -> float:
        """Return 1.0 for the verifier's full marks, else 0.0. Partial credit rewarded SmolLM2 for
        repeating the question before a wrong sum.
        """
        return float(self._dataset.score_answer(self.text.answer(response), entry) == 1.0)

    def shown(self, prompt: Sequence[int], response: Sequence[int], reward: float | None) -> str:
        """Return a prompt without its common parts, 200 tokens of the response, and the reward."""
        head, tail = self._template
        question = self.text.decode(prompt[head : len(prompt) - tail]).strip()
        return f"{question} -> {self.text.decode(response[:200])}  reward {reward:g}"


class TaskSteps:
    """The steps of `--task`. Every rank makes one and makes the same calls.

    A round's questions depend only on the seed and its number.
    """

    def __init__(self, args: Namespace, config: PolicyLossConfig, groups: ParallelGroups) -> None:
        self._args, self._config, self._groups = args, config, groups
        self.questions = questions = Questions(args)
        self._pending: list[list[Sample]] = []
        self._wanted = args.prompts_per_step * args.steps_per_round
        if len(questions.training) < self._wanted:
            found = f"--task {args.task} has {len(questions.training)} distinct training tasks"
            raise ValueError(
                f"{found}, but a round needs {self._wanted}: reduce --prompts-per-step"
            )
        if args.vocab_size < questions.text.size:
            raise ValueError(f"--vocab-size is {args.vocab_size}: use {questions.text.size}")
        if questions.longest + args.max_response_tokens > (limit := args.max_position_embeddings):
            found = f"--max-position-embeddings {limit}: prompts have {questions.longest} tokens"
            raise ValueError(f"{found}, answers --max-response-tokens {args.max_response_tokens}")

    def attach(self, model: Sequence[Any], score: Callable[[Sequence[Sample]], Any]) -> None:
        """Set the model that generates. `score` adds the log-probs that the loss needs to
        samples.
        """
        self._score = score
        self._sampler = Sampler(
            unwrap_model(list(model))[0],
            vocab_size=self._args.vocab_size,
            stop_tokens=self.questions.text.stops,
            max_new_tokens=self._args.max_response_tokens,
        )

    def step(self, iteration: int) -> Step:
        """Return the step after `iteration` steps."""
        if not self._pending:
            self._pending = self._round(iteration // self._args.steps_per_round)
        samples, group = self._pending.pop(0), self._groups.data
        return with_advantages(self._args, self._config, samples, group), means_of(samples, group)

    def _round(self, number: int) -> list[list[Sample]]:
        args, draw = self._args, random.Random(f"{self._args.seed}-{number}")
        entries = draw.sample(self.questions.training, self._wanted)
        temperature = self._config.rollout_temperature
        steps: list[list[Sample]] = [[] for _ in range(args.steps_per_round)]
        for index, prompt, reward, response in self._answers(
            entries, args.samples_per_prompt, temperature, str(number)
        ):
            group = number * self._wanted + index
            part, length = steps[index // args.prompts_per_step], len(response.tokens)
            fields: dict[str, Any] = {"group_index": group, "reward": reward}
            fields["name"] = f"answer {len(part)} (prompt group {group})"
            fields["rollout_log_probs"] = response.log_probs
            fields["policy_version"] = number * args.steps_per_round
            tokens = [*prompt, *response.tokens]
            part.append(RewardedSample(tokens, length, [1] * length, **fields))
        # The round's policy computes the old log-probs of all its steps.
        return [self._score(part) for part in steps]

    def held_out(self) -> tuple[float, list[str]]:
        """Return the held-out tasks' mean score and a few responses, on all ranks."""
        temperature, entries = self._args.held_out_temperature, self.questions.held_out
        answers = self._answers(entries, 1, temperature, "held out")
        shown = [self.questions.shown(p, answer.tokens, r) for _, p, r, answer in answers[:4]]
        rewards = sum(gather([reward for _, _, reward, _ in answers], self._groups.data), [])
        return sum(rewards) / len(entries), shown

    def shown(self, samples: Sequence[Any]) -> list[str]:
        """Return prompts, responses and rewards for the log."""
        return [
            self.questions.shown(tokens[: s.prompt_length], tokens[s.prompt_length :], s.reward)
            for s in samples
            for tokens in [s.tokens.tolist()]
        ]

    def state(self) -> list[list[dict[str, Any]]]:
        """Return the round's remaining steps over all data-parallel ranks, as plain values."""
        ranks = gather(self._pending, self._groups.data)
        steps = (
            [sample for part in parts for sample in part] for parts in zip(*ranks, strict=True)
        )
        return [[{name: _plain(sample, name) for name in STORED} for sample in s] for s in steps]

    def restore(self, state: list[list[dict[str, Any]]]) -> None:
        """Resume with this rank's share of these steps."""
        self._pending = [
            [RewardedSample(**s) for s in part if self._is_mine(s["group_index"] % self._wanted)]
            for part in state
        ]

    def _is_mine(self, index: int) -> bool:
        return index % self._groups.data_size == self._groups.data_rank

    def _answers(
        self, entries: Sequence[Entry], copies: int, temperature: float, name: str
    ) -> list[tuple[int, list[int], float, Response]]:
        """Return index, prompt, score and response for this data-parallel rank's share of the
        entries.

        Context-parallel ranks divide the share and then gather it, because they must pack the same
        micro-batches. Temperature 0 takes the likeliest tokens.
        """
        groups, questions = self._groups, self.questions
        mine = [*filter(self._is_mine, range(len(entries)))]
        mine = mine[groups.context_rank :: groups.context_size]
        prompts = [questions.text.prompt(entries[index]["question"]) for index in mine]
        generator = None
        if temperature > 0:
            rank = dist.get_rank(groups.data_with_context)
            seed = random.Random(f"{self._args.seed}-{name}-{rank}").getrandbits(48)
            generator = torch.Generator(torch.device(torch.cuda.current_device())).manual_seed(seed)
        settings = {"temperature": temperature or 1.0, "generator": generator}
        answers = []
        for number, response in enumerate(self._sampler.sample(prompts, copies, **settings)):
            index, prompt = mine[number // copies], prompts[number // copies]
            reward = questions.reward(entries[index], response.tokens)
            answers.append((index, prompt, reward, response))
        return [answer for part in gather(answers, groups.context) for answer in part]


def _plain(sample: Any, name: str) -> Any:
    value = getattr(sample, name)
    return value.tolist() if isinstance(value, torch.Tensor) else value
