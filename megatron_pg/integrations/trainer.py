"""The hooks of slime and miles: checks before the model is loaded, and divisors per rollout.

An installed trainer is accepted if its loss computes the right numbers
(`megatron_pg.integrations.verify`).
"""

import importlib.util
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megatron_pg.integrations import verify
from megatron_pg.integrations.divided_lengths import divided_lengths, policy_loss_reducer
from megatron_pg.integrations.reducers import HOOKS, PREFIX, divisor_of_args, refuse_flag
from megatron_pg.integrations.rollout_mask_sums import Rollout, rollout_mask_sums
from megatron_pg.loss.aggregation import AGGREGATIONS, Aggregation, checked_aggregation
from megatron_pg.megatron.trainer_globals import (
    context_parallel_place,
    data_parallel_group,
    global_args,
)
from megatron_pg.step.totals import BareSample

REDUCER = "megatron_pg.integrations.divided_lengths.policy_loss_reducer"
Chosen = tuple[Aggregation, float | None]
"""An aggregation, and L of `constant`."""


@dataclass(frozen=True)
class Trainer:
    """A trainer with a hook that gives each sample its divisor."""

    name: str  # of its package, and of its module in `integrations`
    hook: str  # the setting with the hook's import path
    hooks: verify.TrainerHooks
    refusals: Callable[[Any, Aggregation], Iterable[str]] = (
        lambda args, row: ()
    )  # specific to the trainer

    def path(self, name: str) -> str:
        """Return the flag with the import path of a function of the trainer's module."""
        return f"--{self.hook.replace('_', '-')} megatron_pg.integrations.{self.name}.{name}"

    def require(self, name: str, args: Any) -> Chosen:
        """Return the aggregation. Raise ValueError with the settings that exclude it, by flag."""
        path = self.path(name)
        row, divisor = _chosen(path, name, args, self._violations(name, args))
        if divisor is not None and divisor < 1 and is_for_all_terms(args):
            raise ValueError(
                f"{path}: the divisor is {divisor:g}, but {self.name} divides by at least 1. Give "
                "the tokens of a response, or set regularizer_aggregation: sample_mean"
            )
        return row, divisor

    def turn_on(self, name: str, args: Any) -> Chosen:
        """Require and verify the aggregation, and let the trainer's policy loss read the divisors.

        Every training process must call it before its first step.
        """
        row, divisor = self.require(name, args)
        self.verify(row, divisor, args)
        if not is_for_all_terms(args):
            for settings in (args, global_args()):
                if settings is not None:
                    settings.custom_pg_loss_reducer_function_path = REDUCER
        return row, divisor

    def verify(self, row: Aggregation, divisor: float | None, args: Any) -> None:
        """Raise ValueError if the installed trainer's loss is not the aggregation."""
        if (package := importlib.util.find_spec(self.name)) is None:
            raise ValueError(f"{self.name} cannot be imported: only {self.name} may call this")
        for_all_terms, group = is_for_all_terms(args), data_parallel_group()
        sizes = context_parallel_place()[1], 1 if group is None else group.size()
        tokens = map(sum, verify.MASKS)
        samples = list(map(BareSample, tokens, verify.GROUPS, range(len(verify.MASKS))))
        tiny = Rollout(samples, [range(len(samples))], [len(samples)], divisor)
        divisors = self.divisors(row, lambda: tiny, args)
        policy = verify.token_weights(row.name, divisor)
        own = policy if for_all_terms else verify.token_weights("sample_mean", None)
        hook = partial(give_divisors, divisors, for_all_terms)
        reducer = None if for_all_terms else policy_loss_reducer
        module = self.hooks.loss_function.partition(":")[0]
        verify.require(
            (self.name, row.name, divisor, for_all_terms, sizes, verify.correction_of(args)),
            lambda: verify.loss_difference(self.hooks, args, (policy, own), hook, reducer, sizes),
            f"{self.path(row.name)}: the installed {self.name} ({package.origin}) does not compute "
            f"{row.name} with it. In {module}, ",
            "remove the hook",
        )

    def check(self, args: Any) -> None:
        """Raise ValueError for inexact settings, before the model is loaded
        (`--custom-megatron-init-path`).

        The trainer calls it in every training process, without communication. Rank 0 prints the
        active aggregation. It also raises if no aggregation is active.
        """
        hook = str(_setting(args, self.hook) or "")
        reducer = str(_setting(args, "custom_pg_loss_reducer_function_path") or "")
        package = f"megatron_pg.integrations.{self.name}."
        terms = f"the policy loss. KL, entropy and every metric keep the mean of {self.name}"
        if hook.startswith(package):
            row, divisor = self.turn_on(hook.removeprefix(package), args)
            if is_for_all_terms(args):
                terms = "policy loss, KL, entropy and their metrics"
        elif reducer == REDUCER:
            row, divisor = AGGREGATIONS["prompt_mean"], None
            self.verify(row, divisor, args)
            terms += ", if your own hook ends with a call of it"
        elif reducer.startswith("megatron_pg.integrations."):
            name = reducer.rpartition(".")[2]
            row, divisor = _chosen(f"{PREFIX}{name}", name, args, _without_window(args))
            refuse_flag(name, bool(_setting(args, "calculate_per_token_loss")))
        else:
            raise ValueError(
                f"--custom-megatron-init-path {package}check: no megatron_pg aggregation is "
                f"active. Add {self.path('prompt_mean')}, or token_mean or constant"
            )
        if not int(_setting(args, "rank") or 0):
            formula = row.formula if divisor is None else f"{row.formula}, L = {divisor:g}"
            on = f"{row.name} is on in {self.name}: {formula}, for {terms}"
            print(f"megatron_pg: {on}", flush=True)

    def divisors(
        self,
        row: Aggregation,
        rollout: Callable[[], Rollout],
        args: Any,
        group: dist.ProcessGroup | None = None,
    ) -> Tensor:
        """Return the divisors of this rank's samples, [samples] float64 (`rollout_mask_sums`)."""
        return rollout_mask_sums(
            row,
            rollout,
            trainer=self.name,
            data_parallel_group=group,
            allow_different_prompts=bool(_setting(args, "allow_different_prompts_in_group")),
            is_clamped=is_for_all_terms(args),
        )

    def _violations(self, name: str, args: Any) -> Iterator[str]:
        """Yield the trainer's settings that make divisors inexact."""
        setting = partial(_setting, args)
        if setting("calculate_per_token_loss"):
            yield "--calculate-per-token-loss divides by the step's tokens: remove the flag"
        if (reducer := setting("custom_pg_loss_reducer_function_path")) not in (None, "", REDUCER):
            yield f"--custom-pg-loss-reducer-function-path {reducer} divides a second time"
        if reducer == REDUCER and is_for_all_terms(args):
            yield f"{REDUCER} requires regularizer_aggregation: sample_mean"
        chosen = setting("regularizer_aggregation")
        if chosen not in (None, "sample_mean", "loss"):
            yield f"regularizer_aggregation is {chosen!r}: expected sample_mean or loss"
        has_kl = setting("use_kl_loss") and setting("kl_loss_coef") != 0
        if chosen is None and name != "sample_mean" and (has_kl or setting("entropy_coef")):
            yield (
                "--use-kl-loss or --entropy-coef adds a term. In the YAML of --custom-config-path, "
                "choose the mean for the term and metrics: regularizer_aggregation: sample_mean "
                f"({self.name}'s), or regularizer_aggregation: loss (the policy loss's)"
            )
        divisor, wanted = setting("loss_aggregation_divisor"), setting("loss_aggregation")
        if divisor is not None and name != "constant":
            yield f"loss_aggregation_divisor requires constant: use {self.path('constant')}"
        if wanted not in (None, name):
            yield f"the settings have loss_aggregation {wanted}: use {self.path(wanted)}"
        batch, group = setting("global_batch_size"), setting("n_samples_per_prompt")
        if name == "prompt_mean" and batch and group and batch % group:
            yield f"--global-batch-size {batch} is not a multiple of --n-samples-per-prompt {group}"
        yield from _without_window(args)
        yield from self.refusals(args, AGGREGATIONS[name])


