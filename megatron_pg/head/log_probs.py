"""The public functions of logits and hidden states: the plain head with its extensions."""

import functools
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megatron_pg.head.centering import Centering
from megatron_pg.head.from_hidden import linear_log_probs
from megatron_pg.head.from_logits import LogProbsAndEntropy, Scorer, SetGradient, logit_rows
from megatron_pg.head.kept.sets import KeptPairs, check_rows
from megatron_pg.head.kept.sparse_layer import kept_log_probs
from megatron_pg.head.output_layer import Factors, HeadOptions
from megatron_pg.head.ragged import Ragged, to_device
from megatron_pg.head.vocabulary_shard import LogitRows


def log_probs_and_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    tensor_parallel_group: dist.ProcessGroup | None = None,
    temperature: float | Tensor = 1.0,
    row_mask: Tensor | None = None,
    vocab_size: int | None = None,
    with_entropy: bool = False,
    kept: Ragged | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute each target token's log-probability and the entropy of `softmax(logits /
    temperature)`.

    Tensor-parallel ranks run one all-gather of `[tokens, 4]` statistics in forward, and none in
    backward. As in Megatron's cross-entropy, incoming gradients must be equal on these ranks, and
    each rank gets the gradient of its columns. No float32 copy of the logits is kept.

    On CUDA, **backward overwrites the logits with their gradient** unless they are a leaf. Autograd
    raises if their old values are needed again, by a second backward or another loss on the same
    logits. Then pass `logits.clone()`.

    Args:
        logits: [tokens, v/tp] bfloat16, float16 or float32 (or float64, for tests): this rank's
            columns. Rank r holds the global ids from `r * v/tp` on.
        targets: [tokens] int64 global token ids. An id outside the vocabulary gives NaN.
        tensor_parallel_group: the group over which the vocabulary is split. Every rank in it must
            call, with equal targets. None: not split, torch.distributed is not used.
        temperature: a positive number, or a tensor of one element (no gradient, never read on the
            host).
        row_mask: [tokens] bool. False rows give log-probability, entropy and gradient 0, even if
            their logits are NaN or inf.
        vocab_size: true size of the vocabulary. Columns from it on are padding and ignored.
        kept: the global ids that each token was sampled from, [tokens] rows of distinct ids below
            `vocab_size`, including the target. The distribution is renormalized over them, and
            other logits are not read. An empty row keeps all ids.

    Returns:
        log_probs [tokens] and entropy [tokens] in nats (None without `with_entropy`), float32
        (float64 for float64 logits), both differentiable.

    Raises:
        ValueError: a wrong shape or dtype, a temperature that is not positive and finite, or a
            `vocab_size` that the logits cannot hold.
    """
    rows = logit_rows(logits, targets, tensor_parallel_group, temperature, row_mask, vocab_size)
    log_probs, entropy, _ = LogProbsAndEntropy.apply(logits, *_with_sets(rows, kept), None)  # type: ignore
    return log_probs, entropy if with_entropy else None


def _with_sets(rows: LogitRows, kept: Ragged | None) -> tuple[LogitRows, SetGradient | None]:
    """Restrict each row that has a set to its set."""
    if kept is None:
        return rows, None
    logits = rows.logits
    check_rows(kept, logits)
    pairs = KeptPairs.build(kept.to(logits.device), rows.targets, rows.shard, rows.temperature)
    set_logits = pairs.logits_in(logits.detach())
    has_set = to_device(kept.sizes > 0, logits.device)
    rows = replace(rows, has_set=has_set, set_statistics=pairs.local_statistics(set_logits))
    return rows, functools.partial(pairs.add_gradient, set_logits)


def log_probs_and_score(
    logits: Tensor, targets: Tensor, scorer: Scorer, kept: Ragged | None = None, **vocabulary: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute log-probabilities and entropy [tokens] and a score [..., tokens], all differentiable.

    `scorer` is a teacher or a `Centering` for the same tokens and gets no gradient. A teacher's
    score is the divergence from it in nats. A `Centering` also supports `kept`, if its head is
    within the sets. `vocabulary` are `tensor_parallel_group`, `temperature`, `row_mask` and
    `vocab_size` of `log_probs_and_entropy`, which also lists the errors.
    """
    rows = logit_rows(logits, targets, **vocabulary)
    return LogProbsAndEntropy.apply(logits, *_with_sets(rows, kept), scorer)  # type: ignore


def linear_log_probs_and_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    options: HeadOptions | None = None,
    *,
    keep_logits: bool | None = None,
    kept: Ragged | None = None,
    centering: Centering | None = None,
) -> tuple[Tensor, ...]:
    """Compute each target's log-probability and the entropy from hidden states, for any loss.

    Backward recomputes the logits chunk by chunk unless they were kept. Rows with a set of kept
    tokens are multiplied by only the set's columns, or by all columns if the sets are so large that
    this is cheaper.

    Args:
        hidden: [tokens, hidden] bfloat16, float16 or float32, the same on every tensor-parallel
            rank. Its gradient, in its dtype, is this rank's part: the caller sums it over the
            group.
        weight: [v/tp, hidden], the same dtype. Its gradient is accumulated in float32, in
            `weight.main_grad` if Megatron's DistributedDataParallel made one.
        targets: [tokens] int64 global token ids.
        keep_logits: hold all tokens' logits until backward, which overwrites them: three matrix
            products instead of four. None: only if they fit the budget.
        kept: as for `log_probs_and_entropy`, with values on the device of `hidden` or on the host.
        centering: the sampler's head of each token, within its set. Read with `kept`.

    Returns:
        log_probs [tokens] and entropy [tokens] in nats, float32, both differentiable, and with
        `centering` its values [5, tokens], of which the first is differentiable. Raises
        ValueError for inconsistent shapes or dtypes, and NotImplementedError for kept sets under a
        soft-cap.
    """
    options, factors = options or HeadOptions(), Factors(hidden, weight, targets)
    if kept is None:
        return linear_log_probs(factors, options, keep_logits)
    if options.transform.softcap is not None:
        raise NotImplementedError(
            f"kept sets and a soft-cap of the logits (found {options.transform.softcap:g}) are "
            "mutually exclusive in the fused head: drop --fused-lm-head"
        )
    return kept_log_probs(factors, options, keep_logits, kept.to(hidden.device), centering)
