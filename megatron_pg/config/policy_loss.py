"""`PolicyLossConfig`: every setting of the policy loss.

The docstring under a field is also the `--help` text of its flag, so each formula is stated once; what a word of a table
means (`--loss-aggregation`, `--policy-loss`, `--kl-loss-type`) is the text of its row. In all of them m is the loss mask,
A the advantage, sg() stops the gradient, and log-ratios are clamped to +-20 before they are exponentiated.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from megatron_pg.config.combinations import violations_of
from megatron_pg.config.fields import PYTHON_ONLY, Interval, refuse
from megatron_pg.config.flags import read_args
from megatron_pg.config.rows import ANCHOR, TABLES

LOG_PROB_FIELDS = ("old_log_probs", "ref_log_probs", "rollout_log_probs")
OPTIONAL_SAMPLE_FIELDS = (*LOG_PROB_FIELDS, "group_index", "kept_tokens", "loss_weights")
"""Fields of `Sample` that some settings need and others do not."""

MAX_LOG_RATIO = 20.0
"""Log-ratios are held within +-20 before they are exponentiated: e^20 is 4.9e8."""
_LOWER_BOUND = Interval(0, math.exp(MAX_LOG_RATIO), closed=True)
_UPPER_BOUND = Interval(math.exp(-MAX_LOG_RATIO), closed=True)
_OPEN_UPPER_BOUND = Interval(math.exp(-MAX_LOG_RATIO), closed=True, or_infinite=True)
"""Bounds of a ratio that some ratio meets: every ratio is in [e^-20, e^20]."""

CpPartitionMode = Literal["zigzag", "contiguous"]
"""How a context-parallel group cuts a pack of sequences, by the names of Megatron's `TransformerConfig`; see
`TokenWindow`."""


@dataclass(frozen=True)
class PolicyLossConfig:
    """What the policy loss computes.

    Raises:
        ValueError: values out of range or that contradict each other, all of them in one error; fields and flags are
            named.
    """

    loss_aggregation: str = "sample_mean"
    """How the per-token losses x of a step become one number; all totals are of the whole step."""

    loss_aggregation_divisor: Annotated[float | None, Interval(0, metavar="L")] = None
    """L of the constant aggregation 1/(N L) sum m x, in tokens (Dr.GRPO, arXiv:2503.20783 eq. 2).
    Above 0. Needed by constant, refused with every other aggregation."""

    loss_weight_denominator: Literal["mask", "weights"] = "mask"
    """What D, G and T count where samples carry loss weights u (Sample.loss_weights), by which every
    term of the loss is multiplied token by token. mask: active tokens, as without weights. weights:
    sum m u, so that a weight of 0 is as good as a masked token; needs samples with weights (1 where others have none)."""

    calculate_per_token_loss: bool = False
    """Megatron's per-token mode: gradients are summed over tokens and divided once by the token
    count of the step. It says how the scale is applied and not what is optimised: token_mean turns
    it on by itself, sample_mean with it becomes token_mean, constant and prompt_mean refuse it. A
    mode that the trainer forces on the model's config is honoured with every aggregation."""

    policy_loss: str = "ppo"
    """Per-token loss, with r = exp(log_prob - old_log_prob)."""

    ratio_anchor: Literal["old", "rollout"] = "old"
    """Whose log-probs the ratio r is taken against, wherever r stands. old: old_log_probs, of the
    policy that the step starts from. rollout: rollout_log_probs, of the engine that sampled; then r
    carries staleness and mismatch, the clip bounds them too, and old_log_probs are not read. Not
    with use_tis."""

    eps_clip: Annotated[float, Interval(0, 1)] = 0.2
    """The ratio is clipped from below at 1 - eps_clip. Above 0, at most 1."""

    eps_clip_high: Annotated[float | None, Interval(0)] = None
    """The ratio is clipped from above at 1 + eps_clip_high (clip-higher, arXiv:2503.14476). Above
    0. Unset: equal to eps_clip."""

    eps_clip_c: Annotated[float | None, Interval(1)] = None
    """Dual clip of ppo and gspo (arXiv:1912.09729): where A < 0 the per-token loss is at most
    -eps_clip_c A. Above 1. Unset: no dual clip."""

    cispo_lower_bound: bool = False
    """Clip the ratio of cispo from below too: -sg(clip(r, 1 - eps_clip, 1 + eps_clip_high)) A
    log_prob."""

    sapo_tau_pos: Annotated[float, Interval(0)] = 1.0
    """Temperature tau of sapo where A > 0. Above 0; the larger, the faster the gradient falls off as
    r leaves 1."""

    sapo_tau_neg: Annotated[float, Interval(0)] = 1.05
    """Temperature tau of sapo where A <= 0. Above 0."""

    dppo_delta: Annotated[float | None, Interval(0, 1)] = None
    """Divergence above which dppo_tv and dppo_kl drop a token with A < 0 whose probability fell.
    Above 0, at most 1. Unset: 0.15 for dppo_tv, 0.05 nats for dppo_kl."""

    dppo_delta_high: Annotated[float | None, Interval(0, 1)] = None
    """The same for a token with A > 0 whose probability rose. Unset: equal to dppo_delta."""

    regularizer_aggregation: Literal["sample_mean", "loss"] = "sample_mean"
    """How the KL and entropy terms become one number each. sample_mean: by the sample mean, whatever
    loss_aggregation is. loss: by the aggregation of the policy loss, so that the whole loss is
    aggregate(pg + beta kl - c H), over the tokens before any rejection; grad_divisor then divides
    all of it. Needs kl_loss_coef or entropy_coef."""

    kl_loss_coef: Annotated[float, Interval(0, closed=True)] = 0.0
    """Weight beta of the KL term: loss = pg + beta * kl, the mean of regularizer_aggregation. At
    least 0. Above 0 it needs the log-probs of the reference model (ref_log_probs)."""

    kl_loss_type: str = "k3"
    """Per-token estimate of KL(policy || reference), with d = log_prob - ref_log_prob."""

    use_unbiased_kl: bool = False
    """Weight the KL estimate by the ratio: r * kl, with gradient through r."""

    kl_loss_gradient: Literal["estimate", "k2"] = "estimate"
    """Whose gradient the KL term has. estimate: that of kl_loss_type. k2: that of d^2 / 2, whatever
    kl_loss_type makes of the value (straight-through): its expectation on-policy is the gradient of
    the divergence (arXiv:2506.09477). Not with use_unbiased_kl."""

    entropy_coef: Annotated[float, Interval(0, closed=True)] = 0.0
    """Weight c of the entropy bonus: loss = pg - c * entropy, the mean of regularizer_aggregation of
    the entropy of the full vocabulary, in nats, with gradient. At least 0."""

    use_tis: bool = False
    """Truncated importance sampling against the mismatch of rollout engine and trainer: multiply
    the per-token loss by the weight chosen with tis_level and tis_mode. Needs the log-probs of the
    rollout engine (rollout_log_probs)."""

    tis_level: Literal["token", "sequence", "geometric"] = "token"
    """What the importance weight w is of, with d = old_log_prob - rollout_log_prob. token: w =
    exp(d). sequence: w = exp(sum_t d), one for all tokens of the sample. geometric: w = exp(mean_t
    d), likewise."""

    tis_mode: Literal["truncate", "mask"] = "truncate"
    """What becomes of w. truncate: clamp(w, tis_clip_low, tis_clip). mask: w inside [tis_clip_low,
    tis_clip], else 0 (token level: IcePop)."""

    tis_clip: Annotated[float, _UPPER_BOUND] = 2.0
    """Upper bound of the importance weight. At least e^-20, the smallest weight."""

    tis_clip_low: Annotated[float, _LOWER_BOUND] = 0.0
    """Lower bound of the importance weight. At least 0, at most e^20 and tis_clip."""

    use_geometric_rejection: bool = False
    """Keep a sequence only if exp(mean_t d), d = old_log_prob - rollout_log_prob, lies between
    geometric_rejection_low and geometric_rejection_high. Needs the log-probs of the rollout engine
    (rollout_log_probs)."""

    geometric_rejection_low: Annotated[float, _LOWER_BOUND] = 0.999
    """Smallest exp(mean_t d) that is kept. At least 0, at most e^20 and geometric_rejection_high; 0
    leaves the bound open."""

    geometric_rejection_high: Annotated[float, _OPEN_UPPER_BOUND] = 1.001
    """Largest exp(mean_t d) that is kept. At least e^-20; inf leaves the bound open."""

    use_sequence_rejection: bool = False
    """Keep a sequence only if exp(sum_t d), d = old_log_prob - rollout_log_prob, lies between
    sequence_rejection_low and sequence_rejection_high. Needs the log-probs of the rollout engine
    (rollout_log_probs)."""

    sequence_rejection_low: Annotated[float, _LOWER_BOUND] = 0.5
    """Smallest exp(sum_t d) that is kept. At least 0, at most e^20 and sequence_rejection_high; 0
    leaves the bound open."""

    sequence_rejection_high: Annotated[float, _OPEN_UPPER_BOUND] = 2.0
    """Largest exp(sum_t d) that is kept. At least e^-20; inf leaves the bound open."""

    use_opsm: bool = False
    """Off-policy sequence masking: drop a sequence if A < 0 and mean_t(old_log_prob - log_prob) >
    opsm_delta."""

    opsm_delta: Annotated[float, Interval(0, closed=True)] = 1e-4
    """Threshold of use_opsm, in nats per token. At least 0."""

    rejection_denominator: Literal["original", "accepted"] = "original"
    """What the aggregation divides by when tokens or sequences are rejected. original: the totals
    before rejection, so that a rejected token counts as a zero. accepted: the totals of what was
    kept."""

    rollout_temperature: Annotated[float, Interval(0)] = 1.0
    """Temperature t at which the rollout engine sampled and scored: log-probs and entropy are those
    of logits / t. Above 0."""

    replay_sampling_set: bool = False
    """Log-probs and entropy of the distribution renormalised to the set that each token was sampled
    from (top-p, top-k): log_prob = z_y / t - logsumexp over the set of z_k / t. Needs the sets
    (kept_tokens) of every sample, and old, reference and rollout log-probs over the same sets; a KL
    term is then that of the two renormalised distributions."""

    distill_coef: Annotated[float, Interval(0, closed=True)] = 0.0
    """Weight of a distillation term beside another policy loss: loss = pg + distill_coef * D, D the
    divergence from the teacher by the same aggregation. At least 0. Needs distill_teacher."""

    distill_divergence: Literal["forward_kl", "reverse_kl", "jsd"] = "reverse_kl"
    """D of --policy-loss distill and of distill_coef, with p of the student and q of the teacher.
    forward_kl: sum_v q log(q / p). reverse_kl: sum_v p log(p / q). jsd: beta sum_v q log(q / m) + (1 -
    beta) sum_v p log(p / m), m = beta q + (1 - beta) p (arXiv:2306.13649)."""

    distill_beta: Annotated[float, Interval(0, 1)] = 0.5
    """beta of jsd, the teacher's weight in the mixture. Above 0, below 1."""

    distill_teacher: Literal["logits", "hidden", "top_k"] | None = None
    """What the samples' side channels bring of the teacher for every response token. logits:
    teacher_logits over the vocabulary. hidden: teacher_hidden, to be multiplied by the teacher's
    output weight (PolicyStep's teacher_weight). top_k: teacher_ids and teacher_log_probs of its
    likeliest tokens, at the rollout temperature; the rest is one bucket on both sides."""

    kept_set_mass: bool = False
    """Report kept_set_mass, the probability that the policy in training gives the kept sets, at the
    cost of a pass over the vocabulary. Needs replay_sampling_set; not with fused_lm_head."""

    qkv_format: Literal["thd", "bshd"] = "thd"
    """Layout of the model's input. thd: sequences packed back to back. bshd: one padded row a
    sequence, refused under context parallelism."""

    cp_partition_mode: CpPartitionMode = "zigzag"
    """Which tokens of a pack a context-parallel rank holds, which is the attention's to say. zigzag:
    of every sequence the chunks r and 2 CP - 1 - r. contiguous: one slice of the whole pack."""

    pg_metrics: Literal["none", "basic", "with_entropy"] = "basic"
    """Metrics of a step. none: no metrics beyond the loss. basic: ratios, clip fractions,
    advantages and token counts. with_entropy: basic and the entropy."""

    check_aggregation: bool = False
    """Stop with an error, instead of one warning, when the aggregation checksum of a step (sums of
    weights, plain and by what each sample is, over their values from the totals) is not 1: a sample
    was duplicated, dropped, mis-sliced or exchanged for another."""

    custom_policy_loss_path: str | None = None
    """Import path, pkg.mod.fn or pkg.mod:fn, of f(config, batch, log_probs) -> per-token loss
    [window]. Takes the place of policy_loss."""

    custom_tis_function_path: str | None = None
    """Import path of f(config, batch, log_probs, pg_loss) -> (pg_loss, loss_mask). Takes the place
    of the weights of use_tis, which must be on."""

    custom_pg_loss_reducer_function_path: str | None = None
    """Import path of f(total_lengths, response_lengths, loss_masks, calculate_per_token_loss) ->
    reducer, where reducer(x) is the inner sum over this rank's window; f is given cp_rank,
    cp_size, cp_partition_mode and pad_to_multiple too where its signature names them. The masks
    are those that corrections leave. Takes the place of loss_aggregation; the outer count is N
    rollouts, T active tokens in per-token mode."""

    fused_lm_head: bool = False
    """Compute output layer, log-probs and entropy together, a chunk of tokens at a time, without the
    logits of all tokens in memory. Needs a model whose output layer is Megatron's
    ColumnParallelLinear, and a step built with PolicyStep and the model. Not with bshd."""

    fp32_lm_head: bool = False
    """Logits with float32 accumulation and output from the model's bf16 operands, in the fused head
    or, without it, in the model's own output layer: Megatron's ColumnParallelLinear, and a step built
    with PolicyStep."""

    divide_gradient_twice: bool = False
    """Report the loss and differentiate loss / outer count, KL and entropy terms included: parity
    with a script that returns the mean over M documents to an engine that divides by M again
    (DeepSpeed). Not with grad_divisor."""

    grad_divisor: Annotated[float | None, Interval(0), PYTHON_ONLY] = None
    """Python API only. The reported policy loss is inner sum / outer count, the differentiated one
    inner sum / grad_divisor, for parity with engines that divide twice; PolicyStep takes one for its
    step. The same of the whole loss under regularizer_aggregation loss. Above 0. None: the outer
    count for both."""

    def __post_init__(self) -> None:
        refuse(violations_of(PolicyLossConfig, vars(self))[0])

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> PolicyLossConfig:
        """The config from args that `validate_policy_loss_args` has returned.

        A field whose flag the parser did not define keeps its default.

        Raises:
            ValueError: the args were not validated, or a value is out of range.
        """
        if vars(args).get("loss_aggregation", "") is None:
            raise ValueError(
                "args.loss_aggregation is None: call validate_policy_loss_args(args) before "
                "PolicyLossConfig.from_args(args)"
            )
        return read_args(cls, args)

    @property
    def required_sample_fields(self) -> tuple[str, ...]:
        """Optional fields of `Sample` that every sample must carry under these settings."""
        return tuple(required_inputs(self))

    @property
    def changes_output_layer(self) -> bool:
        """Whether the model's own output layer is to give float32 logits: the fused head has its own product."""
        return self.fp32_lm_head and not self.fused_lm_head

    @property
    def distills(self) -> bool:
        """Whether the loss or one of its terms is the divergence from a teacher."""
        return self.distill_coef > 0 or (
            self.policy_loss == "distill" and self.custom_policy_loss_path is None
        )

    @property
    def needs_entropy(self) -> bool:
        """Whether the loss or a metric reads the entropy."""
        return self.entropy_coef > 0 or self.pg_metrics == "with_entropy"


