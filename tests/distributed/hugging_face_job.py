"""What ranks do with a Hugging Face folder: build the model its config means, load, score, train a
step, write it back.
"""

import contextlib
import io
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from megatron.core import distributed, parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.training import arguments
from torch import Tensor
from trainer import model as trainer_model
from trainer.hugging_face import (
    WeightsError,
    load_hugging_face,
    megatron_arguments_of,
    read_config,
    save_hugging_face,
)

from megatron_pg import PackedBatch, PolicyLossConfig, pack, plan_step
from megatron_pg.megatron import ParallelGroups, PolicyStep, packed_seq_params
from megatron_pg.megatron.schedule import run_micro_batches
from tests.oracle import PlainSample, Step
from tests.random_steps import package_samples

from .launch import refusal
from .models import Sharding, initialize_groups

LEARNING_RATE = 0.5
FLAGS = """
    --seq-length 64 --micro-batch-size 1 --global-batch-size 8 --train-iters 1 --lr 1 --eval-iters 0
    --distributed-backend gloo --transformer-impl local --use-cpu-initialization
    --tokenizer-type NullTokenizer --no-gradient-accumulation-fusion --no-masked-softmax-fusion
    --no-persist-layer-norm --no-rope-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion
    --attention-backend unfused --moe-token-dispatcher-type alltoall
    --make-vocab-size-divisible-by 8 --expert-tensor-parallel-size 1
"""


@dataclass(frozen=True)
class Job:
    """Load `source` at a sharding, write it to `copy`; with `trained`, take a step and write that
    there.
    """

    source: Path
    samples: list[PlainSample]
    copy: Path | None = None
    trained: Path | None = None
    dtype: torch.dtype = torch.float32
    flags: tuple[str, ...] = ()


class Logits(NamedTuple):
    """A rank's part [tokens of its context-parallel rank, columns] of all samples in one pack, at
    the last stage.
    """

    tensor_rank: int
    context_rank: int
    local: Tensor


def load_and_save(sharding: Sharding, job: Job) -> list[Logits | None]:
    chunks = build(sharding, job)
    load_hugging_face(chunks, job.source)
    logits = [forward(chunks, sharding, job.samples)]
    if job.copy is not None:
        save_hugging_face(chunks, job.copy, job.source)
    if job.trained is not None:
        train_step(chunks, job.samples, vocab_size=read_config(job.source)["vocab_size"])
        logits.append(forward(chunks, sharding, job.samples))
        save_hugging_face(chunks, job.trained, job.source)
    return logits


def convert(sharding: Sharding, job: Job) -> None:
    chunks = build(sharding, job)
    load_hugging_face(chunks, job.source)
    save_hugging_face(chunks, job.copy, job.source)


def parse(sharding: Sharding, job: Job) -> Any:
    """Megatron's arguments, by its own parser and checks, of the flags that the config means."""
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"  # validate_args wants it under TP and CP
    flags = (
        f"{FLAGS} --tensor-model-parallel-size {sharding.tensor} --context-parallel-size "
        f"{sharding.context} "
        f"--pipeline-model-parallel-size {sharding.pipeline} --expert-model-parallel-size "
        f"{sharding.expert}"
    )
    if sharding.virtual_pipeline is not None:
        flags += f" --num-virtual-stages-per-pipeline-rank {sharding.virtual_pipeline}"
    flags += " --sequence-parallel" * sharding.sequence_parallel
    model = megatron_arguments_of(read_config(job.source))
    sys.argv = ["train", *model, *flags.split(), *job.flags]
    with contextlib.redirect_stdout(io.StringIO()):  # it prints every argument
        return arguments.validate_args(arguments.parse_args())


