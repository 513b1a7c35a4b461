"""The check of the user's model: the provider builds it at the given sizes and at sizes 1, with the
same weights.

Each number has a measured tolerance. Its unit is how far the number moves in the unsharded model
when every weight moves by one epsilon of its dtype.
"""

from __future__ import annotations

import gc
import importlib
import inspect
import math
import re
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import ModelParallelConfig, distributed, tensor_parallel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from torch import Tensor

from megatron_pg.check.cases import CASE_AGGREGATION, Case, Run
from megatron_pg.check.compare import STEPS, CheckRow, compare, compare_copies
from megatron_pg.check.job import CannotCheckError
from megatron_pg.check.model import Provider, build_chunks, initialize_groups, wrap_chunks
from megatron_pg.check.options import CheckOptions, config_of
from megatron_pg.check.placement import (
    Piece,
    gradient_parts,
    names_in_whole,
    pieces_of,
    placed,
    whole_tensors,
)
from megatron_pg.check.reference import Expected, Scores, WholeModel
from megatron_pg.check.routers import Pack
from megatron_pg.check.samples import make_samples, with_log_probs
from megatron_pg.check.step import train_step
from megatron_pg.config import versions
from megatron_pg.loss.checksum import CHECKSUM
from megatron_pg.megatron.groups import ParallelGroups, unwrapped
from megatron_pg.megatron.policy_step import MicroBatchHead, model_inputs
from megatron_pg.megatron.schedule import run_micro_batches
from megatron_pg.megatron.scoring import compute_log_probs
from megatron_pg.megatron.varying_log_probs import require_steady_log_probs
from megatron_pg.step.agreement import gather
from megatron_pg.step.batch import pack
from megatron_pg.step.sample import Sample

MODEL = "your model"
SIGNATURE = ("pre_process", "post_process", "vp_stage", "config", "pg_collection")
ADAM_EPSILON = 1e-8
SEED = 1234
PACK_SIZE = 4
"""The number of samples in the pack that is compared with single samples."""
FAR = 1.5
"""The wrong factor of a gradient that the check must find."""
FEWEST_STEPS = 5.0
"""The tolerance of a gradient in units if `STEPS` would miss `FAR`."""


