"""Megatron's own training loop, with steps of rollouts in place of its batches."""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

from megatron.core.enums import ModelType
from megatron.core.utils import get_model_config
from megatron.training import checkpointing, training

from megatron_pg import PolicyLossConfig, accepted_samples
from megatron_pg.megatron.groups import ParallelGroups

from .arguments import parse_arguments
from .checkpoint import claim_save_folder, loading, rollout_states, saving, stored_arguments
from .dry_run import print_plan
from .errors import agreed, mendable, plain_errors
from .initialize import start_megatron
from .log import MetricsLog
from .model import provide_model
from .resumption import refuse_other_settings
from .rollouts import FileSteps
from .scoring import Scoring
from .step import RolloutStep


class Run:
    """A run, fresh or gone on with; every rank makes one.

    Args:
        args: validated.
        config: the policy loss.
    """

    def __init__(self, args: argparse.Namespace, config: PolicyLossConfig) -> None:
        self._args, self._config = args, config
        microbatches = start_megatron(args)
        self._groups = groups = ParallelGroups.from_parallel_state()
        claim_save_folder(args)
        with agreed("the run cannot begin"):  # a rollout file may be absent on one node alone
            self._rollouts = _rollouts_of(args, config, groups)
        stored = stored_arguments(args)
        with mendable():
            if stored is not None:
                states = rollout_states(stored)
                refuse_other_settings(args, stored)
                self._rollouts.restore(states)
        self._rollout_step = RolloutStep(args, config, groups, microbatches)
        self._train_step: Callable[..., tuple[Any, ...]] = training.train_step
        self._save_all = saving(
            training.save_checkpoint, args, groups, self._rollouts.state, self._flush
        )
        self._last_saved, self._is_exhausted = 0, False

    def train(self) -> None:
        """Train until `--train-iters`, the end of the rollouts, or where Megatron's flags end the process."""
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
                if args.hf_model and not _has_checkpoint(args):
                    from .hugging_face import load_hugging_face  # needs safetensors

                    load_hugging_face(model, args.hf_model)
                    updates[0].reload_model_params()
                self._scoring = Scoring(args, self._config, self._groups)
            self._last_saved = args.iteration
            with agreed("the run cannot begin"):
                self._log = MetricsLog(args)
            self._rollouts.attach(model)
            if args.iteration == 0:
                self._score_held_out(0)
            config = get_model_config(model[0])
            iteration = args.train_iters
            try:
                iteration, flops = training.train(
                    None, model, *updates, None, None, None, config, {}, None
                )
            except SystemExit:  # an exit by a flag, unless the rollouts were exhausted
                if not self._is_exhausted:
                    raise
            else:
                if args.save and iteration > self._last_saved:
                    training.save_checkpoint_and_time(iteration, model, *updates, flops, {})
                    training.maybe_finalize_async_save(blocking=True, terminate=True)
            self._score_held_out(iteration)
        with mendable():
            self._log.close()
        if args.save_hf:
            from .hugging_face import save_hugging_face

            with mendable():
                save_hugging_face(model, args.save_hf, args.hf_model)

    def _step(
        self,
        _forward_step: None,
        _data_iterator: None,
        model: list[Any],
        optimizer: Any,
        scheduler: Any,
        model_config: Any,
        forward_backward: Callable[..., Any],
        **named: Any,
    ) -> tuple[Any, ...]:
        """Megatron's `train_step` on the rollouts that come next; see `megatron.training.training.train_step`."""
        times = [time.monotonic()]
        done: int = named["iteration"]
        with mendable():
            collected = self._rollouts.step(done)
            if collected is None:
                self._is_exhausted = True
                should_save = bool(self._args.save) and done > self._last_saved
                return {}, 0, should_save, True, 0, None, None, 0
            times.append(time.monotonic())
            samples = self._scoring.filled(collected[0], model)
            times.append(time.monotonic())
            samples = list(accepted_samples(self._config, samples))
            plan = self._rollout_step.plan(samples, model_config)
        # Where no token is active, nothing is updated.
        result: tuple[Any, ...] = ({}, 1, False, False, 0, None, None, 0)
        metrics: dict[str, float | None] = dict(collected[1])
        if plan.totals.num_active_tokens > 0:
            result, of_loss = self._rollout_step.train(
                self._train_step,
                samples,
                plan,
                model,
                optimizer,
                scheduler,
                model_config,
                forward_backward,
                **named,
            )
            metrics |= of_loss
        metrics["learning_rate"] = optimizer.param_groups[0]["lr"]
        times.append(time.monotonic())
        for phase, (begin, end) in zip(PHASES, itertools.pairwise(times), strict=True):
            metrics[f"seconds_{phase}"] = end - begin
        with mendable():  # a disk takes no more
            self._log.step(done + 1, metrics, self._rollouts.shown(samples[:2]))
        return result

    def _score_held_out(self, iteration: int) -> None:
        if isinstance(self._rollouts, FileSteps) or not self._args.held_out_tasks:
            return
        score, answers = self._rollouts.held_out()
        with mendable():
            self._log.held_out(iteration, score, answers)

    def _save(self, iteration: int, *rest: Any, **named: Any) -> None:
        self._save_all(iteration, *rest, **named)
        self._last_saved = iteration

    def _flush(self) -> None:
        self._log.flush()


PHASES = ("rollouts", "scoring", "training")
"""Of a step: getting its rollouts, the log-probs that they lack, and forward, backward and update."""


def _rollouts_of(args: argparse.Namespace, config: PolicyLossConfig, groups: ParallelGroups) -> Any:
    if args.rollout_files:
        return FileSteps(args, config, groups)
    from .tasks import TaskSteps  # needs reasoning-gym and transformers

    return TaskSteps(args, config, groups)


def _has_checkpoint(args: argparse.Namespace) -> bool:
    return args.pretrained_checkpoint or (args.load and checkpointing.checkpoint_exists(args.load))


@plain_errors()
def main() -> None:
    """Parse the flags, and train or print the plan."""
    with mendable():
        args = parse_arguments()
        config = PolicyLossConfig.from_args(args)
        if args.dry_run:
            print_plan(args, config)
            return
    Run(args, config).train()
