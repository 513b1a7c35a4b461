"""The matrix: every sharding, loss mode and gradient reduction, with the steps each one runs."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron_pg.config.versions import derives_multi_token_labels, has_hybrid_model

from .models import ModelOptions, Sharding
from .steps import AGGREGATIONS, CUTS, MATRIX_SHAPES, Run, ValueRun

DENSE = ModelOptions()
TIED = ModelOptions(tied_embeddings=True)
EXPERTS = ModelOptions(mixture_of_experts=True)
CRITIC = ModelOptions(value_head=True)
AHEAD = ModelOptions(mtp_num_layers=2)
HYBRID = ModelOptions(hybrid=True)
BALANCED = ModelOptions(
    mixture_of_experts=True,
    balancing=("aux_loss", "global_aux_loss"),
    moe_aux_loss_coeff=(0.2, 0.4),
    moe_z_loss_coeff=0.25,
)
KINDS = {
    **{EXPERTS: "MoE ", TIED: "tied ", CRITIC: "critic "},
    **{AHEAD: "MTP ", HYBRID: "HybridModel "},
}

SHARDINGS: list[tuple[ModelOptions, str]] = [
    (DENSE, "one process, TP2, TP2+SP, PP2, PP2 VPP2, CP2, DP2, CP4, PP4, DP3, TP2 CP2"),
    (DENSE, "TP2+SP CP2, TP2 DP2, TP2+SP PP2, PP2 CP2, PP2 VPP2 CP2, PP2 DP2, CP2 DP2, CP2 DP3"),
    (DENSE, "CP4 DP2, TP2 CP4, TP2 PP2 CP2, TP2+SP PP2 VPP2 CP2, TP2+SP CP2 DP2, PP2 CP2 DP2"),
    (DENSE, "PP2 VPP2 CP2 DP2, PP4 DP2, TP2 PP2 DP2"),
    (TIED, "PP2, PP2 VPP2 CP2, TP2+SP PP2 CP2"),
    (EXPERTS, "one process, DP2, CP2, EP2 DP2, CP2 EP2, TP2+SP EP2, PP2 EP2 DP2, CP2 EP2 DP2"),
    (EXPERTS, "CP2 EP4 DP2, CP4 EP4 DP2, TP2+SP CP2 EP2 DP2, PP2 VPP2 CP2 EP2 DP2"),
    (CRITIC, "one process, TP2, TP2+SP, CP2 DP2, CP4 DP2, PP2 DP2, TP2+SP CP2 DP2"),
    (CRITIC, "TP2+SP PP2 VPP2 CP2"),
]
"""Of each model the names of its shardings."""
if derives_multi_token_labels():
    ahead = "one process, CP2, CP4 DP2, TP2+SP CP2 DP2, PP2 CP2 DP2, PP2 VPP2 CP2 DP2"
    SHARDINGS.append((AHEAD, ahead))
if has_hybrid_model():
    SHARDINGS.append((HYBRID, "one process, TP2+SP, CP2, CP2 DP2, TP2+SP CP2"))
KEPT_SHARDINGS = "one process, TP2, CP2, CP4, TP2+SP CP2 DP2, TP2+SP PP2 VPP2 CP2"
ROUTED_SHARDINGS = "one process, DP2, CP2, CP4, TP2+SP ETP2, CP2 EP2 DP2, PP2 VPP2 CP2"
"""Of routing replay, and of losses of routers beside padding."""


@dataclass(frozen=True)
class Case:
    """A sharded model and the steps that are run on it."""

    sharding: Sharding
    options: ModelOptions
    runs: tuple[Run, ...]

    @property
    def model(self) -> str:
        """The kind of model and data, empty for a dense one."""
        model = replace(self.options.unsharded, num_layers=DENSE.num_layers)
        sets = "kept sets " if self.runs[0].kept else ""
        sets += "replayed " if self.runs[0].replay_layers else ""
        sets += "balanced " if self.options.moe_aux_loss_coeff else ""
        return f"{sets}{KINDS.get(model, '')}"

    @property
    def configuration(self) -> str:
        return f"{self.model}{self.sharding}"

    def reference(self, run: Run) -> tuple[Any, ...]:
        """What a step's reference depends on: not on the cut, where routers have no loss of
        their own.
        """
        options, sharding = self.options, self.sharding
        if not options.moe_aux_loss_coeff:
            return options.unsharded, replace(run, cut="")
        multiple = sharding.pipeline if sharding.virtual_pipeline is not None else 1
        losses = ("balancing", "moe_aux_loss_coeff", "moe_z_loss_coeff", "calculate_per_token_loss")
        balanced = replace(options.unsharded, **{name: getattr(options, name) for name in losses})
        return balanced, run, sharding.data, multiple

    @property
    def mode(self) -> str:
        mode = "per token" if self.options.calculate_per_token_loss else "per micro-batch"
        parts = {
            "average in collective": self.options.average_in_collective,
            "distributed optimizer": self.options.distributed_optimizer,
            "overlapped": self.options.overlap_grad_reduce,
        }
        return ", ".join([mode, *(part for part, is_on in parts.items() if is_on)])

    def __str__(self) -> str:
        return f"{self.configuration}: {self.mode}, {self.precision}"

    @property
    def precision(self) -> str:
        """float32 or float64, of the sharded model; the reference is float64."""
        return str(self.options.dtype).removeprefix("torch.")


def modes(options: ModelOptions, sharding: Sharding) -> list[ModelOptions]:
    """Both loss modes; where gradients are reduced over several ranks, also every way to do it."""
    both = [options, replace(options, calculate_per_token_loss=True)]
    if options.mtp_num_layers is not None:
        return [options]  # the other mode is refused
    if sharding.data * sharding.context == 1:
        return both
    return both + [
        replace(options, average_in_collective=True),
        replace(options, distributed_optimizer=True),
        replace(options, distributed_optimizer=True, calculate_per_token_loss=True),
        replace(options, distributed_optimizer=True, average_in_collective=True),
        replace(options, overlap_grad_reduce=True),
    ]


def legal_cuts(sharding: Sharding) -> list[str]:
    """Ragged micro-batch counts need data parallelism, and experts that stay where they are.

    Experts are exchanged between data-parallel ranks in every micro-batch.
    """
    return [cut for cut in CUTS if cut != "ragged" or (sharding.expert == 1 and sharding.data > 1)]


TERMS_BY = {"ragged": "sample_mean", "short": "loss"}
"""The aggregation of a KL and an entropy term, by the shape of the samples."""


def runs(sharding: Sharding, *, place: int) -> tuple[Run, ...]:
    """Every aggregation with every step shape, cut in every legal way; every second one with a KL
    and an entropy term.

    Those that have the terms at an even `place` lack them at an odd one. With short samples the
    terms follow the loss.
    """
    every = itertools.product(*map(enumerate, (AGGREGATIONS, MATRIX_SHAPES, legal_cuts(sharding))))
    return tuple(
        Run(aggregation, shape, cut, bool((place + a + s + c) % 2), TERMS_BY[shape])
        for (a, aggregation), (s, shape), (c, cut) in every
    )


def all_cases() -> list[Case]:
    """The whole matrix, each case in float32 and in float64, of models with four layers."""
    kept = [
        replace(case, runs=with_sets(case.runs))
        for sharding in map(Sharding.named, KEPT_SHARDINGS.split(", "))
        for mode in modes(DENSE, sharding)[:2]
        for case in both_precisions(sharding, mode)
    ]
    routed = [
        case
        for sharding in map(Sharding.named, ROUTED_SHARDINGS.split(", "))
        for place, mode in enumerate(modes(BALANCED, sharding)[:2])
        for case in (
            *map(with_experts, both_precisions(sharding, modes(EXPERTS, sharding)[place])),
            # Megatron computes its losses of routers in float32.
            balanced_case(sharding, replace(mode, num_layers=4), place),
        )
    ]
    return (
        kept
        + routed
        + [
            case
            for options, names in SHARDINGS
            for sharding in map(Sharding.named, names.split(", "))
            for mode in modes(options, sharding)
            for case in both_precisions(sharding, mode)
            # Megatron computes its losses ahead in float32, whatever the model is in.
            if options is not AHEAD or case.options.dtype == torch.float32
        ]
    )


def both_precisions(sharding: Sharding, mode: ModelOptions) -> Iterator[Case]:
    for place, dtype in enumerate((torch.float32, torch.float64)):
        options = replace(mode, dtype=dtype, num_layers=4)
        yield Case(sharding, options, of_model(mode, runs(sharding, place=place)))


def with_sets(steps: tuple[Run, ...]) -> tuple[Run, ...]:
    """The same steps over the sets that the tokens were sampled from."""
    return tuple(replace(run, kept=True) for run in steps)


def with_experts(case: Case) -> Case:
    """The same steps with the experts of every token."""
    layers = case.options.num_layers
    return replace(case, runs=tuple(replace(run, replay_layers=layers) for run in case.runs))


def balanced_case(sharding: Sharding, options: ModelOptions, place: int) -> Case:
    """Equal numbers of micro-batches, over which data-parallel ranks add up tokens."""
    runs = sample_of_runs(sharding, place)
    even = tuple(replace(run, cut="uniform") if run.cut == "ragged" else run for run in runs)
    return Case(sharding, replace(options, dtype=torch.float64), even)


def of_model(options: ModelOptions, steps: tuple[Run, ...]) -> tuple[Run, ...]:
    """The same steps, of a critic where the model is one."""
    if not options.value_head:
        return steps
    return tuple(ValueRun(run.aggregation, run.shape, run.cut) for run in steps)


def sample_of_runs(sharding: Sharding, place: int) -> tuple[Run, ...]:
    """One run of each aggregation; shape, cut and added terms go round with `place`."""
    steps = []
    for index, aggregation in enumerate(AGGREGATIONS):
        shape, cut = (
            names[(place + index) % len(names)] for names in (MATRIX_SHAPES, legal_cuts(sharding))
        )
        is_regularized = bool((place + index // 2) % 2)
        steps.append(Run(aggregation, shape, cut, is_regularized, TERMS_BY[shape]))
    return tuple(steps)
