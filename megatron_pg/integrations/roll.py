"""The four aggregations inside ROLL's RLVR pipeline, unmodified: worker classes for its `worker_cls`.

    actor_train:
      worker_cls: megatron_pg.integrations.roll.PromptMeanActorWorker
    loss_agg_mode: seq-mean-token-mean

The way of a loss through ROLL (read in commit 8eb27cc): DP is the data-parallel size, M the micro-batches, V the samples
of the step with an active token, m the mask after the filters of the loss.

1. `roll/pipeline/rlvr/actor_worker.py`, `loss_func`: gathers the log-probs over context parallelism and aggregates
   policy loss, KL and entropy by `loss_agg_mode`, with the totals of the step over data parallelism. It multiplies the
   policy loss alone, per sample, by the result of `compute_sample_weights`.
2. `roll/distributed/strategy/megatron_strategy.py`, `inner_forward_step`: returns `loss * M * DP` in a pair, of which
   Megatron makes the sum of the losses. With `calculate_per_token_loss` it is an unnormalised sum: refused here.
3. `roll/utils/functionals.py`, `agg_loss`: `seq-mean-token-mean` is `1 / V * sum over samples of f_i * (sum m x) /
   (sum m)`, exact up to float32. (`token-mean` keeps tokens that a filter took out, and `seq-mean-token-sum-norm` divides by
   the padded length.)

The classes weigh the policy loss alone. With `f_i = w_i * V * sum m` it is `sum of w_i m x`, with w_i from the totals
before the filters; L of `constant` is in the worker's environment (MEGATRON_PG_LOSS_AGGREGATION_DIVISOR). KL and entropy
are sample means over V. A prompt group is the samples with the same prompt tokens.
"""

import functools
import hashlib
from collections.abc import Callable
from typing import Any, ClassVar

from roll.distributed.scheduler.decorator import Dispatch, register
from roll.pipeline.rlvr.actor_worker import ActorWorker
from roll.utils.functionals import agg_loss
from torch import Tensor

from megatron_pg.integrations.roll_weights import (
    prove,
    refuse_settings,
    sample_factors,
    step_weights,
)
from megatron_pg.megatron.trainer_globals import data_parallel_group

WEIGHT = "megatron_pg_weight"
"""Key of the batch under which a sample's weight travels into its micro-batch."""


class _AggregationActorWorker(ActorWorker):  # type: ignore[misc]
    """ROLL's worker with the sample weights of one aggregation."""

    aggregation: ClassVar[str]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def initialize(self, pipeline_config: Any) -> None:
        """Check settings and `agg_loss`, initialize as ROLL does, and make the weights before each optimizer step."""
        self.divisor = refuse_settings(self.aggregation, pipeline_config)
        prove(self.aggregation, self.divisor, agg_loss)
        super().initialize(pipeline_config)
        model = getattr(self.strategy, "model", None)
        if getattr(getattr(model, "config", None), "calculate_per_token_loss", False):
            raise ValueError(
                f"megatron_pg {self.aggregation} with calculate_per_token_loss in the model's config: ROLL returns no token "
                "count, and Megatron would not divide at all; set it to false under actor_train.strategy_args.strategy_config"
            )
        self.strategy.train_step = functools.partial(self.weighted_step, self.strategy.train_step)
        self.logger.info(f"megatron_pg: {self.aggregation} is on")

    def weighted_step(self, train_step: Callable[..., Any], batch: Any, loss_func: Any) -> Any:
        """Take one optimizer step of the strategy; every rank calls it with its data-parallel rank's samples."""
        mask = batch.batch.get("final_response_mask", batch.batch["response_mask"][:, 1:])
        prompts = None
        if self.aggregation == "prompt_mean":
            rows = batch.batch["prompts"].cpu().numpy()
            prompts = [hashlib.blake2b(row.tobytes(), digest_size=16).digest() for row in rows]
        batch.non_tensor_batch[WEIGHT] = step_weights(
            self.aggregation,
            mask.sum(dim=-1).tolist(),
            prompts,
            data_parallel_group(),
            rollouts_per_prompt=self.pipeline_config.num_return_sequences_in_group,
            divisor=self.divisor,
        ).astype(object)
        return train_step(batch=batch, loss_func=loss_func)

    def compute_sample_weights(self, data: Any, response_mask: Tensor) -> Tensor:
        """Return the factors `[samples]` of a micro-batch's policy loss. The mask has the filters of the loss applied."""
        kept = data.batch.get("final_response_mask", response_mask) * response_mask
        valid = data.meta_info["global_valid_samples"]
        count = valid.get("final_response_mask", valid["response_mask"])
        return sample_factors(data.non_tensor_batch[WEIGHT], kept, count)


class SampleMeanActorWorker(_AggregationActorWorker):
    aggregation = "sample_mean"


class PromptMeanActorWorker(_AggregationActorWorker):
    aggregation = "prompt_mean"


class TokenMeanActorWorker(_AggregationActorWorker):
    aggregation = "token_mean"


class ConstantActorWorker(_AggregationActorWorker):
    aggregation = "constant"
