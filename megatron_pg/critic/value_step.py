"""`ValueStep`: a critic's optimizer step in Megatron's schedules. `compute_values`: its values,
forward only.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_pg.config import PolicyLossConfig
from megatron_pg.config.planning import OversizedSamples
from megatron_pg.critic.settings import CriticConfig
from megatron_pg.critic.value_loss import MicroBatchValueLoss, value_report
from megatron_pg.loss.metrics import SumsReport
from megatron_pg.megatron.groups import ParallelGroups
from megatron_pg.megatron.policy_step import MicroBatchHead, PolicyStep
from megatron_pg.megatron.scoring import score_samples
from megatron_pg.step.batch import PackedBatch
from megatron_pg.step.plan import StepPlan
from megatron_pg.step.sample import Sample
from megatron_pg.step.totals import StepTotals


class ValueStep:
    """The value loss of one optimizer step of a critic on this rank. Use it as `PolicyStep`, with
    the critic's model.

        step = ValueStep(config, critic, plan, model=critic_model)
        def forward_step(data_iterator, model):
            head = step.head(next(data_iterator))
            return model(**head.model_inputs), head.loss_func
        metrics = policy_step.metrics(policy_output, critic=step.report(value_output))

    The loss is aggregated as the config's policy loss, with the same totals, and scaled for the
    schedule by the same contract. Where policy and critic are sharded alike, they share the plan
    and the micro-batches. Further arguments and errors are those of `PolicyStep`.

    Args:
        config: the policy loss: aggregation, metrics, checks.
        critic: the value loss.
        model: the critic, a model with a value head (`add_value_head`), wrapped or a list of
            virtual-pipeline chunks.
    """

    def __init__(
        self,
        config: PolicyLossConfig,
        critic: CriticConfig,
        plan: StepPlan | None = None,
        *,
        model: Any | None = None,
        totals: StepTotals | None = None,
        num_microbatches: int | None = None,
        groups: ParallelGroups | None = None,
        accumulate_gradients: bool = False,
    ) -> None:
        # A critic has no vocabulary, and nothing to fuse with it. Its routers are its own, and its
        # tokens are those before any rejection.
        config = dataclasses.replace(
            config,
            fused_lm_head=False,
            fp32_lm_head=False,
            replay_routing=False,
            rejection_denominator="original",
        )
        self.critic = critic
        self._step = PolicyStep(
            config,
            plan,
            model=model,
            totals=totals,
            num_microbatches=num_microbatches,
            groups=groups,
            accumulate_gradients=accumulate_gradients,
        )

    def head(self, batch: PackedBatch) -> MicroBatchHead:
        """Build the head of one micro-batch; called in `forward_step`, before the model, on every
        rank and stage.

        Args:
            batch: the micro-batch, packed for this context-parallel rank, on the model's device.

        Raises:
            ValueError: the samples have no `old_values` or `returns`; as for `PolicyStep.head`.
        """
        step = self._step
        inputs = step.checked_inputs(batch)
        loss = MicroBatchValueLoss(step.config, self.critic, batch, step.totals, step.share)
        return step.scaled_head(batch, inputs, lambda output: loss(values_of_output(batch, output)))

    def report(self, schedule_output: Sequence[Mapping[str, Tensor]]) -> SumsReport:
        """Report what the schedule returned on this rank, for `PolicyStep.metrics(critic=...)`; no
        communication.
        """
        counted = schedule_output if self._step.groups.contributes else ()
        return value_report(self._step.config, counted, self._step.device)

    def metrics(self, schedule_output: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
        """Return the critic's metrics, the same on every rank, for a step without a policy; errors
        as of `PolicyStep.metrics`.

        Every rank of the job calls it once a step: one SUM all-reduce.
        """
        report = self.report(schedule_output)
        dist.all_reduce(report.sums)
        return report.metrics(report.sums)


@dataclass(frozen=True, eq=False)
class ScoredValues:
    """Values of samples under a critic, in the samples' order."""

    values: list[Tensor]
    """Per sample the value before each of its response tokens, [response_length] float32 on the
    host."""
    bootstrap_values: Tensor
    """The value after each sample's last token where generation was cut off, 0 where it ended:
    [samples] float32."""


def compute_values(
    model: Any,
    samples: Sequence[Sample],
    *,
    max_tokens_per_microbatch: int,
    is_truncated: Sequence[bool] | None = None,
    oversized: OversizedSamples = "error",
    groups: ParallelGroups | None = None,
) -> ScoredValues:
    """Compute values of samples under a critic, forward only. Callers and further arguments are
    those of `compute_log_probs`.

        scored = compute_values(
            critic, samples, max_tokens_per_microbatch=16384, is_truncated=is_truncated
        )
        estimates = gae(
            rewards, scored.values, masks, gamma, lam, bootstrap_values=scored.bootstrap_values
        )

    Args:
        model: a model with a value head (`add_value_head`), wrapped or not, or the list of chunks
            of a virtual pipeline.
        samples: this data-parallel rank's, in any order; none at all is legal.
        is_truncated: `[samples]`, True where generation stopped at a limit and not at an end token:
            the model gets one more token and needs a position for it. None: all ended.

    Raises:
        ValueError: the number of flags is not that of the samples; as for `compute_log_probs`.
    """
    flags = [False] * len(samples) if is_truncated is None else list(map(bool, is_truncated))
    if len(flags) != len(samples):
        raise ValueError(
            f"is_truncated has {len(flags)} flags for {len(samples)} samples: give one each"
        )
    longer_samples = []
    for sample, is_cut in zip(samples, flags, strict=True):
        # The value after the last token is the value before one token more; as attention is causal,
        # any token will do.
        tokens = torch.cat([sample.tokens, sample.tokens[-1:].clamp(min=0)[:is_cut]])
        length = sample.response_length + is_cut
        longer_samples.append(Sample(tokens, length, [1] * length, name=sample.name))
    scores = score_samples(
        model,
        longer_samples,
        lambda batch, output: values_of_output(batch, output)[None],
        empty_scores=torch.empty(1, 0, dtype=torch.float32, device="cpu"),
        max_tokens_per_microbatch=max_tokens_per_microbatch,
        oversized=oversized,
        groups=groups,
    )
    values = [score[0, : s.response_length] for score, s in zip(scores, samples, strict=True)]
    last = [float(s[0, -1]) if is_cut else 0.0 for s, is_cut in zip(scores, flags, strict=True)]
    return ScoredValues(values, torch.tensor(last, dtype=torch.float32, device="cpu"))


def values_of_output(batch: PackedBatch, output: Tensor) -> Tensor:
    """Read the values [window] of response tokens from the output [1, local_tokens, 1], each in the
    row that predicts its token.
    """
    rows = output.reshape(-1, output.shape[-1])
    if rows.shape != (batch.window.local_tokens, 1):
        raise ValueError(
            f"the critic's output has shape {list(output.shape)} and the micro-batch "
            f"{batch.window.local_tokens} tokens on "
            "this rank: expected one value a token, from a model with add_value_head(model), fed "
            "batch.tokens"
        )
    return rows[batch.logit_rows, 0]
