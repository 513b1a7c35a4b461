"""The reference: the same Megatron model in one process, each sample alone, and the oracle's loss.

All of it in float64, so that what is measured is the error of the float32 run alone.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler
from torch import Tensor

from megatron_pg.megatron.groups import unwrapped
from tests import critic_oracle, oracle
from tests.oracle import PlainSample

from .launch import run_ranks
from .models import ModelOptions, Sharding, build_model, gather_gradients, initialize_groups
from .one_step import Outcome
from .steps import TOPK, VALUE_CLIP, VOCAB_SIZE, Run, ValueRun

MTP_SCALING_FACTOR = 0.1
"""Megatron's default."""
Result = tuple[Tensor, dict[str, float]]
"""A loss and the metrics that are expected with it."""
Outputs = tuple[list[Tensor], list[list[Tensor]], dict[str, float]]
"""By sample the logits, and those of multi-token prediction by depth; `router_agreement` where
experts are given."""


def references_of(
    models: Iterable[ModelOptions], runs: list[Run]
) -> dict[ModelOptions, list[Outcome]]:
    """The outcome of each run, whatever its cut, for each model by its `unsharded` options; in a
    launch of its own.
    """
    unsharded = {options.unsharded for options in models}
    return {options: run_ranks(reference_steps, 1, options, runs)[0] for options in unsharded}


def reference_steps(options: ModelOptions, runs: list[Run]) -> list[Outcome]:
    """The outcome of each run, whatever its cut; call it in a world of one process."""
    outputs: dict[Any, Outputs] = {}

    def loss_of(model: Any, run: Any) -> Result:
        if isinstance(run, ValueRun):
            return value_loss_alone(model, run)
        # One forward serves every loss of the same tokens, but where it has Megatron's loss of
        # tokens ahead, whose backward overwrites what it has saved.
        tokens = (run.replay_layers, *(tuple(sample.tokens) for sample in run.samples))
        if tokens not in outputs or options.mtp_num_layers is not None:
            outputs[tokens] = outputs_alone(model, options, run.samples)
        logits, ahead, agreement = outputs[tokens]
        result = oracle.policy_loss(run.samples, logits, run.objective)
        metrics = expected_metrics(run, result) | agreement
        return result.loss + loss_ahead(run.samples, ahead), metrics

    return outcomes_alone(options, runs, loss_of)


def outcomes_alone(
    options: ModelOptions, runs: Sequence[Run], loss_of: Callable[[Any, Any], Result]
) -> list[Outcome]:
    """The outcome of each run by a function of the unsharded model and the run; call it in a world
    of one process.
    """
    initialize_groups(Sharding())
    (model,) = build_model(Sharding(), replace(options, dtype=torch.float64))
    outcomes = []
    for run in runs:
        model.zero_grad_buffer()
        loss, metrics = loss_of(model, run)
        with model.no_sync():
            loss.backward(retain_graph=True)
        outcomes.append(Outcome(gather_gradients([model]) or {}, metrics))
    return outcomes


def outputs_alone(model: Any, options: ModelOptions, samples: list[PlainSample]) -> Outputs:
    """Run each sample by itself. The routers of the layers that a sample gives experts for are
    replaced by plain loops.

    A token's experts are the given ones, any other's the largest logits; probabilities are the
    softmax of their logits.
    """
    logits, counts = [], [0, 0]
    rows: list[list[list[int]]] = []  # by layer those of the sample that runs
    routers = [m for m in unwrapped(model).decoder.modules() if hasattr(m, "apply_z_loss")]
    layers = len(samples[0].routed_experts or ())
    given = options.layers_of_experts if layers == options.num_layers else range(layers)

    def routing(layer: int, logits: Tensor, *_: Any, **__: Any) -> Any:
        logits = logits.flatten(0, 1)
        probs = torch.zeros_like(logits)
        for token, row in enumerate(rows[layer]):
            own = logits[token].topk(TOPK).indices.tolist()
            ids = own if row[0] < 0 else row
            if row[0] >= 0:
                counts[0] += len(set(own) & set(row))
                counts[1] += TOPK
            # Megatron's routers round to float32.
            probs[token, ids] = logits[token, ids].softmax(0, dtype=torch.float32).double()
        return probs, probs > 0

    if layers:
        for layer, router in zip(given, routers, strict=True):
            router.routing = functools.partial(routing, layer)
    with outputs_ahead(model, options.mtp_num_layers) as ahead:
        for sample in samples:
            rows[:] = sample.routed_experts or []
            logits.append(logits_alone(model, sample))
    for router in routers if layers else ():
        del router.routing
    return logits, ahead, {"router_agreement": counts[0] / counts[1]} if counts[1] else {}


@contextlib.contextmanager
def outputs_ahead(model: Any, depths: int | None) -> Iterator[list[list[Tensor]]]:
    """What the output layer makes of multi-token prediction: of each call of the model
    [total_length, vocab] by depth.

    Megatron's own loss of them is taken out of the graph.
    """
    found: list[list[Tensor]] = []
    if depths is None:
        yield found
        return
    calls: list[Tensor] = []

    def keep(layer: torch.nn.Module, inputs: Any, output: Any) -> None:
        calls.append(output[0][:, 0])
        if len(calls) == depths + 1:  # the last is the model's own output
            found.append(calls[:-1])
            calls.clear()

    hook = unwrapped(model).output_layer.register_forward_hook(keep)
    MTPLossAutoScaler.set_loss_scale(torch.zeros(1))
    yield found
    hook.remove()


