"""Policy gradients on Megatron's training loop, with steps of rollouts instead of its batches.

    torchrun --nproc-per-node 8 examples/train.py FLAGS

Rollouts are read from files or sampled from the trained model. quickstart.sh and the scripts in
launch/ start it. docs/trainer.md explains it.
"""

import itertools
import os
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.enums import ModelType
from megatron.core.utils import get_model_config
from megatron.training import checkpointing, training
from torch.distributed.elastic.multiprocessing.errors import record
from trainer.arguments import parse_arguments
from trainer.checkpoint import claim_save_folder, loading, restore_rollouts, saving
from trainer.dry_run import print_plan
from trainer.errors import RunError, agreed, fixable
from trainer.log import SHOWN_PROMPTS, RunLog, rollout_row
from trainer.model import provide_model, start_megatron
from trainer.rollouts import FileSteps, Scoring, layout_of, plan_of

from megatron_pg import PolicyLossConfig, Sample, StepPlan, accepted_samples, adapted_kl, pack
from megatron_pg.config.command_line import exit_refused
from megatron_pg.megatron import ParallelGroups, PolicyStep
from megatron_pg.megatron.schedule import run_micro_batches
from megatron_pg.step.advantages import half_of_dr_grpo
from megatron_pg.step.agreement import gather


