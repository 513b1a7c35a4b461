"""The diagnosis of failed rows by a table: the first line that fits a row is its diagnosis.

The lines look at all rows of the check: a row that passes clears the parts that it uses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from megatron_pg.check.compare import Row
from megatron_pg.check.finding import Finding, instead, named
from megatron_pg.check.options import CheckOptions


def diagnoses(rows: Sequence[Row], options: CheckOptions, world_size: int) -> list[str]:
    """Name the likely mistake behind each failed row; "" for a passed one."""
    data_size = world_size // options.model_parallel_size
    findings = [Finding(row, rows, options, data_size) for row in rows]
    return ["" if each.row.passed else _words(each) for each in findings]


def _words(finding: Finding) -> str:
    found = next(words(finding) for fits, words in DIAGNOSES if fits(finding))
    row = finding.row
    if not row.samples_counted_once:
        found += (
            f"; the weights that reached the loss are {row.checksum:.4g} times those of the step's totals "
            "(aggregation_checksum)"
        )
    return found


def _is_not_finite(f: Finding) -> bool:
    return not math.isfinite(f.row.gradient_error) or not math.isfinite(f.row.common_ratio)


def _left_over(f: Finding) -> str:
    early = ", or a reduction starts before the last micro-batch (run it without --overlap-grad-reduce to tell them apart)"
    return (
        "the first step of each model passes and those after it fail: gradients of the step before are left over "
        f"(zero_grad_buffer){early * f.options.overlap_grad_reduce}"
    )


def _follows(f: Finding) -> bool:
    gradient = f.same(f.row.model)
    return f.row.what != "gradient" and gradient is not None and not gradient.passed


def _reported_loss(f: Finding) -> str:
    return "gradients agree; the reported loss is " + instead(f.row.loss, f.row.reference_loss)


def _gradient_norm(f: Finding) -> str:
    found, expected = f.row.gradient_norm or 0.0, f.row.reference_norm or 1.0
    norm = f"the gradient norm that the optimizer clips by is {instead(found, expected)}"
    if not f.is_of_norm:
        return (
            f"gradients agree; {norm}, and {f.row.worst_parameter} is further off than such a norm makes it: the optimizer "
            "steps with a gradient that is stale, or was changed after the reduction"
        )
    axes = {"TP": "tensor-parallel", "PP": "pipeline", "EP": "expert-parallel"}
    ranks = " and ".join(name for axis, name in axes.items() if f.sizes[axis] > 1)
    cause = f"it is not summed over the {ranks or 'data-parallel'} ranks"
    if found > expected:
        cause = "parameters are counted twice (replicas, tied weights)"
    return f"gradients agree; {norm}: {cause}"


def _update(f: Finding) -> str:
    row = f.row
    what = "differ"
    if f.wrong_have_factor:
        is_zero = abs(row.wrong_ratio) <= f.slack
        what = "were not updated" if is_zero else f"are {row.wrong_ratio:.4g} times the reference"
    cause = "the optimizer's step, or a gradient that is stale there"
    if f.all_have_factor:
        cause = "the learning rate, the weight decay or another setting"
    if row.replica_axes:
        what += f", and not the same on the {' and '.join(row.replica_axes)} ranks"
    if f.options.use_distributed_optimizer:
        cause += ", or the all-gather of parameters after it (without --use-distributed-optimizer)"
    names = f"{named(row.wrong)}{f.where()}"
    return f"gradients agree; after one optimizer step {names} {what}: {cause}"


def _replicas(f: Finding) -> str:
    row = f.row
    where = [REDUCTIONS[axis] for axis in row.replica_axes] or ["some group"]
    sharded = (
        ", or the reduce-scatter of the distributed optimizer (without --use-distributed-optimizer)"
    )
    sharded *= f.options.use_distributed_optimizer
    return (
        f"replicas disagree over {', and over '.join(where)}: {named(row.replica_parameters)}{f.where()}; a reduction over "
        f"that group is missing{sharded}{f.mode()}"
    )


def _case(f: Finding) -> str:
    ratio = f"gradients {f.times()}, " if f.row.what == "loss scale" else ""
    return f"this row alone, {ratio}{CASES[f.row.what]}"


def _factor(f: Finding) -> str:
    ratio = f.row.common_ratio
    in_model = f.row.model != "loss only" and f.passes("loss only")
    where = "; the loss-only rows pass: it arises in the model, or in what reduces it" * in_model
    return f"gradient is {ratio:.4g} times the reference{f.factors(ratio)}{where}{f.mode()}"


def _is_about_micro_batches(f: Finding) -> bool:
    few, many = f.micro_batches[0], f.micro_batches[-1]
    return not f.is_part and (
        few < f.row.common_ratio < many or 1 / many < f.row.common_ratio < 1 / few
    )


def _about_micro_batches(f: Finding) -> str:
    few, many = f.micro_batches[0], f.micro_batches[-1]
    name = "M" if f.row.common_ratio > 1 else "1/M"
    return (
        f"gradient is about {f.row.common_ratio:.4g} times the reference: {name}, the data-parallel ranks having "
        f"{few} and {many} micro-batches{f.mode()}"
    )


def _backward(f: Finding) -> str:
    flags = ("overlap_grad_reduce", "use_distributed_optimizer")
    chosen = [f"--{flag.replace('_', '-')}" for flag in flags if getattr(f.options, flag)]
    reduction = f", or DDP reduces too little or too early (without {' or '.join(chosen)})"
    reduction *= bool(chosen)
    if f.data_size * f.sizes["CP"] > 1:
        reduction = f", or the reduction leaves the gradients of one rank{reduction}"
    return (
        "the reported loss and the weights of its tokens are right and their gradient is not: the backward of a "
        f"micro-batch is missing or done twice (the schedule){reduction}{_at(f)}{f.mode()}"
    )


def _is_of_another_rank(f: Finding) -> bool:
    few, many = f.micro_batches[0], f.micro_batches[-1]
    is_between = few / many <= f.row.common_ratio <= many / few
    return few < many and is_between and f.row.loss_agrees and f.fails_per_micro_batch_alone


def _of_another_rank(f: Finding) -> str:
    few, many = f.micro_batches[0], f.micro_batches[-1]
    return (
        f"gradient is about {f.row.common_ratio:.4g} times the reference, the data-parallel ranks having {few} and {many} "
        f"micro-batches: a rank's loss is divided by the M of another rank{f.mode()}"
    )


def _is_rounding(f: Finding) -> bool:
    # DDP rounds the gradients of the loss-only rows too.
    bound = ROUNDING if f.loss_only is not None and f.row.loss_agrees else 0.0
    return f.row.gradient_error <= max(5 * f.row.tolerance, bound)


def _rounding(f: Finding) -> str:
    error = f"off by {f.row.gradient_error:.2g} and by no factor, {f.worst()}"
    if f.row.gradient_error <= 5 * f.row.tolerance:
        return f"{error}: rounding, or a mistake that small"
    return f"{error}: rounding to bf16, in the reduction or the accumulation of gradients, or a mistake that small{f.mode()}"


def _is_part_elsewhere(f: Finding) -> bool:
    model = f.same("end to end")
    is_part = model is not None and 0 < len(model.wrong) < model.num_parameters
    return f.row.model == "loss only" and is_part and f.all_have_factor


def _wrong_weights(f: Finding) -> str:
    weights = (
        "tokens have wrong weights, as from the totals of a micro-batch, of a rank or of a context-parallel shard, or the "
        "window is misplaced"
    )
    if f.sizes["TP"] > 1 and f.row.samples_counted_once:
        weights = (
            "log-probs are wrong on the vocabulary shards of the loss (--tensor-model-parallel-size 1), the window is "
            "misplaced, or tokens have wrong weights"
        )
    return f"no common factor, {f.row.worst_parameter} is {f.row.worst_ratio:.4g} times the reference: {weights}{f.mode()}"


def _stage(f: Finding) -> str:
    cause = "the backward of a micro-batch is missing or done twice there, or what the next stage sends back is wrong"
    if f.wrong_have_factor:
        cause = "the gradient that the next stage sends back, or that stage's own scaling"
    if f.wrong_have_factor and f.mode() and f.row.calculate_per_token_loss:
        cause = "the token count, which the last stage broadcasts over the pipeline"
    return f"the loss-only rows pass, and gradients {f.times()}{f.where()} ({named(f.row.wrong)}): {cause}{f.mode()}"


def _kind(f: Finding) -> str:
    """Name the common trait of the wrong parameters; "" for none."""
    kinds = [words for part, words in KINDS.items() if all(part in name for name in f.row.wrong)]
    if not kinds and f.wrong_have_factor:
        chunks = ", or in another chunk of the virtual pipeline"
        chunks *= f.options.virtual_pipeline_model_parallel_size is not None
        kinds = [f"they are reduced, or scaled, over another group than the others{chunks}"]
    return kinds[0] if kinds else ""


def _part(f: Finding) -> str:
    row = f.row
    return (
        f"{len(row.wrong)} of {row.num_parameters} gradients {f.times()}{f.where()} ({named(row.wrong)}): {_kind(f)}"
        f"{f.mode()}"
    )


def _model(f: Finding) -> str:
    known = "the loss-only rows pass, so the loss is right"
    if f.same("loss only") is None:
        known = "there are no loss-only rows to judge the loss by (run it again without --fused-lm-head)"
    side = (
        "backward, or what hardly moves the loss in its forward," * f.row.loss_agrees or "forward"
    )
    suspects = [words for words, applies in SUSPECTS.items() if applies(f)]
    return f"{known}: the model's {side} is wrong, {f.worst()}{_at(f)}; look at {', or at '.join(suspects)}{f.mode()}"


def _at(f: Finding) -> str:
    return f", {where.strip()}" if (where := f.where()) else ""


DIAGNOSES: Sequence[tuple[Callable[[Finding], bool], Callable[[Finding], str]]] = (
    (_is_not_finite, lambda f: f"not finite in {f.row.worst_parameter} on rank {f.row.worst_rank}"),
    (lambda f: f.is_left_over, _left_over),
    (_follows, lambda f: "follows the gradient rows of this model and loss mode"),
    (lambda f: f.row.gradients_agree and not f.row.loss_agrees, _reported_loss),
    (lambda f: not f.row.norm_agrees, _gradient_norm),
    (lambda f: f.row.gradients_agree, lambda f: "gradients agree"),
    (lambda f: f.row.what == "update", _update),
    (lambda f: f.row.replica_error > f.row.tolerance, _replicas),
    (
        lambda f: f.row.what in ("auxiliary loss", "router z loss") and f.fails("every token"),
        lambda f: "follows the row `every token`",
    ),
    (lambda f: f.row.what in CASES, _case),
    (
        _is_part_elsewhere,
        lambda f: (
            f"gradient is {f.row.common_ratio:.4g} times the reference, and so is a part of the end-to-end model's: read that row"
        ),
    ),
    (lambda f: f.all_have_factor, _factor),
    (_is_rounding, _rounding),
    (_is_about_micro_batches, _about_micro_batches),
    (lambda f: f.loss_only is not None and _is_of_another_rank(f), _of_another_rank),
    (
        lambda f: (
            f.loss_only is not None and f.row.loss_agrees and f.is_part and f.wrong_have_factor
        ),
        _part,
    ),
    (
        lambda f: (
            f.loss_only is not None and f.loss_only.loss_agrees and f.loss_only.samples_counted_once
        ),
        _backward,
    ),
    (lambda f: f.loss_only is not None, _wrong_weights),
    (lambda f: f.row.loss_agrees and " stage " in f.where(), _stage),
    (lambda f: f.row.loss_agrees and f.is_part and bool(_kind(f)), _part),
    (lambda f: True, _model),
)
"""The test and the words of each diagnosis."""

ROUNDING = 2.0**-7
"""A bound above the error of sums of a few bf16 numbers (3.3e-3 measured) and below any micro-batch's weight."""
REDUCTIONS = {
    "TP": "tensor-parallel ranks (finalize_model_grads, of norms and biases under --sequence-parallel)",
    "CP": "context-parallel ranks (DDP reduces over them and the data-parallel ones together)",
    "DP": "data-parallel ranks (DDP)",
    "PP": "pipeline stages (finalize_model_grads, of tied embeddings)",
}
CASES: Mapping[str, str] = {
    "gspo": "so a sum over a whole sequence is wrong: it takes the tokens of all context-parallel ranks",
    "kept set": "so kept sets are scored wrongly: of another token, or their columns on other tensor-parallel ranks are left out",
    "loss scale": "so the loss scale of fp16 (config.grad_scale_func) is lost, applied twice, or on some gradients only",
    "recompute": "so activations are not recomputed as they were",
    "every token": (
        "so a token that scores nothing is lost or changed, as the last token of a sequence is by an exchange that drops it "
        "(of experts, or between ranks)"
    ),
    "auxiliary loss": (
        "so the auxiliary loss of the experts is wrong: its coefficient, its scale (1 / M, or tokens), or the ranks that "
        "its counts are summed over"
    ),
    "router z loss": "so the z loss of the router is wrong: its coefficient, or its scale (1 / M, CP / M, or tokens)",
}
"""The meaning of a case's failure."""
KINDS = {
    ".experts.": "experts have a data-parallel group of their own, and are divided by the size of the whole one",
    "router": "the router: its auxiliary loss, or its sum over tensor-parallel ranks",
    "position_embeddings": "the position ids, or that embedding's reduction",
    "word_embeddings": "the embedding's vocabulary shards or, where it is tied, the sum with the output layer's",
    "output_layer": "the output layer's vocabulary shards",
    "norm": "norms, which finalize_model_grads sums over tensor-parallel ranks under --sequence-parallel",
    "bias": "biases, which one tensor-parallel rank of several adds",
    "linear_qkv": "attention: what it sends back to queries, keys and values",
}
"""The meaning of a part that all wrong parameters' names share."""
SUSPECTS: Mapping[str, Callable[[Finding], bool]] = {
    "rotary positions (the tied model has learned ones, and passes)": lambda f: (
        f.row.model == "end to end" and f.passes("tied")
    ),
    "position ids, or the tied weight (the end-to-end model has neither, and passes)": lambda f: (
        f.row.model == "tied" and f.passes("end to end")
    ),
    "position ids (of contiguous slices; every model has learned ones)": lambda f: (
        f.options.cp_partition_mode == "contiguous" and not f.passes("end to end")
    ),
    "multi-token prediction: the labels and the mask that it shifts, its loss scale (the end-to-end model has none, and "
    "passes)": lambda f: f.row.model == "multi-token" and f.passes("end to end"),
    "the layers of a HybridModel (the end-to-end model has none, and passes)": lambda f: (
        f.row.model == "hybrid" and f.passes("end to end")
    ),
    "experts, and the exchange of tokens (without --num-experts)": lambda f: (
        f.row.model == "end to end" and f.options.num_experts is not None
    ),
    "the fused output layer (without --fused-lm-head)": lambda f: f.options.fused_lm_head,
    "attention over several ranks (--context-parallel-size 1)": lambda f: (
        f.sizes["CP"] > 1 and not f.passes("end to end")
    ),
    "what tensor-parallel ranks exchange, or their vocabulary shards of the embedding and the output layer "
    "(--tensor-model-parallel-size 1)": lambda f: f.sizes["TP"] > 1,
    "activations and gradients sent between pipeline stages (--pipeline-model-parallel-size 1)": (
        lambda f: f.sizes["PP"] > 1
    ),
    "DDP's reduction (without --use-distributed-optimizer)": lambda f: (
        f.options.use_distributed_optimizer
    ),
    "bf16 (--dtype fp32)": lambda f: f.row.dtype == "bf16",
    "a data-parallel rank with other parameters": lambda f: (
        f.data_size > 1 and not f.passes("end to end")
    ),
    "dropout left on": lambda f: not f.passes("end to end"),
    "attention over a pack of sequences (whatever the flags)": lambda f: not f.passes("end to end"),
}
"""The suspect parts of a model, with the flags that avoid them, and their tests."""
