"""GRPO on Megatron-Core from the first line to the last: to read from top to bottom, and to start your own from.

A small GPT answers reasoning-gym questions, is rewarded by the task's own verifier, and learns. `quickstart.sh` starts it
on two CPU processes; by hand, where --help explains each flag:

    torchrun --nproc-per-node 2 examples/train_grpo.py --context-parallel-size 2 --run-dir runs/mine
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import distributed as megatron_ddp
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from run_log import Log, checkpoints, claim_folder
from tasks import RolloutWorker, Tasks
from torch import Tensor

import megatron_pg as pg
from megatron_pg.megatron import ParallelGroups, PolicyStep, enable_cpu_runtime, torch_block_spec

SIZES = {
    "tensor-model-parallel-size": (1, "TP"),
    "context-parallel-size": (1, "CP; what is left of the processes is data parallel"),
    "num-layers": (2, "of the GPT"),
    "hidden-size": (128, "of the GPT"),
    "num-attention-heads": (4, "of the GPT"),
    "max-tokens-per-microbatch": (4096, "packed tokens over the context-parallel ranks"),
    "train-iters": (80, "optimizer steps of reinforcement learning"),
    "rollout-batch-size": (64, "questions of a round"),
    "n-samples-per-prompt": (8, "answers to each question"),
    "global-batch-size": (256, "answers of an optimizer step; a round is cut into such"),
    "max-response-len": (8, "tokens of an answer, its end included"),
    "num-training-tasks": (16384, "distinct questions"),
    "num-held-out-tasks": (256, "other questions, scored before and after"),
    "warm-start-iters": (250, "supervised steps before"),
    "warm-start-batch-size": (128, "answers of a supervised step"),
    "save-interval": (20, "steps from one checkpoint to the next"),
}
"""Flags of whole numbers from 1 on: default and meaning."""
NUMBERS = {
    "lr": (5e-4, "of reinforcement learning; warms up and decays to 0"),
    "warm-start-lr": (2e-3, "of the supervised steps"),
    "warm-start-corruption": (0.5, "share of the answers to imitate with two letters exchanged"),
    "warm-start-stutter": (0.0, "share with a letter said 1 to 6 times more"),
}


def parse_arguments() -> argparse.Namespace:
    """The flags; a refusal names the flag, what was found and what to do."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    for name, (default, meaning) in (SIZES | NUMBERS).items():
        add(f"--{name}", type=type(default), default=default, help=f"{meaning} ({default})")
    add("--run-dir", type=Path, required=True, help="for what the run leaves")
    add("--resume", action="store_true", help="go on with the run in --run-dir")
    add("--device", choices=["cpu", "cuda"], default="cpu")
    add("--seed", type=int, default=1)
    args = pg.add_policy_loss_args(parser).parse_args()
    least = dict.fromkeys(SIZES, 1) | dict.fromkeys(NUMBERS, 0)
    for name, lowest in least.items():
        if not (value := getattr(args, name.replace("-", "_"))) >= lowest:
            raise ValueError(f"--{name} is {value}: give {lowest} or more")
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
    fields = ["old_log_probs", "rollout_log_probs", "group_index"]
    pg.validate_policy_loss_args(args, sample_fields=fields)
    model_ranks = args.tensor_model_parallel_size * args.context_parallel_size
    data_size, rest = divmod(int(os.environ.get("WORLD_SIZE", "1")), model_ranks)
    if rest or not data_size:
        raise ValueError(
            f"--tensor-model-parallel-size x --context-parallel-size is {model_ranks}, which does not divide the processes: "
            "change one of them, or --nproc-per-node of torchrun"
        )
    answers = args.rollout_batch_size * args.n_samples_per_prompt
    args.steps_per_round, rest = divmod(answers, args.global_batch_size)
    multiple = args.n_samples_per_prompt * data_size
    if rest or args.global_batch_size % multiple or args.train_iters % args.steps_per_round:
        raise ValueError(
            f"--global-batch-size {args.global_batch_size}: give a multiple of {multiple}, the answers to one question on "
            f"each data-parallel rank, that cuts the {answers} answers of a round into steps, and a multiple of these for "
            f"--train-iters {args.train_iters}"
        )
    return args


