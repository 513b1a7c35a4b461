"""Response lengths that carry a sample's divisor to the policy loss of slime and miles.

Both reduce the policy loss by `--custom-pg-loss-reducer-function-path`, and all else by their mean
over rollouts. They call the reducer with one micro-batch's lengths and masks, which do not identify
samples. A hook therefore replaces the response lengths by `DividedLength`.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Self

from torch import Tensor

from megatron_pg.integrations.verify import verified
from megatron_pg.loss.reducer import Reducer, get_pg_loss_reducer
from megatron_pg.megatron.trainer_globals import context_parallel_place, global_args


class DividedLength(int):
    """A response length in tokens, with the divisor of its sample's policy loss."""

    divisor: float

    def __new__(cls, length: int, divisor: float) -> Self:
        self = super().__new__(cls, length)
        self.divisor = divisor
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Keep the divisor when pickled."""
        return DividedLength, (int(self), self.divisor)


def divided_lengths(lengths: Iterable[int], divisors: Tensor) -> list[DividedLength]:
    """Give each length in tokens its divisor. `divisors` is [samples] on the host."""
    return [DividedLength(*pair) for pair in zip(lengths, divisors.tolist(), strict=True)]


def policy_loss_reducer(
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    loss_masks: Sequence[Tensor],
    calculate_per_token_loss: bool = False,
    *,
    place: tuple[int, int] | None = None,
) -> Reducer:
    """Make `reducer(x [window]) -> 0-d`, this rank's sum of m x / divisor over one micro-batch.

    It takes a custom reducer's arguments. `place` is (rank, size) in the context-parallel group, by
    default Megatron's.

    Raises:
        ValueError: a length without a divisor, the trainer's per-token mode, or a trainer that was
            not verified.
        NotImplementedError: `--qkv-format bshd` under context parallelism.
    """
    if calculate_per_token_loss:
        raise ValueError("--calculate-per-token-loss divides by the step's tokens: remove the flag")
    lengths = [n for n in response_lengths if isinstance(n, DividedLength)]
    if len(lengths) < len(response_lengths):
        bare = [isinstance(n, DividedLength) for n in response_lengths].index(False)
        raise ValueError(
            f"the response length of sample {bare} of a micro-batch has no divisor: the trainer "
            "copied it, or the hook of megatron_pg did not run. Set the hook (docs/migrating.md), "
            "or remove the reducer"
        )
    if place is None and not verified:
        raise ValueError(
            "the trainer's loss was not verified in this process: add --custom-megatron-init-path "
            "megatron_pg.integrations.<trainer>.check, or call it in your own init function"
        )
    cp_rank, cp_size = context_parallel_place() if place is None else place
    return get_pg_loss_reducer(
        total_lengths,
        list(map(int, lengths)),
        loss_masks,
        denominators=[length.divisor for length in lengths],
        cp_rank=cp_rank,
        cp_size=cp_size,
        qkv_format=getattr(global_args(), "qkv_format", None) or "thd",
    )
