"""GRPO on Megatron-Core from the first line to the last: to read from top to bottom, and to start
your own from.

A small GPT answers reasoning-gym questions, is rewarded by the task's own verifier, and learns.
`quickstart.sh` starts it on two CPU processes; by hand, where --help explains each flag:

    torchrun --nproc-per-node 2 examples/train_grpo.py --context-parallel-size 2 --run-dir runs/mine
"""

import os
import shutil
import signal
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import distributed as megatron_ddp
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from other_models import Critic, Teacher, check_model_args
from rollout_log import SHOWN_PROMPTS, rollout_row
from run_folder import DamagedFile
from run_log import Log, checkpoints, claim_folder, read_checkpoint, save_checkpoint
from tasks import TITLE, RolloutWorker, Tasks, check_task_args
from torch.distributed.elastic.multiprocessing.errors import record

import megatron_pg as pg
from megatron_pg import megatron as pgm
from megatron_pg.config.command_line import ProgramParser, exit_refused, text_of_words
from megatron_pg.critic import ValueStep, add_value_head
from megatron_pg.megatron.schedule import run_micro_batches
from megatron_pg.step.advantages import METHODS, half_of_dr_grpo
from megatron_pg.step.agreement import compute_and_gather, gather
from megatron_pg.step.token_window import Layout

NUMBERS = {
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
    "lr": (5e-4, "of reinforcement learning; warms up and decays to 0"),
    "critic-lr": (1e-3, "of the critic of --advantage gae, likewise"),
    "warm-start-lr": (2e-3, "of the supervised steps"),
    "warm-start-corruption": (0.5, "share of the answers to imitate with two letters exchanged"),
    "warm-start-stutter": (0.0, "share with a letter said 1 to 6 times more"),
}
"""Flags that take a number, whole from 1 on or any from 0 on: default and meaning."""


def parse_arguments() -> Namespace:
    """The flags; a refusal names the flag, what was found and what to do."""
    parser = ProgramParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_config_args()
    add = parser.add_argument
    for name, (default, meaning) in NUMBERS.items():
        add(f"--{name}", type=type(default), default=default, help=f"{meaning} ({default})")
    add("--run-dir", type=Path, required=True, help="for what the run leaves")
    add("--resume", action="store_true", help="go on with the run in --run-dir")
    add("--device", choices=["cpu", "cuda"], default="cpu")
    add("--seed", type=int, default=1)
    add("--teacher", type=Path, help="folder of a finished run, to be distilled from its model")
    advantage = (
        "of rewards against those of the same question, grpo: (reward - mean) / std, dr_grpo: "
        "reward - mean, rloo: reward - "
        "mean of the others, maxrl: (reward - mean) / mean; step_rloo: reward - mean of the step's "
        "others; reward: as it is; gae: "
        "against a critic's values (grpo)"
    )
    add("--advantage", choices=[*METHODS, "gae"], default="grpo", help=advantage)
    args = pg.add_policy_loss_args(pg.add_critic_args(parser)).parse_args()
    args.settings_file = text_of_words(parser.words)
    for name, (default, _) in NUMBERS.items():
        lowest = 1 if isinstance(default, int) else 0
        if not lowest <= (value := getattr(args, name.replace("-", "_"))) < float("inf"):
            raise ValueError(f"--{name} is {value}: give a finite number from {lowest} on")
    check_task_args(args)
    check_model_args(args, parser)
    fields = ["old_log_probs", "rollout_log_probs", "ref_log_probs", "group_index"]
    pg.validate_policy_loss_args(args, sample_fields=fields)
    local, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
    if args.device == "cuda" and gpus < local:
        raise ValueError(
            f"--device cuda takes a GPU for each of the {local} processes here and torch sees "
            f"{gpus}: give --device cpu, or "
            "fewer processes by --nproc-per-node of torchrun (PROCESSES= of quickstart.sh)"
        )
    model_ranks = args.tensor_model_parallel_size * args.context_parallel_size
    data_size, rest = divmod(int(os.environ.get("WORLD_SIZE", "1")), model_ranks)
    if rest or not data_size:
        raise ValueError(
            f"--tensor-model-parallel-size x --context-parallel-size is {model_ranks}, which does "
            f"not divide the processes: "
            "change one of them, or --nproc-per-node of torchrun"
        )
    answers = args.rollout_batch_size * args.n_samples_per_prompt
    args.steps_per_round, rest = divmod(answers, args.global_batch_size)
    multiple = args.n_samples_per_prompt * data_size
    if rest or args.global_batch_size % multiple or args.train_iters % args.steps_per_round:
        raise ValueError(
            f"--global-batch-size {args.global_batch_size}: give a multiple of {multiple}, the "
            f"answers to one question on "
            f"each data-parallel rank, that cuts the {answers} answers of a round into steps, and "
            f"a multiple of these for "
            f"--train-iters {args.train_iters}"
        )
    return args


