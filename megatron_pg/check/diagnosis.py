"""The diagnosis of failed rows: the first rule that fits a row is its diagnosis.

The rules look at all rows of the check: a row that passes clears the parts that it uses. A function
has the rules of one subject, in order, and returns "" if none fits.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

from megatron_pg.check.compare import CheckRow
from megatron_pg.check.finding import Finding, instead, named
from megatron_pg.check.options import CheckOptions
from megatron_pg.config.values import flag_of


def diagnoses(rows: Sequence[CheckRow], options: CheckOptions, world_size: int) -> list[str]:
    """Name the likely mistake behind each failed row; "" for a passed one."""
    data_size = world_size // options.model_parallel_size
    return ["" if row.passed else _words(Finding(row, rows, options, data_size)) for row in rows]


def _words(f: Finding) -> str:
    rules = (_of_all_rows, _of_right_gradients, _of_one_setting, _of_a_number, _of_the_loss)
    words = next(filter(None, (rule(f) for rule in rules)), "") or _of_the_model(f)
    if not f.row.samples_counted_once:
        words += (
            f"; the weights that reached the loss are {f.row.checksum:.4g} times those of the "
            f"step's totals "
            "(aggregation_checksum)"
        )
    return words


def _of_all_rows(f: Finding) -> str:
    row, gradient = f.row, f.same(f.row.model)
    if not (math.isfinite(row.gradient_error) and math.isfinite(row.common_ratio)):
        return (
            f"not finite in {row.worst_parameter} on {row.worst_name or f'rank {row.worst_rank}'}"
        )
    if f.is_left_over:
        early = (
            ", or a reduction starts before the last micro-batch (run it without "
            "--overlap-grad-reduce to tell them apart)"
        )
        return (
            "the first step of each model passes and those after it fail: gradients of the step "
            "before are left over "
            f"(zero_grad_buffer){early if f.options.overlap_grad_reduce else ''}"
        )
    if row.what != "gradient" and gradient is not None and not gradient.passed:
        return "follows the gradient rows of this model and loss mode"
    return ""


def _of_right_gradients(f: Finding) -> str:
    row = f.row
    if row.gradients_agree and not row.loss_agrees:
        return f"gradients agree; the reported loss is {instead(row.loss, row.reference_loss)}"
    if not row.norm_agrees:
        return f"gradients agree; {_gradient_norm(f)}"
    if row.gradients_agree:
        return "gradients agree"
    return f"gradients agree; after one optimizer step {_update(f)}" if row.what == "update" else ""


def _gradient_norm(f: Finding) -> str:
    found, expected = f.row.gradient_norm or 0.0, f.row.reference_norm or 1.0
    norm = f"the gradient norm that the optimizer clips by is {instead(found, expected)}"
    by_norm = max(abs(found / expected - 1.0), abs(expected / (found or expected) - 1.0))
    # Where no rank sums the norm, each clips by its own: one rank's norm says little of the others'
    # steps.
    if by_norm <= 1e-3 and f.row.gradient_error > 2.0 * by_norm + f.row.tolerance:
        return (
            f"{norm}, and {f.row.worst_parameter} is further off than such a norm makes it: the "
            f"optimizer steps with a "
            "gradient that is stale, or was changed after the reduction"
        )
    if found > expected:
        return f"{norm}: parameters are counted twice (replicas, tied weights)"
    axes = {"TP": "tensor-parallel", "PP": "pipeline", "EP": "expert-parallel"}
    ranks = " and ".join(name for axis, name in axes.items() if f.sizes[axis] > 1)
    return f"{norm}: it is not summed over the {ranks or 'data-parallel'} ranks"


def _update(f: Finding) -> str:
    row = f.row
    what = "differ"
    if f.wrong_have_factor:
        is_zero = abs(row.wrong_ratio) <= f.slack
        what = "were not updated" if is_zero else f"are {row.wrong_ratio:.4g} times the reference"
    if row.replica_axes:
        what += f", and not the same on the {' and '.join(row.replica_axes)} ranks"
    cause = "the optimizer's step, or a gradient that is stale there"
    if f.all_have_factor:
        cause = "the learning rate, the weight decay or another setting"
    if f.options.use_distributed_optimizer:
        cause += ", or the all-gather of parameters after it (without --use-distributed-optimizer)"
    return f"{named(row.wrong)}{f.where()} {what}: {cause}"


def _of_one_setting(f: Finding) -> str:
    row = f.row
    if row.replica_error > row.tolerance:
        where = [REDUCTIONS[axis] for axis in row.replica_axes] or ["some group"]
        sharded = (
            ", or the reduce-scatter of the distributed optimizer (without "
            "--use-distributed-optimizer)"
        )
        return (
            f"replicas disagree over {', and over '.join(where)}: "
            f"{named(row.replica_parameters)}{f.where()}; a reduction "
            f"over that group is "
            f"missing{sharded if f.options.use_distributed_optimizer else ''}{f.mode()}"
        )
    if row.what in ROUTERS and f.fails("every token"):
        return "follows the row `every token`"
    if row.what in CASES:
        ratio = f"gradients {f.times()}, " if row.what == "loss scale" else ""
        failed = [case for case in CASES if f.fails(case)]
        alone = f"the rows {', '.join(failed)} alone" if len(failed) > 1 else "this row alone"
        return f"{alone}, {ratio}{CASES[row.what]}"
    return ""


def _of_a_number(f: Finding) -> str:
    row, ratio, error = f.row, f.row.common_ratio, f.row.gradient_error
    model, is_loss = f.same("end to end"), row.model == "loss only"
    is_part_of_model = model is not None and 0 < len(model.wrong) < model.num_parameters
    if f.all_have_factor and is_loss and is_part_of_model:
        return (
            f"gradient is {ratio:.4g} times the reference, and so is a part of the end-to-end "
            f"model's: read that row"
        )
    if f.all_have_factor:
        where = "; the loss-only rows pass: it arises in the model, or in what reduces it"
        where = where if not is_loss and f.passes("loss only") else ""
        return f"gradient is {ratio:.4g} times the reference{f.factors(ratio)}{where}{f.mode()}"
    rounding = f"off by {error:.2g} and by no factor, {f.worst()}: rounding"
    if error <= 5 * row.tolerance:
        return f"{rounding}, or a mistake that small"
    # DDP rounds the gradients of the loss-only rows too.
    if error <= ROUNDING and row.loss_agrees and _loss_only(f) is not None:
        return (
            f"{rounding} to bf16, in the reduction or the accumulation of gradients, or a mistake "
            f"that small{f.mode()}"
        )
    few, many = f.micro_batches
    if not f.is_part and (few < ratio < many or 1 / many < ratio < 1 / few):
        return (
            f"gradient is about {ratio:.4g} times the reference: {'M' if ratio > 1 else '1/M'}, "
            f"the data-parallel ranks "
            f"having {few} and {many} micro-batches{f.mode()}"
        )
    return ""


def _loss_only(f: Finding) -> CheckRow | None:
    """Return the loss-only row of the same step if it fails too. That row does not depend on the
    model.
    """
    found = f.same("loss only")
    return None if found is None or found.passed else found


def _of_the_loss(f: Finding) -> str:
    row, ratio, loss_only = f.row, f.row.common_ratio, _loss_only(f)
    if loss_only is None:
        return ""
    few, many = f.micro_batches
    is_between = few < many and few / many <= ratio <= many / few
    if is_between and row.loss_agrees and f.failed_modes == {False}:
        return (
            f"gradient is about {ratio:.4g} times the reference, the data-parallel ranks having "
            f"{few} and {many} "
            f"micro-batches: a rank's loss is divided by the M of another rank{f.mode()}"
        )
    if row.loss_agrees and f.is_part and f.wrong_have_factor:
        return _part(f)
    if loss_only.loss_agrees and loss_only.samples_counted_once:
        return _backward(f)
    weights = (
        "tokens have wrong weights, as from the totals of a micro-batch, of a rank or of a "
        "context-parallel shard, or the "
        "window is misplaced"
    )
    if f.sizes["TP"] > 1 and row.samples_counted_once:
        weights = (
            "log-probs are wrong on the vocabulary shards of the loss "
            "(--tensor-model-parallel-size 1), the window is "
            "misplaced, or tokens have wrong weights"
        )
    return (
        f"no common factor, {row.worst_parameter} is {row.worst_ratio:.4g} times the reference: "
        f"{weights}{f.mode()}"
    )


def _backward(f: Finding) -> str:
    causes = ["the backward of a micro-batch is missing or done twice (the schedule)"]
    if f.data_size * f.sizes["CP"] > 1:
        causes.append("the reduction leaves the gradients of one rank")
    flags = ("overlap_grad_reduce", "use_distributed_optimizer")
    if chosen := [flag_of(flag) for flag in flags if getattr(f.options, flag)]:
        causes.append(f"DDP reduces too little or too early (without {' or '.join(chosen)})")
    known = "the reported loss and the weights of its tokens are right and their gradient is not"
    return f"{known}: {', or '.join(causes)}{_at(f)}{f.mode()}"


def _of_the_model(f: Finding) -> str:
    row, where = f.row, f.where()
    if row.loss_agrees and " stage " in where:
        cause = (
            "the backward of a micro-batch is missing or done twice there, or what the next stage "
            "sends back is wrong"
        )
        if f.wrong_have_factor:
            cause = "the gradient that the next stage sends back, or that stage's own scaling"
        if f.wrong_have_factor and f.mode() and row.calculate_per_token_loss:
            cause = "the token count, which the last stage broadcasts over the pipeline"
        return (
            f"the loss-only rows pass, and gradients {f.times()}{where} ({named(row.wrong)}): "
            f"{cause}{f.mode()}"
        )
    if row.loss_agrees and f.is_part and _kind(f):
        return _part(f)
    known = "the loss-only rows pass, so the loss is right"
    if f.same("loss only") is None:
        known = (
            "there are no loss-only rows to judge the loss by (run it again without "
            "--fused-lm-head)"
        )
    backward = "backward, or what hardly moves the loss in its forward,"
    wrong = f"the model's {backward if row.loss_agrees else 'forward'} is wrong, {f.worst()}"
    return f"{known}: {wrong}{_at(f)}; look at {', or at '.join(_suspects(f))}{f.mode()}"


def _suspects(f: Finding) -> Iterator[str]:
    """Yield the suspect parts of the model, with the flags that avoid them."""
    model, options, sizes = f.row.model, f.options, f.sizes
    is_plain, plain_passes = model == "end to end", f.passes("end to end")
    if is_plain and f.passes("tied"):
        yield "rotary positions (the tied model has learned ones, and passes)"
    if model == "tied" and plain_passes:
        yield "position ids, or the tied weight (the end-to-end model has neither, and passes)"
    if model == "multi-token" and plain_passes:
        yield (
            "multi-token prediction: the labels and the mask that it shifts, its loss scale (the "
            "end-to-end model has none, "
            "and passes)"
        )
    if model == "hybrid" and plain_passes:
        yield "the layers of a HybridModel (the end-to-end model has none, and passes)"
    if is_plain and options.num_experts is not None:
        yield "experts, and the exchange of tokens (without --num-experts)"
    if options.fused_lm_head:
        yield "the fused output layer (without --fused-lm-head)"
    if sizes["CP"] > 1 and not plain_passes:
        yield "attention over several ranks (--context-parallel-size 1)"
    if sizes["TP"] > 1:
        yield (
            "what tensor-parallel ranks exchange, or their vocabulary shards of the embedding and "
            "the output layer "
            "(--tensor-model-parallel-size 1)"
        )
    if sizes["PP"] > 1:
        yield (
            "activations and gradients sent between pipeline stages "
            "(--pipeline-model-parallel-size 1)"
        )
    if options.use_distributed_optimizer:
        yield "DDP's reduction (without --use-distributed-optimizer)"
    if f.row.dtype == "bf16":
        yield "bf16 (--dtype fp32)"
    if f.data_size > 1 and not plain_passes:
        yield "a data-parallel rank with other parameters"
    if not plain_passes:
        yield from ("dropout left on", "attention over a pack of sequences (whatever the flags)")


def _kind(f: Finding) -> str:
    """Name the common trait of the wrong parameters; "" for none."""
    for part, words in KINDS.items():
        if all(part in name for name in f.row.wrong):
            return words
    if not f.wrong_have_factor:
        return ""
    is_virtual = f.options.virtual_pipeline_model_parallel_size is not None
    chunks = ", or in another chunk of the virtual pipeline" if is_virtual else ""
    return f"they are reduced, or scaled, over another group than the others{chunks}"


def _part(f: Finding) -> str:
    count = f"{len(f.row.wrong)} of {f.row.num_parameters} gradients"
    return f"{count} {f.times()}{f.where()} ({named(f.row.wrong)}): {_kind(f)}{f.mode()}"


def _at(f: Finding) -> str:
    return f", {where.strip()}" if (where := f.where()) else ""


ROUNDING = 2.0**-7
"""A bound above the error of sums of a few bf16 numbers (3.3e-3 measured) and below any
micro-batch's weight."""
REDUCTIONS = {
    "TP": "tensor-parallel ranks (finalize_model_grads, of norms and biases under "
    "--sequence-parallel)",
    "CP": "context-parallel ranks (DDP reduces over them and the data-parallel ones together)",
    "DP": "data-parallel ranks (DDP)",
    "PP": "pipeline stages (finalize_model_grads, of tied embeddings)",
}
ROUTERS: Mapping[str, str] = {
    "auxiliary loss": (
        "so the auxiliary loss of the experts' router is wrong: its coefficient, its scale (1 / M, "
        "or tokens), the ranks that "
        "its counts are summed over, or padding that it counts"
    ),
    "sequence loss": (
        "so the router's seq_aux_loss is wrong: a pack is one sequence to it, over context- and "
        "tensor-parallel ranks"
    ),
    "global loss": (
        "so the router's global_aux_loss is wrong: its shares of experts are of all tokens of the "
        "step so far, on all "
        "data-parallel ranks, over which its gradient is a sum"
    ),
    "listed losses": (
        "so a list of the router's load-balancing losses is wrong: each has its own coefficient, "
        "and they are added up; or its "
        "sigmoid scores, which they share out before they count"
    ),
    "router z loss": (
        "so the z loss of the router is wrong: its coefficient, its scale (1 / M, CP / M, or "
        "tokens), or padding that it counts"
    ),
    "expert bias": (
        "so the router's bias of experts is wrong: it chooses without the bias or weighs by it, or "
        "the bias counts other tokens "
        "than those of all ranks (padding, one rank's)"
    ),
}
CASES: Mapping[str, str] = {
    "gspo": "so a sum over a whole sequence is wrong: it takes the tokens of all context-parallel "
    "ranks",
    "dis": "so the weight of dis is wrong: the ratio to the rollout log-probs, without gradient, 0 "
    "outside the band",
    "kept set": "so kept sets are scored wrongly: of another token, or their columns on other "
    "tensor-parallel ranks are left out",
    "loss scale": "so the loss scale of fp16 (config.grad_scale_func) is lost, applied twice, or "
    "on some gradients only",
    "recompute": "so activations are not recomputed as they were",
    "every token": (
        "so a token that scores nothing is lost or changed, as the last token of a sequence is by "
        "an exchange that drops it "
        "(of experts, or between ranks)"
    ),
    **ROUTERS,
    "routing replay": (
        "so a router does not take the experts that it is given: it takes those of another token "
        "or layer, or its own in the "
        "first forward or in recomputation"
    ),
}
"""The meaning of a case's failure."""
KINDS = {
    ".experts.": "experts have a data-parallel group of their own, and are divided by the size of "
    "the whole one",
    "router": "the router: its auxiliary loss, or its sum over tensor-parallel ranks",
    "position_embeddings": "the position ids, or that embedding's reduction",
    "word_embeddings": "the embedding's vocabulary shards or, where it is tied, the sum with the "
    "output layer's",
    "output_layer": "the output layer's vocabulary shards",
    "norm": "norms, which finalize_model_grads sums over tensor-parallel ranks under "
    "--sequence-parallel",
    "bias": "biases, which one tensor-parallel rank of several adds",
    "linear_qkv": "attention: what it sends back to queries, keys and values",
}
"""The meaning of a part that all wrong parameters' names share."""
