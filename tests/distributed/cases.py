"""The matrix: every sharding, loss mode and gradient reduction, with the steps each one runs."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import torch

from megatron_pg.config.versions import derives_multi_token_labels, has_hybrid_model

from .models import ModelOptions, Sharding
from .steps import AGGREGATIONS, CUTS, MATRIX_SHAPES, Run, ValueRun

DENSE = ModelOptions()
TIED = ModelOptions(tied_embeddings=True)
EXPERTS = ModelOptions(mixture_of_experts=True)
CRITIC = ModelOptions(value_head=True)
CONTIGUOUS = ModelOptions(cp_partition_mode="contiguous")
AHEAD = ModelOptions(mtp_num_layers=2)
HYBRID = ModelOptions(hybrid=True)

DENSE_SHARDINGS = [
    Sharding(),
    Sharding(tensor=2),
    Sharding(tensor=2, sequence_parallel=True),
    Sharding(pipeline=2),
    Sharding(pipeline=2, virtual_pipeline=2),
    Sharding(context=2),
    Sharding(data=2),
    Sharding(context=4),
    Sharding(pipeline=4),
    Sharding(data=3),
    Sharding(tensor=2, context=2),
    Sharding(tensor=2, sequence_parallel=True, context=2),
    Sharding(tensor=2, data=2),
    Sharding(tensor=2, sequence_parallel=True, pipeline=2),
    Sharding(pipeline=2, context=2),
    Sharding(pipeline=2, virtual_pipeline=2, context=2),
    Sharding(pipeline=2, data=2),
    Sharding(context=2, data=2),
    Sharding(context=2, data=3),
    Sharding(context=4, data=2),
    Sharding(tensor=2, context=4),
    Sharding(tensor=2, pipeline=2, context=2),
    Sharding(tensor=2, sequence_parallel=True, pipeline=2, virtual_pipeline=2, context=2),
    Sharding(tensor=2, sequence_parallel=True, context=2, data=2),
    Sharding(pipeline=2, context=2, data=2),
    Sharding(pipeline=2, virtual_pipeline=2, context=2, data=2),
    Sharding(pipeline=4, data=2),
    Sharding(tensor=2, pipeline=2, data=2),
]

TIED_SHARDINGS = [
    Sharding(pipeline=2),
    Sharding(pipeline=2, virtual_pipeline=2, context=2),
    Sharding(tensor=2, sequence_parallel=True, pipeline=2, context=2),
]

EXPERT_SHARDINGS = [
    Sharding(),
    Sharding(data=2),
    Sharding(context=2),
    Sharding(expert=2, data=2),
    Sharding(expert=2, context=2),
    Sharding(expert=2, tensor=2, sequence_parallel=True),
    Sharding(expert=2, pipeline=2, data=2),
    Sharding(expert=2, context=2, data=2),
    Sharding(expert=4, context=2, data=2),
    Sharding(expert=4, context=4, data=2),
    Sharding(expert=2, tensor=2, sequence_parallel=True, context=2, data=2),
    Sharding(expert=2, pipeline=2, virtual_pipeline=2, context=2, data=2),
]

CRITIC_SHARDINGS = [
    Sharding(),
    Sharding(tensor=2),
    Sharding(tensor=2, sequence_parallel=True),
    Sharding(context=2, data=2),
    Sharding(context=4, data=2),
    Sharding(pipeline=2, data=2),
    Sharding(tensor=2, sequence_parallel=True, context=2, data=2),
    Sharding(tensor=2, sequence_parallel=True, pipeline=2, virtual_pipeline=2, context=2),
]

CONTIGUOUS_SHARDINGS = [
    Sharding(context=2),
    Sharding(context=4, data=2),
    Sharding(context=8),
    Sharding(tensor=2, sequence_parallel=True, context=2, data=2),
    Sharding(pipeline=2, virtual_pipeline=2, context=2, data=2),
]

AHEAD_SHARDINGS = [
    Sharding(),
    Sharding(context=2),
    Sharding(context=4, data=2),
    Sharding(tensor=2, sequence_parallel=True, context=2, data=2),
    Sharding(pipeline=2, context=2, data=2),
    Sharding(pipeline=2, virtual_pipeline=2, context=2, data=2),
]
"""Of megatron-core 0.19 and later."""

HYBRID_SHARDINGS = [
    Sharding(),
    Sharding(tensor=2, sequence_parallel=True),
    Sharding(context=2),
    Sharding(context=2, data=2),
    Sharding(tensor=2, sequence_parallel=True, context=2),
]
"""Where there is a HybridModel."""

KEPT_SHARDINGS = [
    Sharding(),
    Sharding(tensor=2),
    Sharding(context=2),
    Sharding(context=4),
    Sharding(tensor=2, sequence_parallel=True, context=2, data=2),
    Sharding(tensor=2, sequence_parallel=True, pipeline=2, virtual_pipeline=2, context=2),
]


@dataclass(frozen=True)
class Case:
    """A sharded model and the steps that are run on it."""

    sharding: Sharding
    options: ModelOptions
    runs: tuple[Run, ...]

    @property
    def configuration(self) -> str:
        """Model and sharding."""
        kinds = {EXPERTS: "MoE ", TIED: "tied ", CRITIC: "critic ", CONTIGUOUS: "contiguous "}
        kinds |= {AHEAD: "MTP ", HYBRID: "HybridModel "}
        sets = "kept sets " if self.runs[0].kept else ""
        model = replace(self.options.unsharded, num_layers=DENSE.num_layers)
        return f"{sets}{kinds.get(model, '')}{self.sharding}"

    @property
    def mode(self) -> str:
        """Loss mode and gradient reduction."""
        parts = ["per token" if self.options.calculate_per_token_loss else "per micro-batch"]
        if self.options.average_in_collective:
            parts.append("average in collective")
        if self.options.distributed_optimizer:
            parts.append("distributed optimizer")
        if self.options.overlap_grad_reduce:
            parts.append("overlapped")
        return ", ".join(parts)

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
    """Every aggregation with every step shape, cut in every legal way; every second one with a KL and an entropy term.

    Those that have the terms at an even `place` lack them at an odd one. With short samples the terms follow the loss.
    """
    every = itertools.product(AGGREGATIONS, MATRIX_SHAPES, legal_cuts(sharding))
    return tuple(
        Run(aggregation, shape, cut, bool((place + sum(numbers)) % 2), TERMS_BY[shape])
        for (aggregation, shape, cut), numbers in zip(
            every,
            itertools.product(range(4), range(2), range(len(legal_cuts(sharding)))),
            strict=True,
        )
    )


def all_cases() -> list[Case]:
    """The whole matrix, each case in float32 and in float64, of models with four layers."""
    groups = [
        (DENSE, DENSE_SHARDINGS),
        (TIED, TIED_SHARDINGS),
        (EXPERTS, EXPERT_SHARDINGS),
        (CRITIC, CRITIC_SHARDINGS),
        (CONTIGUOUS, CONTIGUOUS_SHARDINGS),
        (AHEAD, AHEAD_SHARDINGS * derives_multi_token_labels()),
        (HYBRID, HYBRID_SHARDINGS * has_hybrid_model()),
    ]
    of_sets = [
        with_sets(
            Case(sharding, replace(mode, dtype=dtype, num_layers=4), runs(sharding, place=place))
        )
        for sharding in KEPT_SHARDINGS
        for mode in modes(DENSE, sharding)[:2]
        for place, dtype in enumerate((torch.float32, torch.float64))
    ]
    return of_sets + [
        Case(
            sharding,
            replace(mode, dtype=dtype, num_layers=4),
            of_model(mode, runs(sharding, place=place)),
        )
        for options, shardings in groups
        for sharding in shardings
        for mode in modes(options, sharding)
        for place, dtype in enumerate((torch.float32, torch.float64))
        # Megatron computes its losses ahead in float32, whatever the model is in.
        if options is not AHEAD or dtype == torch.float32
    ]


def with_sets(case: Case) -> Case:
    """The same steps over the sets that the tokens were sampled from."""
    return replace(case, runs=tuple(replace(run, kept=True) for run in case.runs))


def of_model(options: ModelOptions, steps: tuple[Run, ...]) -> tuple[Run, ...]:
    """The same steps in the model's layout, and of a critic where the model is one."""
    if not options.value_head:
        return tuple(replace(run, cp_partition_mode=options.cp_partition_mode) for run in steps)
    return tuple(ValueRun(run.aggregation, run.shape, run.cut) for run in steps)


