"""``PolicyLossConfig``: every setting of the policy loss.

The docstring under a field is also the ``--help`` text of its flag (``flags.py`` reads it), so each
formula is stated once. In all of them m is the loss mask, A the advantage, sg() stops the gradient,
and log-ratios are clamped to +-20 before they are exponentiated.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Literal, get_type_hints

from megatron_pg.config.values import PYTHON_ONLY_FIELDS, check_combinations, check_value

LossAggregation = Literal["sample_mean", "prompt_mean", "token_mean", "constant"]
PolicyLoss = Literal["ppo", "gspo", "cispo", "reinforce", "sft"]
KLType = Literal["k1", "k2", "k3", "low_var_kl"]
TISLevel = Literal["token", "sequence"]
TISMode = Literal["truncate", "mask"]
RejectionDenominator = Literal["original", "accepted"]
QKVFormat = Literal["thd", "bshd"]
PolicyMetrics = Literal["none", "basic", "with_entropy"]


@dataclass(frozen=True)
class PolicyLossConfig:
    """What the policy loss computes.

    Raises:
        ValueError: A value is out of range or contradicts another; field and flag are named.
    """

    loss_aggregation: LossAggregation = "sample_mean"
    """How the per-token losses x of a step become one number. sample_mean: 1/N sum_i (sum_t m x /
    max(D_i, 1)), D_i the active tokens of rollout i, N rollouts. prompt_mean: 1/P sum_g (sum_(i in
    g, t) m x / max(G_g, 1)), G_g the active tokens of prompt group g, P groups. token_mean:
    1/max(T, 1) sum m x, T active tokens. constant: 1/(N L) sum m x, L the divisor. All totals are
    of the whole step."""

    loss_aggregation_divisor: float | None = None
    """L of the constant aggregation 1/(N L) sum m x, in tokens (Dr.GRPO, arXiv:2503.20783 eq. 2).
    Above 0. Needed by constant, refused with every other aggregation."""

    calculate_per_token_loss: bool = False
    """Megatron's per-token mode: gradients are summed over tokens and divided once by the token
    count of the step. It says how the scale is applied and not what is optimised: token_mean turns
    it on by itself, sample_mean with it becomes token_mean, constant and prompt_mean refuse it. A
    mode that the host forces on the model's config is honoured with every aggregation."""

    policy_loss: PolicyLoss = "ppo"
    """Per-token loss, r = exp(log_prob - old_log_prob). ppo: -min(r A, clip(r, 1 - eps_clip, 1 +
    eps_clip_high) A). gspo: the same with the ratio of the sequence, log s_t = sg(mean_t log r) +
    log_prob - sg(log_prob) (arXiv:2507.18071). cispo: -sg(min(r, 1 + eps_clip_high)) A log_prob
    (arXiv:2506.13585). reinforce: -A log_prob. sft: -log_prob, supervised: advantages are not
    read."""

    eps_clip: float = 0.2
    """The ratio is clipped from below at 1 - eps_clip. Above 0, at most 1."""

    eps_clip_high: float | None = None
    """The ratio is clipped from above at 1 + eps_clip_high (clip-higher, arXiv:2503.14476). Above
    0. Unset: equal to eps_clip."""

    eps_clip_c: float | None = None
    """Dual clip of ppo and gspo (arXiv:1912.09729): where A < 0 the per-token loss is at most
    -eps_clip_c A. Above 1. Unset: no dual clip."""

    cispo_lower_bound: bool = False
    """Clip the ratio of cispo from below too: -sg(clip(r, 1 - eps_clip, 1 + eps_clip_high)) A
    log_prob."""

    kl_loss_coef: float = 0.0
    """Weight beta of the KL term: loss = pg + beta * sample_mean(kl). At least 0. Above 0 it needs
    the log-probs of the reference model (ref_log_probs)."""

    kl_loss_type: KLType = "k3"
    """Per-token estimate of KL(policy || reference), with d = log_prob - ref_log_prob. k1: d. k2:
    d^2 / 2. k3: exp(-d) - 1 + d. low_var_kl: k3 clamped to +-10. As a loss, k1 has zero expected
    gradient on-policy."""

    use_unbiased_kl: bool = False
    """Weight the KL estimate by the ratio: r * kl, with gradient through r."""

    entropy_coef: float = 0.0
    """Weight of the entropy bonus: loss = pg - entropy_coef * sample_mean(entropy), the entropy of
    the full vocabulary in nats, with gradient. At least 0."""

    use_tis: bool = False
    """Truncated importance sampling against the mismatch of rollout engine and trainer: multiply
    the per-token loss by the weight chosen with tis_level and tis_mode. Needs the log-probs of the
    rollout engine (rollout_log_probs)."""

    tis_level: TISLevel = "token"
    """What the importance weight w is of, with d = old_log_prob - rollout_log_prob. token: w =
    exp(d). sequence: w = exp(sum_t d), one for all tokens of the sample."""

    tis_mode: TISMode = "truncate"
    """What becomes of w. truncate: clamp(w, tis_clip_low, tis_clip). mask (IcePop, token level): w
    inside [tis_clip_low, tis_clip], else 0."""

    tis_clip: float = 2.0
    """Upper bound of the importance weight. Above 0."""

    tis_clip_low: float = 0.0
    """Lower bound of the importance weight. At least 0, at most tis_clip."""

    use_geometric_rejection: bool = False
    """Keep a sequence only if exp(mean_t d), d = old_log_prob - rollout_log_prob, lies between
    geometric_rejection_low and geometric_rejection_high. Needs the log-probs of the rollout engine
    (rollout_log_probs)."""

    geometric_rejection_low: float = 0.999
    """Smallest exp(mean_t d) that is kept. At least 0, at most 1."""

    geometric_rejection_high: float = 1.001
    """Largest exp(mean_t d) that is kept. At least 1."""

    use_opsm: bool = False
    """Off-policy sequence masking: drop a sequence if A < 0 and mean_t(old_log_prob - log_prob) >
    opsm_delta."""

    opsm_delta: float = 1e-4
    """Threshold of use_opsm, in nats per token. At least 0."""

    rejection_denominator: RejectionDenominator = "original"
    """What the aggregation divides by when tokens or sequences are rejected. original: the totals
    before rejection, so that a rejected token counts as a zero. accepted: the totals of what was
    kept."""

    rollout_temperature: float = 1.0
    """Temperature t at which the rollout engine sampled and scored: log-probs and entropy are those
    of logits / t. Above 0."""

    qkv_format: QKVFormat = "thd"
    """Layout of the model's input. thd: sequences packed back to back. bshd: one padded row a
    sequence, refused under context parallelism."""

    pg_metrics: PolicyMetrics = "basic"
    """Metrics of a step. none: no metrics beyond the loss. basic: ratios, clip fractions,
    advantages and token counts. with_entropy: basic and the entropy."""

    check_aggregation: bool = False
    """Stop with an error, instead of one warning, when the aggregation checksum of a step (sum of
    weights / outer count, over its value from the totals) is not 1: a sample was duplicated,
    dropped or mis-sliced."""

    custom_policy_loss_path: str | None = None
    """Import path, pkg.mod.fn or pkg.mod:fn, of f(config, batch, log_probs) -> per-token loss
    [window]. Takes the place of policy_loss."""

    custom_tis_function_path: str | None = None
    """Import path of f(config, batch, log_probs, pg_loss) -> (pg_loss, loss_mask). Takes the place
    of the weights of use_tis, which must be on."""

    custom_pg_loss_reducer_function_path: str | None = None
    """Import path of f(total_lengths, response_lengths, loss_masks, calculate_per_token_loss) ->
    reducer, where reducer(x) is the inner sum over this rank's window; f is given cp_rank and
    cp_size too if its signature names them. Takes the place of loss_aggregation; the outer count is
    N rollouts, T active tokens in per-token mode."""

    fused_lm_head: bool = False
    """Compute output layer, log-probs and entropy together, a chunk of tokens at a time, without the
    logits of all tokens in memory. Needs megatron-core 0.18 or later, a GPTModel, and a step built
    with output_head(); megatron_loss, which is given logits, refuses it. Not with bshd."""

    fp32_lm_head: bool = False
    """Logits with float32 accumulation and output from the model's bf16 operands. Needs
    fused_lm_head."""

    grad_divisor: float | None = None
    """Python API only. The reported loss is inner sum / outer count, the differentiated one inner
    sum / grad_divisor, for parity with engines that divide twice. Above 0. None: the outer count
    for both."""

    def __post_init__(self) -> None:
        for name, type_hint in FIELD_TYPES.items():
            check_value(name, getattr(self, name), type_hint)
        check_combinations(self)

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> PolicyLossConfig:
        """Reads the config off args that ``validate_policy_loss_args`` has returned.

        A field whose flag the parser did not define keeps its default.

        Raises:
            ValueError: The args were not validated, or a value is out of range.
        """
        found = vars(args)
        if "loss_aggregation" in found and found["loss_aggregation"] is None:
            raise ValueError(
                "args.loss_aggregation is None: call validate_policy_loss_args(args) before "
                "PolicyLossConfig.from_args(args)"
            )
        return cls(**{name: found[name] for name in config_fields() if name in found})

    @property
    def required_sample_fields(self) -> tuple[str, ...]:
        """Optional fields of ``Sample`` that every sample must carry under these settings."""
        return tuple(required_inputs(self))


