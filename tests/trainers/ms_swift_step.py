"""One step of ms-swift's Megatron GRPO: its trainer without a rollout engine around the protocol's adapter."""

import collections
import contextlib
import dataclasses
import logging
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.oracle import PlainSample

from .engines import FILTERED, GROUP, MASKS, Case, config_of, matrices, scheduled
from .logit_table import initialize, logits_of, share_of, table_under_ddp
from .sources import functions


def gradient(samples: list[PlainSample], case: Case) -> Tensor:
    """Their trainer makes the micro-batches of a step, scores them in `forward_step` and calls the loss; the rollout is ours."""
    from megatron.core import mpu, tensor_parallel

    from megatron_pg.integrations.ms_swift import with_loss

    initialize(case.context)
    folder = "ms-swift/swift/"
    mine = share_of(samples, case.context)
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
        "reconstruct_tensor_cp",
        **basic,
    )
    cut = "mcore-bridge/mcore_bridge/utils/megatron_utils.py", "split_cp_inputs"
    basic |= functions(*cut, **basic) if case.context > 1 else {}
    path = folder + "megatron/utils/megatron_lm_utils.py"
    is_npu = {"is_torch_npu_available": lambda: False}
    basic |= functions(path, "get_batch_on_this_cp_rank", **basic, **is_npu)
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
        """As their template does: rows one after another, or padded at the right; whole parts under context parallelism."""
        if case.context > 1:
            for row in encoded:
                padding = -row["length"] % (2 * case.context)
                row["length"] += padding
                row["input_ids"], row["labels"] = (
                    torch.nn.functional.pad(row[name], (0, padding), value=value)
                    for name, value in (("input_ids", 0), ("labels", -100))
                )
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
            """As theirs for one data-parallel rank under context parallelism, or without it."""
            return dist.group.WORLD if case.context > 1 else mpu.get_model_parallel_group()

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
                    padded = length + -length % (2 * case.context if case.context > 1 else 1)
                    offset = width - padded if case.packed else 0
                    matrix[row, offset : offset + length - 1] = rows[name][number, 1:length]
                setattr(grpo, field, matrix)
            self.scored += len(matrix)
            return batch

        def _prepare_batch(self, data: Any) -> Any:
            batch = basic["get_batch_on_this_pp_rank"](self.args, data)
            if case.packed:
                ends = batch["cu_seq_lens_q"]
                params = SimpleNamespace(cu_seqlens_q=ends, seq_lens=ends.diff())
                batch["packed_seq_params"] = params
            return basic["get_batch_on_this_cp_rank"](self.args, batch)

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
        **{"global_batch_size": len(samples), "is_multimodal": False},
        **{"per_device_generation_batch_size": len(samples) // dist.get_world_size()},
        **{
            "num_microbatches": count,
            "context_parallel_size": case.context,
            "cp_partition_mode": "zigzag",
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
    local = share_of(samples, 1)
    for number, sample in enumerate(samples[local], start=local.start):
        ids = torch.tensor(sample.tokens)
        mask = torch.tensor([0] * sample.prompt_length + MASKS[number]).bool()
        encoded = {"input_ids": ids, "labels": ids.where(mask, -100), "length": len(ids)}
        row = {"encoded": encoded, "plain": sample, "is_truncated": number == FILTERED}
        inputs.append(SimpleNamespace(rollout_logprobs=[], routed_experts=None, **row))
    (step,) = [trainer._generate_and_score_completions(inputs)]
    model = table_under_ddp(logits_of(samples), per_token=False, context=case.context)

    def forward_step(iterator: Any, model: Any) -> Any:
        output, loss_func = trainer.forward_step(iter([step[next(iterator)]]), model)
        if case.mutant != "scale":
            return output, loss_func
        return output, lambda output: (loss_func(output)[0] / count, {})

    return scheduled(model, forward_step, count)
