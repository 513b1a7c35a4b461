"""Study: a small mixture of experts learns from an engine that routes otherwise, with routing replay and without, five seeds.

    python -m benchmarks.routing_replay_study [--seeds 1 2 3 4 5] [--steps 120] [--noise 1.0] [--old-log-probs trainer]

The task is to write four digits backwards. The model has four layers of 16 experts, k = 2. It imitates answers of which half
are wrong, then learns by `ppo`, four optimizer steps a rollout. Old log-probs are the engine's, or the trainer's own of before
the steps. The engine is the trainer's model whose routers choose by logits with a fixed normal error for every token, layer and
expert; probabilities are those of the chosen experts, so that its choices are all that differs. One process, on a CPU, no
sharding.

The table has, by arm and seed: the engine's reward over the first, the best and the last tenth of the steps, the mean gradient
norm, the mean |log r| over the tokens of a rollout's first step (with the trainer's old log-probs 0), the package's metrics of
mismatch between trainer and engine, and `router_agreement`.
"""

import argparse
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_pg.megatron.cpu.runtime import enable_cpu_runtime

enable_cpu_runtime()

from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402

from megatron_pg import PolicyLossConfig, Sample, pack, plan_step  # noqa: E402
from megatron_pg.megatron import PolicyStep, compute_log_probs, packed_seq_params, torch_block_spec  # noqa: E402
from megatron_pg.megatron.schedule import run_micro_batches  # noqa: E402

LAYERS, EXPERTS, TOPK, DIGITS, VOCABULARY = 4, 16, 2, 4, 16
LENGTH = 2 * DIGITS + 1
END_OF_PROMPT = 10


def new_model(seed: int) -> DistributedDataParallel:
    torch.manual_seed(seed)
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=48,
        num_attention_heads=4,
        ffn_hidden_size=48,
        num_moe_experts=EXPERTS,
        moe_router_topk=TOPK,
        moe_token_dispatcher_type="alltoall",
        moe_router_load_balancing_type="none",
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        use_cpu_initialization=True,
        finalize_model_grads_func=finalize_model_grads,
    )
    model = GPTModel(config, torch_block_spec(config), VOCABULARY, LENGTH)
    return DistributedDataParallel(config, DistributedDataParallelConfig(), model)


