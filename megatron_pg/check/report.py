"""The report of a check, as text and as JSON."""

import dataclasses
import importlib.metadata
import importlib.util
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from megatron_pg.check.cases import not_checked
from megatron_pg.check.compare import CheckRow
from megatron_pg.check.diagnosis import diagnoses
from megatron_pg.check.options import CheckOptions, has_transformer_engine
from megatron_pg.check.places import job_size, sampled_data_ranks
from megatron_pg.config.versions import FIRST_UNSUPPORTED, megatron_core_version

KNOWN_MISTAKES: Mapping[tuple[tuple[int, int], tuple[int, int]], Mapping[str, str]] = {
    ((0, 16), (0, 17)): {
        "multi-token prediction without labels fails in the forward pass": "labels.clone() in "
        "models/gpt/gpt_model.py"
    },
    ((0, 16), (0, 18)): {
        "interleaved pipelines free activations that are still being sent, unless "
        "deallocate_pipeline_outputs is "
        "off": "pull request 4047"
    },
    ((0, 16), (0, 19)): {
        "in per-token mode the auxiliary and z losses of experts count 1/(TP CP) of their "
        "coefficients if tokens are split": "issue 1652, pull request 5047",
        "with --expert-model-parallel-size 1, experts whose expert-tensor-parallel size is not the "
        "tensor-parallel size are "
        "reduced over the wrong ranks": "pull request 5916",
        "the gradient norm may leave out grouped experts (--moe-grouped-gemm) under expert and "
        "tensor parallelism": "pull request 5916",
    },
    ((0, 16), FIRST_UNSUPPORTED): {
        "the gradient norm counts learned attention sinks only on the "
        "first tensor-parallel rank": "issue 7452, pull request 7530",
        "under tensor parallelism the rotary part of multi-latent attention's keys gets the "
        "gradient of one rank's heads "
        "(Transformer Engine's layers: without sequence parallelism)": "issue 1699, pull request "
        "6839",
        "global_aux_loss divides the experts' tokens of all micro-batches so far by the last one's "
        "tokens": "pull request 7214",
        "in per-token mode the losses of experts are multiplied by the tokens of all ranks that "
        "share a micro-batch, if padding is masked (PolicyStep makes them "
        "means over tokens)": "issue 7452, pull request 7481",
        "GPTModel splits the padding mask over the global tensor-parallel group instead "
        "of its own": "issue 7452",
        "under tensor parallelism without sequence parallelism, the output norm of GatedDeltaNet "
        "gets the gradient of one "
        "rank's heads": "issue 7452",
    },
    ((0, 16), (0, 20)): {
        "the bias of experts fails with a padding mask (PolicyStep "
        "counts their tokens)": "pull request 6114"
    },
    ((0, 17), (0, 19)): {
        "multi-token prediction without labels is silently not trained": "pull request 3457"
    },
    ((0, 19), FIRST_UNSUPPORTED): {
        "multi-token prediction is a mean over the tokens of one context-parallel rank, prompts "
        "and padding included, and "
        "counts 1/CP of them (PolicyStep makes it the mean over the step's active "
        "tokens)": "pull requests 3959 and 7498",
        "in per-token mode multi-token prediction is multiplied by a rank's tokens before the "
        "shift over its tokens after it "
        "(refused by PolicyStep)": "issue 2417, issue 7452, pull request 3159",
        "multi-token prediction of a model that gathers its logits has a wrong loss under tensor "
        "parallelism (refused by "
        "PolicyStep)": "issue 7452",
    },
}
"""Megatron-Core's mistakes with an issue, pull request or file of github.com/NVIDIA/Megatron-LM, by
the first wrong and the first right version (`FIRST_UNSUPPORTED` if none is known). They were read
in 0.16.0 to 0.19.2, and measured if `check` can."""


class Checked(NamedTuple):
    """A sharding, its rows, and their run time."""

    options: CheckOptions
    rows: Sequence[CheckRow]
    seconds: float


class Beside(NamedTuple):
    """Further facts about the user's model for the report."""

    notes: Sequence[str] = ()
    traits: frozenset[str] = frozenset()
    """The model's `TRAITS`."""
    unproven: Sequence[str] = ()
    """Parameters with gradients that rounding hides."""


