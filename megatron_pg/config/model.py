"""The model's side of the loss: settings of the layout of its input, of its output layer, and of
what is reported.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megatron_pg.config.settings import Settings, setting
from megatron_pg.config.values import ABOVE_0, flag_of


@dataclass(frozen=True)
class ModelSettings(Settings):
    """Settings of the model's input, of how log-probs and entropy come from its output, and of what
    a step reports.
    """

    # fmt: off
    qkv_format: Literal["thd", "bshd"] = setting("thd", """
        Layout of the model's input. thd: packed. bshd: one padded row a sequence, not under
        context parallelism.""")
    rollout_temperature: float = setting(1.0, ABOVE_0, """
        Temperature t of the rollout engine: log-probs and entropy are those of logits / t. Above
        0.""")
    replay_sampling_set: bool = setting(False, """
        Log-probs and entropy of the distribution renormalised to the set that each token was
        sampled from (top-p, top-k): log_prob = z_y / t - logsumexp over the set of z_k / t. Needs
        the sets (kept_tokens) of every sample, and all log-probs of the samples over the same
        sets. A KL term is that of the two renormalised distributions.""")
    replay_routing: bool = setting(False, """
        Routers take the experts that the rollout engine chose (routed_experts of every sample,
        arXiv:2510.11370); their probabilities stay their own. Needs PolicyStep with the model.""")
    fused_lm_head: bool = setting(False, """
        Compute output layer, log-probs and entropy together, a chunk of tokens at a time, without
        the logits of all tokens in memory. Needs Megatron's ColumnParallelLinear as output layer,
        which may scale and soft-cap its logits, and PolicyStep with the model. Not with bshd.""")
    fused_lm_head_memory_gib: float | None = setting(None, ABOVE_0, """
        GiB of bf16 logits in the fused head at once, equal on every rank. A loss over sequences
        may take it twice, float32 logits twice again. Unset: 2.5, on a device below 80 GB
        less.""")
    fused_lm_head_without_quack: bool = setting(False, """
        Leave QuACK's products alone where they are installed.""")
    fp32_lm_head: bool = setting(False, """
        Logits with float32 accumulation and output from the model's bf16 operands, in the fused
        head or in the model's own output layer. Needs Megatron's ColumnParallelLinear there, and
        PolicyStep.""")

    allow_varying_log_probs: bool = setting(False, """
        Train a model whose log-probs vary at the same weights (dropout), with first ratios that
        are not 1.""")

    pg_metrics: Literal["none", "basic", "with_entropy"] = setting("basic", """
        Metrics beside the loss. basic: ratios, clip fractions, advantages, counts. with_entropy:
        the entropy too.""")
    kept_set_mass: bool = setting(False, """
        Report kept_set_mass, the probability that the policy gives the kept sets, by a pass over
        the vocabulary. Needs replay_sampling_set; not with fused_lm_head.""")
    check_aggregation: bool = setting(False, """
        Raise an error, not a warning, if the aggregation checksum of a step is not 1: a sample was
        duplicated, dropped, mis-sliced or exchanged.""")
    # fmt: on

    @property
    def changes_output_layer(self) -> bool:
        """The model's own output layer gives float32 logits. The fused head has its own product."""
        return self.fp32_lm_head and not self.fused_lm_head

    def conflicts(self, given: Mapping[str, Any]) -> Iterator[str]:
        for name in ("fused_lm_head", "replay_routing"):
            if getattr(self, name) and self.qkv_format != "thd":
                found = f"{flag_of(name)} with --qkv-format {self.qkv_format}"
                yield f"{found}: use --qkv-format thd, or drop {flag_of(name)}"
        for name in ("fused_lm_head_memory_gib", "fused_lm_head_without_quack"):
            if getattr(self, name) and not self.fused_lm_head:
                yield f"{flag_of(name)} is about --fused-lm-head: add it, or drop {flag_of(name)}"
        if self.kept_set_mass and not self.replay_sampling_set:
            yield (
                "--kept-set-mass is about the sets of --replay-sampling-set: add it, or drop "
                "--kept-set-mass"
            )
        if self.kept_set_mass and self.fused_lm_head:
            yield (
                "--kept-set-mass takes all logits, which --fused-lm-head does not make: drop one "
                "of the two"
            )
        if self.kept_set_mass and self.pg_metrics == "none":
            yield (
                "--kept-set-mass is a metric, and --pg-metrics none reports none: drop one of the "
                "two"
            )


def layout_violation(qkv_format: str, context_parallel_size: int) -> str | None:
    """Return what is wrong with a layout that has no token window, None where nothing is."""
    if qkv_format != "bshd" or context_parallel_size <= 1:
        return None
    found = f"--qkv-format bshd with --context-parallel-size {context_parallel_size}"
    return (
        f"{found} cuts sequences by a padded length that the loss is not told: use --qkv-format thd"
    )


def output_layer_violations(flag: str, settings: Mapping[str, Any]) -> list[str]:
    """Return why the product that `flag` puts in the output layer's place does not serve Megatron's
    settings, by name.
    """
    violations = []
    if flag != "--fp32-lm-head" and settings.get("use_mup"):
        violations.append("does not scale logits as --use-mup does")
    if settings.get("defer_embedding_wgrad_compute"):
        late = "which --defer-embedding-wgrad-compute puts off"
        violations.append(f"computes the gradient of the output layer's weight in backward, {late}")
    if (settings.get("gtp_weight_remat_size") or 1) > 1:
        cut = "--tensor-parallel-num-weight-shards cuts it further"
        violations.append(f"takes the output layer's weight as tensor parallelism cuts it, {cut}")
    return [f"{flag} {violation}: drop one of the two" for violation in violations]