def _chosen(path: str, name: str, args: Any, violations: Iterable[str]) -> Chosen:
    """Return the aggregation and divisor of the setting `path`. Raise ValueError for violations."""
    if name not in HOOKS:
        raise ValueError(f"{path}: unknown function, expected {', '.join(HOOKS)}")
    divisor = divisor_of_args(path, args) if name == "constant" else None
    if texts := "; ".join(violations):
        raise ValueError(f"{path}: {texts}")
    return checked_aggregation(name, divisor), divisor


def is_for_all_terms(args: Any) -> bool:
    """Return True if KL, entropy and metrics use the policy loss's aggregation."""
    return bool(_setting(args, "regularizer_aggregation") == "loss")


def give_divisors(divisors: Tensor, for_all_terms: bool, data: dict[str, Any]) -> None:
    """Write the divisors, [samples] float64 on the host, where the trainer's loss reads them."""
    if for_all_terms:
        for key in set(verify.OWN_DIVISORS) & set(data):
            data[key] = divisors.to(data["loss_masks"][0].device).float()
    else:
        data["response_lengths"] = divided_lengths(data["response_lengths"], divisors)


def _setting(args: Any, field: str) -> Any:
    return getattr(args, field, None)


def _without_window(args: Any) -> Iterator[str]:
    """Yield context-parallel token layouts that are not THD's zigzag."""
    if int(_setting(args, "context_parallel_size") or 1) == 1:
        return
    if (layout := _setting(args, "qkv_format") or "thd") != "thd":
        yield f"--qkv-format {layout} with --context-parallel-size above 1: use --qkv-format thd"
    if _setting(args, "allgather_cp"):
        yield "--allgather-cp orders tokens differently: remove it or --context-parallel-size"
