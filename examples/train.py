"""Megatron's own training loop, with steps of rollouts in place of its batches."""

import itertools
import os
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from live_line import LiveLine, shown_numbers
from megatron.core.enums import ModelType
from megatron.core.utils import get_model_config
from megatron.training import checkpointing, training
from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer
from rollout_log import SHOWN_PROMPTS, RolloutLog, rollout_row
from run_folder import append_step, cut_back, replace_text

from megatron_pg import PolicyLossConfig, Sample, StepPlan, accepted_samples, adapted_kl, pack
from megatron_pg.config.command_line import exit_refused
from megatron_pg.megatron import PolicyStep
from megatron_pg.megatron.groups import ParallelGroups
from megatron_pg.megatron.schedule import run_micro_batches
from megatron_pg.step.agreement import gather

from .arguments import parse_arguments
from .checkpoint import claim_save_folder, loading, restore_rollouts, saving
from .dry_run import print_plan
from .errors import RunError, agreed, mendable
from .initialize import provide_model, start_megatron
from .rollouts import FileSteps, Scoring, layout_of, plan_of

METRICS, HELD_OUT = "metrics.jsonl", "held_out.jsonl"
SHOWN = ("reward", "response_length", "loss", "kl_new_old", "grad_norm")
"""Metrics in the line of a step, with its seconds; metrics.jsonl has all."""


class MetricsLog:
    """The metrics of a run on the terminal, TensorBoard, W&B and in metrics.jsonl; every rank makes
    one, the last one writes.

    Megatron writes its own line of a step, timers and memory reports; its flags say which writers
    there are. The lines of metrics.jsonl after `args.iteration` are removed: the checkpoint that
    the run goes on from knows nothing of them. A ValueError names a damaged line.
    """

    def __init__(self, args: Namespace) -> None:
        self._args = args
        self._writes = args.rank == args.world_size - 1
        self._path = Path(args.save) / METRICS if args.save else None
        self._line = LiveLine()
        self._rollouts: RolloutLog | None = None
        if self._writes and self._path:
            cut_back(self._path, args.iteration)
            replace_text(self._path.with_name("settings.yaml"), args.settings_file)
            replace_text(self._path.with_name("settings.json"), args.settings_of_run)
            self._rollouts = RolloutLog(self._path.parent, args.iteration)

    def step(
        self,
        number: int,
        metrics: Mapping[str, float | None],
        answers: Sequence[str],
        rollouts: Sequence[Mapping[str, Any]],
    ) -> None:
        """Log step `number`, counted from 1: metrics, None for what is not known, a few of its
        answers, rows of rollouts.
        """
        if not self._writes:
            return
        known = append_step(self._path, number, metrics)
        if number % self._args.tensorboard_log_interval == 0:
            self._draw(number, known)
        if self._rollouts:
            self._rollouts.write(number, rollouts)
        seconds = sum(value for name, value in known.items() if name.startswith("seconds"))
        shown = shown_numbers(known, seconds)
        self._line.show("step", number, self._args.train_iters, shown)
        if number % self._args.log_interval == 0:
            texts = [f"{name} {known[name]:z.4g}" for name in SHOWN if name in known]
            print(f" step {number}: {' | '.join([*texts, f'{seconds:.1f} s'])}", flush=True)
            print(*(f"    {answer!r}\n" for answer in answers), sep="", end="", flush=True)

    def held_out(self, number: int, score: float, answers: Sequence[str]) -> None:
        """Log the score of the held-out tasks after step `number`, and a few answers to them."""
        if not self._writes:
            return
        print(f" held-out tasks after step {number}: {score:.3f}", *map(repr, answers), sep="\n   ")
        path = self._path.with_name(HELD_OUT) if self._path else None
        append_step(path, number, {"score": score}, answers=answers)
        self._draw(number, {"held_out": score})

    def _draw(self, number: int, values: Mapping[str, float]) -> None:
        if writer := get_tensorboard_writer():
            for name, value in values.items():
                writer.add_scalar(name, value, number)
        if wandb := get_wandb_writer():
            wandb.log(dict(values), number)

    def flush(self) -> None:
        """Bring everything to the disk."""
        if not self._writes:
            return
        if self._path:
            with self._path.open("a") as file:
                os.fsync(file.fileno())
        if writer := get_tensorboard_writer():
            writer.flush()

    def close(self, config: PolicyLossConfig) -> None:
        """The last thing of a run that ended by itself."""
        self.flush()
        if not self._writes:
            return
        self._line.close()
        args = self._args
        if self._rollouts:
            title = (args.task, config.policy_loss, config.loss_aggregation, f"seed {args.seed}")
            self._rollouts.write_page(config, " · ".join(map(str, title)), args.hf_model)
        if wandb := get_wandb_writer():
            wandb.finish()


