"""`ValueStep`: a critic's optimizer step in Megatron's schedules. `compute_values`: a forward-only
pass for its values.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_pg.config import PolicyLossConfig
from megatron_pg.config.objective import DistillationSettings
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

WITHOUT_TEACHER: dict[str, Any] = {
    field.name: field.default for field in dataclasses.fields(DistillationSettings)
}


class ValueStep:
    """Value loss of one optimizer step of a critic on this rank. Use it like `PolicyStep`, with the
    critic's model.

        step = ValueStep(config, critic, plan, model=critic_model)
        def forward_step(data_iterator, model):
            head = step.head(next(data_iterator))
            return model(**head.model_inputs), head.loss_func
        metrics = policy_step.metrics(policy_output, critic=step.report(value_output))

    The loss is aggregated like the config's policy loss, with the same totals, and scaled for the
    schedule by the same contract. If policy and critic are sharded alike, they share the plan and
    the micro-batches. For further arguments and errors see `PolicyStep`.

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
        # A critic has no vocabulary to fuse, its routers differ from the policy's, and its tokens
        # are those before any rejection.
        config = dataclasses.replace(
            config,
            fused_lm_head=False,
            fp32_lm_head=False,
            replay_routing=False,
            rejection_denominator="original",
            **(WITHOUT_TEACHER if config.distill_coef else {}),
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
        """Build the head of one micro-batch, in `forward_step`, before the model, on every rank and
        stage.

        Args:
            batch: the micro-batch, packed for this context-parallel rank, on the model's device.

        Raises:
            ValueError: the samples have no `old_values` or `returns`. See also `PolicyStep.head`.
        """
        step = self._step
        inputs = step.checked_inputs(batch)
        loss = MicroBatchValueLoss(step.config, self.critic, batch, step.totals, step.share)
        return step.scaled_head(batch, inputs, lambda output: loss(values_of_output(batch, output)))

    def report(self, schedule_output: Sequence[Mapping[str, Tensor]]) -> SumsReport:
        """Sum the schedule's output on this rank for `PolicyStep.metrics(critic=...)`, without
        communication.
        """
        counted = schedule_output if self._step.groups.contributes else ()
        return value_report(self._step.config, counted, self._step.device)

    def metrics(self, schedule_output: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
        """Return the critic's metrics, equal on every rank, for a step without a policy.

        Every rank of the job calls it once per step: one SUM all-reduce. For errors see
        `PolicyStep.metrics`.
        """
        report = self.report(schedule_output)
        dist.all_reduce(report.sums)
        return report.metrics(report.sums)


@dataclass(frozen=True, eq=False)
class ScoredValues:
    """Values of samples under a critic, in the samples' order."""

    values: list[Tensor]
    """Per sample the value before each response token, [response_length] float32 on the host."""
    bootstrap_values: Tensor
    """The value after each sample's last token if generation was truncated, 0 if it ended:
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
    """Compute values of samples under a critic, forward only. For callers and further arguments see
    `compute_log_probs`.

        scored = compute_values(
            critic, samples, max_tokens_per_microbatch=16384, is_truncated=is_truncated
        )
        estimates = gae(
            rewards, scored.values, masks, gamma, lam, bootstrap_values=scored.bootstrap_values
        )

    Args:
        model: a model with a value head (`add_value_head`), wrapped or not, or the list of chunks
            of a virtual pipeline.
        samples: this data-parallel rank's samples in any order, possibly none.
        is_truncated: `[samples]`, True if generation stopped at a limit instead of an end token:
            the model gets one more token and needs a position for it. None: all ended.

    Raises:
        ValueError: the numbers of flags and samples differ. See also `compute_log_probs`.
    """
    flags = [False] * len(samples) if is_truncated is None else list(map(bool, is_truncated))
    if len(flags) != len(samples):
        raise ValueError(
            f"is_truncated has {len(flags)} flags for {len(samples)} samples: pass one per sample"
        )
    longer_samples = []
    for sample, was_truncated in zip(samples, flags, strict=True):
        # The value after the last token is the value before one more token. Attention is causal, so
        # any token will do.
        tokens = torch.cat([sample.tokens, sample.tokens[-1:].clamp(min=0)[:was_truncated]])
        length = sample.response_length + was_truncated
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
    last = [
        float(s[0, -1]) if was_truncated else 0.0
        for s, was_truncated in zip(scores, flags, strict=True)
    ]
    return ScoredValues(values, torch.tensor(last, dtype=torch.float32, device="cpu"))


def values_of_output(batch: PackedBatch, output: Tensor) -> Tensor:
    """Read the values [window] of response tokens from the output [1, local_tokens, 1], at the rows
    that predict the tokens.
    """
    rows = output.reshape(-1, output.shape[-1])
    if rows.shape != (batch.window.local_tokens, 1):
        raise ValueError(
            f"the critic's output has shape {list(output.shape)} and the micro-batch "
            f"{batch.window.local_tokens} tokens on this rank, expected one value per token. Use "
            "add_value_head(model) and pass batch.tokens."
        )
    return rows[batch.logit_rows, 0]
