"""Running sums along sequences whose tokens are spread over context-parallel ranks.

A row of a table names the scans that it reads (`Row.scans`). Each rank scans its own tokens, the total of each chunk of a
sequence travels in the all-reduce of `sequence.py`, and what the chunks before it brought is added to each token: no token is
gathered. Scans are computed in float64 by sums alone, never as a difference of two longer sums, so that nothing cancels and a
NaN stays in its sequence. They have no gradient, and cover the tokens that are active before any rejection.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_pg.config.policy_loss import PolicyLossConfig
from megatron_pg.loss.sequence import ACTIVE, SUMMANDS, names_read, sequence_units
from megatron_pg.loss.tokens import Tokens, clamped_log_ratio
from megatron_pg.step.batch import PackedBatch, to_device

BLOCK = 64
"""Tokens that are added up directly, then 64 such blocks, then the rest: the pairs of 4096 tokens each are its square."""
LEVELS = 2
"""The levels of blocks, fixed for one trace of all sizes."""


@dataclass(frozen=True)
class Scan:
    """A running sum over the positions of a response, or of a turn under `--sequence-unit turn`, the token's own included."""

    summand: Callable[[PolicyLossConfig, Tokens], Tensor]
    """The values [window] float64, 0 at masked positions."""
    from_end: bool = False  # the sum of the token and those after it, not before it
    half_life: Callable[[PolicyLossConfig], float] = lambda config: math.inf
    """The distance in positions, masked ones included, at which a token counts half."""


def _bounded_log_ratio(config: PolicyLossConfig, tokens: Tokens) -> Tensor:
    return clamped_log_ratio(SUMMANDS["policy"](config, tokens))


def _log_ratio_below_dual_clip(config: PolicyLossConfig, tokens: Tokens) -> Tensor:
    log_ratio = _bounded_log_ratio(config, tokens)
    limit = math.inf if config.eps_clip_c is None else math.log(config.eps_clip_c)
    return torch.where(log_ratio > limit, 0.0, log_ratio)


SCANS = {
    "active_so_far": Scan(SUMMANDS[ACTIVE]),
    "policy_so_far": Scan(_bounded_log_ratio),
    "policy_to_come": Scan(
        _log_ratio_below_dual_clip, from_end=True, half_life=lambda config: config.fipo_half_life
    ),
}


def scan_names(config: PolicyLossConfig) -> tuple[str, ...]:
    """List the scans that the rows read which are on."""
    return names_read(config, "scans")


def host_places(config: PolicyLossConfig, batch: PackedBatch) -> tuple[Tensor, Tensor]:
    """Place the window in its sequences or turns, for scans and sums over turns, and move it to the batch's device.

    Returns the unit, the chunk of its sample and the position in the response of each token, [3, window] int64; and the
    positions at which chunks begin, [chunks + 1, units] int64, of two units at least.
    """
    units, sample_of_unit = sequence_units(config, batch.samples)
    chunks, positions, borders = batch.window.response_chunks()
    places = torch.stack([units[batch.window.response_indices], chunks, positions])
    borders = pad(borders[:, sample_of_unit], (0, max(2 - len(sample_of_unit), 0)))
    numbers = to_device(torch.cat([places.flatten(), borders.flatten()]), batch.loss_mask.device)
    cut = places.numel()
    return numbers[:cut].view_as(places), numbers[cut:].view_as(borders)


@torch.no_grad()
def scans_of_rank(
    config: PolicyLossConfig, tokens: Tokens, places: Tensor, borders: Tensor
) -> tuple[Tensor, Tensor]:
    """Scan each chunk of this rank's window by itself; the last two arguments are of `host_places`.

    Returns the scans [names, window] float64 in the order of `scan_names`, and the totals of the chunks [names * chunks, units],
    0 where another rank holds the chunk; of no row where a response is one chunk, which needs no exchange.
    """
    units, chunks, positions = places
    runs = chunks * borders.shape[1] + units
    scans, totals = [], [borders.new_zeros(0, borders.shape[1], dtype=torch.float64)]
    for scan in map(SCANS.__getitem__, scan_names(config)):
        values = scan_of_runs(
            scan.summand(config, tokens), runs, scan.half_life(config), scan.from_end
        )
        scans.append(values)
        if len(borders) > 2:
            # A unit that ends inside the chunk has no token in the next one, and its total is not read.
            last = borders[:-1] if scan.from_end else borders[1:] - 1
            at_border = torch.where(positions == last.flatten()[runs], values, 0.0)
            total = values.new_zeros(last.numel()).index_add_(0, runs, at_border)
            totals.append(total.view_as(last))
    return torch.stack(scans), torch.cat(totals)