@dataclass
class OwnCheck:
    """The rows of the user's model, and further facts for the report."""

    rows: list[CheckRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    traits: frozenset[str] = frozenset()
    unproven: tuple[str, ...] = ()
    """Parameters with gradients that rounding hides, of kinds that are proven in a different
    layer."""


@dataclass(frozen=True)
class _Stated:
    """The description of a rank's parameter block."""

    piece: Piece
    is_trained: bool
    dtype: str


@dataclass
class _Whole:
    """The results of the unsharded model, kept after it is freed."""

    weights: dict[str, Tensor]
    expected: Expected
    update: Expected
    log_probs: list[Tensor]
    log_prob_unit: float
    trace: dict[str, float]


def load_provider(options: CheckOptions) -> Provider:
    """Import the provider. Its module and calls see the flags after `--` in `sys.argv`."""
    path = options.model_provider or ""
    module_name, _, name = path.rpartition(":" if ":" in path else ".")
    sys.argv = [module_name, *options.provider_flags]
    try:
        provider: Any = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise CannotCheckError(
            f"--model-provider {path}: {type(error).__name__}: {error}. Name a module on "
            "PYTHONPATH as module:function"
        ) from error
    try:
        inspect.signature(provider).bind(**dict.fromkeys(SIGNATURE))
    except TypeError as error:
        raise CannotCheckError(
            f"--model-provider {path} does not take Megatron's arguments ({error}): define "
            "provider(pre_process, post_process, vp_stage=None, config=None, pg_collection=None)"
        ) from error
    return provider  # type: ignore[no-any-return]


def run_own_check(options: CheckOptions) -> OwnCheck:
    """Check the user's model. Every rank of the world calls it and gets the same rows."""
    found, provider = OwnCheck(), load_provider(options)
    data_size = dist.get_world_size() // options.model_parallel_size
    options = replace(options, num_experts=None, mtp_num_layers=None)
    initialize_groups(options)
    chunks = _build(options, provider, sharded=True)
    stated = gather([each for chunk in chunks for each in _stated(chunk)], dist.group.WORLD)
    _require_alike(stated)
    parts = [part for chunk in chunks for part in placed(unwrapped(chunk))]
    first = {"model": MODEL, "aggregation": CASE_AGGREGATION, "what": "first weights"}
    found.rows.append(compare_copies(parts, options, **first))
    num_parameters = sum(
        math.prod(shape)
        for shape in {s.piece.name: s.piece.shape for rank in stated for s in rank}.values()
    )
    found.traits = _traits(chunks[0].config)
    del chunks, parts
    gc.collect()
    found.notes += [_memory(num_parameters, options)]
    if dist.get_rank() == 0:
        print(f"megatron-pg check: {found.notes[-1]}", file=sys.stderr, flush=True)
    initialize_groups(options, sharded=False)
    whole = _run_whole(options, provider, stated, data_size, found)
    gc.collect()
    initialize_groups(options)
    labels = map(whole.expected.label, found.rows[0].replica_parameters)
    found.rows[0] = replace(found.rows[0], replica_parameters=tuple(labels))
    _run_sharded(options, provider, whole, found)
    return found


def _row(
    options: CheckOptions, what: str, error: float, words: str, limit: float = STEPS
) -> CheckRow:
    """Make a row with one number, and words that it has only if the number exceeds the limit."""
    return CheckRow(
        model=MODEL,
        aggregation=CASE_AGGREGATION,
        calculate_per_token_loss=False,
        dtype=options.dtype,
        what=what,
        loss=0.0,
        checksum=1.0,
        reference_loss=0.0,
        gradient_error=error,
        worst_parameter="",
        worst_ratio=1.0,
        common_ratio=1.0,
        scaled_error=0.0,
        num_parameters=0,
        limit=limit,
        words="" if error <= limit else words,
    )


# Building


def parallel_config(options: CheckOptions, *, sharded: bool) -> ModelParallelConfig:
    """Make the provider's `config=` argument: the sizes and the dtype."""
    dtype = torch.bfloat16 if options.dtype == "bf16" else torch.float32
    fields: dict[str, Any] = dict(
        **options.parallel_sizes(sharded),
        sequence_parallel=options.sequence_parallel and sharded,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        pipeline_dtype=dtype,
        use_cpu_initialization=options.device == "cpu",
        gradient_accumulation_fusion=options.gradient_accumulation_fusion and sharded,
    )
    if fields["virtual_pipeline_model_parallel_size"] is not None:
        fields |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
        fields["deallocate_pipeline_outputs"] = not versions.needs_kept_pipeline_outputs()
    return ModelParallelConfig(**fields)


def _build(
    options: CheckOptions,
    provider: Provider,
    *,
    sharded: bool,
    per_token: bool = False,
    prepare: Callable[[Any], None] | None = None,
) -> list[Any]:
    """Build this rank's chunks without DDP, in one loss mode."""
    torch.manual_seed(SEED)
    if options.device == "cuda":
        tensor_parallel.model_parallel_cuda_manual_seed(SEED, force_reset_rng=True)
    config = parallel_config(options, sharded=sharded)
    asked = dict(vars(config))

    def checked(**keywords: Any) -> Any:
        model = provider(**keywords)
        _require_model(model, asked, options)
        _set_up(model, per_token, options)
        return model

    return build_chunks(options, config, checked, prepare)


def _require_model(model: Any, layout: Mapping[str, Any], options: CheckOptions) -> None:
    """Raise unless the model is a Megatron model with the requested layout."""
    path = f"--model-provider {options.model_provider}"
    if not isinstance(model, torch.nn.Module):
        kind = type(model).__name__
        raise CannotCheckError(f"{path} returned a {kind}: return one model, for one chunk")
    for name in ("config", "sharded_state_dict"):
        if not hasattr(model, name):
            raise CannotCheckError(
                f"{path} returned a {type(model).__name__} without {name}: derive the model from "
                "megatron.core.transformer.MegatronModule"
            )
    for name, asked in layout.items():
        is_layout = name.endswith("_parallel_size") or name in ("sequence_parallel", "params_dtype")
        given = getattr(model.config, name, asked)
        if is_layout and (given or 1) != (asked or 1):
            raise CannotCheckError(
                f"{path} built a model with {name}={given} instead of {asked}: take it from the "
                "argument config, as in TransformerConfig(num_layers=..., **vars(config))"
            )


def _set_up(model: Any, per_token: bool, options: CheckOptions) -> None:
    """Set what a trainer sets, and switch off auxiliary losses."""
    config = model.config
    config.finalize_model_grads_func = (
        getattr(config, "finalize_model_grads_func", None) or distributed.finalize_model_grads
    )
    config.calculate_per_token_loss = per_token
    config.variable_seq_lengths = options.pipeline_model_parallel_size > 1
    kinds = getattr(config, "moe_aux_loss_coeff", 0.0)
    config.moe_aux_loss_coeff = [0.0 for _ in kinds] if isinstance(kinds, list) else 0.0
    config.moe_z_loss_coeff, config.moe_router_bias_update_rate = None, 0.0
    config.mtp_loss_scaling_factor = 0.0
    for module in model.modules():
        if hasattr(module, "calculate_per_token_loss"):
            module.calculate_per_token_loss = per_token


def _stated(chunk: Any) -> Iterator[_Stated]:
    named = dict(unwrapped(chunk).named_parameters())
    for name, pieces in pieces_of(unwrapped(chunk), named).items():
        for piece in pieces:
            yield _Stated(piece, named[name].requires_grad, str(named[name].dtype))


def _require_alike(stated: Sequence[Sequence[_Stated]], whole: Sequence[_Stated] = ()) -> None:
    """Raise if ranks or layouts have different parameters."""
    known = {each.piece.name: (each, "the unsharded model") for each in whole}
    for rank, own in enumerate(stated):
        for each in own:
            other, where = known.setdefault(each.piece.name, (each, f"rank {rank}"))
            name, shapes = each.piece.name, (each.piece.shape, other.piece.shape)
            if whole and where == f"rank {rank}":
                raise CannotCheckError(
                    f"{name} is on rank {rank} and not in the unsharded model: the provider builds "
                    "different modules at sizes 1"
                )
            if shapes[0] != shapes[1]:
                raise CannotCheckError(_about_shapes(each, other, f"rank {rank}", where))
            if each.is_trained != other.is_trained:
                trained = f"rank {rank}" if each.is_trained else where
                raise CannotCheckError(
                    f"{name} is trained on {trained} only (compared rank {rank} and {where}): set "
                    "requires_grad alike on every rank"
                )
            if each.dtype != other.dtype:
                raise CannotCheckError(
                    f"{name} is {each.dtype} on rank {rank} and {other.dtype} on {where}"
                )
    held = {each.piece.name for own in stated for each in own}
    if missing := [each.piece.name for each in whole if each.piece.name not in held]:
        raise CannotCheckError(
            f"no rank holds {', '.join(missing[:3])}, which the unsharded model has"
        )


def _about_shapes(each: _Stated, other: _Stated, here: str, there: str) -> str:
    """Explain why two layouts have different shapes of a parameter."""
    name, shapes = each.piece.name, f"{list(each.piece.shape)} on {here}"
    shapes += f" and {list(other.piece.shape)} on {there}"
    if each.piece.is_vocabulary and each.piece.shape[1:] == other.piece.shape[1:]:
        return (
            f"{name} has {each.piece.shape[0]} rows on {here} and {other.piece.shape[0]} on "
            f"{there}: the provider pads the vocabulary to the tensor-parallel size. Pad it to the "
            "same number at every size"
        )
    if not each.piece.is_stated:
        return (
            f"{name} has no entry in sharded_state_dict and is {shapes}: without an entry, every "
            "rank must hold it whole. Add the entry in the module's sharded_state_dict "
            "(make_sharded_tensors_for_checkpoint)"
        )
    return (
        f"in sharded_state_dict, {name} is {shapes}: the entry lacks an axis that ranks divide. "
        "Add it in the module's sharded_state_dict (make_sharded_tensors_for_checkpoint)"
    )


def _memory(num_parameters: int, options: CheckOptions) -> str:
    """Return how much memory the unsharded model takes on each rank. Raise if it does not fit."""
    # Weights and their copy, a backward's gradients, and the float64 sums of four passes.
    size = num_parameters * (3 * (2 if options.dtype == "bf16" else 4) + 4 * 8)
    text = f"the unsharded model has {num_parameters:,} parameters and takes about "
    text += f"{size / 2**30:.2f} GiB on every rank, without activations"
    if options.device == "cuda" and size > (free := torch.cuda.mem_get_info()[0]):
        raise CannotCheckError(
            f"{text}, and {free / 2**30:.1f} GiB are free: build fewer layers in the provider"
        )
    return text


def _traits(config: Any) -> frozenset[str]:
    """Return the model's traits that known mistakes depend on."""
    settings = {name: str(value) for name, value in vars(config).items() if value}
    has = {
        "experts": "num_moe_experts" in settings,
        "multi-token": "mtp_num_layers" in settings,
        "latent attention": "multi_latent_attention" in settings,
        "attention sinks": settings.get("softmax_type") == "learnable",
        "delta rule": any("gated_delta_net" in value for value in settings.values()),
    }
    return frozenset(trait for trait, is_there in has.items() if is_there)


# The unsharded model


def _run_whole(
    options: CheckOptions,
    provider: Provider,
    stated: Sequence[Sequence[_Stated]],
    data_size: int,
    found: OwnCheck,
) -> _Whole:
    """Run the unsharded model, measure the units of its numbers, and compare packs with single
    samples.
    """
    module = _build(options, provider, sharded=False)[0]
    model = unwrapped(module)
    own = list(_stated(model))
    _require_alike(stated, own)
    if unstated := sorted({each.piece.name for each in own if not each.piece.is_stated}):
        rest = f" and {len(unstated) - 4} more" if len(unstated) > 4 else ""
        found.notes.append(
            "compared by name, without an entry in sharded_state_dict: "
            f"{', '.join(unstated[:4])}{rest}"
        )
    try:
        require_steady_log_probs(module, config_of(CASE_AGGREGATION, options))
    except ValueError as error:
        raise CannotCheckError(
            str(error).replace(", or add --allow-varying-log-probs", "")
        ) from error
    _fill_constants(model)
    vocab_size = getattr(model, "vocab_size", None) or min(
        (each.piece.shape[0] for each in own if each.piece.is_vocabulary), default=64
    )
    samples = make_samples(options, data_size, vocab_size)
    whole = WholeModel(options, module)
    trace = _trace_whole(whole, module, samples[0])
    scores = whole.scores(samples)
    samples = with_log_probs(samples, [log_probs for log_probs, _ in scores])
    run = Run(MODEL, Case("gradient"), CASE_AGGREGATION, False)
    packs = [Pack([index], 0.0, 0) for index in range(len(samples))]

    def results() -> tuple[list[Scores], Expected]:
        again = whole.scores(samples)
        return again, whole.expected((samples, again), run, packs)

    scores, expected = results()
    again, same = results()
    pairs = [(a[0], b[0]) for a, b in zip(scores, again, strict=True)]
    pairs += [(gradient, same.gradients[name]) for name, gradient in expected.gradients.items()]
    if not all(torch.equal(*pair) for pair in pairs):
        raise CannotCheckError(
            "two runs of the unsharded model with the same weights and samples differ: switch off "
            "dropout and other randomness, and kernels that are not deterministic"
        )
    moved = []
    for seed in (1, 2):
        before = _move_weights(model, seed)
        moved.append(results())
        for parameter, values in zip(model.parameters(), before, strict=True):
            parameter.data.copy_(values)
    log_probs = [values for values, _ in scores]
    unit = max(_largest(log_probs, [each for each, _ in other])[0] for other, _ in moved)
    eps = torch.finfo(torch.bfloat16 if options.dtype == "bf16" else torch.float32).eps
    unit = max(unit, eps, *(eps * float(each.abs().max()) for each in log_probs if each.numel()))
    weights = whole_tensors([*placed(model)])
    expected, update = _with_units(
        expected, [each for _, each in moved], options, weights, eps, found
    )
    found.rows += _packed_rows(options, whole, samples, log_probs, unit)
    return _Whole(weights, expected, update, log_probs, unit, trace)


@torch.no_grad()
def _fill_constants(model: Any) -> None:
    """Add noise to constant parameters, such as a norm, a bias or the second factor of a new
    adapter, which would hide mistakes. Give all ranks rank 0's weights.
    """
    for name, parameter in model.named_parameters():
        if parameter.numel() > 1 and bool((parameter == parameter.flatten()[0]).all()):
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            noise = torch.randn(parameter.shape, generator=generator)
            scale = 0.1 if parameter.dim() < 2 else 0.5 / math.sqrt(parameter.shape[-1])
            parameter.add_((scale * noise).to(parameter))
        dist.broadcast(parameter.data, 0)


def _move_weights(model: Any, seed: int) -> list[Tensor]:
    """Move every weight up or down by one epsilon of its dtype. Return the previous weights."""
    generator, before = torch.Generator().manual_seed(seed), []
    for parameter in model.parameters():
        before.append(parameter.data.clone())
        signs = 2.0 * torch.randint(2, parameter.shape, generator=generator) - 1.0
        step = torch.finfo(parameter.dtype).eps * signs.to(parameter.device)
        parameter.data.copy_((parameter.data.double() * (1.0 + step)).to(parameter.dtype))
    return before


def _largest(found: Sequence[Tensor], expected: Sequence[Tensor]) -> tuple[float, int, int]:
    """Return the largest difference between log-probs, with its sample and response token."""
    worst = (0.0, 0, 0)
    for index, (a, b) in enumerate(zip(found, expected, strict=True)):
        if not b.numel():
            continue
        difference = (a.double() - b.double()).abs().nan_to_num(math.inf, math.inf)
        place = int(difference.argmax())
        worst = max(worst, (float(difference[place]), index, place))
    return worst


def _with_units(
    expected: Expected,
    moved: Sequence[Expected],
    options: CheckOptions,
    weights: Mapping[str, Tensor],
    eps: float,
    found: OwnCheck,
) -> tuple[Expected, Expected]:
    """Add the units to the expected gradients, and compute the expected update and its units."""
    norm = expected.gradient_norm()
    clip = _clip(expected, options)
    updates = [_update(each, options) for each in (expected, *moved)]
    units, update_units, coarse, proven = {}, {}, {}, set()
    for name, gradient in expected.gradients.items():
        own = float(gradient.norm())
        moves = [float((other.gradients[name] - gradient).norm()) for other in moved]
        unit = max(*moves, 0.1 * eps * own, 1e-3 * eps * norm)
        units[name] = narrowed(unit, own)
        moves = [float((other[name] - updates[0][name]).norm()) for other in updates[1:]]
        # Adam's first step is each element's sign, which rounding flips near 0.
        share = clip * unit / math.sqrt(gradient.numel())
        turned = (share / ((clip * gradient).abs() + ADAM_EPSILON)).clamp(max=2.0)
        rounding = eps * float(weights[name].double().norm())
        update_units[name] = max(*moves, options.lr * float(turned.norm()), rounding)
        # A gradient that is zero except for rounding proves nothing.
        if own > 2 * unit and FEWEST_STEPS * unit >= (FAR - 1.0) * own:
            coarse[name] = unit / own
        elif own > 2 * unit:
            proven.add(kind_of(name))
    found.unproven = tuple(name for name in coarse if kind_of(name) in proven)
    coarse = {name: each for name, each in coarse.items() if kind_of(name) not in proven}
    worst = max(coarse, key=lambda name: coarse[name], default="")
    remedy = "use --dtype fp32" if options.dtype == "bf16" else "build fewer layers"
    found.rows.append(
        _row(
            options,
            "noise",
            max((FEWEST_STEPS * each / (FAR - 1.0) for each in coarse.values()), default=0.0),
            f"not provable in {options.dtype}: rounding moves the gradient of {worst} by "
            f"{coarse.get(worst, 0.0):.2g} of its norm, so that a factor of {FAR} would pass in "
            f"every layer ({len(coarse)} of {len(units)} parameters): {remedy}, or scale the "
            "weights",
            1.0,
        )
    )
    loss_unit = max(abs(each.loss - expected.loss) for each in moved)
    norm_unit = max(abs(each.gradient_norm() - norm) for each in moved)
    loss_unit, norm_unit = max(loss_unit, eps), max(norm_unit, eps * norm)
    expected = expected._replace(units=units, norm=norm, loss_unit=loss_unit, norm_unit=norm_unit)
    return expected, expected._replace(gradients=updates[0], units=update_units)


def kind_of(name: str) -> str:
    """Return a parameter's name without layer and expert numbers."""
    return re.sub(r"(?<=[.\[,])\d+(?=[.\],])", "*", name)


def narrowed(unit: float, norm: float) -> float:
    """Reduce a gradient's unit so that `STEPS` units do not hide a factor of `FAR`, but at most to
    `FEWEST_STEPS / STEPS` of the measured unit.
    """
    room = 0.8 * (FAR - 1.0) * norm / STEPS  # rounding may hide a part of the fault too
    return unit if norm <= 2 * unit else min(unit, max(room, FEWEST_STEPS / STEPS * unit))


def _clip(expected: Expected, options: CheckOptions) -> float:
    return min(1.0, options.clip_grad / (expected.gradient_norm() + 1e-6))


def _update(expected: Expected, options: CheckOptions) -> dict[str, Tensor]:
    """Compute Adam's first step after clipping, in float64."""
    clip = _clip(expected, options)
    clipped = {name: clip * gradient for name, gradient in expected.gradients.items()}
    return {name: -options.lr * g / (g.abs() + ADAM_EPSILON) for name, g in clipped.items()}


def _packed_rows(
    options: CheckOptions,
    whole: WholeModel,
    samples: Sequence[Sample],
    log_probs: Sequence[Tensor],
    unit: float,
) -> Iterator[CheckRow]:
    """Yield the rows that compare packed with single samples, at sizes 1."""
    for what, step in (("pack", 1), ("pack reversed", -1)):
        worst = (0.0, 0, 0)
        for start in range(
            dist.get_rank() * PACK_SIZE, len(samples), dist.get_world_size() * PACK_SIZE
        ):
            packed = range(start, min(start + PACK_SIZE, len(samples)))[::step]
            scored = whole.packed_log_probs([samples[index] for index in packed])
            error, place, token = _largest(scored, [log_probs[index] for index in packed])
            worst = max(worst, (error, packed[place], token))
        error, index, token = max(gather(worst, dist.group.WORLD))
        words = (
            f"a leak between packed samples: the log-prob of token {token} of "
            f"{samples[index].name} moves by {error:.2g} when other samples share its pack, "
            "without any sharding. Attention, a convolution or a running state ignores cu_seqlens "
            "of packed_seq_params"
        )
        yield _row(options, what, error / unit, words)


# The sharded model


def _run_sharded(options: CheckOptions, provider: Provider, whole: _Whole, found: OwnCheck) -> None:
    """Run the sharded model in both loss modes and compare it with the unsharded one."""

    def copy_weights(model: Any) -> None:
        for piece, parameter in placed(model):
            parameter.copy_(piece.cut(whole.weights[piece.name]))

    for per_token in (False,) if options.average_in_collective else (False, True):
        run = Run(MODEL, Case("gradient"), CASE_AGGREGATION, per_token)
        chunks = wrap_chunks(
            options,
            _build(options, provider, sharded=True, per_token=per_token, prepare=copy_weights),
        )
        if not per_token:
            found.rows.append(_log_prob_row(options, chunks, whole))
        found.rows.append(_gradient_row(options, chunks, whole, run))
        if not per_token:
            fused = run._replace(case=Case("fused head"))
            try:
                found.rows.append(
                    _gradient_row(replace(options, fused_lm_head=True), chunks, whole, fused)
                )
            except NotImplementedError as error:
                found.notes.append(f"the fused output layer is not checked: {error}")
            found.rows += _update_rows(options, chunks, whole, run)


def _gradient_row(options: CheckOptions, chunks: list[Any], whole: _Whole, run: Run) -> CheckRow:
    buffers = [(each, each.clone()) for chunk in chunks for each in unwrapped(chunk).buffers()]
    metrics = train_step(chunks, options, whole.expected.samples, run)
    for buffer, values in buffers:
        buffer.copy_(values)
    row = compare(
        gradient_parts(chunks, whole.expected.gradients),
        whole.expected._replace(norm=None),
        options,
        model=MODEL,
        aggregation=run.aggregation,
        calculate_per_token_loss=run.per_token,
        loss=metrics["loss"],
        checksum=metrics[CHECKSUM],
        what=run.case.name,
    )
    return _with_culprit(row, whole.trace, "gradient")


def _with_culprit(row: CheckRow, trace: Mapping[str, float], of: str) -> CheckRow:
    """Name the wrong parameter nearest to the output, because errors travel backwards."""
    order = {name: place for place, name in enumerate(trace)}

    def place(name: str) -> int:
        parts = name.split(".")
        known = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
        return next((order[each] for each in known if each in order), -1)

    if not row.faults:
        return row
    fault = max(row.faults, key=lambda fault: place(fault.name))
    rest = f" ({len(row.faults)} of {row.num_parameters} are wrong)" if len(row.faults) > 1 else ""
    return replace(row, words=f"the {of} of {fault.name}: {fault.kind}{rest}", ratio=fault.ratio)


def _log_prob_row(options: CheckOptions, chunks: list[Any], whole: _Whole) -> CheckRow:
    """Compare every response token's log-prob, and name the first module that differs."""
    groups = ParallelGroups.from_parallel_state()
    samples = [
        replace(sample, loss_mask=torch.ones_like(sample.loss_mask))
        for sample in whole.expected.samples
    ]
    mine = range(groups.data_rank, len(samples), groups.data_size)
    config = replace(config_of(CASE_AGGREGATION, options), allow_varying_log_probs=True)
    scored = compute_log_probs(
        chunks,
        [samples[index] for index in mine],
        config,
        max_tokens_per_microbatch=2 * options.longest,
    ).log_probs
    error, place, token = _largest(scored, [whole.log_probs[index] for index in mine])
    error, index, token = max(gather((error, mine[place], token), dist.group.WORLD))
    words = ""
    if error > STEPS * whole.log_prob_unit:
        first = _first_difference(options, chunks, whole.trace, samples[0])
        words = f"log-probs differ by up to {error:.2g} (token {token} of {samples[index].name}): "
        words += first
    return _row(options, "log-probs", error / whole.log_prob_unit, words)


def _update_rows(
    options: CheckOptions, chunks: list[Any], whole: _Whole, run: Run
) -> Iterator[CheckRow]:
    """Yield the rows of an optimizer step: updates and frozen parameters."""
    train_step(chunks, options, whole.expected.samples, run)
    parts = [part for chunk in chunks for part in placed(unwrapped(chunk))]
    before = [parameter.detach().double() for _, parameter in parts]
    is_bf16 = options.dtype == "bf16"
    config = OptimizerConfig(
        optimizer="adam",
        lr=options.lr,
        adam_eps=ADAM_EPSILON,
        weight_decay=0.0,
        clip_grad=options.clip_grad,
        bf16=is_bf16,
        params_dtype=torch.bfloat16 if is_bf16 else torch.float32,
        use_distributed_optimizer=options.use_distributed_optimizer,
    )
    _, norm, _ = get_megatron_optimizer(config, chunks).step()
    moves = [
        (piece, after.detach().double() - start)
        for (piece, after), start in zip(parts, before, strict=True)
    ]
    trained = whole.update.gradients
    row = compare(
        [(piece, move) for piece, move in moves if piece.name in trained],
        whole.update,
        options,
        model=MODEL,
        aggregation=run.aggregation,
        calculate_per_token_loss=run.per_token,
        loss=whole.update.loss,
        checksum=1.0,
        what="update",
        gradient_norm=float(norm),
    )
    yield _with_culprit(row, whole.trace, "update")
    moved = [piece.name for piece, move in moves if piece.name not in trained and bool(move.any())]
    named = [
        name
        for chunk in chunks
        for name, parameter in unwrapped(chunk).named_parameters()
        if not parameter.requires_grad and parameter.grad is not None
    ]
    wrong = sorted({name for names in gather(moved + named, dist.group.WORLD) for name in names})
    if len(trained) < len(whole.weights):
        words = f"frozen parameters have a gradient or moved: {', '.join(wrong[:3])}"
        yield _row(options, "frozen", float(len(wrong)), words, 0.0)


# The first module that differs


def _trace_whole(whole: WholeModel, module: Any, sample: Sample) -> dict[str, float]:
    """Return each module's sum of squared outputs for one sample, in forward order."""
    try:
        with torch.no_grad():
            return _traced([module], lambda: whole.packed_log_probs([sample]))
    except CannotCheckError:
        raise
    except Exception as error:
        raise CannotCheckError(
            f"the model does not run a packed sequence ({type(error).__name__}: {error}). Its "
            "forward takes input_ids, position_ids, attention_mask and packed_seq_params, and its "
            "attention packs: Transformer Engine's, or megatron_pg.megatron.torch_block_spec on a "
            "CPU"
        ) from error


def _traced(chunks: Sequence[Any], run: Callable[[], Any]) -> dict[str, float]:
    sums: dict[str, float] = {}
    handles = []
    for chunk in chunks:
        model = unwrapped(chunk)
        rename = names_in_whole(model)
        for name, module in model.named_modules():
            if name:
                handles.append(module.register_forward_hook(_note(sums, rename(name))))
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return sums


def _note(sums: dict[str, float], name: str) -> Callable[..., None]:
    def note(module: Any, inputs: Any, output: Any) -> None:
        first = output[0] if isinstance(output, (tuple, list)) and output else output
        if name not in sums and isinstance(first, Tensor) and first.is_floating_point():
            sums[name] = float(first.detach().double().square().sum())

    return note


def _first_difference(
    options: CheckOptions, chunks: list[Any], expected: Mapping[str, float], sample: Sample
) -> str:
    """Name the first module in forward order whose output differs for one sample.

    The sums of squares are added over ranks. The total is the unsharded one if ranks divide tokens
    or columns, and a parallel size times it if they hold copies.
    """
    groups = ParallelGroups.from_parallel_state()
    multiple = groups.context_size * groups.tensor_size if options.sequence_parallel else 1
    batch = pack(
        [sample], cp_rank=groups.context_rank, cp_size=groups.context_size, pad_to_multiple=multiple
    ).to(options.device)
    count = 1 if len(chunks) == 1 else options.pipeline_model_parallel_size

    def head(micro_batch: Any) -> MicroBatchHead:
        return MicroBatchHead(
            lambda output: (output.new_zeros(()), {}), model_inputs(micro_batch), {}
        )

    with torch.no_grad():
        mine = _traced(
            chunks, lambda: run_micro_batches(head, [batch] * count, chunks, forward_only=True)
        )
    total: dict[str, float] = {}
    for data_rank, sums in gather((groups.data_rank, mine), dist.group.WORLD):
        for name, value in sums.items() if data_rank == 0 else ():
            total[name] = total.get(name, 0.0) + value
    slack = 3e-2 if options.dtype == "bf16" else 1e-3
    for name, value in expected.items():
        if name not in total or ".experts." in name or not value:
            continue
        ratio = total[name] / value
        copies = {1, groups.tensor_size, groups.context_size}
        if all(abs(ratio / size - 1.0) > slack for size in copies):
            return f"the first module whose output differs is {name}"
    return "no module's output has a different norm: look at positions and the order of tokens"