def as_json(
    rows: Sequence[CheckRow], options: CheckOptions, world_size: int, beside: Beside | None = None
) -> str:
    """Write the whole report, with null for numbers that are not finite."""
    beside = beside or Beside()
    report = {
        "passed": all(row.passed for row in rows),
        "world_size": world_size,
        "sampled_data_ranks": sampled_data_ranks(options, job_size()),
        "options": dataclasses.asdict(options),
        "versions": versions(),
        "accelerations": accelerations(options),
        "notes": [*beside.notes],
        "not_provable": [*beside.unproven],
        "not_checked": not_checked(options),
        "known_mistakes": [*_mistakes(options, beside)],
        "rows": [
            {
                name: None if isinstance(value, float) and not math.isfinite(value) else value
                for name, value in dataclasses.asdict(row).items()
            }
            | {"tolerance": row.tolerance, "passed": row.passed, "diagnosis": words}
            for row, words in zip(rows, diagnoses(rows, options, world_size), strict=True)
        ],
    }
    return json.dumps(report, indent=2, allow_nan=False)


def as_text(
    rows: Sequence[CheckRow], options: CheckOptions, world_size: int, beside: Beside | None = None
) -> str:
    """Write the verdict, failed rows with diagnoses, the table, and what is not checked."""
    beside = beside or Beside()
    installed = ", ".join(f"{name} {version}" for name, version in versions().items())
    left_out = [f"not checked here: {name} ({why})" for name, why in not_checked(options).items()]
    failed = sum(not row.passed for row in rows)
    verdict = f"FAIL: {failed} of {len(rows)} rows"
    if not failed:
        verdict = f"PASS: every gradient is the unsharded one ({len(rows)} rows)"
        verdict += " on the sample" if options.sample_groups else ""
        if beside.unproven:
            verdict += f", but {len(beside.unproven)} are not provable in {options.dtype}"
    lines = [
        verdict,
        *_lines(rows, options, world_size, only_failed=True),
        "",
        f"megatron-pg check: {installed}",
        ", ".join(f"{name}: {what}" for name, what in accelerations(options).items()),
        f"{world_size} processes on {options.device}: {_sharding(options, world_size)}",
        *([_sample_words(options)] if options.sample_groups else []),
        *beside.notes,
        *(f"not provable in {options.dtype}: {name}" for name in beside.unproven),
        "",
        f"{'model':<12}{'dtype':<6}{'aggregation':<13}{'loss mode':<16}{'what':<15}{'loss':>12}"
        f"{'error':>9}{'replicas':>10}{'tolerance':>11}  result",
        *map(_line, rows),
        *([""] if left_out else []),
        *left_out,
        *(f"known mistake of this megatron-core: {each}" for each in _mistakes(options, beside)),
    ]
    return "\n".join(lines)


def summary(checked: Checked, world_size: int) -> str:
    """Write one line for a sharding, with its failed rows below."""
    options, rows, seconds = checked
    worst = max(rows, key=lambda row: row.gradient_error / row.tolerance)
    failed = sum(not row.passed for row in rows)
    line = (
        f"{f'FAIL {failed}' if failed else 'PASS':<8}{len(rows):>3} rows, worst "
        f"{worst.gradient_error:.1e} of "
        f"{worst.tolerance:.0e}, {seconds:4.0f} s  {_sharding(options, world_size)}"
    )
    return "\n".join([line, *_lines(rows, options, world_size, only_failed=True)])


def verdict(checked: Sequence[Checked], _: int) -> str:
    """Write the last line of the summaries, after an empty line."""
    wrong = sum(not all(row.passed for row in sharding.rows) for sharding in checked)
    words = f"FAIL: {wrong} of" if wrong else "PASS: every gradient is the unsharded one in"
    return f"\n{words} {len(checked)} shardings"


def as_json_list(checked: Sequence[Checked], world_size: int) -> str:
    """List the reports of `as_json`."""
    return f"[{', '.join(as_json(rows, options, world_size) for options, rows, _ in checked)}]"


def _lines(
    rows: Sequence[CheckRow], options: CheckOptions, world_size: int, *, only_failed: bool = False
) -> Iterator[str]:
    """Yield one line per row, with the diagnosis below a failed row."""
    for row, words in zip(rows, diagnoses(rows, options, world_size), strict=True):
        if row.passed and only_failed:
            continue
        yield _line(row)
        if not row.passed:
            yield f"{'':<12}{words}"


