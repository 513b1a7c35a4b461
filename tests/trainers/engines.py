"""One step through the loss protocol inside real engines, and the gradient of every logit in plain float64 loops.

Each engine is a function `(samples, case) -> gradient of the table of logits`, which every rank of the world calls. The
engine's own code, from a checkout, cuts the rows, calls the loss and scales it; the table stands for the model.
"""

import collections
import contextlib
import dataclasses
import importlib
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_pg import PolicyLossConfig
from megatron_pg.megatron.cpu.runtime import enable_cpu_runtime
from tests import oracle
from tests.oracle import PlainSample
from tests.random_steps import package_samples

from . import logit_table
from .logit_table import initialize, logits_of, share_of, table_under_ddp
from .sources import TRAINERS, functions, stand_in_for

DIVISOR = 8.0
MASKS = [
    *([1, 1, 1, 0, 0, 1], [1, 1, 1], [1, 1], [1]),
    *([1, 1, 0, 1, 1, 1, 1, 1], [1, 0, 1, 1], [1] * 7, [1, 1, 1]),
]
FILTERED = 2
"""A sample that a filter takes out of the loss; it counts in N."""
GROUP, WIDTH = 4, 14


@dataclass(frozen=True)
class Case:
    engine: str
    aggregation: str
    packed: bool = True
    mutant: str = ""
    """`scale`: what the engine divides by is not undone. `windows`: log-probs are those of the next token."""