class Engine:
    """The trainer's model as another numerics routes it."""

    def __init__(
        self, model: DistributedDataParallel, noise: float, generator: torch.Generator
    ) -> None:
        self.model, self.noise, self.generator = model.module, noise, generator

    @contextmanager
    def routing(self, error: Tensor) -> Iterator[list[Tensor]]:
        """Route by logits plus error [tokens, LAYERS, EXPERTS], and list the chosen experts by layer."""
        routers = [m for m in self.model.modules() if hasattr(m, "apply_z_loss")]
        chosen: list[Tensor] = [torch.zeros(0)] * LAYERS
        for layer, router in enumerate(routers):

            def routing(logits: Tensor, layer: int = layer, **_: Any) -> tuple[Tensor, Tensor]:
                logits = logits.flatten(0, 1)
                chosen[layer] = (logits + error[: len(logits), layer]).topk(TOPK).indices
                mask = torch.zeros_like(logits, dtype=torch.bool).scatter(1, chosen[layer], True)
                return logits.masked_fill(~mask, -torch.inf).softmax(1), mask

            router.routing = routing
        try:
            yield chosen
        finally:
            for router in routers:
                del router.routing

    @torch.no_grad()
    def generate(self, prompts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Answer prompts [n, DIGITS + 1]: tokens [n, LENGTH], log-probs [n, DIGITS], experts [n, LAYERS, LENGTH, TOPK]."""
        self.model.eval()
        count, tokens, log_probs = len(prompts), prompts, []
        error = self.noise * torch.randn(count, LENGTH, LAYERS, EXPERTS, generator=self.generator)
        for length in range(DIGITS + 1, LENGTH + 1):
            samples = [Sample(row, 1, [1]) for row in tokens]
            batch = pack(samples)
            with self.routing(error[:, :length].flatten(0, 1)) as chosen:
                inputs = batch.tokens[None], batch.position_ids[None], None
                logits = self.model(*inputs, packed_seq_params=packed_seq_params(batch))
            if length == LENGTH:  # what the trainer will see of the last token
                break
            rows = logits[0].view(count, length, -1)[:, -1].float().log_softmax(1)
            token = torch.multinomial(rows.exp(), 1, generator=self.generator)
            log_probs.append(rows.gather(1, token))
            tokens = torch.cat([tokens, token], 1)
        experts = torch.stack(chosen, 1).view(count, LENGTH, LAYERS, TOPK).transpose(1, 2).clone()
        experts[:, :, -1] = -1
        self.model.train()
        return tokens, torch.cat(log_probs, 1), experts


def prompts_of(count: int, generator: torch.Generator) -> Tensor:
    digits = torch.randint(10, (count, DIGITS), generator=generator)
    return torch.cat([digits, torch.full((count, 1), END_OF_PROMPT)], 1)


class Trainer:
    def __init__(self, seed: int) -> None:
        self.model = new_model(seed)
        self.optimizer = torch.optim.Adam(self.model.parameters(), betas=(0.9, 0.95))

    def step(self, config: PolicyLossConfig, samples: list[Sample], lr: float) -> dict[str, float]:
        plan = plan_step(samples, max_tokens_per_microbatch=len(samples) * LENGTH)
        self.model.zero_grad_buffer()
        step = PolicyStep(config, plan, model=self.model)
        packs = [pack([samples[i] for i in indices]) for indices in plan.microbatches]
        metrics = step.metrics(run_micro_batches(step.head, packs, [self.model]))
        for parameter in self.model.parameters():
            parameter.grad = parameter.main_grad
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.param_groups[0]["lr"] = lr
        self.optimizer.step()
        return {**metrics, "grad_norm": float(norm)}


def run(replay: bool, seed: int, args: argparse.Namespace) -> list[dict[str, float]]:
    generator = torch.Generator().manual_seed(seed)
    trainer = Trainer(seed)
    supervised = PolicyLossConfig(policy_loss="sft", loss_aggregation="token_mean")
    for _ in range(args.warm_start):
        prompts = prompts_of(64, generator)
        answers = prompts[:, :DIGITS].flip(1)
        is_wrong = torch.rand(64, 1, generator=generator) < 0.5
        others = torch.randint(10, answers.shape, generator=generator)
        tokens = torch.cat([prompts, torch.where(is_wrong, others, answers)], 1)
        trainer.step(supervised, [Sample(row, DIGITS, [1] * DIGITS, 1.0) for row in tokens], 2e-3)
    engine = Engine(trainer.model, args.noise, generator)
    config = PolicyLossConfig(loss_aggregation="token_mean", replay_routing=replay)
    report = []
    for _ in range(args.steps // args.steps_a_rollout):
        questions = prompts_of(32, generator)
        tokens, log_probs, experts = engine.generate(questions.repeat_interleave(8, 0))
        answers = tokens[:, :DIGITS].flip(1)
        rewards = (tokens[:, DIGITS + 1 :] == answers).float().mean(1)
        groups = rewards.view(-1, 8)
        advantages = (
            (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)
        ).flatten()
        samples = [
            Sample(
                tokens[i], DIGITS, [1] * DIGITS, float(advantages[i]), old_log_probs=log_probs[i].clamp(max=0),
                rollout_log_probs=log_probs[i].clamp(max=0), routed_experts=experts[i],
            )
            for i in range(len(tokens))
        ]  # fmt: skip
        if args.old_log_probs == "trainer":
            budget = len(samples) * LENGTH
            scored = compute_log_probs(
                trainer.model, samples, config, max_tokens_per_microbatch=budget
            )
            pairs = zip(samples, scored.log_probs, strict=True)
            samples = [replace(sample, old_log_probs=values) for sample, values in pairs]
        order = torch.randperm(len(samples), generator=generator).chunk(args.steps_a_rollout)
        for part in order:
            metrics = trainer.step(config, [samples[i] for i in part], args.lr)
            report.append({**metrics, "reward": float(rewards.mean())})
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--arms", nargs="+", choices=("yes", "no"), default=["yes", "no"])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--steps-a-rollout", type=int, default=4)
    parser.add_argument("--warm-start", type=int, default=100)
    parser.add_argument("--noise", type=float, default=1.0)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--old-log-probs", choices=("engine", "trainer"), default="engine")
    args = parser.parse_args()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    names = "rollout_abs_difference", "max_rollout_abs_difference", "rollout_kl", "router_agreement"
    columns = "replay", "seed", "reward, first", "best", "last", "gradient norm", "abs(log r)"
    print(f"| {' | '.join((*columns, *names))} |\n{'|---' * (len(columns) + len(names))}|")
    for arm in args.arms:
        for seed in args.seeds:
            report = run(arm == "yes", seed, args)
            tenth = len(report) // 10
            rewards = [r["reward"] for r in report]
            tenths = [statistics.mean(rewards[i : i + tenth]) for i in range(0, 10 * tenth, tenth)]
            first = report[:: args.steps_a_rollout]  # of each rollout
            row = [
                *(tenths[0], max(tenths), tenths[-1]),
                statistics.mean(r["grad_norm"] for r in report),
                statistics.mean(abs(r["ppo_kl"]) for r in first),
                *(statistics.mean(r.get(name, float("nan")) for r in report) for name in names),
            ]
            numbers = " | ".join(f"{x:.3f}" for x in row)
            print(f"| {arm} | {seed} | {numbers} |", flush=True)


if __name__ == "__main__":
    main()