class Run:
    """The model, what updates it, and how far it is; every rank makes one."""

    def __init__(self, args: Namespace) -> None:
        self.args, self.config = args, pg.PolicyLossConfig.from_args(args)
        self.device = torch.device(args.device)
        self.tasks = Tasks(args.num_training_tasks, args.num_held_out_tasks, args.seed)
        longest = self.tasks.longest_sequence(args.max_response_len)
        layout = Layout(cp_size=args.context_parallel_size)
        budget, least = args.max_tokens_per_microbatch, layout.padded_length(longest)
        if budget < least:
            raise ValueError(
                f"--max-tokens-per-microbatch is {budget}: give {least} or more, what the longest "
                f"question and answer take"
            )
        self.budget = {"max_tokens_per_microbatch": budget}
        self.groups = pgm.ParallelGroups.from_parallel_state()
        self.model = self._build_model()
        self.reference: torch.nn.Module | None = None
        self.critic: Critic | None = None
        self.teacher: Teacher | None = None
        self.parts: dict[str, Any] = {"model": self.model}
        """The modules and optimizers that a checkpoint has."""
        self.start_optimizer()
        self.worker = RolloutWorker(args, self.model.module, self.tasks)
        self.progress: dict[str, Any] = {"warm_start": 0, "step": 0, "held_out_before": None}

    def _build_model(
        self, sizes: Namespace | None = None, critic: bool = False
    ) -> megatron_ddp.DistributedDataParallel:
        """A GPT with learned positions; a critic is one that begins as the model, with a value
        head.
        """
        size, sizes = self.groups.tensor_size, sizes or self.args
        config = TransformerConfig(
            num_layers=sizes.num_layers,
            hidden_size=sizes.hidden_size,
            num_attention_heads=sizes.num_attention_heads,
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
            pgm.torch_block_spec(config),
            vocab_size=-(-self.tasks.vocabulary_size // size) * size,
            max_sequence_length=self.tasks.longest_sequence(self.args.max_response_len),
        ).to(self.device)
        if critic:
            model.load_state_dict(self.model.module.state_dict())
            add_value_head(model)
        ddp_config = megatron_ddp.DistributedDataParallelConfig()
        return megatron_ddp.DistributedDataParallel(config, ddp_config, model)

    def start_optimizer(self) -> None:
        """Adam without a history; `train_step` is told the learning rate."""
        self.optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.0), [self.model])
        self.parts["optimizer"] = self.optimizer

    def train_step(
        self, config: pg.PolicyLossConfig, samples: Sequence[pg.Sample], lr: float
    ) -> dict[str, float]:
        """One optimizer step, of a critic too, on this data-parallel rank's samples: the metrics,
        equal on every rank.
        """
        groups = self.groups
        cut: dict[str, Any] = {"cp_size": groups.context_size}
        samples = pg.accepted_samples(config, samples)
        plan = pg.plan_step(samples, data_parallel_group=groups.data, **self.budget, **cut)
        if plan.totals.num_active_tokens == 0:
            return {}  # nothing is updated
        packs = [[samples[index] for index in indices] for indices in plan.microbatches]
        batches = [pg.pack(p, cp_rank=groups.context_rank, **cut).to(self.device) for p in packs]
        output = {"vocab_size": self.tasks.vocabulary_size}
        if self.teacher:
            output["teacher_weight"] = self.teacher.weight
        step = pgm.PolicyStep(config, plan, model=self.model, **output)
        schedule_output, grad_norm = update(self.model, self.optimizer, step.head, batches, lr)
        report = None
        if critic := self.critic:  # its rate warms up and decays as the policy's
            rate = self.args.critic_lr * lr / (self.args.lr or 1.0)
            values = ValueStep(config, critic.settings, plan, model=critic.model)
            value_output, _ = update(critic.model, critic.optimizer, values.head, batches, rate)
            report = values.report(value_output)
        metrics = step.metrics(schedule_output, critic=report)
        if config is self.config:
            self.config = pg.adapted_kl(config, metrics, plan.totals.num_rollouts)
        return {**metrics, "grad_norm": float(grad_norm), "learning_rate": lr}

    def begin_reinforcement_learning(self) -> None:
        """The model as it is becomes the reference of a KL term, and the optimizer forgets."""
        self.start_optimizer()
        if self.config.kl_loss_coef:
            self.reference = self.parts["reference"] = self._build_model()
            self.reference.load_state_dict(self.model.state_dict())
        if self.args.advantage == "gae":
            model = self._build_model(critic=True)
            self.critic = self.worker.critic = Critic(self.args, model, self.groups)
            self.parts |= {"critic": model, "critic_optimizer": self.critic.optimizer}
        if self.args.teacher:
            self.teacher = Teacher(self.args, self._build_model)

    def with_other_models(self, samples: list[pg.Sample]) -> list[pg.Sample]:
        """The samples with what the teacher says, and with the reference's log-probs where the loss
        has a KL term.
        """
        if self.teacher is not None:
            samples = self.teacher.taught(samples)
        if self.reference is None:
            return samples
        scores = pgm.compute_log_probs(self.reference, samples, self.config, **self.budget)
        pairs = zip(samples, scores.log_probs, strict=True)
        return [replace(sample, ref_log_probs=log_probs) for sample, log_probs in pairs]

    def rollout_rows(self, samples: Sequence[Any]) -> list[dict[str, Any]]:
        """Rows of a rollout file: the first prompts of a step on every data-parallel rank, before
        the step.
        """
        shown = samples[: SHOWN_PROMPTS * self.args.n_samples_per_prompt]
        scores = pgm.compute_log_probs(self.model, shown, self.config, **self.budget)
        pairs = zip(shown, scores.log_probs, strict=True)
        rows = [rollout_row(replace(sample, new_log_probs=values)) for sample, values in pairs]
        return [row for part in gather(rows, self.groups.data) for row in part]

    def save(self) -> None:
        """Writes a checkpoint; every rank calls it."""
        state = {name: part.state_dict() for name, part in self.parts.items()}
        self.progress["kl_loss_coef"] = self.config.kl_loss_coef
        state |= {"generator": self.worker.generator.get_state(), "progress": self.progress}
        save_checkpoint(self.args.run_dir, self.progress, state)

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on from the state of a checkpoint."""
        self.progress = state["progress"]
        beta = self.progress.get("kl_loss_coef", self.config.kl_loss_coef)
        self.config = replace(self.config, kl_loss_coef=beta)
        if self.progress["held_out_before"] is not None:
            self.begin_reinforcement_learning()
        for name, part in self.parts.items():
            part.load_state_dict(state[name])
        self.worker.generator.set_state(state["generator"])


def update(
    model: Any, optimizer: Any, head: Callable[..., Any], batches: list[pg.PackedBatch], lr: float
) -> tuple[list[dict[str, torch.Tensor]], float]:
    """Forward, backward and optimizer step over micro-batches: the output of Megatron's schedule,
    and the norm.
    """
    model.zero_grad_buffer()
    optimizer.zero_grad()
    schedule_output = run_micro_batches(head, batches, [model])
    for group in optimizer.param_groups:
        group["lr"] = lr
    _, grad_norm, _ = optimizer.step()
    return schedule_output, grad_norm


def start_megatron(args: Namespace) -> None:
    """Process groups and random state; every rank calls it."""
    if args.device == "cpu":
        pgm.enable_cpu_runtime()
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
            if log:
                print("stopped as asked, after a checkpoint: --resume goes on from there")
            sys.exit()

    # With advantages of 1 the loss is the negative log-likelihood of the answers.
    kept = ("calculate_per_token_loss", "fused_lm_head", "fp32_lm_head")
    same = {name: getattr(config, name) for name in kept}
    imitation = pg.PolicyLossConfig(policy_loss="reinforce", loss_aggregation="token_mean", **same)
    while progress["warm_start"] < args.warm_start_iters:
        samples = run.tasks.imitation_batch(progress["warm_start"], args)
        mine = samples[run.groups.data_rank :: run.groups.data_size]
        progress["warm_start"] += 1
        lr = args.warm_start_lr * min(progress["warm_start"] / 50, 1)
        metrics = run.train_step(imitation, mine, lr)
        if log:
            log.write("warm_start", metrics)
        pause(is_due=False)
    if progress["held_out_before"] is None:
        run.begin_reinforcement_learning()
        progress["held_out_before"] = run.worker.held_out_reward()
        pause(is_due=True)
    while progress["step"] < args.train_iters:
        for samples, metrics in run.worker.steps(progress["step"] // args.steps_per_round):
            progress["step"] += 1
            share = min(10 * progress["step"], args.train_iters - progress["step"] + 1)
            lr = args.lr * share / args.train_iters
            samples = run.with_other_models(samples)
            rows = run.rollout_rows(samples)
            metrics |= run.train_step(run.config, samples, lr)
            if log:
                log.write("step", metrics, map(run.tasks.shown, samples[:3]), rows)
        is_last = progress["step"] == args.train_iters
        pause(is_last or progress["step"] % args.save_interval < args.steps_per_round)
    after = run.worker.held_out_reward()
    if log:
        scores = {"held_out_before": progress["held_out_before"], "held_out_after": after}
        log.finish(task=TITLE, **scores)


def main() -> None:
    """A run from its flags to its picture; what is refused is said in one line."""
    try:
        args = parse_arguments()
        start_megatron(args)
        size, rank = dist.get_world_size(), dist.get_rank()
        run = Run(args)

        def agreed(compute: Callable[[], Any]) -> Any:
            return compute_and_gather(compute, id, dist.group.WORLD)[0]

        lock = agreed(lambda: claim_folder(args, size) if rank == 0 else None)
        if args.resume and (kept := checkpoints(args.run_dir)):
            run.restore(agreed(lambda: read_checkpoint(kept[-1], rank)))
            if rank == 0:
                print(f"resuming from {kept[-1]}", flush=True)
        if rank == 0 and (remark := half_of_dr_grpo(args.advantage, args.loss_aggregation)):
            print(f"remark: {remark}", flush=True)
        log = agreed(lambda: Log(args, run.progress, run.tasks.texts) if lock else None)
    except (ValueError, NotImplementedError) as error:
        exit_refused(f"error: {error}")
    try:
        train(run, log)
    except DamagedFile as error:  # the teacher's
        sys.exit(f"error: {error}")
    except OSError as error:
        free = shutil.disk_usage(args.run_dir.parent).free // 2**20
        sys.exit(
            f"error: {args.run_dir} cannot be written (rank {rank}): {error}; {free} MiB are free "
            f"there"
        )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    record(main)()