class Run:
    """A run, fresh or gone on with, from validated arguments; every rank makes one."""

    def __init__(self, args: Namespace, config: PolicyLossConfig) -> None:
        self._args = args
        self._microbatches = start_megatron(args)
        self._groups = ParallelGroups.from_parallel_state()
        self._lock = claim_save_folder(args)
        with agreed("the run cannot begin"):  # a rollout file may be absent on one node alone
            if args.rollout_files:
                self._rollouts: Any = FileSteps(args, config, self._groups)
            else:
                from .tasks import TaskSteps  # needs reasoning-gym and transformers

                self._rollouts = TaskSteps(args, config, self._groups)
        beta = restore_rollouts(args, self._rollouts)
        self._config = config if beta is None else replace(config, kl_loss_coef=beta)
        self._train_step, self._save_checkpoint = training.train_step, training.save_checkpoint
        self._last_saved, self._is_exhausted = 0, False

    def train(self) -> None:
        """Train until `--train-iters`, the end of the rollouts, or where Megatron's flags end the
        process.
        """
        args = self._args
        with mock.patch.multiple(
            training,
            train_step=self._step,
            save_checkpoint=self._save,
            load_checkpoint=loading(training.load_checkpoint),
        ):
            model, *updates = training.setup_model_and_optimizer(
                model_provider_func=provide_model, model_type=ModelType.encoder_or_decoder
            )
            with mendable():
                begun = args.load and checkpointing.checkpoint_exists(args.load)
                if args.hf_model and not (begun or args.pretrained_checkpoint):
                    from .hugging_face import load_hugging_face  # needs safetensors

                    load_hugging_face(model, args.hf_model)
                    updates[0].reload_model_params()
                self._scoring = Scoring(args, self._config, self._groups)
            self._last_saved = iteration = args.iteration
            with agreed("the run cannot begin"):
                self._log = MetricsLog(args)
            if args.task:
                self._rollouts.attach(model)
            if iteration == 0:
                self._score_held_out(0)
            config = get_model_config(model[0])
            try:
                iteration, flops = training.train(
                    None, model, *updates, None, None, None, config, {}, None
                )
            except SystemExit:  # an exit by a flag, unless the rollouts were exhausted
                if not self._is_exhausted:
                    raise
                iteration = args.train_iters
            else:
                if args.save and iteration > self._last_saved:
                    training.save_checkpoint_and_time(iteration, model, *updates, flops, {})
                    training.maybe_finalize_async_save(blocking=True, terminate=True)
            self._score_held_out(iteration)
        with mendable():
            if args.save_hf:
                from .hugging_face import save_hugging_face

                save_hugging_face(model, args.save_hf, args.hf_model)
            self._log.close(self._config)

    def _step(self, _: None, __: None, *rest: Any, **named: Any) -> tuple[Any, ...]:
        """Megatron's `train_step` on the rollouts that come next; see
        `megatron.training.training.train_step`.
        """
        model, optimizer, *_ = rest
        times, done = [time.monotonic()], named["iteration"]
        with mendable():
            collected = self._rollouts.step(done)
            if collected is None:
                self._is_exhausted = True
                should_save = bool(self._args.save) and done > self._last_saved
                return {}, 0, should_save, True, 0, None, None, 0
            times.append(time.monotonic())
            samples = self._scoring.filled(collected[0], model)
            times.append(time.monotonic())
            rows = self._rollout_rows(samples)
            samples = list(accepted_samples(self._config, samples))
            plan = plan_of(self._args, samples, self._groups.data)
        # Where no token is active, nothing is updated.
        result: tuple[Any, ...] = ({}, 1, False, False, 0, None, None, 0)
        # Megatron's step sets the next rate.
        metrics = collected[1] | {"learning_rate": optimizer.param_groups[0]["lr"]}
        if plan.totals.num_active_tokens > 0:
            result, loss_metrics = self._update(samples, plan, *rest, **named)
            metrics |= loss_metrics
        times.append(time.monotonic())
        phases = ("rollouts", "scoring", "training")
        for phase, (begin, end) in zip(phases, itertools.pairwise(times), strict=True):
            metrics[f"seconds_{phase}"] = end - begin
        with mendable():  # a disk takes no more
            self._log.step(done + 1, metrics, self._rollouts.shown(samples[:2]), rows)
        return result

    def _rollout_rows(self, samples: Sequence[Any]) -> list[dict[str, Any]]:
        """Rows of the first prompts of a step of `--task`, on all data-parallel ranks; files are
        there already.
        """
        if not self._args.task:
            return []
        shown = samples[: SHOWN_PROMPTS * self._args.samples_per_prompt]
        return [
            r for part in gather(list(map(rollout_row, shown)), self._groups.data) for r in part
        ]

    def _update(
        self,
        samples: Sequence[Sample],
        plan: StepPlan,
        model: list[Any],
        optimizer: Any,
        scheduler: Any,
        model_config: Any,
        _forward_backward: Any,
        **named: Any,
    ) -> tuple[tuple[Any, ...], dict[str, float]]:
        """Forward, backward and update by Megatron's `train_step`: its result, and the step's
        metrics.
        """
        step = PolicyStep(self._config, plan, model=model, vocab_size=self._args.vocab_size)
        packs = [[samples[index] for index in indices] for indices in plan.microbatches]
        place = {"cp_rank": self._groups.context_rank, **layout_of(self._args)}
        batches = [pack(part, **place).to(torch.cuda.current_device()) for part in packs]
        reported: list[Any] = []

        def run_schedule(**_: Any) -> list[Any]:
            reported.extend(run_micro_batches(step.head, batches, model))
            return []  # Megatron would average what is there

        self._microbatches.plan(plan.num_microbatches)
        if hasattr(training, "update_seqlen_stats_from_cu_seqlens"):
            # For Megatron's throughput; before 0.18 it takes all sequences for --seq-length long.
            lengths = itertools.accumulate((sample.total_length for sample in samples), initial=0)
            training.update_seqlen_stats_from_cu_seqlens(torch.tensor(list(lengths)))
        by_iteration = SimpleNamespace(step=lambda increment: scheduler.step(increment=1))
        result = self._train_step(
            None, None, model, optimizer, by_iteration, model_config, run_schedule, **named
        )
        metrics = {**step.metrics(reported), "grad_norm": result[5]}
        self._config = adapted_kl(self._config, metrics, plan.totals.num_rollouts)
        return result, metrics

    def _score_held_out(self, iteration: int) -> None:
        if isinstance(self._rollouts, FileSteps) or not self._args.held_out_tasks:
            return
        score, answers = self._rollouts.held_out()
        with mendable():
            self._log.held_out(iteration, score, answers)

    def _save(
        self, iteration: int, model: list[Any], optimizer: Any, *rest: Any, **named: Any
    ) -> None:
        """In place of Megatron's `save_checkpoint`."""
        state, self._args.current_kl_loss_coef = self._rollouts.state(), self._config.kl_loss_coef
        with saving(self._args, state, self._log, iteration, optimizer):
            self._save_checkpoint(iteration, model, optimizer, *rest, **named)
        self._last_saved = iteration


def main() -> None:
    """Parse the flags, and train or print the plan; what the user can mend is said in a line, by
    one rank.
    """
    try:
        with mendable():
            args = parse_arguments()
            config = PolicyLossConfig.from_args(args)
            if args.dry_run:
                print_plan(args, config)
                return
        Run(args, config).train()
    except RunError as error:
        exit_refused(f"error: {error}")