def loss_ahead(samples: list[PlainSample], ahead: list[list[Tensor]]) -> Tensor:
    """0-d: the mean over the step's active tokens, and over depths, of the cross-entropy of a token
    so far ahead.
    """
    total = torch.zeros((), dtype=torch.float64)
    for sample, depths in zip(samples, ahead, strict=False):
        for depth, logits in enumerate(depths, start=1):
            for position in range(len(sample.tokens) - 1 - depth):
                place = position + 1 + depth - sample.prompt_length
                if place >= 0 and sample.loss_mask[place]:
                    target = sample.tokens[position + 1 + depth]
                    total = total - torch.log_softmax(logits[position], 0)[target] / len(depths)
    return MTP_SCALING_FACTOR * total / max(sum(sum(sample.loss_mask) for sample in samples), 1)


def value_loss_alone(model: torch.nn.Module, run: ValueRun) -> tuple[Tensor, dict[str, float]]:
    values = [
        values_alone(model, sample)[sample.prompt_length - 1 : len(sample.tokens) - 1]
        for sample in run.samples
    ]
    divisor = run.objective.loss_aggregation_divisor
    return critic_oracle.value_loss(run.samples, values, run.aggregation, divisor, VALUE_CLIP)


def reference_log_probs(run: Run) -> list[list[float]]:
    """Of every response token of every sample, as a rollout engine without any parallelism
    scores it.
    """
    initialize_groups(Sharding())
    (model,) = build_model(Sharding(), ModelOptions(dtype=torch.float64))
    active = [replace(sample, loss_mask=[1] * sample.response_length) for sample in run.samples]
    with torch.no_grad():
        logits = [logits_alone(model, sample) for sample in active]
    result = oracle.policy_loss(active, logits, run.objective)
    return [log_probs.tolist() for log_probs in result.log_probs]


def thd(boundaries: list[int]) -> PackedSeqParams:
    """Megatron's parameters of sequences that lie end to end between these boundaries."""
    ends = torch.tensor(boundaries, dtype=torch.int32)
    longest = int(ends.diff().max())
    return PackedSeqParams("thd", ends, ends, max_seqlen_q=longest, max_seqlen_kv=longest)


def logits_alone(model: torch.nn.Module, sample: PlainSample) -> Tensor:
    """[total_length, vocab] float64 logits of one sample, neither packed nor padded."""
    logits = _output_alone(model, sample)
    assert logits.shape == (len(sample.tokens), VOCAB_SIZE) and logits.dtype == torch.float64
    return logits


def logits_of_pack(model: torch.nn.Module, samples: list[PlainSample]) -> list[Tensor]:
    """The same of samples in one pack without padding; of no samples a pack of one token runs, as a
    micro-batch may be empty.
    """
    lengths = [len(sample.tokens) for sample in samples] or [1]
    tokens = torch.tensor([[token for sample in samples for token in sample.tokens] or [0]])
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    boundaries = [0, *itertools.accumulate(lengths)]
    output = model(tokens, positions, None, packed_seq_params=thd(boundaries))[0]
    return list(output.split(lengths))[: len(samples)]


def values_alone(model: torch.nn.Module, sample: PlainSample) -> Tensor:
    """[total_length] float64: a critic's value after each token of one sample."""
    values = _output_alone(model, sample)
    assert values.shape == (len(sample.tokens), 1) and values.dtype == torch.float64
    return values[:, 0]


def _output_alone(model: torch.nn.Module, sample: PlainSample) -> Tensor:
    length = len(sample.tokens)
    tokens, positions = torch.tensor([sample.tokens]), torch.arange(length)[None]
    output: Tensor = model(tokens, positions, None, packed_seq_params=thd([0, length]))
    return output[0]


def expected_metrics(run: Run, result: oracle.PolicyLoss) -> dict[str, float]:
    """What the package must report, by its names."""
    expected = {
        "loss": result.loss.item(),
        "pg_loss": result.pg_loss.item(),
        "aggregation_checksum": 1.0,
    }
    if run.regularized:
        assert result.kl_loss is not None and result.entropy is not None
        expected["kl_loss"] = result.kl_loss.item()
    if run.kept:
        sizes = [torch.tensor(list(map(len, s.kept_tokens or []))).double() for s in run.samples]
        expected["kept_set_size"] = oracle.document_mean(run.samples, sizes)
        expected["kept_set_mass"] = oracle.document_mean(run.samples, result.kept_masses)
    lowest, highest = oracle.clip_range(run.objective)
    values = {
        "new_logprobs": result.log_probs,
        "clipped_ratio_fraction": [1.0 * ((r < lowest) | (r > highest)) for r in result.ratios],
        "ratio_new_old": result.ratios,
        "kl_new_old": [r - 1 - r.log() for r in result.ratios],
    }
    means = {name: oracle.document_mean(run.samples, each) for name, each in values.items()}
    return expected | means
