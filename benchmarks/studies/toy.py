"""The quickstart's task on real Megatron-Core, one run of it at any sharding, with a mistake or without.

A run starts from the supervised model of its seed. An engine of its own (`engine.py`) answers from the whole weights in
chunks of the same size at every sharding, so equal weights give equal answers.
"""

import hashlib
import json
import random
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_pg.megatron.cpu.runtime import enable_cpu_runtime

enable_cpu_runtime()

from megatron.core import distributed, parallel_state  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402
from tasks import END, Entry, Tasks  # noqa: E402

from megatron_pg import PolicyLossConfig, Sample, group_advantages, pack, plan_step  # noqa: E402
from megatron_pg.check.sharded_parameters import shards  # noqa: E402
from megatron_pg.megatron import ParallelGroups, PolicyStep, torch_block_spec  # noqa: E402
from megatron_pg.megatron.schedule import run_micro_batches  # noqa: E402

from .engine import Engine  # noqa: E402
from .mistakes import MISTAKES  # noqa: E402

STEPS, WARM_STEPS = 80, 250
QUESTIONS, ANSWERS, STEPS_A_ROUND = 64, 8, 2
CHUNK = 128  # answers that the engine samples together
LONGEST = 16  # tokens of an answer
RATE, WARM_RATE = 5e-4, 2e-3
LAYERS, HIDDEN, HEADS = 2, 128, 4
EXPERTS, EXPERTS_PER_TOKEN = 8, 2
CUTS = {"one": 16384, "few": 1024, "many": 256}
"""Packed tokens of a micro-batch: about 1, 5 and 18 micro-batches a step."""
SIZES = {
    "one process": {},
    "CP 2": {"context_parallel_size": 2},
    "TP 2": {"tensor_model_parallel_size": 2},
    "PP 2": {"pipeline_model_parallel_size": 2},
    "DP 2": {},
}


@dataclass(frozen=True)
class Arm:
    """One way to train."""

    sharding: str = "one process"
    cut: str = "many"
    per_token: bool = False
    mistake: str | None = None
    loss: dict[str, Any] = field(default_factory=lambda: {"loss_aggregation": "token_mean"})
    dtype: torch.dtype = torch.float32
    experts: bool = False

    @property
    def processes(self) -> int:
        return 1 if self.sharding == "one process" else 2


