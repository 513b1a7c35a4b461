"""Settings of the aggregation of per-token losses, and their agreement with Megatron's per-token
mode.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megatron_pg.config.settings import Settings, fields_of, setting
from megatron_pg.config.tables import is_replaced, table_of
from megatron_pg.config.values import ABOVE_0, Interval, flag_of

BALANCING_LOSSES = frozenset({"aux_loss", "seq_aux_loss", "global_aux_loss"})


@dataclass(frozen=True)
class AggregationSettings(Settings):
    """Settings for the aggregation of per-token losses and its scale."""

    # fmt: off
    loss_aggregation: str = setting("sample_mean", """
        Aggregation of a step's per-token losses x to one number. All totals are step totals.""")
    loss_aggregation_divisor: float | None = setting(None, Interval(0, metavar="L"), """
        Divisor L of constant, 1/(N L) sum m x, in tokens (Dr.GRPO, arXiv:2503.20783 eq. 2). Above
        0.""")
    loss_weight_denominator: Literal["mask", "weights"] = setting("mask", """
        Unit of D, G and T if samples carry loss weights u (Sample.loss_weights), which multiply
        every term of the loss token by token. mask: active tokens, as without weights. weights:
        sum m u, so that a weight of 0 acts like a masked token. Requires samples with weights;
        samples without them weigh 1.""")
    calculate_per_token_loss: bool = setting(False, """
        Megatron's per-token mode: gradients are summed over tokens and divided by the step's token
        count. token_mean turns it on, sample_mean becomes token_mean with it, constant and
        prompt_mean reject it.""")
    custom_pg_loss_reducer_function_path: str | None = setting(None, """
        Import path of f(total_lengths, response_lengths, loss_masks, calculate_per_token_loss) ->
        reducer. reducer(x) returns the inner sum over this rank's window. f also gets cp_rank and
        cp_size if its signature names them. The masks include corrections. Replaces
        loss_aggregation. The normalizer is N rollouts, or T active tokens in per-token mode.""")
    divide_gradient_twice: bool = setting(False, """
        Report the loss and differentiate loss / normalizer, including the KL and entropy terms:
        parity with a script that returns the mean over M rollouts to an engine that divides by M
        again (DeepSpeed). Not with grad_divisor.""")
    grad_divisor: float | None = setting(None, ABOVE_0, """
        Python API only. The reported policy loss is inner sum / normalizer, the differentiated
        one inner sum / grad_divisor, for parity with engines that divide twice. PolicyStep accepts
        one for its step. With regularizer_aggregation loss it divides the whole loss. Above 0.
        None: the normalizer for both.""", flag=False)
    # fmt: on

    def conflicts(self, given: Mapping[str, Any]) -> Iterator[str]:
        divisor = self.loss_aggregation_divisor
        if self.custom_pg_loss_reducer_function_path is not None:
            ignores = "--custom-pg-loss-reducer-function-path ignores"
            if divisor is not None or self.loss_aggregation == "constant":
                constant = f"--loss-aggregation constant --loss-aggregation-divisor {divisor}"
                yield f"{ignores} {constant}. Remove the divisor or the path."
            if self.loss_weight_denominator == "weights":
                yield f"{ignores} --loss-weight-denominator weights. Remove one of them."
        if self.divide_gradient_twice and self.grad_divisor is not None:
            found = f"grad_divisor {self.grad_divisor:g}"
            yield (
                f"--divide-gradient-twice and {found} are mutually exclusive: each sets the "
                "gradient's divisor. Remove one of them."
            )


def settle_divisor(values: dict[str, Any], divisor: Any) -> list[str]:
    """Write the aggregation that `--pg-loss-divisor` (or None) implies into `values` and return the
    violations.
    """
    chosen, other = values.get("loss_aggregation"), values.get("loss_aggregation_divisor")
    if chosen is None:
        values["loss_aggregation"] = AggregationSettings.loss_aggregation
    if divisor is None:
        return []
    field = fields_of(AggregationSettings)["loss_aggregation_divisor"]
    if violation := field.violation(divisor):
        return [violation.replace(field.flag, "--pg-loss-divisor", 1)]
    path = values.get("custom_pg_loss_reducer_function_path")
    if path is None:
        values.update(loss_aggregation="constant", loss_aggregation_divisor=divisor)
    contradictions = {
        f"--loss-aggregation {chosen}": chosen not in (None, "constant"),
        f"--loss-aggregation-divisor {other}": other not in (None, divisor),
        f"--custom-pg-loss-reducer-function-path {path}": path is not None,
    }
    short = f"--pg-loss-divisor {divisor:g}, short for --loss-aggregation constant with it,"
    found = [setting for setting, is_given in contradictions.items() if is_given]
    return [f"{short} contradicts {setting}. Remove one of them." for setting in found]


def settle_per_token_mode(
    config: AggregationSettings, trainer: Mapping[str, Any]
) -> tuple[bool, str, list[str]]:
    """Return whether per-token mode is on, the resulting aggregation, and violations.

    `trainer` has arguments by Megatron's names. A mode that is forced on the model's config later
    is not visible here.
    """
    chosen, table = config.loss_aggregation, "loss_aggregation"
    is_custom, counterpart = (
        is_replaced(table, config),
        table_of(table)[chosen].under_per_token_flag,
    )
    exclusive = ("use_torch_fsdp2", "ddp_average_in_collective")
    obstacle = next((name for name in exclusive if trainer.get(name)), None)
    if not config.calculate_per_token_loss:
        # Per-token mode would rescale the losses inside the model, so they keep it off.
        is_token_mean = counterpart == chosen and not is_custom
        return is_token_mean and not (obstacle or _scales_inner_losses(trainer)), chosen, []
    violations = []
    if counterpart is None:
        violations.append(
            f"--calculate-per-token-loss and --loss-aggregation {chosen} are mutually exclusive: "
            "the first computes the token mean. Remove one of them."
        )
    if obstacle:
        violations.append(
            f"--calculate-per-token-loss does not work with {flag_of(obstacle)}. Replace it by "
            "--loss-aggregation token_mean, which has the same gradient."
        )
    return True, chosen if is_custom else counterpart, violations


def _scales_inner_losses(trainer: Mapping[str, Any]) -> bool:
    """Return whether Megatron adds losses inside the model, which per-token mode rescales."""
    has_experts = bool(trainer.get("num_experts"))
    return bool(trainer.get("mtp_num_layers")) or (has_experts and routers_have_loss(trainer))


def routers_have_loss(settings: Mapping[str, Any]) -> bool:
    """Return whether routers with these Megatron settings have a loss."""
    kinds, coefficients = (
        value if isinstance(value, (list, tuple)) else [value]
        for value in (
            settings.get("moe_router_load_balancing_type", "aux_loss"),
            settings.get("moe_aux_loss_coeff"),
        )
    )
    balances = any(coefficients) and not BALANCING_LOSSES.isdisjoint(kinds)
    return balances or bool(settings.get("moe_z_loss_coeff"))
