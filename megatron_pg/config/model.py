"""Settings for the model's input layout, its output layer, and the reported metrics."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megatron_pg.config.settings import Settings, setting
from megatron_pg.config.values import ABOVE_0, flag_of


@dataclass(frozen=True)
class ModelSettings(Settings):
    """Settings for the model's input layout, its log-probs and entropy, and a step's metrics."""

    # fmt: off
    qkv_format: Literal["thd", "bshd"] = setting("thd", """
        Layout of the model's input. thd: packed. bshd: one padded row per sequence, without
        context parallelism.""")
    rollout_temperature: float = setting(1.0, ABOVE_0, """
        Temperature t of the rollout engine: log-probs and entropy come from logits / t. Above
        0.""")
    replay_sampling_set: bool = setting(False, """
        Renormalize log-probs and entropy to the set that each token was sampled from (top-p,
        top-k): log_prob = z_y / t - logsumexp over the set of z_k / t. Requires every sample's
        sampling sets (kept_tokens), and sample log-probs over the same sets. A KL term compares the
        two renormalized distributions.""")
    replay_routing: bool = setting(False, """
        Routers take the experts that the rollout engine chose (every sample's routed_experts,
        arXiv:2510.11370) with the model's own probabilities. Requires PolicyStep with the
        model.""")
    fused_lm_head: bool = setting(False, """
        Compute output layer, log-probs and entropy together, a chunk of tokens at a time, without
        the logits of all tokens in memory. Requires Megatron's ColumnParallelLinear as output
        layer, which may scale and soft-cap its logits, and PolicyStep with the model. Not with
        bshd.""")
    fused_lm_head_memory_gib: float | None = setting(None, ABOVE_0, """
        GiB of bf16 logits in the fused head at once, equal on every rank. A loss over sequences
        may use twice as much, and float32 logits double it again. Unset: 2.5, or less on a device
        below 80 GB.""")
    fused_lm_head_without_quack: bool = setting(False, """
        Do not use QuACK's products, even if QuACK is installed.""")
    fp32_lm_head: bool = setting(False, """
        Compute logits with float32 accumulation and output from the model's bf16 operands, in the
        fused head or in the model's output layer. Requires Megatron's ColumnParallelLinear there,
        and PolicyStep.""")

    allow_varying_log_probs: bool = setting(False, """
        Train a model with log-probs that vary at the same weights (dropout), so that the first
        ratios are not 1.""")

    pg_metrics: Literal["none", "basic", "with_entropy"] = setting("basic", """
        Metrics in addition to the loss. basic: ratios, clip fractions, advantages, counts.
        with_entropy: also the entropy.""")
    kept_set_mass: bool = setting(False, """
        Report kept_set_mass, the policy's probability mass in the sampling sets, by a pass over
        the vocabulary. Requires replay_sampling_set. Not with fused_lm_head.""")
    check_aggregation: bool = setting(False, """
        Raise an error instead of a warning if a step's aggregation checksum is not 1, because a
        sample was duplicated, dropped, mis-sliced or exchanged.""")
    # fmt: on

    @property
    def changes_output_layer(self) -> bool:
        """Whether the model's output layer must return float32 logits: not with the fused head."""
        return self.fp32_lm_head and not self.fused_lm_head

    def conflicts(self, given: Mapping[str, Any]) -> Iterator[str]:
        for name in ("fused_lm_head", "replay_routing"):
            if getattr(self, name) and self.qkv_format != "thd":
                found = f"{flag_of(name)} does not work with --qkv-format {self.qkv_format}"
                yield f"{found}. Use --qkv-format thd or remove {flag_of(name)}."
        for name in ("fused_lm_head_memory_gib", "fused_lm_head_without_quack"):
            if getattr(self, name) and not self.fused_lm_head:
                flag = flag_of(name)
                yield f"{flag} has no effect without --fused-lm-head. Add it or remove {flag}."
        if self.kept_set_mass and not self.replay_sampling_set:
            yield (
                "--kept-set-mass requires --replay-sampling-set. Add it or remove --kept-set-mass."
            )
        if self.kept_set_mass and self.fused_lm_head:
            yield (
                "--kept-set-mass requires all logits, which --fused-lm-head does not compute. "
                "Remove one of them."
            )
        if self.kept_set_mass and self.pg_metrics == "none":
            yield ("--kept-set-mass has no effect with --pg-metrics none. Remove one of them.")


def layout_violation(qkv_format: str, context_parallel_size: int) -> str | None:
    """Return what is wrong with a layout, or None if it has a token window."""
    if qkv_format != "bshd" or context_parallel_size <= 1:
        return None
    found = f"--qkv-format bshd does not work with --context-parallel-size {context_parallel_size}"
    return (
        f"{found}: the loss does not know the padded length by which sequences are split. Use "
        "--qkv-format thd."
    )


def output_layer_violations(flag: str, settings: Mapping[str, Any]) -> list[str]:
    """Return the Megatron settings that the output layer of `flag` does not support, with reasons.

    `settings` has Megatron's settings by name.
    """
    violations = []
    if flag != "--fp32-lm-head" and settings.get("use_mup"):
        violations.append("does not scale logits as --use-mup does")
    if settings.get("defer_embedding_wgrad_compute"):
        late = "which --defer-embedding-wgrad-compute delays"
        violations.append(f"computes the gradient of the output layer's weight in backward, {late}")
    if (settings.get("gtp_weight_remat_size") or 1) > 1:
        further = "which --tensor-parallel-num-weight-shards splits further"
        violations.append(f"requires the output layer's tensor-parallel weight shard, {further}")
    return [f"{flag} {violation}. Remove one of them." for violation in violations]
