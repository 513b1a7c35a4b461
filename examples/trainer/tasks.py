"""Steps from reasoning-gym tasks: chat prompts, answered by the policy as it is, scored by the
task's own verifier.
"""

import os
import random
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import unwrap_model
from sampler import Response, Sampler, answer_sample

from megatron_pg import PolicyLossConfig, Sample
from megatron_pg.megatron.groups import ParallelGroups
from megatron_pg.step.agreement import gather

from .rollouts import Step, estimated, means_of

MOST_TASKS = 16384


class TaskSteps:
    """The steps of `--task`: `--prompts-per-step` tasks with `--samples-per-prompt` answers each.

    What a step asks depends on the seed and its number alone, so a run that goes on needs no place.
    Every rank makes one and calls it alike.
    """

    def __init__(self, args: Namespace, config: PolicyLossConfig, groups: ParallelGroups) -> None:
        import reasoning_gym
        from transformers import AutoTokenizer

        self._args, self._config, self._groups = args, config, groups
        self._tokenizer = AutoTokenizer.from_pretrained(args.hf_model)
        given = args.task_settings or {}
        try:
            settings = {"size": MOST_TASKS, "seed": args.seed} | given
            self._dataset = reasoning_gym.create_dataset(args.task, **settings)
        except (TypeError, AssertionError) as error:  # what its generators refuse with
            raise ValueError(f"--task-settings {given} of --task {args.task}: {error}") from error
        distinct = {entry["question"]: entry for entry in self._dataset}
        entries = list(distinct.values())
        self._examples, entries = entries[: args.prompt_examples], entries[args.prompt_examples :]
        held_out = args.held_out_tasks
        self._held_out, self._training = entries[:held_out], entries[held_out:]
        if len(self._training) < args.prompts_per_step:
            raise ValueError(
                f"--task {args.task} has {len(entries)} distinct tasks: too few for "
                f"--held-out-tasks "
                f"{args.held_out_tasks} and --prompts-per-step {args.prompts_per_step}"
            )
        prompts = [self._prompt(entry) for entry in entries[:256]]
        longest = max(map(len, prompts))
        # What every prompt begins and ends with is not shown again and again.
        backwards = [prompt[::-1] for prompt in prompts]
        self._template = [len(os.path.commonprefix(part)) for part in (prompts, backwards)]
        if longest + args.max_response_tokens > args.max_position_embeddings:
            raise ValueError(
                f"prompts of {longest} tokens and --max-response-tokens {args.max_response_tokens} "
                f"need more than "
                f"--max-position-embeddings {args.max_position_embeddings}"
            )

    def attach(self, model: Sequence[Any]) -> None:
        """Generate with this model."""
        stop = {self._tokenizer.eos_token_id, self._tokenizer.convert_tokens_to_ids("<|im_end|>")}
        self._sampler = Sampler(
            unwrap_model(list(model))[0],
            self._groups.pipeline,
            vocab_size=self._args.vocab_size,
            stop_tokens=sorted(token for token in stop if token is not None),
            max_new_tokens=self._args.max_response_tokens,
        )

    def step(self, iteration: int) -> Step:
        """The step after `iteration` others."""
        args = self._args
        draw = random.Random(f"{args.seed}-{iteration}")
        entries = draw.sample(self._training, args.prompts_per_step)
        rollouts = self._answers(entries, args.samples_per_prompt, iteration)
        samples: list[Sample] = []
        for prompt, task, reward, response in rollouts:
            group = iteration * args.prompts_per_step + task
            sample = answer_sample(
                prompt,
                response.tokens,
                rollout_log_probs=response.log_probs,
                group_index=group,
                name=f"answer {len(samples)} (prompt group {group})",
                reward=reward,
            )
            samples.append(sample)
        samples = estimated(args, self._config, samples, self._groups.data)
        return samples, self._metrics(rollouts)

    def held_out(self) -> tuple[float, list[str]]:
        """Mean score of the held-out tasks, each answered with the likeliest tokens, and a few
        answers; on all ranks.
        """
        rollouts = self._answers(self._held_out, 1, None)
        score = self._metrics(rollouts)["reward"]
        shown = [self._shown(prompt, answer.tokens, r) for prompt, _, r, answer in rollouts[:4]]
        return float(score or 0.0), shown

    def shown(self, samples: Sequence[Any]) -> list[str]:
        """Prompts without what all have in common, answers of 200 tokens at most, and rewards."""
        parts = [
            sample.tokens.split([sample.prompt_length, sample.response_length])
            for sample in samples
        ]
        pairs = zip(samples, parts, strict=True)
        return [self._shown(p.tolist(), a.tolist(), sample.reward) for sample, (p, a) in pairs]

    def _shown(self, prompt: list[int], answer: list[int], reward: float) -> str:
        head, tail = self._template
        question = self._tokenizer.decode(prompt[head : len(prompt) - tail]).strip()
        return f"{question} -> {self._tokenizer.decode(answer[:200])}  reward {reward:g}"

    def state(self) -> None:
        """None: there is no place to go on from."""

    def restore(self, state: None) -> None:
        """Nothing, likewise."""

    def _prompt(self, entry: dict[str, Any]) -> list[int]:
        messages = []
        if self._args.system_prompt:
            messages.append({"role": "system", "content": self._args.system_prompt})
        for example in self._examples:
            messages.append({"role": "user", "content": example["question"]})
            messages.append({"role": "assistant", "content": example["answer"]})
        messages.append({"role": "user", "content": entry["question"]})
        settings = {"add_generation_prompt": True, "return_dict": False}
        return self._tokenizer.apply_chat_template(messages, **settings)

    def _answers(
        self, entries: Sequence[dict[str, Any]], copies: int, iteration: int | None
    ) -> list[tuple[list[int], int, float, Response]]:
        """Prompt, number of the task, score and response of this data-parallel rank's share of the
        tasks.

        The context-parallel ranks divide the share among themselves and then all hold all of it:
        they must pack the same micro-batches.
        """
        groups = self._groups
        share = range(groups.data_rank, len(entries), groups.data_size)
        mine = share[groups.context_rank :: groups.context_size]
        prompts = [self._prompt(entries[index]) for index in mine]
        generator = None
        if iteration is not None:
            rank = dist.get_rank(groups.data_with_context)
            seed = random.Random(f"{self._args.seed}-{iteration}-{rank}").getrandbits(48)
            generator = torch.Generator(torch.device(torch.cuda.current_device())).manual_seed(seed)
        settings = {"temperature": self._config.rollout_temperature, "generator": generator}
        responses = self._sampler.sample(prompts, copies, **settings)
        rollouts = []
        for number, response in enumerate(responses):
            index, prompt = mine[number // copies], prompts[number // copies]
            rollouts.append((prompt, index, self._score(entries[index], response), response))
        return [rollout for part in gather(rollouts, groups.context) for rollout in part]

    def _score(self, entry: dict[str, Any], response: Response) -> float:
        """1.0 where the task's verifier gives full marks, else 0.0.

        Its partial credit is no reward: SmolLM2 came to repeat the question before a wrong sum for
        it.
        """
        answer = self._tokenizer.decode(response.tokens, skip_special_tokens=True).strip()
        return float(self._dataset.score_answer(answer, entry) == 1.0)

    def _metrics(self, rollouts: Sequence[tuple[Any, ...]]) -> dict[str, float | None]:
        rows = [(None, reward, len(response.tokens)) for _, _, reward, response in rollouts]
        return means_of(rows, self._groups.data)