def a_step() -> list[PlainSample]:
    """Two prompt groups of four, each with a prompt of its own length."""
    generator = torch.Generator().manual_seed(7)
    samples, next_id = [], 8
    for number, mask in enumerate(MASKS):
        prompt = list(range(1 + 4 * (number // GROUP), 4 + 5 * (number // GROUP)))
        old, ref, rollout = (-4.5 + torch.rand(3, len(mask), generator=generator)).tolist()
        advantages = torch.randn(1, generator=generator).tolist() * len(mask)
        kept = [0] * len(mask) if number == FILTERED else mask
        tokens = prompt + list(range(next_id, next_id + len(mask)))
        fields = {"ref_log_probs": ref, "rollout_log_probs": rollout}
        group = number // GROUP
        samples.append(
            PlainSample(tokens, len(mask), kept, advantages, old, group_index=group, **fields)
        )
        next_id += len(mask)
    return samples


def fields_of(case: Case) -> dict[str, Any]:
    return {
        "loss_aggregation": case.aggregation,
        "loss_aggregation_divisor": DIVISOR if case.aggregation == "constant" else None,
        "eps_clip": logit_table.CLIP,
        "eps_clip_high": logit_table.CLIP_HIGH,
        "kl_loss_coef": logit_table.KL_COEF,
        "kl_loss_type": "low_var_kl",
    }


def config_of(case: Case) -> PolicyLossConfig:
    return PolicyLossConfig(**fields_of(case))


def expected(case: Case, samples: list[PlainSample]) -> Tensor:
    objective = logit_table.objective(case.aggregation, DIVISOR, kl_loss_coef=logit_table.KL_COEF)
    return logit_table.gradient(samples, lambda x: oracle.policy_loss(samples, x, objective).loss)


def matrices(samples: list[PlainSample]) -> dict[str, Tensor]:
    """Rows [samples, WIDTH] as engines hold them: the value of each token at its own column."""
    made: dict[str, Tensor] = {}
    for number, sample in enumerate(samples):
        rows = {
            name: getattr(sample, name)
            for name in ("advantages", "old_log_probs", "ref_log_probs", "rollout_log_probs")
        }
        rows |= {"response_mask": MASKS[_number(sample)], "loss_mask": sample.loss_mask}
        for name, values in rows.items():
            matrix = made.setdefault(name, torch.zeros(len(samples), WIDTH))
            matrix[number, sample.prompt_length : len(sample.tokens)] = torch.tensor(values).float()
        ids = made.setdefault("tokens", torch.zeros(len(samples), WIDTH, dtype=torch.int64))
        ids[number, : len(sample.tokens)] = torch.tensor(sample.tokens)
    return made


def _number(sample: PlainSample) -> int:
    return [s.tokens for s in a_step()].index(sample.tokens)


def log_probs_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Log-probs [...] of the targets from logits [..., vocabulary]."""
    return torch.log_softmax(logits, -1).gather(-1, targets[..., None])[..., 0]


def scheduled(model: Any, forward_step: Callable[..., Any], count: int) -> Tensor:
    """The table's gradient after Megatron's own schedule and DDP."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(range(count)),
        model=[model],
        num_microbatches=count,
        seq_length=WIDTH,
        micro_batch_size=1,
        forward_only=False,
    )
    (parameter,) = model.parameters()
    gradient: Tensor = parameter.main_grad.detach().clone()
    return gradient


VIME_PACKAGES = "ray httpx wandb vllm vllm_router torch_memory_saver".split()
NEMO_RL_PACKAGES = "ray requests decord torchvision PIL pynvml uvicorn fastapi zmq wandb omegaconf transformers".split()
NEMO_RL_MODULES = "models algorithms.x_token environments utils experience distributed.model_utils data.multimodal_utils".split()


def nemo_rl_gradient(samples: list[PlainSample], case: Case) -> Tensor:
    """Their BatchedDataDict deals rows to ranks and micro-batches; LossPostProcessor and its wrappers call the loss."""
    from megatron.core import parallel_state

    from megatron_pg.integrations.nemo_rl import train_with

    stand_in_for(NEMO_RL_PACKAGES, even_if_installed=True)
    stand_in_for([f"nemo_rl.{name}" for name in NEMO_RL_MODULES], even_if_installed=True)
    interfaces = importlib.import_module("nemo_rl.algorithms.loss.interfaces")
    wrappers = importlib.import_module("nemo_rl.algorithms.loss.wrapper")
    batches = importlib.import_module("nemo_rl.distributed.batched_data_dict")
    initialize(1)
    table = logits_of(samples)
    rows = matrices(samples)
    lengths = torch.tensor([len(sample.tokens) for sample in samples])
    is_kept = [float(number != FILTERED) for number in range(len(samples))]
    data = batches.BatchedDataDict(
        input_ids=rows["tokens"],
        input_lengths=lengths,
        token_mask=rows["response_mask"],
        sample_mask=torch.tensor(is_kept),
        advantages=rows["advantages"],
        prev_logprobs=rows["old_log_probs"],
        reference_policy_logprobs=rows["ref_log_probs"],
        generation_logprobs=rows["rollout_log_probs"],
    )
    parallel = {
        name: getattr(parallel_state, name)
        for name in vars(parallel_state)
        if name.startswith("get_")
    }

    def prepare(logits: Tensor, data: Any, **others: Any) -> Any:
        """As theirs: [rows, positions, vocabulary] to the log-probs of the next tokens."""
        shift = 1 if case.mutant != "windows" else 0
        width = data["input_ids"].shape[1] - 1
        targets = data["input_ids"][:, shift : shift + width]
        return {"next_token_logprobs": log_probs_of(logits[:, :width], targets)}, data

    names = {**parallel, "prepare_loss_input": prepare, "partial": partial}
    names |= {name: None for name in ("LossFunction", "PolicyConfig", "TrainingSamplingParams")}
    names |= {name: Any for name in ("MegatronModule", "BatchedDataDict", "PackedSeqParams")}
    names |= vars(wrappers)
    names["BatchedDataDict"] = batches.BatchedDataDict
    path = "NeMo-RL/nemo_rl/models/megatron/train.py"
    processor = functions(path, "LossPostProcessor", **names)["LossPostProcessor"]
    found: list[Tensor] = []

    class Policy:
        cfg = {"train_global_batch_size": len(samples)}

        def train(self, data: Any, loss_fn: Any) -> None:
            size, rank = dist.get_world_size(), dist.get_rank()
            packing = {
                "max_tokens_per_microbatch": 24,
                "input_key": "input_ids",
                "input_lengths_key": "input_lengths",
                "algorithm": "modified_first_fit_decreasing",
                "sequence_length_pad_multiple": 1,
            }
            if case.packed:
                shards, _ = data.shard_by_batch_size(
                    size, batch_size=len(samples), sequence_packing_args=packing
                )
                shard = shards[rank].get_batch(0)
                bounds = shard.micro_batch_indices[0]
            else:
                shard = data.shard_by_batch_size(size, batch_size=len(samples))[rank]
                bounds = [[at, at + 2] for at in range(0, shard.size, 2)]
            post = processor(
                loss_fn=loss_fn,
                cfg={"sequence_packing": {"enabled": case.packed}},
                num_microbatches=len(bounds) if case.mutant != "scale" else 1,
            )
            model = table_under_ddp(table, per_token=True, dtype=torch.float64)

            def forward_step(iterator: Any, model: Any) -> Any:
                start, end = bounds[next(iterator)]
                batch = shard.slice(start, end)
                if not case.packed:
                    return model(batch["input_ids"]), post(batch)
                parts = zip(batch["input_ids"], batch["input_lengths"].tolist(), strict=True)
                packed = torch.cat([row[:length] for row, length in parts])[None]
                cu_seqlens = torch.nn.functional.pad(batch["input_lengths"].cumsum(0), (1, 0))
                params = SimpleNamespace(cu_seqlens_q=cu_seqlens, cu_seqlens_q_padded=None)
                return model(packed), post(batch, packed_seq_params=params)

            found.append(scheduled(model, forward_step, len(bounds)))

    policy: Any = Policy()
    train_with(policy, config_of(case), GROUP)
    types = interfaces.LossType.TOKEN_LEVEL, interfaces.LossInputType.LOGPROB
    policy.train(
        data, SimpleNamespace(loss_type=types[0], input_type=types[1], force_on_policy_ratio=False)
    )
    return found[0]


def ms_swift_gradient(samples: list[PlainSample], case: Case) -> Tensor:
    """Their trainer makes the micro-batches of a step, scores them in `forward_step` and calls the loss; the rollout is ours."""
    from megatron.core import mpu, tensor_parallel

    from megatron_pg.integrations.ms_swift import with_loss

    initialize(1)
    folder = "ms-swift/swift/"
    mine = share_of(samples, 1)
    first = mine.start
    rows = matrices(samples[mine])
    basic = {"mpu": mpu, "tensor_parallel": tensor_parallel, "F": torch.nn.functional}
    basic |= {"pad_sequence": torch.nn.utils.rnn.pad_sequence, "partial": partial}
    basic |= {"to_device": lambda value, *args, **named: value, "get_current_device": lambda: "cpu"}
    annotations = "MegatronArguments Template RolloutOutput DataType OnPolicySample RequestConfig RolloutInferRequest"
    basic |= dict.fromkeys(annotations.split(), Any)
    basic |= {"contextmanager": contextlib.contextmanager, "GRPOSample": Any, "logger": logging}
    basic |= {
        "dataclass": dataclass,
        "fields": dataclasses.fields,
        "profiling_decorator": lambda f: f,
    }
    basic |= {"profiling_context": lambda *args: contextlib.nullcontext()}
    basic |= functions(folder + "rl_core/data.py", "GRPOBatch", **basic)
    vocabulary = (
        "_AllReduceAcrossVocabShards vocab_parallel_log_softmax vocab_parallel_gather_logps"
    )
    vocabulary += " compute_logps_and_entropy_from_logits"
    path = folder + "megatron/trainers/vocab_parallel_utils.py"
    basic |= functions(path, *vocabulary.split(), **basic)
    basic |= functions(
        folder + "megatron/trainers/utils.py",
        "get_batch_on_this_pp_rank",
        "gather",
        "gather_object",
        **basic,
    )
    made = (
        "pad_logps_back_to_batch build_completion_mask_and_seq_lengths collate_to_grpo_micro_batch"
    )
    nothing = {"build_rollout_logps": lambda *args: None, "build_opsd_samples": lambda rows: False}
    nothing |= {"build_routed_experts_batch": lambda *args, **named: None}
    basic |= (
        functions(folder + "rlhf_trainers/utils.py", *made.split(), **basic, **nothing) | nothing
    )
    basic |= functions(folder + "rl_core/advantage.py", "expand_advantage_to_per_token", **basic)
    basic |= {
        "encode_sample": lambda sample, template: sample.encoded,
        "get_padding_to": lambda args: None,
    }
    if case.mutant == "windows":
        score = basic["compute_logps_and_entropy_from_logits"]
        basic["compute_logps_and_entropy_from_logits"] = lambda logits, labels, **named: score(
            logits, labels.roll(1, -1), **named
        )
    bases = {
        "MegatronRolloutMixin": type("Rollouts", (), {}),
        "MegatronRLHFTrainer": type("Base", (), {}),
    }
    path = folder + "megatron/trainers/grpo_trainer.py"
    theirs = functions(path, "MegatronGRPOTrainer", **basic, **bases)["MegatronGRPOTrainer"]

    def collate(encoded: list[Any], padding_to: Any) -> dict[str, Tensor]:
        """As their template does: rows without padding one after another, or padded at the right."""
        lengths = torch.tensor([each["length"] for each in encoded])
        if case.packed:
            batch = {
                name: torch.cat([e[name] for e in encoded])[None]
                for name in ("input_ids", "labels")
            }
            return batch | {"cu_seq_lens_q": torch.nn.functional.pad(lengths.cumsum(0), (1, 0))}
        pad = partial(basic["pad_sequence"], batch_first=True)
        labels = pad([each["labels"] for each in encoded], padding_value=-100)
        attention = (torch.arange(labels.shape[1]) < lengths[:, None]).long()
        ids = pad([each["input_ids"] for each in encoded])
        return {"input_ids": ids, "labels": labels, "attention_mask": attention}

    class Rollouts(theirs):  # type: ignore[misc,valid-type]
        """Without an engine: the samples are there, and so are their advantages and log-probs."""

        process_index = property(lambda self: dist.get_rank())

        def _get_rollout_group(self) -> Any:
            return mpu.get_model_parallel_group()

        def to_samples(self, inputs: Any) -> Any:
            return inputs

        get_local_rollout_batch = _generate_completions = to_samples

        def _score_completions(self, inputs: Any) -> Tensor:
            return torch.zeros(len(inputs), 1)

        def _log_completions_from_samples(self, inputs: Any) -> None: ...

        _flush_log_completions = lambda self: None  # noqa: E731
        _template_context = lambda self, template: contextlib.nullcontext()  # noqa: E731

        def _compute_advantages(self, inputs: Any, *others: Any, **named: Any) -> Tensor:
            return torch.tensor([sample.plain.advantages[0] for sample in inputs])

        def _maybe_compute_logps(self, batch: Any, teacher_inputs: Any) -> Any:
            grpo = batch["grpo_batch"]
            width = grpo.completion_mask.shape[1]
            for name, field in (
                ("old_log_probs", "old_per_token_logps"),
                ("ref_log_probs", "ref_per_token_logps"),
            ):
                matrix = torch.zeros(grpo.completion_mask.shape)
                for row, number in enumerate(range(self.scored, self.scored + len(matrix))):
                    length = len(samples[first + number].tokens)
                    offset = width - length if case.packed else 0
                    matrix[row, offset : offset + length - 1] = rows[name][number, 1:length]
                setattr(grpo, field, matrix)
            self.scored += len(matrix)
            return batch

        def _prepare_batch(self, data: Any) -> Any:
            return basic["get_batch_on_this_pp_rank"](self.args, data)

        def _all_reduce_metric(self, metric: dict[str, Tensor]) -> dict[str, Tensor]:
            """As theirs; gloo has no average."""
            values = torch.stack(list(metric.values()))
            dist.all_reduce(values, group=mpu.get_data_parallel_group())
            return dict(zip(metric, values / mpu.get_data_parallel_world_size(), strict=True))

    config = config_of(case)
    count = len(samples[mine]) // 2
    args = SimpleNamespace(
        num_generations=GROUP,
        **dict.fromkeys(
            "num_generations_eval delta real_tau rollout_importance_sampling_mode".split()
        ),
        **dict.fromkeys(
            "off_policy_sequence_mask_delta fipo_clip_range fipo_clip_high_only".split()
        ),
        **dict.fromkeys(
            "fipo_safety_threshold scale_rewards advantage_estimator max_resample_times".split()
        ),
        **dict.fromkeys(
            "rollout_importance_sampling_threshold teacher_kl_coef tau_pos tau_neg".split()
        ),
        **dict.fromkeys(
            "dynamic_sample kl_in_reward log_entropy calculate_per_token_loss".split(), False
        ),
        **dict.fromkeys(("log_rollout_offpolicy_metrics", "truncation_strategy"), False),
        **{"beta": config.kl_loss_coef, "loss_type": "grpo", "epsilon": config.eps_clip},
        **{
            "epsilon_high": config.eps_clip_high,
            "top_entropy_quantile": 1.0,
            "fipo_decay_rate": 32,
        },
        **{"importance_sampling_level": "token", "overlong_filter": True, "task_type": "causal_lm"},
        **{"generation_batch_size": len(samples), "steps_per_generation": 1, "micro_batch_size": 2},
        **{"global_batch_size": len(samples), "per_device_generation_batch_size": 2 * count},
        **{
            "num_microbatches": count,
            "context_parallel_size": 1,
            "pipeline_model_parallel_size": 1,
        },
        **{"padding_free": case.packed, "router_replay_mode": "disabled"},
    )
    made_trainer = with_loss(Rollouts, config)
    trainer = made_trainer.__new__(made_trainer)
    trainer.args, trainer.device, trainer.temperature, trainer._step = (
        args,
        torch.device("cpu"),
        1.0,
        1,
    )
    trainer.template = SimpleNamespace(padding_free=case.packed, data_collator=collate)
    trainer.unwrapped_models, trainer.scored = [SimpleNamespace(training=True)], 0
    trainer._metrics = {"train": collections.defaultdict(list)}
    for name in "enable_routing_replay use_teacher_api _has_teacher _has_teacher_explicit".split():
        setattr(trainer, name, False)
    trainer._is_dynamic_self_distillation = trainer.disable_rollout_importance_sampling = False
    trainer._init_grpo_params()
    inputs = []
    for number, sample in enumerate(samples[mine], start=first):
        ids = torch.tensor(sample.tokens)
        mask = torch.tensor([0] * sample.prompt_length + MASKS[number]).bool()
        encoded = {"input_ids": ids, "labels": ids.where(mask, -100), "length": len(ids)}
        row = {"encoded": encoded, "plain": sample, "is_truncated": number == FILTERED}
        inputs.append(SimpleNamespace(rollout_logprobs=[], routed_experts=None, **row))
    (step,) = [trainer._generate_and_score_completions(inputs)]
    model = table_under_ddp(logits_of(samples), per_token=False)

    def forward_step(iterator: Any, model: Any) -> Any:
        output, loss_func = trainer.forward_step(iter([step[next(iterator)]]), model)
        if case.mutant != "scale":
            return output, loss_func
        return output, lambda output: (loss_func(output)[0] / count, {})

    return scheduled(model, forward_step, count)


def megatron_lite_gradient(samples: list[PlainSample], case: Case) -> Tensor:
    """Their loop over micro-batches, packed batches and unpacking, before Megatron's DDP; the forward step is the table."""
    from megatron_pg import step_totals
    from megatron_pg.integrations.megatron_lite import SAMPLES, lite_loss
    from megatron_pg.megatron.trainer_globals import data_parallel_group

    initialize(1)
    sys.path.append(str(TRAINERS / "Megatron-Lite/experimental/lite"))
    loop = importlib.import_module("megatron.lite.primitive.train_step").run_microbatch_loop
    contracts = importlib.import_module("megatron.lite.runtime.contracts.data")
    thd = importlib.import_module("megatron.lite.primitive.parallel.thd")
    made = package_samples(samples)[share_of(samples, 1)]
    group = data_parallel_group()
    totals = step_totals(made, data_parallel_group=group)
    parts = [made[at : at + 2] for at in range(0, len(made), 2)]

    def batch_of(part: list[Any]) -> Any:
        labels = torch.cat(
            [sample.tokens.roll(-1 if case.mutant != "windows" else 0) for sample in part]
        )
        return contracts.PackedBatch(
            input_ids=torch.cat([sample.tokens for sample in part]),
            labels=labels,
            seq_lens=torch.tensor([sample.total_length for sample in part]),
            extras={SAMPLES: part},
        )

    def unpack(batch: Any, output: Tensor) -> Any:
        meta = thd.thd_pack_meta(batch.seq_lens, tp_size=1, cp_size=1, cp_group=None)
        return thd.unpack_thd_to_nested(output, meta)

    def forward_step(model: Any, batch: Any) -> dict[str, Tensor]:
        return {"log_probs": log_probs_of(model(batch.input_ids[None]), batch.labels[None])}

    model = table_under_ddp(logits_of(samples), per_token=False)
    size = 1 if case.mutant == "scale" else len(parts)
    sizes = {"num_microbatches": size, "data_parallel_size": dist.get_world_size(group)}
    loss_fn = lite_loss(config_of(case), totals, unpack, **sizes)
    batches = iter([batch_of(part) for part in parts])
    loop(model, batches, len(parts), forward_step, loss_fn=loss_fn)
    model.finish_grad_sync()
    (parameter,) = model.parameters()
    gradient: Tensor = parameter.main_grad.detach().clone()
    return gradient


def vime_gradient(samples: list[PlainSample], case: Case) -> Tensor:
    """Their iterator, batch, log-probs and `loss_function`, with both functions by their import paths."""
    import torch._dynamo
    from megatron.core import tensor_parallel
    from megatron.core.fusions import fused_cross_entropy

    torch._dynamo.config.disable = True
    # Megatron's fused one, which vime imports when called, rounds its gradient to bfloat16 (0.19.2).
    fused_cross_entropy.fused_vocab_parallel_cross_entropy = lambda logits, tokens, group: (
        tensor_parallel.vocab_parallel_cross_entropy(logits, tokens)
    )
    stand_in_for(VIME_PACKAGES)
    theirs = "vime.backends.megatron_utils."
    data, losses = (importlib.import_module(theirs + name) for name in ("data", "loss"))
    load_function = importlib.import_module("vime.utils.misc").load_function
    initialize(1)
    torch.Tensor.cuda = lambda tensor: tensor  # type: ignore[method-assign,assignment]
    mine = share_of(samples, 1)
    count = len(samples[mine]) // 2
    settings = fields_of(case)
    args = SimpleNamespace(
        **{"loss_type": "custom_loss", "advantage_estimator": "grpo", "qkv_format": "thd"},
        **{"custom_loss_function_path": "megatron_pg.integrations.vime.loss", "use_kl_loss": True},
        **dict.fromkeys("calculate_per_token_loss use_tis use_opsm allgather_cp".split(), False),
        **dict.fromkeys(["recompute_loss_function"], False),
        **{
            name: settings[name]
            for name in "eps_clip eps_clip_high kl_loss_coef kl_loss_type".split()
        },
        **{"entropy_coef": 0.0, "rollout_temperature": 1.0, "log_probs_chunk_size": -1},
        **{"n_samples_per_prompt": GROUP, "megatron_pg": settings},
    )
    names = {
        "advantages": "advantages",
        "log_probs": "old_log_probs",
        "ref_log_probs": "ref_log_probs",
    }
    numbers = range(mine.start, mine.stop)
    rollout_data: dict[str, Any] = {
        "tokens": [torch.tensor(sample.tokens) for sample in samples[mine]],
        "loss_masks": [torch.tensor(sample.loss_mask, dtype=torch.int) for sample in samples[mine]],
        "total_lengths": [len(sample.tokens) for sample in samples[mine]],
        "response_lengths": [sample.response_length for sample in samples[mine]],
        "rollout_mask_sums": torch.tensor([float(sum(s.loss_mask)) for s in samples[mine]]),
        "sample_indices": list(numbers),
        "rollout_ids": [100 + number for number in numbers],
        "micro_batch_indices": [[at, at + 1] for at in range(0, 2 * count, 2)],
        "num_microbatches": [count],
        "global_batch_sizes": [len(samples)],
        **{
            name: [torch.tensor(getattr(sample, field)) for sample in samples[mine]]
            for name, field in names.items()
        },
    }
    load_function("megatron_pg.integrations.vime.prepare")(args, 0, rollout_data)
    (iterator,) = data.get_data_iterator(rollout_data)
    keys = "tokens loss_masks total_lengths response_lengths rollout_mask_sums max_seq_lens".split()
    model = table_under_ddp(logits_of(samples), per_token=False)

    def forward_step(numbers: Any, model: Any) -> Any:
        batch = data.get_batch(iterator, keys, 4, "thd", False)
        logits = model(batch["tokens"])
        if case.mutant == "windows":
            logits = logits.roll(1, 1)
        loss = partial(losses.loss_function, args, batch, count, len(samples))
        if case.mutant != "scale":
            return logits, loss
        return logits, lambda logits: (loss(logits)[0] / len(samples), *loss(logits)[1:])

    return scheduled(model, forward_step, count)


def gradients(samples: list[PlainSample], cases: list[Case]) -> list[Tensor]:
    enable_cpu_runtime()
    made = []
    for case in cases:
        folder, engine = ENGINES[case.engine]
        if str(TRAINERS / folder) not in sys.path:
            sys.path.insert(0, str(TRAINERS / folder))
        made.append(engine(samples, case))
    return made


ENGINES: dict[str, tuple[str, Callable[[list[PlainSample], Case], Tensor]]] = {
    "nemo_rl": ("NeMo-RL", nemo_rl_gradient),
    "ms_swift": ("ms-swift", ms_swift_gradient),
    "vime": ("vime", vime_gradient),
    "megatron_lite": ("Megatron-Lite", megatron_lite_gradient),
}
"""The folder under TRAINERS, and the step, of each engine."""
