"""The steps that are trained on, how they are cut, and the settings of the loss."""

import functools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_pg.config.policy_loss import PolicyLossConfig
from tests import oracle
from tests.critic_oracle import with_values
from tests.oracle import Objective, PlainSample
from tests.random_steps import float32, random_step

DIVISOR = 8.0
VOCAB_SIZE = 16
NUM_EXPERTS, TOPK = 4, 3
NUM_SAMPLES = 20
VALUE_CLIP = 0.5
MICRO_BATCHES = 3


def _told_apart_by_float32(samples: list[PlainSample]) -> list[PlainSample]:
    """The same lengths and groups; tokens, numbers and masks that cost float32 few digits.

    Three tokens of four have a positive advantage, the KL term pulls the same way, and responses
    have ids of the half of the vocabulary that leans one way
    (`megatron_pg.check.weights`): gradients add up where they would cancel. About every
    fourth token is clipped. The number of active tokens is a power of two: in per-token mode
    Megatron divides by it in float32, and then without error, so that float64 is held to 1e-12
    there too.
    """
    changed = []
    for sample in samples:
        prompt = sample.tokens[: sample.prompt_length]
        response = [token % (VOCAB_SIZE // 2) for token in sample.tokens[sample.prompt_length :]]
        advantages = [
            0.5 + abs(value) / 2 if place % 4 else -abs(value) / 4
            for place, value in enumerate(sample.advantages, start=1)
        ]
        assert sample.ref_log_probs is not None
        # The models' own log-probs are near log(1/16) = -2.8.
        changed.append(
            replace(
                sample,
                tokens=prompt + response,
                advantages=[float32(value) for value in advantages],
                old_log_probs=[float32(-2.8 + (v + 2.5) / 4) for v in sample.old_log_probs],
                ref_log_probs=[float32(-2.2 + (v + 2.5) / 4) for v in sample.ref_log_probs],
            )
        )
    surplus = sum(sum(sample.loss_mask) for sample in changed)
    surplus -= 2 ** (surplus.bit_length() - 1)
    for _ in range(surplus):
        fullest = max(range(len(changed)), key=lambda index: sum(changed[index].loss_mask))
        mask = list(changed[fullest].loss_mask)
        mask[mask.index(1)] = 0
        changed[fullest] = replace(changed[fullest], loss_mask=mask)
    return changed


KEPT_SIZES = (1, 2, 3, 5, 8, 12, 0)


def with_kept_sets(samples: Sequence[PlainSample]) -> list[PlainSample]:
    """Every response token with the ids that it was sampled from, seven in all sizes; one in seven
    from the whole vocabulary.

    Old and reference log-probs move with the sets, of which a model without a preference gives each
    id 1 / size.
    """
    rng, changed = random.Random(11), []
    for sample in samples:
        kept, moved = [], []
        for target in sample.tokens[sample.prompt_length :]:
            size = KEPT_SIZES[rng.randrange(len(KEPT_SIZES))]
            others = [id for id in range(VOCAB_SIZE) if id != target]
            kept.append([*rng.sample(others, size - 1), target] if size else [])
            rng.shuffle(kept[-1])
            moved.append(math.log(VOCAB_SIZE / size) if size else 0.0)

        def over_sets(log_probs: list[float] | None, sizes=kept, moved=moved) -> list[float]:
            assert log_probs is not None
            return [
                0.0 if len(ids) == 1 else min(float32(value + shift), 0.0)
                for ids, value, shift in zip(sizes, log_probs, moved, strict=True)
            ]

        old, ref = over_sets(sample.old_log_probs), over_sets(sample.ref_log_probs)
        changed.append(replace(sample, kept_tokens=kept, old_log_probs=old, ref_log_probs=ref))
    return changed


def with_experts(samples: Sequence[PlainSample], layers: int) -> list[PlainSample]:
    """Every token with experts of its layers, as an engine chose them; none of the last token."""
    rng, changed = random.Random(3), []
    for sample in samples:
        chosen = [
            [rng.sample(range(NUM_EXPERTS), TOPK) for _ in sample.tokens[:-1]] + [[-1] * TOPK]
            for _ in range(layers)
        ]
        changed.append(replace(sample, routed_experts=chosen))
    return changed


SHAPES: dict[str, list[PlainSample]] = {
    # Ragged lengths; one sample fully masked, one without response, one of a single response token,
    # rollouts of two samples, prompt groups that no cut below keeps together.
    "ragged": _told_apart_by_float32(
        random_step(29, num_samples=NUM_SAMPLES, longest_prompt=6, longest_response=14)
    ),
    # So short that under context parallelism some ranks hold no response token at all.
    "short": _told_apart_by_float32(
        random_step(5, num_samples=2 * NUM_SAMPLES, longest_prompt=2, longest_response=2)
    ),
}


@functools.cache
def changed(shape: str, change: Callable[..., list[PlainSample]], *args: int) -> list[PlainSample]:
    """The samples of a shape after a change; one list for all who ask, as a cut does for every
    sample.
    """
    return change(SHAPES[shape], *args)


def with_active_tokens(count: int) -> list[PlainSample]:
    """The ragged step with all response tokens masked, but that many in the middle of its longest
    response.
    """
    samples = [
        replace(sample, loss_mask=[0] * sample.response_length) for sample in SHAPES["ragged"]
    ]
    longest = max(samples, key=lambda sample: sample.response_length)
    middle = longest.response_length // 2
    longest.loss_mask[middle : middle + count] = [1] * count
    return samples


MATRIX_SHAPES = ("ragged", "short")
SHAPES["one active token"], SHAPES["no active token"] = map(with_active_tokens, (1, 0))

CUTS = ("uniform", "ragged", "empty")


@dataclass(frozen=True)
class Run:
    """One optimizer step through Megatron: which samples, cut how, under which loss."""

    aggregation: str = "sample_mean"
    shape: str = "ragged"
    cut: str = "uniform"
    regularized: bool = False
    """Also a KL and an entropy term, whose outer count is not that of the policy-gradient term."""
    regularizer_aggregation: str = "sample_mean"
    """The aggregation of these terms; read where there are any."""
    temperature: float = 1.0
    fp32_lm_head: bool = False
    fused_lm_head: bool = False
    kept: bool = False
    """Over the sets that the tokens were sampled from."""
    replay_layers: int = 0
    """Layers whose experts are given; 0: routers choose."""

    def __str__(self) -> str:
        terms = " + KL + entropy" if self.regularized else ""
        terms += " by the loss" * (self.terms_by == "loss")
        sets = " with kept sets" if self.kept else ""
        return f"{self.aggregation}{terms}, {self.shape} samples{sets}, {self.cut} micro-batches"

    @property
    def terms_by(self) -> str:
        return self.regularizer_aggregation if self.regularized else "sample_mean"

    @property
    def samples(self) -> list[PlainSample]:
        if self.replay_layers:
            return changed(self.shape, with_experts, self.replay_layers)
        return changed(self.shape, with_kept_sets) if self.kept else SHAPES[self.shape]

    @property
    def settings(self) -> dict[str, Any]:
        """Those that the package and the oracle have."""
        return {
            "loss_aggregation": self.aggregation,
            "loss_aggregation_divisor": DIVISOR if self.aggregation == "constant" else None,
            "kl_loss_coef": 0.1 if self.regularized else 0.0,
            "entropy_coef": 0.05 if self.regularized else 0.0,
            "regularizer_aggregation": self.terms_by,
            "rollout_temperature": self.temperature,
        }

    @property
    def config(self) -> PolicyLossConfig:
        return PolicyLossConfig(
            **self.settings,
            fp32_lm_head=self.fp32_lm_head,
            fused_lm_head=self.fused_lm_head,
            replay_sampling_set=self.kept,
            kept_set_mass=self.kept and not self.fused_lm_head,
            replay_routing=self.replay_layers > 0,
        )

    @property
    def objective(self) -> Objective:
        return Objective(**self.settings)

    def micro_batches(self, data_size: int, data_rank: int, multiple: int) -> list[list[int]]:
        """Sample indices of each micro-batch of one data-parallel rank.

        `uniform`: three on every rank. `ragged`: one more on each next rank. `empty`: as uniform,
        and the last rank's last micro-batch is empty. All counts are rounded up to `multiple`,
        which interleaved pipelines ask for, with empty micro-batches.
        """
        mine = list(range(data_rank, len(self.samples), data_size))
        count = MICRO_BATCHES + (data_rank if self.cut == "ragged" else 0)
        filled = count - 1 if self.cut == "empty" and data_rank == data_size - 1 else count
        # The last bin holds one sample of few response tokens: under context parallelism some ranks
        # have none of them. The first has two shares of the others.
        last = min(mine, key=lambda index: self.samples[index].response_length or len(mine))
        others = [index for index in mine if index != last]
        bins: list[list[int]] = [[] for _ in range(filled - 1)]
        for place, index in enumerate(others):
            bins[place % filled % (filled - 1)].append(index)
        bins.append([last])
        padded = -(-count // multiple) * multiple
        return bins + [[] for _ in range(padded - filled)]


@dataclass(frozen=True)
class ValueRun(Run):
    """One optimizer step of a critic, whose loss is aggregated as the policy's."""

    def __str__(self) -> str:
        return f"value loss, {super().__str__()}"

    @property
    def samples(self) -> list[PlainSample]:
        return changed(self.shape, with_values)


AGGREGATIONS = oracle.AGGREGATIONS
