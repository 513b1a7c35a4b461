"""What each tensor of the loss path is over data-, context- and tensor-parallel ranks: sharded, the
same, or a part of a sum.

`typed_ranks` has the meaning of the letters, and says where the proof ends. A rank's loss has to be
"P P I": Megatron adds gradients up over data- and context-parallel ranks, and tensor-parallel ranks
compute the same loss.
"""

import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

pytest.importorskip("spmd_types")

import spmd_types as spmd
import torch
import torch.distributed as dist
from spmd_types import P, S, SpmdTypeError, V
from torch import Tensor

from megatron_pg import PolicyLossConfig, pack, step_totals
from megatron_pg.head import rows_torch
from megatron_pg.head.vocabulary_shard import RowStatistics, VocabularyShard
from megatron_pg.loss import micro_batch
from megatron_pg.megatron import ParallelGroups, PolicyStep, policy_step
from megatron_pg.megatron.scale_contract import ScaleContract
from tests.fast import typed_ranks
from tests.fast.sequences import OF_LOG_PROBS, package_sample, random_sequences
from tests.fast.typed_ranks import Seen, fake_mesh, torch_itself, type_batch, typed, types_of

SAMPLES = [package_sample(sequence, group_index=1) for sequence in random_sequences(1)]
EVERYTHING = {"use_tis": True, "tis_level": "sequence", "kl_loss_coef": 0.1, "entropy_coef": 0.01}
EVERYTHING["pg_metrics"] = "with_entropy"
"""Settings that read every field of a sample, and sum over whole sequences."""


@pytest.fixture(scope="module")
def mesh() -> Iterator[object]:
    with torch_itself(), fake_mesh() as made:
        yield made


def types_of_step(mesh: object, **settings: object) -> Seen:
    """The types of a step of one micro-batch, from the logits to the metrics that the host
    reads.
    """
    config = PolicyLossConfig(**{**EVERYTHING, **settings})
    batch = pack(SAMPLES, cp_rank=0, cp_size=2)
    totals, (device_mesh, groups) = step_totals(SAMPLES), mesh
    head = PolicyStep(config, totals=totals, num_microbatches=1, groups=groups)
    with typed(device_mesh) as seen:
        type_batch(batch)
        logits = torch.randn(batch.tokens.numel(), 8, requires_grad=True)
        spmd.assert_type(logits, {"dp": V, "cp": S(0), "tp": S(1)})
        loss, *_, found = head.head(batch).loss_func(logits)
        seen["loss of a data-parallel rank"] = types_of(loss)
        spmd.assert_type(loss, {"dp": P})
        seen["loss"] = types_of(loss)
        loss.backward()
        with spmd.local():
            brought = typed_ranks.contributed(found)
            seen["metrics"] = types_of(brought.pairs)
            assert math.isfinite(head.metrics([brought])["loss"])
    return seen


@pytest.mark.parametrize("objective", OF_LOG_PROBS)
def test_what_is_partial_replicated_and_sharded(mesh: object, objective: str) -> None:
    per_token = objective == "gspo"
    # The ratio of dis is the weight of TIS already.
    others = {"use_tis": False, "tis_level": "token", "use_sequence_rejection": True}
    settings = {"policy_loss": objective, **(others if objective == "dis" else {})}
    seen = types_of_step(mesh, **settings, calculate_per_token_loss=per_token)
    assert seen == {
        "log_probs": "V V I",
        "entropy": "V V I",
        "sums over sequences": "V R R",
        "loss of a data-parallel rank": "V P I",
        "loss": "P P I",
        "metrics": "P P P",
        "read on the host": "R R R",
    }


def exchange_of_statistics(patch: pytest.MonkeyPatch, groups: ParallelGroups) -> None:
    """Log-probs of this tensor-parallel rank's columns alone."""
    patch.setattr(VocabularyShard, "gather", lambda shard, local: local[None])


def sum_of_dot_products(patch: pytest.MonkeyPatch, groups: ParallelGroups) -> None:
    """An entropy whose second sum is over this tensor-parallel rank's columns alone."""
    combine = rows_torch.combine_statistics

    def combined(local: Tensor, *args: object) -> RowStatistics:
        whole = combine(local, *args)
        return whole._replace(entropy=whole.log_sum - local[:, 2])

    patch.setattr(rows_torch, "combine_statistics", combined)


def sum_over_sequences(patch: pytest.MonkeyPatch, groups: ParallelGroups) -> None:
    """Sums over the part of a sequence that this context-parallel rank has."""
    patch.setattr(micro_batch, "add_over_group", lambda sums, group: sums)


def totals_of_the_step(patch: pytest.MonkeyPatch, groups: ParallelGroups) -> None:
    """A mean over the tokens that this context-parallel rank has."""
    patch.setattr(
        micro_batch, "weighted_sum", lambda x, weights, mask: (x * weights).sum() / weights.sum()
    )


def that_gradients_are_summed(patch: pytest.MonkeyPatch, groups: ParallelGroups) -> None:
    """A loss that is added up before Megatron adds up its gradients."""
    apply = ScaleContract.apply

    def applied(contract: ScaleContract, loss: Tensor, *args: Any) -> Any:
        dist.all_reduce(loss, group=groups.context)
        return apply(contract, loss, *args)

    patch.setattr(ScaleContract, "apply", applied)


def metrics_of_other_samples(patch: pytest.MonkeyPatch, groups: ParallelGroups) -> None:
    """Metrics of the samples that this data-parallel rank has."""
    reduced = partial(policy_step.reduce_metrics, group=dist.new_group([0, 1, 2, 3]))
    patch.setattr(policy_step, "reduce_metrics", reduced)


def that_peers_hold_the_same(patch: pytest.MonkeyPatch, groups: ParallelGroups) -> None:
    """Metrics that every tensor-parallel rank adds its own to."""
    patch.setattr(typed_ranks, "contributed", lambda found: found)


MISTAKES = {
    exchange_of_statistics: "R or I; got PerMeshAxisLocalSpmdType.V on axis mesh_tp",
    sum_of_dot_products: "R or I; got PerMeshAxisLocalSpmdType.V on axis mesh_tp",
    sum_over_sequences: "Partial type on axis mesh_cp",
    totals_of_the_step: "Partial type in nonlinear argument on axis mesh_cp",
    that_gradients_are_summed: "backward() on a Replicate loss on axis mesh_cp",
    metrics_of_other_samples: "Partial type on axis mesh_dp",
    that_peers_hold_the_same: "Partial type on axis mesh_tp",
}
"""What is forgotten, and what the types say of it."""


@pytest.mark.parametrize("forgotten", MISTAKES)
def test_mutants_have_no_type(mesh: Any, forgotten: Callable, monkeypatch) -> None:
    forgotten(monkeypatch, mesh[1])
    with pytest.raises(SpmdTypeError, match=re.escape(MISTAKES[forgotten])):
        types_of_step(mesh, policy_loss="gspo")
