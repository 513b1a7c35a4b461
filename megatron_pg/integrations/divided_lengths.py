"""The way of a sample's divisor into a trainer's own loss: a response length that carries it to the policy loss's reducer.

slime and miles reduce the policy loss by `--custom-pg-loss-reducer-function-path`, and all else by their own mean over
rollouts. They call the reducer with the lengths and masks of one micro-batch, which do not tell samples apart. A hook
therefore replaces the response lengths by `DividedLength`. A length that has lost its divisor on the way is refused.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Self

from torch import Tensor

from megatron_pg.integrations.proof import PROVEN
from megatron_pg.loss.reducer import Reducer, get_pg_loss_reducer
from megatron_pg.megatron.trainer_globals import context_parallel_place, global_args


class DividedLength(int):
    """A response length in tokens, with the divisor of its sample's tokens in the policy loss."""

    divisor: float

    def __new__(cls, length: int, divisor: float) -> Self:
        self = super().__new__(cls, length)
        self.divisor = divisor
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel between processes with the divisor."""
        return DividedLength, (int(self), self.divisor)


def divided_lengths(lengths: Iterable[int], divisors: Tensor) -> list[DividedLength]:
    """Give each of the lengths, in tokens, its divisor; `divisors` is [samples], on the host."""
    pairs = zip(lengths, divisors.tolist(), strict=True)
    return [DividedLength(length, divisor) for length, divisor in pairs]


def policy_loss_reducer(
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    loss_masks: Sequence[Tensor],
    calculate_per_token_loss: bool = False,
    *,
    place: tuple[int, int] | None = None,
) -> Reducer:
    """Make `reducer(x [window]) -> 0-d`, the sum of m x / divisor over this rank's part of one micro-batch.

    Arguments are those of a custom reducer; `place` is (rank, size) in the context-parallel group, by default Megatron's.

    Raises:
        ValueError: a length without a divisor; the trainer's per-token mode; a trainer that was not proven.
        NotImplementedError: `--qkv-format bshd` under context parallelism.
    """
    if calculate_per_token_loss:
        raise ValueError(
            "--calculate-per-token-loss divides the policy loss by the step's tokens: drop the flag (token_mean of "
            "megatron_pg is exact without it)"
        )
    bare = [i for i, length in enumerate(response_lengths) if not isinstance(length, DividedLength)]
    if bare:
        raise ValueError(
            f"the response length of sample {bare[0]} of a micro-batch has no divisor: its data did not pass the hook of "
            "megatron_pg, or the trainer has copied the length on the way; set the hook (--rollout-data-postprocess-path in "
            "slime, --custom-convert-samples-to-train-data-path in miles), or take the reducer off"
        )
    if place is None and not PROVEN:
        raise ValueError(
            "nothing has proven in this process that the trainer's loss takes these divisors: give --custom-megatron-init-path "
            "megatron_pg.integrations.<trainer>.check, or call it in your own init function"
        )
    cp_rank, cp_size = context_parallel_place() if place is None else place
    return get_pg_loss_reducer(
        total_lengths,
        [int(length) for length in response_lengths],
        loss_masks,
        denominators=[length.divisor for length in response_lengths],  # type: ignore[attr-defined]
        cp_rank=cp_rank,
        cp_size=cp_size,
        qkv_format=getattr(global_args(), "qkv_format", None) or "thd",
    )
