"""Everything that a run consists of, fresh or resumed."""

from __future__ import annotations

import argparse
import signal
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from megatron_pg import PolicyLossConfig, Sample
from megatron_pg.config.versions import megatron_core_version

from .checkpoint import Checkpoints, Progress
from .checkpoint_folder import CheckpointFolder
from .errors import agreed, mendable
from .file_steps import FileSteps
from .generated_steps import GeneratedSteps
from .identity import identity_of
from .model import build_policy, start_megatron
from .report import draw_report
from .run_directory import RunDirectory, StopSignal, die_with_launcher
from .run_log import RunLog, summarise
from .training_step import TrainingStep


class Run:
    """A run and where it is; every rank makes one.

    Iterating over `warm_start` and then over `steps` moves it on; between their items it writes the checkpoints that
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
        stream_type = FileSteps if args.rollout_files else GeneratedSteps
        with agreed("the run cannot begin"):  # a rollout file may be absent on one node alone
            self._stream = stream_type(args, config, self.groups, self.device)
        self.policy = build_policy(args, self.groups, self.device, self._stream.vocabulary_size)
        self._stream.attach(self.policy)
        self._is_main = dist.get_rank() == 0
        self._directory: RunDirectory | None = None
        with agreed("--run-dir"):
            if self._is_main:
                self._directory = RunDirectory(args.run_dir, args.resume)
        self._warned = False
        self.progress = Progress()
        self._checkpoints = self._open_checkpoints()
        self._started = time.monotonic() - self.progress.seconds
        self._log = self._open_log() if self._is_main else None

    def warm_start(self) -> Iterator[list[Sample]]:
        """The supervised batches that remain, this data-parallel rank's part of each; none with rollout files."""
        if isinstance(self._stream, FileSteps):
            return
        batches = self._stream.warm_start_batches(self.progress.warm_start_step)
        if self._in_warm_start and self._log:
            self._log.start_bar(
                "warm start", self.args.warm_start_iters, self.progress.warm_start_step
            )
        while self._in_warm_start:
            yield next(batches)
            if self._in_warm_start:
                self._pause(self._is_due(self.progress.warm_start_step))
        if self.progress.held_out_before is None:
            self._begin_reinforcement_learning(self._stream)

    def steps(self) -> Iterator[TrainingStep]:
        """The steps of reinforcement learning that remain."""
        if self._log:
            self._log.start_bar(self._stream.title, self.args.train_iters, self.progress.step)
        steps = self._stream.steps(self.progress.step)
        while True:
            with mendable():
                step = next(steps, None)
            if step is None:
                break
            yield step
            if step.may_stop:
                round_ = range(self._stream.steps_per_round)
                self._pause(
                    any(self._is_due(self.progress.step - i) for i in round_)
                    or self.progress.step == self.args.train_iters
                )
        self._save()  # rollout files may end before --train-iters

    def log_warm_start(self, metrics: dict[str, float]) -> None:
        """Count a supervised step."""
        self.progress.warm_start_step += 1
        if self._log:
            step = {"step": self.progress.warm_start_step, "pg_loss": metrics["pg_loss"]}
            self._log.warm_start_step({**step, "grad_norm": metrics["grad_norm"]})

    def log_step(self, step: TrainingStep, metrics: dict[str, float]) -> None:
        """Count a step of reinforcement learning.

        Args:
            metrics: empty where nothing was updated.
        """
        self.progress.step += 1
        if not metrics and self._log and not self._warned:
            self._warned = True
            self._log.say(
                f"step {self.progress.step} has no active token: it updates nothing (said once)"
            )
        line: dict[str, float | None] = {"step": self.progress.step, **step.metrics, **metrics}
        line["learning_rate"] = self.policy.optimizer.param_groups[0]["lr"]
        line["seconds"] = round(self._seconds(), 3)
        if self._log:
            self._log.step(line)

    def finish(self) -> None:
        """Write the summary and the report, and score the held-out tasks again; every rank must call it."""
        held_out_after = None
        if isinstance(self._stream, GeneratedSteps):
            held_out_after = self._stream.score_held_out()
        if self._log:
            steps = self._log.read_steps()
            summary = self._summary(steps) | {"held_out_after": held_out_after}
            self._log.write_summary(summary)
            title = f"{summary['loss_aggregation']}, seed {summary['seed']}, CP {summary['context_parallel_size']}"
            draw_report(steps, title, self.args.run_dir / "report.png")
            self._log.say(f"{self._outcome(summary)}; see {self.args.run_dir}/report.png")
            self._log.close()
        dist.barrier()
        dist.destroy_process_group()

    @property
    def _in_warm_start(self) -> bool:
        is_online = isinstance(self._stream, GeneratedSteps)
        return is_online and self.progress.warm_start_step < self.args.warm_start_iters

    def _is_due(self, step: int) -> bool:
        interval: int | None = self.args.save_interval
        return interval is not None and step % interval == 0

    def _seconds(self) -> float:
        return time.monotonic() - self._started

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

    def _begin_reinforcement_learning(self, stream: GeneratedSteps) -> None:
        self._start_optimizer()
        stream.remember_reference()
        self.progress.held_out_before = stream.score_held_out()
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
            self._save()
        if stopping:
            if self._log:
                self._log.say("stopped as asked, after a checkpoint: --resume goes on from there")
                self._log.close()
            raise SystemExit(128 + signal.SIGTERM)

    def _save(self) -> None:
        self.progress.seconds = self._seconds()
        if self._log:
            self._log.flush()
        self._checkpoints.save(self.progress, self.policy, self._stream)

    def _open_checkpoints(self) -> Checkpoints:
        """The checkpoints, after the last whole one is put in place where one is to be resumed from."""
        checkpoints = Checkpoints(
            CheckpointFolder(self.args.run_dir / "checkpoints", self.args.keep_last_checkpoints),
            identity_of(self.args, self.config),
        )
        latest = checkpoints.folder.latest() if self.args.resume else None
        if latest is None:
            self._start_optimizer()
            if self.args.resume and self._is_main:
                print(f"no checkpoint in {self.args.run_dir} yet: starting from the beginning")
            return checkpoints
        self.progress = checkpoints.read(latest)
        self._start_optimizer()
        checkpoints.restore(latest, self.policy, self._stream)
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

    def _outcome(self, summary: dict[str, Any]) -> str:
        if self.args.rollout_files:
            return f"{summary['steps']} steps from rollout files, {summary['seconds']:.0f} s"
        return (
            f"reward {summary['reward_first']:.2f} -> {summary['reward_last']:.2f}, held-out tasks "
            f"{summary['held_out_before']:.2f} -> {summary['held_out_after']:.2f}, {summary['seconds']:.0f} s"
        )

    def _summary(self, steps: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            **summarise(steps),
            "steps": len(steps),
            "held_out_before": self.progress.held_out_before,
            "held_out_tasks": 0 if self.args.rollout_files else self.args.num_held_out_tasks,
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