class Run:
    """The model, what updates it, and how far it is; every rank makes one."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.config = args, pg.PolicyLossConfig.from_args(args)
        self.device = torch.device(args.device)
        self.tasks = Tasks(args.num_training_tasks, args.num_held_out_tasks, args.seed)
        self.groups = ParallelGroups.from_parallel_state()
        self.model = self._build_model()
        self.start_optimizer()
        self.worker = RolloutWorker(args, self.model, self.tasks, self.groups, self.device)
        self.progress: dict[str, Any] = {"warm_start": 0, "step": 0, "held_out_before": None}

    def _build_model(self) -> megatron_ddp.DistributedDataParallel:
        """A GPT with learned positions."""
        size = self.groups.tensor_size
        config = TransformerConfig(
            num_layers=self.args.num_layers,
            hidden_size=self.args.hidden_size,
            num_attention_heads=self.args.num_attention_heads,
            attention_dropout=0.0,
            hidden_dropout=0.0,
            tensor_model_parallel_size=size,
            context_parallel_size=self.groups.context_size,
            use_cpu_initialization=self.args.device == "cpu",
            calculate_per_token_loss=self.args.calculate_per_token_loss,
            finalize_model_grads_func=megatron_ddp.finalize_model_grads,
        )
        model = GPTModel(
            config,
            torch_block_spec(config),
            vocab_size=-(-self.tasks.vocabulary_size // size) * size,
            max_sequence_length=self.tasks.longest_prompt + self.args.max_response_len + 8,
        ).to(self.device)
        ddp_config = megatron_ddp.DistributedDataParallelConfig()
        return megatron_ddp.DistributedDataParallel(config, ddp_config, model)

    def start_optimizer(self) -> None:
        """Adam without a history; `train_step` is told the learning rate."""
        self.optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.0), [self.model])

    def train_step(
        self, config: pg.PolicyLossConfig, samples: Sequence[pg.Sample], lr: float
    ) -> dict[str, float]:
        """One optimizer step on this data-parallel rank's samples: the metrics, equal on every rank."""
        context = {"cp_size": self.groups.context_size}
        max_tokens = self.args.max_tokens_per_microbatch
        samples = pg.accepted_samples(config, samples)
        plan = pg.plan_step(
            samples,
            max_tokens_per_microbatch=max_tokens,
            data_parallel_group=self.groups.data,
            **context,
        )
        if plan.totals.num_active_tokens == 0:
            return {}  # nothing is updated
        batches = [
            pg.pack([samples[i] for i in indices], cp_rank=self.groups.context_rank, **context)
            for indices in plan.microbatches
        ]
        step = PolicyStep(config, plan, model=self.model, vocab_size=self.tasks.vocabulary_size)

        def forward_step(batch_iterator: Any, model: Any) -> tuple[Tensor, Any]:
            head = step.head(next(batch_iterator))
            return model(**head.model_inputs), head.loss_func

        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        schedule_output = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter([batch.to(self.device) for batch in batches]),
            model=self.model,
            num_microbatches=plan.num_microbatches,
            seq_length=max_tokens,
            micro_batch_size=1,
            forward_only=False,
        )
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        _, grad_norm, _ = self.optimizer.step()
        return {**step.metrics(schedule_output), "grad_norm": float(grad_norm), "learning_rate": lr}

    def state(self) -> dict[str, Any]:
        """The parts of this rank that a checkpoint holds."""
        return {
            "model": self.model.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "generator": self.worker.generator.get_state(),
            "progress": self.progress,
        }

    def restore(self, folder: Path) -> None:
        """Goes on from a checkpoint."""
        if dist.get_rank() == 0:
            print(f"resuming from {folder}", flush=True)
        state = torch.load(folder / f"rank_{dist.get_rank()}.pt", map_location="cpu")
        self.model.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.worker.generator.set_state(state["generator"])
        self.progress = state["progress"]

    def save(self) -> None:
        """Writes a checkpoint, and keeps two; it gets its name when every rank is done, so what has it is whole."""
        folder = self.args.run_dir / "checkpoints"
        name = "step_{warm_start:06d}_{step:06d}".format(**self.progress)
        if dist.get_rank() == 0:
            shutil.rmtree(folder / "partial", ignore_errors=True)
            (folder / "partial").mkdir(parents=True)
        dist.barrier()
        with open(folder / "partial" / f"rank_{dist.get_rank()}.pt", "wb") as file:
            torch.save(self.state(), file)
            file.flush()
            os.fsync(file.fileno())
        dist.barrier()
        if dist.get_rank() == 0 and not (folder / name).exists():
            (folder / "partial").rename(folder / name)
            for old in checkpoints(self.args.run_dir)[:-2]:
                shutil.rmtree(old)