class Run:
    """A new or resumed run from validated arguments. Every rank makes one."""

    def __init__(self, args: Namespace, config: PolicyLossConfig) -> None:
        self._args = args
        self._microbatches = start_megatron(args)
        self._groups = ParallelGroups.from_parallel_state()
        self._lock = claim_save_folder(args)
        with agreed("the run cannot begin"):  # a rollout file may be missing on only one node
            if args.rollout_files:
                self._rollouts: Any = FileSteps(args, config, self._groups)
            else:
                from trainer.tasks import TaskSteps  # needs reasoning-gym

                self._rollouts = TaskSteps(args, config, self._groups)
        beta = restore_rollouts(args, self._rollouts)
        self._config = config if beta is None else replace(config, kl_loss_coef=beta)
        self._train_step, self._save_checkpoint = training.train_step, training.save_checkpoint
        self._last_saved, self._is_exhausted = 0, False

    def train(self) -> None:
        """Train until `--train-iters`, the end of the rollouts, or an exit by Megatron's flags."""
        args = self._args
        own: dict[str, Any] = {"train_step": self._step, "save_checkpoint": self._save}
        own["load_checkpoint"] = loading(training.load_checkpoint)
        # Megatron has no memory formula for a HybridModel, and a CPU has no GPU memory to report.
        silent = ["report_theoretical_memory"] + ["report_memory"] * (args.device == "cpu")
        own |= dict.fromkeys(silent, lambda *_, **__: None)
        with mock.patch.multiple(training, **own):
            model, *updates = training.setup_model_and_optimizer(
                model_provider_func=provide_model, model_type=ModelType.encoder_or_decoder
            )
            with fixable():
                begun = args.load and checkpointing.checkpoint_exists(args.load)
                if args.hf_model and not (begun or args.pretrained_checkpoint):
                    from trainer.hugging_face import load_hugging_face  # needs safetensors

                    load_hugging_face(model, args.hf_model)
                    updates[0].reload_model_params()
                self._scoring = Scoring(args, self._config, self._groups)
                self._rollouts.attach(model, lambda samples: self._scoring.filled(samples, model))
            self._last_saved = iteration = args.iteration
            with agreed("the run cannot begin"):
                text = self._rollouts.questions.text.texts if args.task else None
                self._log = RunLog(args, text)
            if iteration == 0:
                self._score_held_out(0)
            config = get_model_config(model[0])
            try:
                iteration, flops = training.train(
                    None, model, *updates, None, None, None, config, {}, None
                )
            except SystemExit:  # an exit by a flag, or the end of the rollouts
                if not self._is_exhausted:
                    raise
                iteration = args.train_iters
            else:
                if args.save and iteration > self._last_saved:
                    training.save_checkpoint_and_time(iteration, model, *updates, flops, {})
                    training.maybe_finalize_async_save(blocking=True, terminate=True)
            self._score_held_out(iteration)
        with fixable():
            if args.save_hf:
                from trainer.hugging_face import save_hugging_face

                save_hugging_face(model, args.save_hf, args.hf_model)
            self._log.close(self._config)
        # A process that ends with gloo's threads running may abort.
        dist.destroy_process_group()

    def _step(self, _: None, __: None, *rest: Any, **named: Any) -> tuple[Any, ...]:
        """Run Megatron's `train_step` (megatron.training.training) on the next rollouts."""
        model, optimizer, *_ = rest
        times, done = [time.monotonic()], named["iteration"]
        with fixable():
            collected = self._rollouts.step(done)
            if collected is None:
                self._is_exhausted = True
                should_save = bool(self._args.save) and done > self._last_saved
                return {}, 0, should_save, True, 0, None, None, 0
            times.append(time.monotonic())
            samples = self._scoring.filled(collected[0], model)
            times.append(time.monotonic())
            rows = self._rollout_rows(samples, model) if self._args.task else []
            samples = list(accepted_samples(self._config, samples))
            plan = plan_of(self._args, samples, self._groups.data)
        # Without an active token, nothing is updated.
        result: tuple[Any, ...] = ({}, 1, False, False, 0, None, None, 0)
        # Read it first: Megatron's step sets the next rate.
        metrics = collected[1] | {"learning_rate": optimizer.param_groups[0]["lr"]}
        if plan.totals.num_active_tokens > 0:
            result, loss_metrics = self._update(samples, plan, *rest, **named)
            metrics |= loss_metrics
        times.append(time.monotonic())
        phases = ("rollouts", "scoring", "training")
        for phase, (begin, end) in zip(phases, itertools.pairwise(times), strict=True):
            metrics[f"seconds_{phase}"] = end - begin
        with fixable():  # the disk may be full
            self._log.step(done + 1, metrics, self._rollouts.shown(samples[:2]), rows)
        return result

    def _rollout_rows(self, samples: Sequence[Any], model: list[Any]) -> list[dict[str, Any]]:
        """Return the rows of a `--task` step's first prompts on all data-parallel ranks, with
        log-probs under the policy at the step's start.
        """
        shown = samples[: SHOWN_PROMPTS * self._args.samples_per_prompt]
        if self._args.steps_per_round > 1:
            pairs = zip(shown, self._scoring.scored(shown, model), strict=True)
            shown = [replace(sample, new_log_probs=values) for sample, values in pairs]
        rows = [rollout_row(sample) for sample in shown]
        return [row for part in gather(rows, self._groups.data) for row in part]

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
        """Update by Megatron's `train_step`, and return its result and the step's metrics."""
        step = PolicyStep(
            self._config,
            plan,
            model=model,
            vocab_size=self._args.vocab_size,
            policy_version=named["iteration"],
        )
        packs = [[samples[index] for index in indices] for indices in plan.microbatches]
        place = {"cp_rank": self._groups.context_rank, **layout_of(self._args)}
        batches = [pack(part, **place).to(torch.cuda.current_device()) for part in packs]
        reported: list[Any] = []

        def run_schedule(**_: Any) -> list[Any]:
            reported.extend(run_micro_batches(fixable()(step.head), batches, model))
            return []  # Megatron would average its entries

        self._microbatches.plan(plan.num_microbatches)
        if hasattr(training, "update_seqlen_stats_from_cu_seqlens"):
            # For Megatron's throughput. Before 0.18 it assumes sequences of --seq-length.
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
        if self._args.task:
            with fixable():
                self._log.held_out(iteration, *self._rollouts.held_out())

    def _save(
        self, iteration: int, model: list[Any], optimizer: Any, *rest: Any, **named: Any
    ) -> None:
        """Save a checkpoint, instead of Megatron's `save_checkpoint`."""
        state, self._args.current_kl_loss_coef = self._rollouts.state(), self._config.kl_loss_coef
        with saving(self._args, state, self._log, iteration, optimizer):
            self._save_checkpoint(iteration, model, optimizer, *rest, **named)
        self._last_saved = iteration


def main() -> None:
    """Train or print the plan. One rank prints errors that the user can fix, in one line."""
    try:
        with fixable():
            args = parse_arguments()
            config = PolicyLossConfig.from_args(args)
            remark = half_of_dr_grpo(args.advantage, args.loss_aggregation)
            if remark and os.environ.get("RANK", "0") == "0":
                print(f"remark: {remark}", flush=True)
            if args.dry_run:
                print_plan(args, config)
                return
        Run(args, config).train()
    except RunError as error:
        exit_refused(f"error: {error}")


if __name__ == "__main__":
    record(main)()