class ToyRun:
    """One rank of a run."""

    def __init__(self, arm: Arm, tasks: Tasks, seed: int, warm: dict[str, Tensor] | None) -> None:
        self.arm, self.tasks, self.seed = arm, tasks, seed
        self.groups = ParallelGroups.from_parallel_state()
        torch.manual_seed(seed)
        model_parallel_cuda_manual_seed(seed)
        self.vocab_size = tasks.vocabulary_size
        self.model = self._build_model()
        if warm is not None:
            with torch.no_grad():
                for shard, parameter in shards(self.model.module):
                    parameter.copy_(shard.cut(warm[shard.name]))
        # Megatron clips float32 alone. Its norm is float32 too, so that of float64 is made here.
        self.is_double = arm.dtype == torch.float64
        settings = OptimizerConfig(lr=0.0, clip_grad=0.0 if self.is_double else 1.0)
        self.optimizer = get_megatron_optimizer(settings, [self.model])
        self.optimizer.reload_model_params()
        self.config = PolicyLossConfig(**arm.loss)

    def _build_model(self) -> distributed.DistributedDataParallel:
        arm, experts = self.arm, {}
        if arm.experts:
            experts = {
                "num_moe_experts": EXPERTS,
                "moe_router_topk": EXPERTS_PER_TOKEN,
                "moe_router_load_balancing_type": "aux_loss",
                "moe_aux_loss_coeff": 0.1,
                "ffn_hidden_size": HIDDEN,
                "add_bias_linear": False,
            }
        config = TransformerConfig(
            num_layers=LAYERS,
            hidden_size=HIDDEN,
            num_attention_heads=HEADS,
            attention_dropout=0.0,
            hidden_dropout=0.0,
            params_dtype=arm.dtype,
            pipeline_dtype=arm.dtype,
            variable_seq_lengths=arm.sharding == "PP 2",
            moe_token_dispatcher_type="alltoall",
            use_cpu_initialization=True,
            calculate_per_token_loss=arm.per_token,
            finalize_model_grads_func=distributed.finalize_model_grads,
            **SIZES[arm.sharding],
            **experts,
        )
        model = GPTModel(
            config,
            torch_block_spec(config),
            vocab_size=self.vocab_size + self.vocab_size % 2,  # the same columns at TP 2
            max_sequence_length=self.tasks.longest_sequence(LONGEST),
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
        )
        ddp_config = distributed.DistributedDataParallelConfig(grad_reduce_in_fp32=False)
        return distributed.DistributedDataParallel(config, ddp_config, model)

    def weights(self) -> dict[str, Tensor]:
        """Collect the whole model's weights; every rank calls it."""
        mine = [(shard, parameter.detach()) for shard, parameter in shards(self.model.module)]
        parts: dict[str, dict[int, Tensor]] = {}
        ranks: list[Any] = [None] * dist.get_world_size()
        if len(ranks) == 1 or self.arm.sharding in ("CP 2", "DP 2"):
            ranks = [mine]
        else:
            dist.all_gather_object(ranks, mine)
        dimensions = {}
        for shard, part in (pair for rank in ranks for pair in rank):
            parts.setdefault(shard.name, {})[shard.index] = part
            dimensions[shard.name] = shard.dimension
        return {
            name: torch.cat([found[i] for i in sorted(found)], dimensions[name])
            if len(found) > 1
            else found[0].clone()
            for name, found in parts.items()
        }

    def train_step(
        self, config: PolicyLossConfig, samples: list[Sample], rate: float
    ) -> dict[str, float]:
        """One optimizer step on all samples of the step, of which this data-parallel rank takes its part."""
        groups = self.groups
        share = len(samples) // groups.data_size
        mine = samples[groups.data_rank * share :][:share]
        cut: dict[str, Any] = {"cp_size": groups.context_size}
        budget = CUTS[self.arm.cut]
        plan = plan_step(
            mine, max_tokens_per_microbatch=budget, data_parallel_group=groups.data, **cut
        )
        packs = [[mine[index] for index in indices] for indices in plan.microbatches]
        batches = [pack(part, cp_rank=groups.context_rank, **cut) for part in packs]
        step = PolicyStep(config, plan, model=self.model, vocab_size=self.vocab_size)
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        output = run_micro_batches(step.head, batches, [self.model])
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        norm = self._double_norm() if self.is_double else 0.0
        _, float32_norm, _ = self.optimizer.step()
        norm = norm or float(float32_norm)
        return {**step.metrics(output), "grad_norm": norm, "micro_batches": plan.num_microbatches}

    def _double_norm(self) -> float:
        squares = {
            (shard.name, shard.index): float(parameter.main_grad.square().sum())
            for shard, parameter in shards(self.model.module)
        }
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, squares)
        whole = {key: square for rank in ranks for key, square in rank.items()}
        return sum(whole[key] for key in sorted(whole)) ** 0.5

    def answers(
        self, questions: Sequence[Entry], copies: int, number: int
    ) -> tuple[list[Sample], list[float]]:
        """Answer questions with the weights as they are: samples and rewards, equal on every rank."""
        heads = (HEADS, EXPERTS_PER_TOKEN)
        engine, tasks = Engine(self.weights(), *heads), self.tasks
        asked = [index for index in range(len(questions)) for _ in range(copies)]
        prompts = [tasks.prompt(questions[index]) for index in asked]
        rank, world = dist.get_rank(), dist.get_world_size()
        starts = range(0, len(prompts), CHUNK)
        mine = {}
        for place, start in enumerate(starts):
            if place % world == rank:
                seed = 1_000_003 * self.seed + 1009 * number + place
                part = prompts[start : start + CHUNK]
                mine[start] = engine.sample(part, END, self.vocab_size, LONGEST, seed)
        ranks: list[Any] = [mine]
        if world > 1:
            ranks = [None] * world
            dist.all_gather_object(ranks, mine)
        chunks = {start: chunk for part in ranks for start, chunk in part.items()}
        answers = [answer for start in starts for answer in chunks[start]]
        rewards = [
            tasks.reward(questions[index], tokens)
            for index, (tokens, _) in zip(asked, answers, strict=True)
        ]
        samples = [
            Sample(
                [*prompt, *tokens], len(tokens), [1] * len(tokens),
                old_log_probs=log_probs, rollout_log_probs=log_probs, group_index=index,
            )
            for index, prompt, (tokens, log_probs) in zip(asked, prompts, answers, strict=True)
        ]  # fmt: skip
        return samples, rewards


