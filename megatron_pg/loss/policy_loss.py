r"""Policy loss of one micro-batch on one rank.

    loss = aggregate(pg) + beta mean(kl) - c mean(entropy) + d aggregate(divergence)
    aggregate(x) = sum over this rank's tokens of weight * x, divided by the step's normalizer

`aggregate` uses the weights of `--loss-aggregation`. `mean` is the sample mean, or `aggregate` with
`--regularizer-aggregation loss`. beta is `kl_loss_coef`, c `entropy_coef`, d `distill_coef`.
Corrections change only pg: all other terms use the tokens that are active before any rejection. The
sum over ranks and micro-batches is the step's objective, because weights and normalizers are known
before the step (`aggregation.py`). Objectives, corrections and KL estimates are table rows, chosen
by name. Inputs are tensors by name: a CPU runs the function operator by operator, the compiler
traces it, and the fused head calls it chunk by chunk.
"""

from dataclasses import dataclass

from torch import Tensor

from megatron_pg.loss.aggregation import Weights
from megatron_pg.loss.corrections import Corrected, apply_corrections
from megatron_pg.loss.objectives import Outcome
from megatron_pg.loss.reducer import Reduction, weighted_sum
from megatron_pg.loss.regularizers import kl_estimate
from megatron_pg.loss.resolved import ResolvedLoss
from megatron_pg.loss.sequence import SequenceSums
from megatron_pg.loss.tokens import Tokens


@dataclass(frozen=True)
class Terms:
    """Loss of one micro-batch on one rank, its terms, and the per-token loss before and after
    corrections.
    """

    loss: Tensor  # 0-d, with gradient, scaled by `grad_divisor` and `divide_gradient_twice`
    reported: dict[str, Tensor]  # 0-d terms by name, and as `loss` their total, unscaled
    outcome: Outcome
    corrected: Corrected


def policy_loss(
    resolved: ResolvedLoss,
    tokens: Tokens,
    weights: Weights,
    sums: SequenceSums,
    reduce: Reduction = weighted_sum,
) -> Terms:
    """Compute the loss of one micro-batch on one rank. `reduce` is the weighted sum, or a custom
    reduction, which does not read weights.
    """
    config = resolved.config
    outcome = resolved.objective(config, tokens, sums)
    corrected = apply_corrections(config, tokens, outcome.loss, sums, resolved.corrections)
    pg_sum = reduce(corrected.loss, weights.loss, corrected.loss_mask)
    pg_loss = quotient(pg_sum, weights.outer_count)

    def aggregated(x: Tensor) -> Tensor:
        return quotient(reduce(x, weights.unrejected), weights.unrejected_count)

    def regularizer(x: Tensor) -> Tensor:
        if config.regularizer_aggregation == "loss":
            return aggregated(x)
        return quotient(weighted_sum(x, weights.regularizer), weights.regularizer_count)

    terms, penalties = {"pg_loss": pg_loss}, []
    if config.kl_loss_coef:
        kl = terms["kl_loss"] = regularizer(kl_estimate(config, tokens))
        penalties.append(weights.kl_coefficient.to(kl.dtype) * kl)
    if config.entropy_coef:
        terms["entropy_loss"] = regularizer(tokens.given("entropy"))
        penalties.append(-config.entropy_coef * terms["entropy_loss"])
    if config.distill_coef:
        terms["distill_loss"] = aggregated(tokens.given("divergence"))
        penalties.append(config.distill_coef * terms["distill_loss"])
    loss = terms["loss"] = sum(penalties, start=pg_loss)
    if config.grad_divisor is not None:
        if config.regularizer_aggregation == "loss":
            factor = weights.unrejected_count / weights.gradient_divisor
            penalties = [penalty * factor.to(penalty.dtype) for penalty in penalties]
        loss = sum(penalties, start=quotient(pg_sum, weights.gradient_divisor))
    if config.divide_gradient_twice:
        loss = quotient(loss, weights.outer_count)
    return Terms(loss, terms, outcome, corrected)


def quotient(inner_sum: Tensor, count: Tensor) -> Tensor:
    """Divide a sum by a step count, in the sum's precision."""
    return inner_sum / count.to(inner_sum.dtype)
