"""Random steps for the tests, as the oracle's plain samples, and their way into the package."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_pg import Sample, StepTotals, step_totals

from .oracle import PlainSample, Step

VOCAB_SIZE = 11
FLOATS = ("advantages", "old_log_probs", "ref_log_probs", "rollout_log_probs", "loss_weights")
FLOATS += ("old_values", "returns")


def float32(value: float) -> float:
    """The nearest number that float32 holds, so that storing it there changes nothing."""
    return torch.tensor(value, dtype=torch.float32).item()


def plain_sample(
    mask: list[int], *, prompt_length: int = 2, group: int | None = 0, rollout: int | None = None
) -> PlainSample:
    """A sample of which only the mask and the ids matter: all else is constant."""
    return PlainSample(
        tokens=[0] * (prompt_length + len(mask)),
        response_length=len(mask),
        loss_mask=mask,
        advantages=[1.0] * len(mask),
        old_log_probs=[-1.0] * len(mask),
        group_index=group,
        rollout_id=rollout,
    )


def random_sample(
    rng: random.Random,
    *,
    prompt_length: int,
    response_length: int,
    active_rate: float = 0.7,
    group_index: int | None = None,
    rollout_id: int | None = None,
) -> PlainSample:
    def numbers(lowest: float, highest: float) -> list[float]:
        return [float32(rng.uniform(lowest, highest)) for _ in range(response_length)]

    return PlainSample(
        tokens=[rng.randrange(VOCAB_SIZE) for _ in range(prompt_length + response_length)],
        response_length=response_length,
        loss_mask=[int(rng.random() < active_rate) for _ in range(response_length)],
        advantages=numbers(-2.0, 2.0),
        old_log_probs=numbers(-4.0, -1.0),
        ref_log_probs=numbers(-4.0, -1.0),
        group_index=group_index,
        rollout_id=rollout_id,
    )


def random_step(
    seed: int,
    *,
    num_samples: int = 9,
    num_groups: int = 3,
    longest_prompt: int = 4,
    longest_response: int = 9,
) -> list[PlainSample]:
    """Ragged samples in interleaved prompt groups; some rollouts have two samples.

    With four samples or more, one is fully masked, one has a single response token and one has
    none. Group and rollout ids are arbitrary int64, negative ones included.
    """
    rng = random.Random(seed)
    groups = [rng.randrange(-(2**62), 2**62) for _ in range(num_groups)]
    samples = []
    for index in range(num_samples):
        # Step 2 and 3 are turns of one rollout, as are 6 and 7: not neighbours in a group list.
        shared = index // 4 if index % 4 in (2, 3) else None
        group = groups[shared % num_groups] if shared is not None else groups[index % num_groups]
        samples.append(
            random_sample(
                rng,
                prompt_length=rng.randint(1, longest_prompt),
                response_length={1: 1, 3: 0}.get(index, rng.randint(1, longest_response)),
                active_rate=0.0 if index == 0 and num_samples >= 4 else 0.7,
                group_index=group,
                rollout_id=shared if shared is None else -1000 - shared,
            )
        )
    return samples


def with_policies_near(
    samples: Step,
    logits: Sequence[Tensor],
    seed: int = 0,
    *,
    temperature: float = 1.0,
    spread: float = 0.4,
    has_sets: bool = False,
    has_weights: bool = False,
) -> list[PlainSample]:
    """The samples with what every setting of the loss reads.

    Log-probs of the old, the reference and the rollout engine's policy lie within `spread` of those
    of the logits, so that no ratio is extreme. The samples have turns, versions and, if asked for,
    sets that were kept and weights of tokens: 0 to 3, none for one sample.
    """
    rng = random.Random(seed)
    changed = []
    for index, (sample, rows) in enumerate(zip(samples, logits, strict=True)):
        sets: list[list[int]] = []
        for target in sample.tokens[sample.prompt_length :]:
            others = rng.sample(range(VOCAB_SIZE), rng.randint(2, 5))
            sets.append(
                [target, *(id for id in others if id != target)] if rng.random() < 0.8 else []
            )
        log_probs = []
        for token, target in enumerate(sample.tokens[sample.prompt_length :]):
            scaled = rows.detach()[sample.prompt_length + token - 1] / temperature
            kept = sets[token] if has_sets and sets[token] else range(VOCAB_SIZE)
            log_probs.append((scaled[target] - scaled[list(kept)].logsumexp(0)).item())
        near: dict[str, Any] = {}
        for name in ("old_log_probs", "ref_log_probs", "rollout_log_probs"):
            moved = [value + rng.uniform(-spread, spread) for value in log_probs]
            near[name] = [float32(min(value, 0.0)) for value in moved]
        weights = [float32(rng.choice([0.0, 1.0, rng.uniform(0, 3)])) for _ in log_probs]
        turns = sorted(rng.randrange(3) for _ in log_probs)
        changed.append(
            replace(
                sample,
                **near,
                turn_ids=turns,
                policy_version=rng.randrange(9),
                kept_tokens=sets if has_sets else None,
                loss_weights=weights if has_weights and index != 1 else None,
            )
        )
    return changed


def leaf(generator: torch.Generator, *shape: int, requires_grad: bool = True) -> Tensor:
    values = torch.randn(*shape, dtype=torch.float64, generator=generator)
    return values.requires_grad_(requires_grad)


def random_losses(samples: Step, seed=0, requires_grad=True) -> list[Tensor]:
    """A float64 leaf [response_length] for each sample."""
    generator = torch.Generator().manual_seed(seed)
    return [leaf(generator, s.response_length, requires_grad=requires_grad) for s in samples]


def random_logits(samples: Step, seed: int = 0) -> list[Tensor]:
    """A float64 leaf [total_length, VOCAB_SIZE] for each sample."""
    generator = torch.Generator().manual_seed(seed)
    return [leaf(generator, len(sample.tokens), VOCAB_SIZE) for sample in samples]


class RandomSample(Sample):
    """A sample whose prompt is random, within its prompt group too, and whose rollout may lie on
    several ranks.
    """

    prompt_hash = property(lambda self: None)  # type: ignore[assignment]


def package_sample(sample: PlainSample) -> Sample:
    """Make the package's sample; the same plain sample gives the same one to the checksum each
    time.
    """
    values = vars(sample).copy()
    for name in ("tokens", "loss_mask"):
        values[name] = torch.tensor(values[name], dtype=torch.int64)
    for name in FLOATS:
        if values[name] is not None:
            values[name] = torch.tensor(values[name], dtype=torch.float32)
    packaged = RandomSample(**values, id_source="the test")
    vars(sample)["number"] = packaged.number
    return packaged


def package_samples(samples: Step) -> list[Sample]:
    return [package_sample(sample) for sample in samples]


def uneven_totals(samples: Sequence[Sample], **keywords: Any) -> StepTotals:
    """The totals of a step whose prompt groups may differ in size."""
    return step_totals(samples, allow_different_group_sizes=True, **keywords)


def lengths(samples: Step) -> tuple[list[int], list[int]]:
    total = [len(sample.tokens) for sample in samples]
    return total, [sample.response_length for sample in samples]


def loss_masks(samples: Step) -> list[Tensor]:
    return [torch.tensor(sample.loss_mask, dtype=torch.int64) for sample in samples]
