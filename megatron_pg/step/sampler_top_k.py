"""Most likely tokens of a rollout engine, with their log-probs, for score centering."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_pg.head.ragged import Ragged, offsets_of
from megatron_pg.step.values import (
    LARGEST_LOG_PROB,
    check_log_probs,
    check_sets,
    has_integers,
    host_tensor,
    refuse_values,
)


@dataclass(frozen=True, eq=False)
class TopK:
    """The engine's most likely tokens per response token, as many as it returned."""

    ids: Ragged
    """Distinct ids [response_length] rows int32, empty if masked."""
    log_probs: Ragged
    """The log-prob of each id, in nats, float32, under the sampling distribution."""

    def __len__(self) -> int:
        return len(self.ids)

    def padded(self) -> tuple[Tensor, Tensor]:
        """Return ids and log-probs, [rows, k] each, with -1 and 0 beyond the end of a row."""
        sizes = self.ids.sizes
        k = max(int(sizes.max()) if len(sizes) else 0, 1)
        rows = torch.repeat_interleave(sizes)
        places = torch.arange(rows.numel(), device="cpu") - self.ids.offsets[:-1][rows]
        ids = torch.full((len(sizes), k), -1, dtype=torch.int32, device="cpu")
        log_probs = torch.zeros(len(sizes), k, dtype=torch.float32, device="cpu")
        ids[rows, places] = self.ids.values.int()
        log_probs[rows, places] = self.log_probs.values
        return ids, log_probs


def checked_top_k(where: str, given: Any, loss_mask: Tensor) -> TopK:
    """Convert a pair (ids, log_probs) with a row per response token, and check active tokens.

    Each is a `Ragged`, a tensor [response_length, k] or a sequence of rows. A masked token may have
    an empty row.
    """
    if isinstance(given, TopK):
        given = given.ids, given.log_probs
    try:
        ids, log_probs = map(_ragged, given)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ValueError(
            f"{where} is not a pair (ids, log_probs) with a row per response token: {error}"
        ) from error
    if len(ids) != len(loss_mask) or not torch.equal(ids.offsets, log_probs.offsets):
        raise ValueError(
            f"{where} has {len(ids)} rows of ids and {len(log_probs)} rows of log-probs, expected "
            f"one per response token ({len(loss_mask)}), with a log-prob per id"
        )
    if ids.values.numel() and not has_integers(ids.values):
        raise ValueError(f"{where}: ids have dtype {ids.values.dtype}, expected integers")
    sizes, problem = ids.offsets.diff(), ", expected 1 or more for a token that is not masked"
    refuse_values(f"{where}: number of tokens", sizes, loss_mask & (sizes == 0), problem)
    ids, log_probs = ids.only(loss_mask), log_probs.only(loss_mask)
    check_sets(f"{where}: ids", Ragged(ids.values.long(), ids.offsets))
    values = log_probs.values.float()
    check_log_probs(f"{where}: log_probs", values, torch.ones_like(values, dtype=torch.bool))
    rows = ids.row_of_element()
    mass = torch.zeros(len(ids), dtype=torch.float64, device="cpu")
    mass.index_add_(0, rows, values.double().exp())
    is_more = mass > math.exp(LARGEST_LOG_PROB)
    problem = ", expected at most 1: log-probs of distinct tokens, in nats"
    refuse_values(f"{where}: the sum of the probabilities of token ", mass, is_more, problem)
    return TopK(Ragged(ids.values.int(), ids.offsets), Ragged(values, ids.offsets))


def _ragged(rows: Any) -> Ragged:
    """Convert rows to a `Ragged` on the host with copied values."""
    if isinstance(rows, Ragged):
        return Ragged(rows.values.detach().clone(), rows.offsets)
    if isinstance(rows, Tensor):
        if rows.dim() != 2 or rows.device.type != "cpu":
            raise ValueError(f"found shape {list(rows.shape)} on {rows.device}, expected [n, k]")
        sizes = torch.full((len(rows),), rows.shape[1], dtype=torch.int64, device="cpu")
        return Ragged(rows.detach().flatten().clone(), offsets_of(sizes))
    lists = [list(row) for row in rows]
    sizes = torch.tensor([len(row) for row in lists], dtype=torch.int64, device="cpu")
    values = host_tensor(list(itertools.chain.from_iterable(lists)))
    return Ragged(values, offsets_of(sizes))


def top_k_of_vllm(logprobs: Sequence[Mapping[int, Any] | None]) -> tuple[list[Any], list[Any]]:
    """Convert vLLM's `CompletionOutput.logprobs` to `Sample.sampler_top_k`.

    Request them with `SamplingParams(logprobs=k)`, and start the engine with `--logprobs-mode
    processed_logprobs --max-logprobs k`: by default it returns log-probs before temperature, top-k
    and top-p.

    Args:
        logprobs: per response token a mapping of ids to objects with `logprob`, or to numbers. It
            includes the sampled token even if that is not in the top k. Ids of probability 0 are
            left out.
    """
    rows = [row for row in logprobs if row is not None]
    if len(rows) < len(logprobs):
        raise ValueError("vLLM returned no log-probs. Use SamplingParams(logprobs=k).")
    heads = [{id: float(getattr(x, "logprob", x)) for id, x in row.items()} for row in rows]
    # Outside of top-k and top-p.
    heads = [{id: x for id, x in head.items() if x > -math.inf} for head in heads]
    return [list(map(int, head)) for head in heads], [list(head.values()) for head in heads]


def top_k_of_sglang(meta_info: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    """Convert `output_top_logprobs` in SGLang's `meta_info` to `Sample.sampler_top_k`.

    Request it with `"return_logprob": true, "top_logprobs_num": k`. SGLang returns log-probs at the
    sampling temperature, before top-k and top-p, so sample without top-k and top-p.
    """
    rows = meta_info.get("output_top_logprobs")
    if rows is None:
        raise ValueError(
            "SGLang returned no output_top_logprobs. Use return_logprob and top_logprobs_num."
        )
    ids = [[int(token) for _, token, *_ in row or ()] for row in rows]
    return ids, [[float(log_prob) for log_prob, *_ in row or ()] for row in rows]