def scan_of_runs(values: Tensor, runs: Tensor, half_life: float, from_end: bool) -> Tensor:
    """Compute the sum over each token's run up to it, or from it on, by half-life: [window] float64, as the values are.

    Tokens of one run lie side by side; `runs` [window] int64, from 0 on, tells a run from all others.
    """
    if from_end:
        return _scan(values.flip(0), runs.flip(0), half_life, LEVELS).flip(0)
    return _scan(values, runs, half_life, LEVELS)


def _scan(values: Tensor, runs: Tensor, half_life: float, levels: int) -> Tensor:
    """Compute the sum up to each token, over blocks and then, level by level, over their last tokens."""
    if levels == 0:
        return _direct_scan(values, runs, half_life)
    # Not `len`, which would make a size of the trace its only one. Three blocks at least, and some padding: a size of 1 would be
    # a trace of its own.
    padding = (0, 3 * BLOCK - values.shape[0] % BLOCK)
    values_of_blocks, runs_of_blocks = (pad(x, padding).view(-1, BLOCK) for x in (values, runs))
    within = _direct_scan(values_of_blocks, runs_of_blocks, half_life)
    last_runs = runs_of_blocks[:, -1]
    at_ends = _scan(within[:, -1], last_runs, half_life / BLOCK, levels - 1)
    before, run_before = pad(at_ends[:-1], (1, 0)), pad(last_runs[:-1], (1, 0), value=-1)
    distance = torch.arange(BLOCK, device=values.device) + 1
    carried = before[:, None] * _share(half_life, distance)
    carried = torch.where(runs_of_blocks == run_before[:, None], carried, 0.0)
    return (within + carried).flatten()[: values.shape[0]]


def _direct_scan(values: Tensor, runs: Tensor, half_life: float) -> Tensor:
    """Compute the scan along the last dimension, [..., tokens], by a comparison of every two tokens."""
    steps = torch.arange(values.shape[-1], device=values.device)
    distance = steps[:, None] - steps
    is_read = (runs[..., :, None] == runs[..., None, :]) & (distance >= 0)
    decayed = values[..., None, :] * _share(half_life, distance.clamp(min=0))
    return torch.where(is_read, decayed, 0.0).sum(-1)


def _share(half_life: float, distance: Tensor) -> Tensor:
    """Compute what a token counts at a distance of 0 or more positions, in float64."""
    return torch.exp2(distance.double() / -half_life)


def whole_scans(
    config: PolicyLossConfig, scans: Tensor, totals: Tensor, places: Tensor, borders: Tensor
) -> dict[str, Tensor]:
    """Add to each token of a rank's scans what the chunks before its own brought, by name, [window] float64.

    `totals` are those of `scans_of_rank`, added up over the context-parallel group.
    """
    names, num_chunks = scan_names(config), len(borders) - 1
    by_name = dict(zip(names, scans.unbind(), strict=True))
    if num_chunks == 1:
        return by_name
    units, chunks, positions = places
    runs, order = chunks * borders.shape[1] + units, torch.arange(num_chunks, device=borders.device)
    for name, total in zip(names, totals.view(len(names), num_chunks, -1), strict=True):
        scan = SCANS[name]
        half_life, first, end = scan.half_life(config), borders[:-1], borders[1:]
        first, end = (end, first) if scan.from_end else (first, end)
        is_before = (order[:, None] < order) if scan.from_end else (order[:, None] > order)
        distance = (first[:, None] - end).abs()  # [chunks, chunks before, units]
        before = torch.where(is_before[..., None], total * _share(half_life, distance), 0.0).sum(1)
        distance = (positions - first.flatten()[runs]).abs() + (0 if scan.from_end else 1)
        by_name[name] = by_name[name] + before.flatten()[runs] * _share(half_life, distance)
    return by_name