def anchor_of(config: Any) -> str:
    """The field of `Sample` that the ratio is taken against."""
    return f"{config.ratio_anchor}_log_probs"


def required_inputs(config: PolicyLossConfig) -> dict[str, tuple[str, ...]]:
    """The optional `Sample` fields that `config` cannot do without, each with the flags asking.

    A custom policy loss may read what it likes of the batch: nothing is required on its behalf.
    """
    asking: list[tuple[str, tuple[str, ...]]] = []
    if config.use_unbiased_kl and config.kl_loss_coef > 0:
        asking.append(("--use-unbiased-kl", (ANCHOR,)))
    if config.replay_sampling_set:
        asking.append(("--replay-sampling-set", ("kept_tokens",)))
    for table in TABLES.values():
        asking += [(table.flag_of_row(row, config), row.inputs) for row in table.rows_on(config)]
    anchored = " --ratio-anchor rollout" if config.ratio_anchor == "rollout" else ""
    asking = [
        (flag + anchored, tuple(anchor_of(config) if name == ANCHOR else name for name in inputs))
        if ANCHOR in inputs
        else (flag, inputs)
        for flag, inputs in asking
    ]
    flags = {
        field: tuple(dict.fromkeys(flag for flag, inputs in asking if field in inputs))
        for field in OPTIONAL_SAMPLE_FIELDS
    }
    return {field: asked_by for field, asked_by in flags.items() if asked_by}
