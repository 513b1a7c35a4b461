"""Dealing sequences to bins of limited capacity: lengths in, bins out. NumPy and the host alone.

As few bins as first-fit decreasing needs (at most 11/9 of the fewest possible plus 6/9, Dosa 2007;
in practice the lower bound `ceil(sum / capacity)` where sequences are short beside the capacity),
and their costs evened out by longest-processing-time-first (Graham 1969) wherever that keeps within
the capacity.
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
    """Deal every sequence to one bin, no bin above the capacity.

    The same arguments give the same bins. The lengths in each bin do not depend on the order of the
    sequences; which of several equally long ones goes where does.

    Args:
        lengths: [sequences] positive integers, in tokens with whatever padding a sequence brings.
        capacity: the most tokens of one bin.
        multiple: the number of bins is rounded up to a multiple of it, and the cost spread over all
            of them; there is at least one multiple, so that no sequences are that many empty bins.
        oversized_alone: a sequence longer than the capacity gets a bin of its own; otherwise it is
            an error.
        seed: equally long sequences are dealt in an order drawn from it; None deals them in the
            order they come.
        cost: what is evened out between the bins; the capacity counts tokens whatever it is.

    Returns:
        Per bin the indices of its sequences, ascending; the bins by falling cost, empty ones last.

    Raises:
        ValueError: sizes out of range, or a sequence longer than the capacity.
    """
    sizes = np.asarray(lengths, dtype=np.int64).reshape(-1)
    if not all(isinstance(size, Integral) and size >= 1 for size in (capacity, multiple)):
        raise ValueError(
            f"capacity {capacity} and number of bins {multiple}: expected an integer of at least 1 "
            f"for both"
        )
    is_oversized = sizes > capacity
    is_wrong = (sizes < 1) | (is_oversized & (not oversized_alone))
    if is_wrong.any():
        index = int(np.argmax(is_wrong))
        raise ValueError(
            f"lengths[{index}] is {sizes[index]}: expected 1 or more, and no more than the "
            f"capacity of a bin ({capacity})"
        )
    order = np.arange(sizes.size)
    if seed is not None:
        order = np.random.default_rng(seed).permutation(sizes.size)
    order = order[np.argsort(-sizes[order], kind="stable")]
    num_alone = int(is_oversized.sum())  # the first of that order
    shared = sizes[order[num_alone:]].tolist()
    # Ranks have no capacity: what fits one bin needs no search.
    bins = [0] * len(shared) if sum(shared) <= capacity else _first_fit(shared, capacity)
    num_needed = num_alone + max(bins, default=-1) + 1
    num_bins = max(-(-num_needed // multiple), 1) * multiple
    # First fit is the tighter packer: where the bins have to be full, only it may fit.
    bins = _longest_to_cheapest(shared, cost, num_bins - num_alone, capacity) or bins
    bin_of_sequence = np.empty(sizes.size, dtype=np.int64)
    bin_of_sequence[order] = [*range(num_alone), *(num_alone + number for number in bins)]
    ends = np.cumsum(np.bincount(bin_of_sequence, minlength=num_bins))
    members = np.split(np.argsort(bin_of_sequence, kind="stable"), ends[:-1])
    costs = np.bincount(bin_of_sequence, cost.of_lengths(sizes), num_bins)
    return [members[number] for number in np.argsort(-costs, kind="stable")]


def _first_fit(sizes: Sequence[int], capacity: int) -> list[int]:
    """Deal each sequence, in the given order, to the first bin with room.

    `room` is a binary tree over the bins whose inner nodes hold the largest room below them, so
    that a sequence takes time logarithmic in the number of bins. All bins but one are more than
    half full, which bounds their number.
    """
    most_bins = 2 * sum(sizes) // capacity + 1
    num_leaves = 1 << (most_bins - 1).bit_length()
    room = [capacity] * (2 * num_leaves)
    bins = []
    for size in sizes:
        node = 1
        while node < num_leaves:
            node *= 2
            if room[node] < size:
                node += 1
        bins.append(node - num_leaves)
        room[node] -= size
        while node > 1:
            node //= 2
            left, right = room[2 * node], room[2 * node + 1]
            largest = left if left > right else right
            if room[node] == largest:
                break
            room[node] = largest
    return bins


def _longest_to_cheapest(
    sizes: Sequence[int], cost: SampleCost, num_bins: int, capacity: int
) -> list[int] | None:
    """Deal each sequence to the bin of least cost that has room; None where a sequence fits no bin.

    The sizes fall, so that a bin without room waits until a sequence fits again. A sequence takes
    time logarithmic in the number of bins.
    """
    room = [capacity] * num_bins
    open_bins = [(0.0, number) for number in range(num_bins)]
    full: list[tuple[int, float, int]] = []  # the roomiest first
    bins = []
    for size, added in zip(sizes, cost.of_lengths(sizes).tolist(), strict=True):
        while full and -full[0][0] >= size:
            heapq.heappush(open_bins, heapq.heappop(full)[1:])
        while open_bins and room[open_bins[0][1]] < size:
            load, number = heapq.heappop(open_bins)
            heapq.heappush(full, (-room[number], load, number))
        if not open_bins:
            return None
        load, number = open_bins[0]
        heapq.heapreplace(open_bins, (load + added, number))
        room[number] -= size
        bins.append(number)
    return bins