def sample_of_runs(sharding: Sharding, place: int) -> tuple[Run, ...]:
    """One run of each aggregation; shape, cut and added terms go round with `place`."""
    cuts = legal_cuts(sharding)
    return tuple(
        Run(
            aggregation,
            MATRIX_SHAPES[(place + index) % len(MATRIX_SHAPES)],
            cuts[(place + index) % len(cuts)],
            bool((place + index // 2) % 2),
            TERMS_BY[MATRIX_SHAPES[(place + index) % len(MATRIX_SHAPES)]],
        )
        for index, aggregation in enumerate(AGGREGATIONS)
    )


def representative_cases() -> list[Case]:
    """Each kind of parallelism and reduction at least once, every aggregation in each, with as few layers as that takes."""
    chosen: list[tuple[Sharding, ModelOptions]] = [
        (Sharding(), DENSE),
        (Sharding(tensor=2), DENSE),
        (Sharding(pipeline=2, virtual_pipeline=2), replace(DENSE, calculate_per_token_loss=True)),
        (Sharding(context=2, data=2), DENSE),
        (Sharding(context=2, data=2), replace(DENSE, calculate_per_token_loss=True)),
        (Sharding(context=2, data=2), replace(DENSE, average_in_collective=True)),
        (Sharding(context=2, data=2), replace(DENSE, distributed_optimizer=True)),
        (Sharding(context=4), replace(DENSE, calculate_per_token_loss=True)),
        (Sharding(pipeline=2, data=2), replace(DENSE, distributed_optimizer=True)),
        (Sharding(pipeline=2, context=2), TIED),
        (Sharding(tensor=2, sequence_parallel=True, context=2), DENSE),
        (Sharding(expert=2, context=2, data=2), EXPERTS),
        (Sharding(expert=2, data=2), replace(EXPERTS, calculate_per_token_loss=True)),
        (
            Sharding(tensor=2, sequence_parallel=True, pipeline=2, virtual_pipeline=2, context=2),
            DENSE,
        ),
        (Sharding(context=2, data=2), CRITIC),
        (Sharding(context=4), replace(CRITIC, calculate_per_token_loss=True)),
        (Sharding(tensor=2), CRITIC),
        (
            Sharding(tensor=2, sequence_parallel=True, context=2),
            replace(CRITIC, calculate_per_token_loss=True),
        ),
        (Sharding(pipeline=2, virtual_pipeline=2, context=2), CRITIC),
        (Sharding(data=2), replace(CRITIC, calculate_per_token_loss=True)),
        (Sharding(context=4), CONTIGUOUS),
        (
            Sharding(tensor=2, sequence_parallel=True, context=2),
            replace(CONTIGUOUS, calculate_per_token_loss=True),
        ),
        (Sharding(pipeline=2, virtual_pipeline=2, context=2), CONTIGUOUS),
    ]
    if derives_multi_token_labels():
        shardings = Sharding(context=2, data=2), Sharding(pipeline=2, context=2)
        chosen += [(sharding, AHEAD) for sharding in shardings]
        chosen.append((Sharding(tensor=2, sequence_parallel=True, context=2), AHEAD))
    sharding = Sharding(tensor=2, sequence_parallel=True, context=2)
    of_sets = with_sets(Case(sharding, DENSE, sample_of_runs(sharding, 0)))
    return [of_sets] + [
        # In float32 and float64 in turn.
        Case(
            sharding,
            replace(
                options,
                dtype=torch.float64 if place % 2 and options != AHEAD else torch.float32,
                num_layers=max(2, sharding.num_chunks),
            ),
            of_model(options, sample_of_runs(sharding, place)),
        )
        for place, (sharding, options) in enumerate(chosen)
    ]