def _line(row: CheckRow) -> str:
    mode = "per token" if row.calculate_per_token_loss else "per micro-batch"
    return (
        f"{row.model:<12}{row.dtype:<6}{row.aggregation:<13}{mode:<16}{row.what:<15}"
        f"{row.loss:>12.6f}{row.gradient_error:>9.1e}{row.replica_error:>10.1e}"
        f"{row.tolerance:>11.0e}  {'PASS' if row.passed else 'FAIL'}"
    )


def _sharding(options: CheckOptions, world_size: int) -> str:
    stages = options.virtual_pipeline_model_parallel_size
    plus = " + SP" if options.sequence_parallel else ""
    parts = {
        f"TP {options.tensor_model_parallel_size}{plus}": True,
        f"PP {options.pipeline_model_parallel_size}": True,
        f"VPP {stages}": stages,
        f"CP {options.context_parallel_size}": True,
        f"EP {options.expert_model_parallel_size}": options.num_experts,
        f"ETP {options.expert_tensor_parallel_size}": options.num_experts,
        f"DP {world_size // options.model_parallel_size}": True,
        "distributed optimizer": options.use_distributed_optimizer,
        "average in collective": options.average_in_collective,
        "overlapped reduction": options.overlap_grad_reduce,
    }
    return ", ".join(part for part, is_said in parts.items() if is_said)


def _sample_words(options: CheckOptions) -> str:
    """Describe the sample of data-parallel ranks."""
    size = job_size()
    ranks = sampled_data_ranks(options, size)
    named = f"{', '.join(map(str, ranks[:32]))}{' ...' if len(ranks) > 32 else ''}"
    data_size = size // options.model_parallel_size
    return (
        f"a sample of the job's {size} processes: data-parallel ranks {named} of {data_size} with "
        "their TP, CP and PP groups"
    )


def versions() -> dict[str, str]:
    """Return the installed versions by name, or "absent"."""
    core = ".".join(map(str, megatron_core_version()))
    found = {"torch": torch.__version__, "megatron-core": core}
    has_apex = importlib.util.find_spec("amp_C") is not None
    usable = {"transformer-engine": has_transformer_engine(), "apex": has_apex, "triton": True}
    for name, is_usable in usable.items():
        try:
            found[name] = importlib.metadata.version(name) if is_usable else "absent"
        except importlib.metadata.PackageNotFoundError:
            found[name] = "absent"
    if torch.cuda.is_available() and torch.distributed.is_nccl_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        found["gpu"] = torch.cuda.get_device_name()
    return found


def accelerations(options: CheckOptions) -> dict[str, str]:
    """Return the implementations of attention, log-probs and output layer."""
    has_kernels = options.device == "cuda" and importlib.util.find_spec("triton") is not None
    return {
        "attention": "torch" if options.transformer_impl == "local" else "Transformer Engine",
        "log-probs": "Triton kernels" if has_kernels else "torch",
        "fused output layer": "checked" if options.fused_lm_head else "available",
    }


TRAITS: Mapping[str, str] = {
    "multi-token": "multi-token",
    "expert|global_aux_loss|padding mask": "experts",
    "tensor parallelism|tensor-parallel": "TP",
    "interleaved": "VPP",
    "context-parallel": "CP",
    "attention sinks": "attention sinks",
    "multi-latent": "latent attention",
    "GatedDeltaNet": "delta rule",
}
"""The trait of a layout or model that a mistake needs, by a pattern for the mistake's words."""


def mistakes_in(
    version: tuple[int, int, int], traits: frozenset[str] | None = None
) -> Iterator[str]:
    """Yield the known mistakes of a version, or only the ones that `traits` can meet."""
    for (first, fixed), mistakes in KNOWN_MISTAKES.items():
        until = "" if fixed == FIRST_UNSUPPORTED else f", right from {fixed[0]}.{fixed[1]}"
        for what, source in mistakes.items() if first <= version[:2] < fixed else ():
            needs = {trait for words, trait in TRAITS.items() if re.search(words, what)}
            if traits is None or needs <= traits:
                yield f"{what} ({source}{until})"


def _mistakes(options: CheckOptions, beside: Beside) -> Iterator[str]:
    """Yield the known mistakes that the layout and the model can meet."""
    sizes = {
        "TP": options.tensor_model_parallel_size > 1,
        "CP": options.context_parallel_size > 1,
        "VPP": options.virtual_pipeline_model_parallel_size is not None,
        "experts": options.num_experts is not None,
        "multi-token": options.mtp_num_layers is not None,
    }
    traits = beside.traits | {trait for trait, is_there in sizes.items() if is_there}
    return mistakes_in(megatron_core_version(), traits)
