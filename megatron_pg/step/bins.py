"""Assignment of sequences to bins of limited capacity, in NumPy on the host.

First-fit decreasing gives the number of bins: at most 11/9 of the minimum plus 6/9 (Dosa 2007), and
in practice the lower bound `ceil(sum / capacity)` if sequences are short relative to the capacity.
Longest-processing-time-first (Graham 1969) balances their costs if the bins then stay within the
capacity.
"""

import heapq
from collections.abc import Sequence
from numbers import Integral

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron_pg.step.cost import TOKENS, SampleCost

Indices = NDArray[np.int64]


def plan_bins(
    lengths: ArrayLike,
    capacity: int,
    *,
    multiple: int = 1,
    oversized_alone: bool = False,
    seed: int | None = None,
    cost: SampleCost = TOKENS,
) -> list[Indices]:
    """Assign every sequence to one bin, with no bin above the capacity.

    The same arguments give the same bins. The lengths in each bin do not depend on the order of the
    sequences, but the choice between equally long sequences does.

    Args:
        lengths: [sequences] positive integers, in tokens including padding.
        capacity: the maximum number of tokens per bin.
        multiple: the number of bins is rounded up to a multiple of it, and at least one multiple.
            The cost is spread over all bins, and without sequences all are empty.
        oversized_alone: a sequence longer than the capacity gets its own bin. Otherwise it is an
            error.
        seed: order equally long sequences at random by it. None: in the given order.
        cost: the quantity to balance between the bins. The capacity always counts tokens.

    Returns:
        Per bin the indices of its sequences, ascending. Bins are sorted by falling cost, empty ones
        last.

    Raises:
        ValueError: sizes are out of range, or a sequence is longer than the capacity.
    """
    sizes = np.asarray(lengths, dtype=np.int64).reshape(-1)
    if not all(isinstance(size, Integral) and size >= 1 for size in (capacity, multiple)):
        raise ValueError(
            f"capacity is {capacity} and multiple {multiple}, expected integers of at least 1"
        )
    is_oversized = sizes > capacity
    is_wrong = (sizes < 1) | (is_oversized & (not oversized_alone))
    if is_wrong.any():
        index = int(np.argmax(is_wrong))
        raise ValueError(
            f"lengths[{index}] is {sizes[index]}, expected at least 1 and at most the capacity of "
            f"a bin ({capacity})"
        )
    order = np.arange(sizes.size)
    if seed is not None:
        order = np.random.default_rng(seed).permutation(sizes.size)
    order = order[np.argsort(-sizes[order], kind="stable")]
    num_alone = int(is_oversized.sum())  # the first of that order
    shared = sizes[order[num_alone:]].tolist()
    # If all fit in one bin, as for ranks without a capacity, skip the search.
    bins = [0] * len(shared) if sum(shared) <= capacity else _first_fit(shared, capacity)
    num_needed = num_alone + max(bins, default=-1) + 1
    num_bins = max(-(-num_needed // multiple), 1) * multiple
    # First fit packs tighter. If bins must be full, only first fit may succeed.
    bins = _longest_to_cheapest(shared, cost, num_bins - num_alone, capacity) or bins
    bin_of_sequence = np.empty(sizes.size, dtype=np.int64)
    bin_of_sequence[order] = [*range(num_alone), *(num_alone + number for number in bins)]
    ends = np.cumsum(np.bincount(bin_of_sequence, minlength=num_bins))
    members = np.split(np.argsort(bin_of_sequence, kind="stable"), ends[:-1])
    costs = np.bincount(bin_of_sequence, cost.of_lengths(sizes), num_bins)
    return [members[number] for number in np.argsort(-costs, kind="stable")]


def _first_fit(sizes: Sequence[int], capacity: int) -> list[int]:
    """Assign each sequence, in the given order, to the first bin with enough free tokens.

    `free` is a binary tree over the bins. Inner nodes hold the maximum below them, so that a
    sequence takes time logarithmic in the number of bins. All bins except one are more than half
    full, which bounds their number.
    """
    most_bins = 2 * sum(sizes) // capacity + 1
    num_leaves = 1 << (most_bins - 1).bit_length()
    free = [capacity] * (2 * num_leaves)
    bins = []
    for size in sizes:
        node = 1
        while node < num_leaves:
            node *= 2
            if free[node] < size:
                node += 1
        bins.append(node - num_leaves)
        free[node] -= size
        while node > 1:
            node //= 2
            left, right = free[2 * node], free[2 * node + 1]
            largest = left if left > right else right
            if free[node] == largest:
                break
            free[node] = largest
    return bins


def _longest_to_cheapest(
    sizes: Sequence[int], cost: SampleCost, num_bins: int, capacity: int
) -> list[int] | None:
    """Assign each sequence to the cheapest bin with enough free tokens. Return None if one does not
    fit.

    The sizes fall, so that a full bin waits until a sequence fits again. A sequence takes time
    logarithmic in the number of bins.
    """
    free = [capacity] * num_bins
    open_bins = [(0.0, number) for number in range(num_bins)]
    full: list[tuple[int, float, int]] = []  # most free tokens first
    bins = []
    for size, added in zip(sizes, cost.of_lengths(sizes).tolist(), strict=True):
        while full and -full[0][0] >= size:
            heapq.heappush(open_bins, heapq.heappop(full)[1:])
        while open_bins and free[open_bins[0][1]] < size:
            load, number = heapq.heappop(open_bins)
            heapq.heappush(full, (-free[number], load, number))
        if not open_bins:
            return None
        load, number = open_bins[0]
        heapq.heapreplace(open_bins, (load + added, number))
        free[number] -= size
        bins.append(number)
    return bins