def build(sharding: Sharding, job: Job) -> list[DistributedDataParallel]:
    """This rank's chunks under DDP, as Megatron initialises them."""
    args = parse(sharding, job)
    args.params_dtype = job.dtype
    initialize_groups(sharding)
    config = arguments.core_transformer_config_from_args(args)
    config.finalize_model_grads_func = distributed.finalize_model_grads
    config.variable_seq_lengths = sharding.pipeline > 1
    multiple = args.make_vocab_size_divisible_by * sharding.tensor
    args.padded_vocab_size = -(-args.vocab_size // multiple) * multiple
    ddp_config = distributed.DistributedDataParallelConfig(grad_reduce_in_fp32=False)
    chunks = []
    for stage in range(sharding.virtual_pipeline) if sharding.virtual_pipeline else [None]:
        is_first = parallel_state.is_pipeline_first_stage(False, vp_stage=stage)
        is_last = parallel_state.is_pipeline_last_stage(False, vp_stage=stage)
        with mock.patch.object(trainer_model, "get_args", lambda: args):
            model = trainer_model.provide_model(
                config, stage, pre_process=is_first, post_process=is_last
            )
        options = {"disable_bucketing": bool(stage)}
        chunks.append(DistributedDataParallel(config, ddp_config, model, **options))
    return chunks


def forward(chunks: Sequence[Any], sharding: Sharding, samples: Step) -> Logits | None:
    """All samples in one pack through Megatron's schedule; None on earlier pipeline stages."""
    groups = ParallelGroups.from_model(chunks)
    multiple = sharding.context * sharding.tensor if sharding.sequence_parallel else 1
    place = {"cp_rank": groups.context_rank, "cp_size": groups.context_size}
    batch, kept = pack(package_samples(samples), pad_to_multiple=multiple, **place), []

    def keep(output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        kept.append(output[0].clone())
        return output.sum(), {}

    def head(batch: PackedBatch) -> Any:
        inputs = {
            "input_ids": batch.tokens[None],
            "position_ids": batch.position_ids[None],
            "attention_mask": None,
            "packed_seq_params": packed_seq_params(batch),
        }
        return SimpleNamespace(model_inputs=inputs, loss_func=keep)

    # An interleaved pipeline takes as many micro-batches as it has stages.
    batches = [batch] * (sharding.pipeline if sharding.virtual_pipeline else 1)
    with torch.no_grad():
        run_micro_batches(head, batches, chunks, forward_only=True)
    return Logits(groups.tensor_rank, groups.context_rank, kept[0]) if kept else None


def train_step(
    chunks: Sequence[DistributedDataParallel], samples: Step, *, vocab_size: int
) -> None:
    """Plain gradient descent on the policy loss of all samples, in two micro-batches or more."""
    groups = ParallelGroups.from_model(chunks)
    mine, multiple = package_samples(samples), groups.tensor_size * groups.context_size
    place = {"cp_size": groups.context_size, "pad_to_multiple": multiple}
    half = sum(len(sample.tokens) for sample in samples) // 2
    plan = plan_step(mine, max_tokens_per_microbatch=half, data_parallel_group=groups.data, **place)
    packs = [[mine[index] for index in indices] for indices in plan.microbatches]
    batches = [pack(part, cp_rank=groups.context_rank, **place) for part in packs]
    for chunk in chunks:
        chunk.zero_grad_buffer()
    step = PolicyStep(PolicyLossConfig(), plan, model=list(chunks), vocab_size=vocab_size)
    run_micro_batches(step.head, batches, chunks)
    with torch.no_grad():
        for chunk in chunks:
            for parameter in chunk.parameters():
                parameter -= LEARNING_RATE * parameter.main_grad


def load_errors(sharding: Sharding, jobs: dict[str, Job]) -> dict[str, str]:
    """What loading says of broken folders and of models that are not theirs, by name."""
    said = {}
    for name, job in jobs.items():
        chunks = build(sharding, job)
        before = [parameter.clone() for chunk in chunks for parameter in chunk.parameters()]
        said[name] = refusal(WeightsError, load_hugging_face, chunks, job.source)
        after = [parameter for chunk in chunks for parameter in chunk.parameters()]
        assert all(torch.equal(*pair) for pair in zip(before, after, strict=True)), name
    return said


def mutants(job: Job) -> dict[str, Logits | None]:
    from mbridge.core.bridge import Bridge
    from mbridge.models import LLaMABridge

    to_megatron, mlp = Bridge._weight_to_mcore_format, LLaMABridge._MLP_MAPPING
    gate_and_up = mlp["mlp.linear_fc1.weight"]

    def one_after_another(self: Any, name: str, weights: list[Tensor]) -> Tensor:
        return torch.cat(weights) if len(weights) == 3 else to_megatron(self, name, weights)

    up_and_gate = mlp | {"mlp.linear_fc1.weight": gate_and_up[::-1]}
    wrong = {
        "q, k and v one after another": (Bridge, "_weight_to_mcore_format", one_after_another),
        "up before gate": (LLaMABridge, "_MLP_MAPPING", up_and_gate),
    }
    found = {}
    for name, change in wrong.items():
        with mock.patch.object(*change):
            chunks = build(Sharding(), job)
            load_hugging_face(chunks, job.source)
        found[name] = forward(chunks, Sharding(), job.samples)
    return found


def load_by_transformer_engines_names(job: Job) -> Logits | None:
    """The logits of a model whose parameters are named as those of Transformer Engine's layers,
    which need a GPU.
    """
    chunks = build(Sharding(), job)
    model = chunks[0].module
    tensors = model.state_dict(keep_vars=True)
    renamed = {_transformer_engines_name(name): tensor for name, tensor in tensors.items()}
    model.state_dict = lambda **_: renamed
    load_hugging_face(chunks, job.source)
    return forward(chunks, Sharding(), job.samples)


def _transformer_engines_name(name: str) -> str:
    """What megatron-core 0.19.2 calls it with `get_gpt_decoder_block_spec(...,
    use_transformer_engine=True)`.
    """
    name = name.replace("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight")
    if name.startswith("decoder.layers.1."):  # the dense one: with experts the norm stays by itself
        name = name.replace("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight")
    return re.sub(r"local_experts\.(\d+)\.(linear_fc\d\.weight)", r"\2\1", name)