def start_megatron(args: argparse.Namespace) -> None:
    """Process groups and random state; every rank calls it."""
    if args.device == "cpu":
        enable_cpu_runtime()
    else:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if not dist.is_initialized():
        dist.init_process_group("gloo" if args.device == "cpu" else "nccl")
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
    )
    torch.manual_seed(args.seed)
    model_parallel_cuda_manual_seed(args.seed)


def train(run: Run, log: Log | None) -> None:
    """What remains of a run."""
    args, config, progress = run.args, run.config, run.progress
    received: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: received.append(number))

    def pause(is_due: bool) -> None:
        """A checkpoint where one is due, and the end where a rank was asked to stop."""
        stops = torch.tensor(len(received), device=run.device)
        dist.all_reduce(stops, op=dist.ReduceOp.MAX)
        if is_due or stops:
            run.save()
        if stops:
            sys.exit("stopped as asked, after a checkpoint: --resume goes on from there")

    # With advantages of 1 the loss is the negative log-likelihood of the answers.
    kept = ("calculate_per_token_loss", "fused_lm_head", "fp32_lm_head")
    imitation = pg.PolicyLossConfig(
        policy_loss="reinforce",
        loss_aggregation="token_mean",
        **{name: getattr(config, name) for name in kept},
    )
    shares = args.warm_start_corruption, args.warm_start_stutter
    while progress["warm_start"] < args.warm_start_iters:
        samples = run.tasks.imitation_batch(
            progress["warm_start"], args.warm_start_batch_size, *shares
        )
        mine = samples[run.groups.data_rank :: run.groups.data_size]
        metrics = run.train_step(
            imitation, mine, args.warm_start_lr * min(1.0, (progress["warm_start"] + 1) / 50)
        )
        progress["warm_start"] += 1
        if log:
            log.write("warm_start", metrics)
        pause(is_due=False)
    if progress["held_out_before"] is None:
        run.start_optimizer()
        progress["held_out_before"] = run.worker.held_out_reward()
        pause(is_due=True)
    while progress["step"] < args.train_iters:
        for samples, metrics in run.worker.steps(progress["step"] // args.steps_per_round):
            lr = args.lr * min(
                (progress["step"] + 1) / (args.train_iters / 10),
                1 - progress["step"] / args.train_iters,
            )
            metrics |= run.train_step(config, samples, lr)
            progress["step"] += 1
            if log:
                log.write("step", metrics)
        pause(progress["step"] % args.save_interval < args.steps_per_round)
    after = run.worker.held_out_reward()
    if log:
        log.finish(held_out_before=progress["held_out_before"], held_out_after=after)


def main() -> None:
    """A run from its flags to its picture; what is refused is said in one line."""
    try:
        args = parse_arguments()
        start_megatron(args)
        lock = claim_folder(args, dist.get_world_size()) if dist.get_rank() == 0 else None
    except (ValueError, NotImplementedError) as error:
        sys.exit(f"error: {error}" if os.environ.get("RANK", "0") == "0" else 1)
    dist.barrier()
    run = Run(args)
    if args.resume and (found := checkpoints(args.run_dir)):
        run.restore(found[-1])
    train(run, Log(args, run.progress) if lock else None)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