def warm_start(arm: Arm, tasks: Tasks, seed: int) -> dict[str, Tensor]:
    """Imitate answers of which half are wrong, in one process: the whole weights from which all arms of a seed start."""
    run = ToyRun(arm, tasks, seed, None)
    imitation = PolicyLossConfig(policy_loss="sft", loss_aggregation="token_mean")
    settings = Namespace(
        warm_start_corruption=0.25, warm_start_stutter=0.25, warm_start_batch_size=128
    )
    for number in range(WARM_STEPS):
        samples = tasks.imitation_batch(number, settings)
        run.train_step(imitation, samples, WARM_RATE * min((number + 1) / 50, 1))
    return run.weights()


def train(
    arm: Arm, tasks: Tasks, seed: int, warm: dict[str, Tensor], steps: int
) -> list[dict[str, Any]]:
    """A run's steps, each with its reward, length, gradient norm and a digest of its answers; the last line is of held-out
    questions."""
    if arm.mistake:
        MISTAKES[arm.mistake].apply()
    run = ToyRun(arm, tasks, seed, warm)
    reference = None
    if run.config.kl_loss_coef:
        reference = Engine(
            {name: part.clone() for name, part in warm.items()}, HEADS, EXPERTS_PER_TOKEN
        )
    lines: list[dict[str, Any]] = []
    for number in range(steps // STEPS_A_ROUND):
        questions = tasks.batch(number, QUESTIONS)
        samples, rewards = run.answers(questions, ANSWERS, number)
        indices = [sample.group_index for sample in samples]
        advantages = group_advantages(rewards, indices).advantages.tolist()
        pairs = zip(samples, advantages, strict=True)
        samples = [replace(sample, advantages=advantage) for sample, advantage in pairs]
        if reference is not None:
            samples = with_reference(reference, samples)
        size = len(samples) // STEPS_A_ROUND
        for start in range(0, len(samples), size):
            part, marks = samples[start : start + size], rewards[start : start + size]
            began, done = time.monotonic(), len(lines) + 1
            share = min(10 * done, STEPS - done + 1)
            metrics = run.train_step(run.config, part, RATE * share / STEPS)
            text = json.dumps([sample.tokens.tolist() for sample in part])
            lines.append({
                "step": done,
                "reward": sum(marks) / len(marks),
                "length": sum(sample.response_length for sample in part) / len(part),
                "grad_norm": metrics["grad_norm"],
                "loss": metrics["loss"],
                "kl": metrics.get("kl_loss", 0.0),
                "checksum": metrics["aggregation_checksum"],
                "micro_batches": metrics["micro_batches"],
                "mismatch": abs(metrics["ppo_kl"]),
                "answers": hashlib.sha256(text.encode()).hexdigest()[:2],
                "seconds": time.monotonic() - began,
            })  # fmt: skip
            print(f"step {done} of {steps}", flush=True)
    _, marks = run.answers(tasks.held_out, 1, 10_000)
    weights = run.weights()
    squares = sum(float(part.double().square().sum()) for part in weights.values())
    return [*lines, {"held_out": sum(marks) / len(marks), "weights_norm": squares**0.5}]


def with_reference(engine: Engine, samples: list[Sample]) -> list[Sample]:
    """Score the answers with the supervised model, for a KL term."""
    scored = []
    for start in range(0, len(samples), CHUNK):
        part = samples[start : start + CHUNK]
        longest = max(sample.total_length for sample in part)
        padding = [longest - sample.total_length for sample in part]
        rows = [[0] * pad + s.tokens.tolist() for pad, s in zip(padding, part, strict=True)]
        scores = engine.score(torch.tensor(rows), torch.tensor(padding))
        for row, sample in zip(scores, part, strict=True):
            scored.append(replace(sample, ref_log_probs=row[-sample.response_length :].clone()))
    return scored


def run_rank(
    arm: Arm,
    tasks: Tasks,
    seed: int,
    warm: dict[str, Tensor] | None,
    steps: int,
    rank: int,
    folder: str,
    device: None = None,
) -> Any:
    """One process of a run: the supervised weights where there are none, else the lines of `train`."""
    torch.set_num_threads(1)
    random.seed(seed)
    store = dist.FileStore(f"{folder}/store", arm.processes)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=arm.processes)
    parallel_state.initialize_model_parallel(**SIZES[arm.sharding])
    if warm is None:
        return warm_start(arm, tasks, seed)
    return train(arm, tasks, seed, warm, steps)