FIELD_TYPES = get_type_hints(PolicyLossConfig)
"""The evaluated annotation of every field, by name and in order."""


def config_fields(*, with_python_only: bool = True) -> tuple[str, ...]:
    """Field names in their order; those without a flag can be left out."""
    names = tuple(FIELD_TYPES)
    return names if with_python_only else tuple(n for n in names if n not in PYTHON_ONLY_FIELDS)


def required_inputs(config: PolicyLossConfig) -> dict[str, tuple[str, ...]]:
    """The optional ``Sample`` fields that ``config`` cannot do without, each with the flags asking.

    A custom policy loss may read what it likes of the batch: nothing is required on its behalf.
    """
    built_in_ratio = config.custom_policy_loss_path is None and config.policy_loss not in (
        "reinforce",
        "sft",
    )
    built_in_reducer = config.custom_pg_loss_reducer_function_path is None
    prompt_mean = config.loss_aggregation == "prompt_mean" and built_in_reducer
    unbiased_kl = config.use_unbiased_kl and config.kl_loss_coef > 0
    table = (
        ("old_log_probs", f"--policy-loss {config.policy_loss}", built_in_ratio),
        ("old_log_probs", "--use-unbiased-kl", unbiased_kl),
        ("old_log_probs", "--use-tis", config.use_tis),
        ("old_log_probs", "--use-geometric-rejection", config.use_geometric_rejection),
        ("old_log_probs", "--use-opsm", config.use_opsm),
        ("ref_log_probs", f"--kl-loss-coef {config.kl_loss_coef:g}", config.kl_loss_coef > 0),
        ("rollout_log_probs", "--use-tis", config.use_tis),
        ("rollout_log_probs", "--use-geometric-rejection", config.use_geometric_rejection),
        ("group_index", "--loss-aggregation prompt_mean", prompt_mean),
    )
    required: dict[str, tuple[str, ...]] = {}
    for sample_field, flag, asked in table:
        if asked:
            required[sample_field] = (*required.get(sample_field, ()), flag)
    return required
