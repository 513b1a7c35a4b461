"""Everything that a run consists of, fresh or resumed."""

from __future__ import annotations

import argparse
import dataclasses
import signal
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_pg import PolicyLossConfig, Sample
from megatron_pg.megatron.versions import megatron_core_version

from .checkpoint import Checkpoints, Progress
from .generation import Sampler
from .model import build_model, build_policy, start_megatron
from .report import draw_report
from .rollouts import Rollout, RolloutWorker, rollout_means
from .run_directory import RunDirectory, StopSignal, die_with_launcher
from .run_log import RunLog, summarise
from .tasks import TaskSet
from .tokenizer import CharacterTokenizer
from .warm_start import warm_start_batches

REPEATED_BY_RESUMED_RUNS = (
    "world_size",
    "tensor_model_parallel_size",
    "context_parallel_size",
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "bf16",
    "seed",
    "lr",
    "train_iters",
    "global_batch_size",
    "rollout_batch_size",
    "n_samples_per_prompt",
    "num_training_tasks",
    "num_held_out_tasks",
    "warm_start_iters",
    "warm_start_lr",
    "warm_start_batch_size",
    "warm_start_corruption",
)
"""Arguments that decide what a run computes."""


class Run:
    """A run and where it is; every rank makes one.

    Iterating over `warm_start` and then over `rounds` moves it on; between their items it writes the checkpoints that
    are due, and stops where it was asked to.

    Args:
        args: validated.
        config: the policy loss.
    """

    def __init__(self, args: argparse.Namespace, config: PolicyLossConfig) -> None:
        self.args, self.config = args, config
        die_with_launcher()
        self._stop = StopSignal()
        self.groups, self.device = start_megatron(args)
        self.task_set = TaskSet.generate(
            args.num_training_tasks, args.num_held_out_tasks, args.seed
        )
        self.tokenizer = CharacterTokenizer([self.task_set.question_opening])
        self._check_sequence_length()
        self.policy = build_policy(args, self.groups, self.device, self.tokenizer.vocabulary_size)
        reference = None
        if config.kl_loss_coef > 0:
            reference = self._sampler(build_model(args, self.device, self.policy.vocabulary_size))
        self.worker = RolloutWorker(
            self.task_set,
            self.tokenizer,
            self._sampler(self.policy.model),
            reference,
            self.groups,
        )
        self._is_main = dist.get_rank() == 0
        self._directory = RunDirectory(args.run_dir, args.resume) if self._is_main else None
        dist.barrier()
        self._warned = False
        self.progress = Progress()
        self._checkpoints = self._open_checkpoints()
        self._started = time.monotonic() - self.progress.seconds
        self._log = self._open_log() if self._is_main else None

    def warm_start(self) -> Iterator[list[Sample]]:
        """The supervised batches that remain, this data-parallel rank's part of each."""
        batches = warm_start_batches(
            self.task_set,
            self.tokenizer,
            batch_size=self.args.warm_start_batch_size,
            corruption=self.args.warm_start_corruption,
            seed=self.args.seed,
            start=self.progress.warm_start_step,
        )
        if self._in_warm_start and self._log:
            self._log.start_bar(
                "warm start", self.args.warm_start_iters, self.progress.warm_start_step
            )
        while self._in_warm_start:
            yield next(batches)[self.groups.data_rank :: self.groups.data_size]
            if self._in_warm_start:
                self._pause(self._is_due(self.progress.warm_start_step))
        if self.progress.held_out_before is None:
            self._begin_reinforcement_learning()

    def rounds(self) -> Iterator[list[Rollout]]:
        """The rounds of generation that remain: the answers that this data-parallel rank trains on."""
        args = self.args
        number = self.progress.step // self._steps_per_round
        batches = self.task_set.training_batches(args.rollout_batch_size, args.seed, number)
        if self._log:
            self._log.start_bar("GRPO", args.train_iters, self.progress.step)
        while self.progress.step < args.train_iters:
            number = self.progress.step // self._steps_per_round
            yield self.worker.collect(
                next(batches), args.n_samples_per_prompt, number * args.rollout_batch_size
            )
            self._pause(
                any(self._is_due(self.progress.step - i) for i in range(self._steps_per_round))
                or self.progress.step == args.train_iters
            )

    def steps(self, rollouts: Sequence[Rollout]) -> Iterator[Sequence[Rollout]]:
        """The answers of a round, cut into optimizer steps at the boundaries of prompt groups."""
        size = self.args.global_batch_size // self.groups.data_size
        for start in range(0, len(rollouts), size):
            yield rollouts[start : start + size]

    def log_warm_start(self, metrics: dict[str, float]) -> None:
        """Count a supervised step."""
        self.progress.warm_start_step += 1
        if self._log:
            step = {"step": self.progress.warm_start_step, "pg_loss": metrics["pg_loss"]}
            self._log.warm_start_step({**step, "grad_norm": metrics["grad_norm"]})

    def log_step(self, rollouts: Sequence[Rollout], metrics: dict[str, float]) -> None:
        """Count a step of reinforcement learning; every rank must call it.

        Args:
            metrics: empty where nothing was updated.
        """
        self.progress.step += 1
        if not metrics and self._log and not self._warned:
            self._warned = True
            self._log.say(
                f"step {self.progress.step} has no active token: it updates nothing (said once)"
            )
        line: dict[str, float] = {"step": self.progress.step}
        line |= rollout_means(rollouts, self.groups, self.device)
        line |= metrics
        line["learning_rate"] = self.policy.optimizer.param_groups[0]["lr"]
        line["seconds"] = round(self._seconds(), 3)
        if self._log:
            self._log.step(line)

    def finish(self) -> None:
        """Score the held-out tasks again and write the summary and the report; every rank must call it."""
        held_out_after = self.worker.score_held_out()
        if self._log:
            steps = self._log.read_steps()
            summary = self._summary(steps) | {"held_out_after": held_out_after}
            self._log.write_summary(summary)
            title = f"{summary['loss_aggregation']}, seed {summary['seed']}, CP {summary['context_parallel_size']}"
            draw_report(steps, title, self.args.run_dir / "report.png")
            self._log.say(
                f"reward {summary['reward_first']:.2f} -> {summary['reward_last']:.2f}, held-out tasks "
                f"{summary['held_out_before']:.2f} -> {held_out_after:.2f}, {summary['seconds']:.0f} s; "
                f"see {self.args.run_dir}/report.png"
            )
            self._log.close()
        dist.barrier()
        dist.destroy_process_group()

    @property
    def _in_warm_start(self) -> bool:
        return self.progress.warm_start_step < self.args.warm_start_iters

    @property
    def _steps_per_round(self) -> int:
        args = self.args
        return int(args.rollout_batch_size * args.n_samples_per_prompt // args.global_batch_size)

    def _is_due(self, step: int) -> bool:
        interval: int | None = self.args.save_interval
        return interval is not None and step % interval == 0

    def _seconds(self) -> float:
        return time.monotonic() - self._started

    def _sampler(self, model: Any) -> Sampler:
        """Tensor-parallel ranks sample alike, all others each with a random state of their own."""
        rank = dist.get_rank(self.groups.data_with_context)
        return Sampler(
            model,
            vocabulary_size=self.tokenizer.vocabulary_size,
            max_new_tokens=self._max_response_length,
            padding=self.tokenizer.padding,
            end=self.tokenizer.end,
            temperature=self.config.rollout_temperature,
            seed=self.args.seed + 100_003 * rank,
            device=self.device,
        )

    @property
    def _max_response_length(self) -> int:
        return int(self.args.max_response_len or self.task_set.max_answer_length + 1)

    def _check_sequence_length(self) -> None:
        tasks = (*self.task_set.training, *self.task_set.held_out)
        question = max((task.question for task in tasks), key=len)
        longest = len(self.tokenizer.encode_prompt(question))
        if longest + self._max_response_length > self.args.max_position_embeddings:
            raise ValueError(
                f"--max-position-embeddings is {self.args.max_position_embeddings}: prompts of up to {longest} tokens and "
                f"responses of up to {self._max_response_length} need {longest + self._max_response_length}"
            )

    def _start_optimizer(self) -> None:
        args = self.args
        if self._in_warm_start:
            self.policy.start_optimizer(
                args,
                lr=args.warm_start_lr,
                num_steps=args.warm_start_iters,
                warmup_steps=args.warm_start_iters // 5,
                decay_style="constant",
            )
        else:
            self.policy.start_optimizer(
                args,
                lr=args.lr,
                num_steps=args.train_iters,
                warmup_steps=args.lr_warmup_iters,
                decay_style=args.lr_decay_style,
            )

    def _begin_reinforcement_learning(self) -> None:
        self._start_optimizer()
        if self.worker.reference is not None:
            self.worker.reference.model.load_state_dict(self.policy.model.module.state_dict())
        self.progress.held_out_before = self.worker.score_held_out()
        if self._log:
            self._log.say(
                f"after {self.progress.warm_start_step} supervised steps: held-out tasks "
                f"{self.progress.held_out_before:.2f}"
            )
        self._pause(is_due=self.args.save_interval is not None)

    def _pause(self, is_due: bool) -> None:
        """Write a checkpoint where one is due, and stop where the run was asked to."""
        stopping = self._stop.agreed(self.device)
        if is_due or stopping:
            self.progress.seconds = self._seconds()
            if self._log:
                self._log.flush()
            self._checkpoints.save(
                self.progress, self.policy, self.worker.sampler, self._reference_model()
            )
        if stopping:
            if self._log:
                self._log.say("stopped as asked, after a checkpoint: --resume goes on from there")
                self._log.close()
            raise SystemExit(128 + signal.SIGTERM)

    def _reference_model(self) -> Any:
        return None if self.worker.reference is None else self.worker.reference.model

    def _open_checkpoints(self) -> Checkpoints:
        """The checkpoints, after the last whole one is put in place where one is to be resumed from."""
        identity = {name: getattr(self.args, name) for name in REPEATED_BY_RESUMED_RUNS}
        identity |= dataclasses.asdict(self.config)
        checkpoints = Checkpoints(self.args.run_dir / "checkpoints", identity)
        latest = checkpoints.latest() if self.args.resume else None
        if latest is None:
            self._start_optimizer()
            if self.args.resume and self._is_main:
                print(f"no checkpoint in {self.args.run_dir} yet: starting from the beginning")
            return checkpoints
        self.progress, state = checkpoints.read(latest, self.policy)
        self._start_optimizer()
        checkpoints.restore(
            latest, state, self.policy, self.worker.sampler, self._reference_model()
        )
        if self._is_main:
            print(f"resuming from {latest}")
        return checkpoints

    def _open_log(self) -> RunLog:
        return RunLog(
            self.args.run_dir,
            self.args.tensorboard_dir or self.args.run_dir / "tensorboard",
            self.progress.warm_start_step,
            self.progress.step,
        )

    def _summary(self, steps: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            **summarise(steps),
            "steps": len(steps),
            "held_out_before": self.progress.held_out_before,
            "held_out_tasks": len(self.task_set.held_out),
            "warm_start_steps": self.progress.warm_start_step,
            "loss_aggregation": self.config.loss_aggregation,
            "policy_loss": self.config.policy_loss,
            "seed": self.args.seed,
            "world_size": self.args.world_size,
            "context_parallel_size": self.args.context_parallel_size,
            "tensor_model_parallel_size": self.args.tensor_model_parallel_size,
            "device": self.args.device,
            # Not megatron.core.__version__: it carries the commit of whatever repository the run was started in.
            "megatron_core": ".".join(map(str, megatron_core_version())),
            "torch": torch.__version__,
            "seconds": round(self._seconds(), 1),
        }
