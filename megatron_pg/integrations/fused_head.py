"""The fused head inside slime, miles and verl's Megatron engine as they are: log-probs and entropy without logits.

    --custom-megatron-init-path megatron_pg.integrations.fused_head.slime      # or .miles
    actor_rollout_ref.model.external_lib=megatron_pg.integrations.verl_fused_head

The model gives [batch, sequence, 1] in the place of its logits, with a note of the two factors that it did not multiply. The
trainer hands that on to its own loss. One function is exchanged, from logits to log-probs and entropy:
`get_log_probs_and_entropy` of slime and miles, and `_lm_head_logits_processor` of verl's engine (`verl_head.py`). Before the
first step both score a few tokens, forward and backward, and a trainer with other numbers is refused.
"""

import copy
import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megatron_pg.head import HeadOptions, LogitTransform, linear_log_probs_and_entropy
from megatron_pg.megatron.groups import chunks_of, unwrapped
from megatron_pg.megatron.output_layer import take_output_processor

TOLERANCE = 1e-2
"""Largest accepted difference, as a part of the largest number: Megatron's fused cross-entropy, which miles calls, rounds its
gradient to bfloat16."""
_models: WeakSet[Any] = WeakSet()
"""The models that make no logits."""


class OutputFactors(NamedTuple):
    """The factors of the logits that a model did not make."""

    hidden: Tensor  # [batch, sequence, hidden], the same on every tensor-parallel rank
    weight: Tensor  # [v/tp, hidden]
    transform: LogitTransform = LogitTransform()  # what the output layer does with their product

    def stand_in(self) -> Tensor:
        """Return one component of the hidden states, [batch, sequence, 1] float32, with a note of the factors."""
        output = self.hidden[..., :1].float()
        output.megatron_pg_factors = self  # type: ignore[attr-defined]
        return output

    @staticmethod
    def noted(output: Tensor, user: str) -> "OutputFactors":
        """Return the note of a model's output."""
        factors: OutputFactors | None = getattr(output, "megatron_pg_factors", None)
        if factors is None:
            raise RuntimeError(
                f"{user}: a tensor {tuple(output.shape)} came in the place of the model's output, which something between the "
                "model and the loss has changed: drop the flag"
            )
        return factors

    def scores(
        self, rows: Tensor | None, targets: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Return log-probs of `targets` and entropy, [tokens] each, by `rows` of the flat [batch * sequence] (None: all)."""
        hidden = self.hidden.flatten(0, 1)
        hidden = hidden if rows is None else hidden.index_select(0, rows)
        group = parallel_state.get_tensor_model_parallel_group()
        options = HeadOptions(
            tensor_parallel_group=group, temperature=temperature, transform=self.transform
        )
        return linear_log_probs_and_entropy(hidden, self.weight, targets, options)


def slime(args: Any) -> None:
    """Put the fused head into slime: its `--custom-megatron-init-path`, which every training process calls.

    `megatron_pg.integrations.slime.check` runs too where an aggregation is on, because the flag takes one function. There
    are collectives over tensor parallelism. A ValueError names settings under which slime reads logits elsewhere, by flag,
    or the differences of a slime whose log-probs, entropy or gradients are others.
    """
    folder = "slime.backends.megatron_utils"
    _install("slime", args, f"{folder}.loss", f"{folder}.model")


def miles(args: Any) -> None:
    """Put the fused head into miles; see `slime`."""
    folder = "miles.backends"
    loss = f"{folder}.training_utils.loss_hub.logit_processors"
    _install("miles", args, loss, f"{folder}.megatron_utils.model")


def leave_out_logits(model: Any, user: str) -> None:
    """Let the model give `OutputFactors.stand_in` in the place of its logits; twice is once. A value head stays.

    Args:
        model: wrapped or not, or the list of chunks of a virtual pipeline.
        user: the setting, for errors, which are those of `take_output_processor`.
    """
    for chunk in chunks_of(model):
        module = unwrapped(chunk)
        is_value_head = getattr(getattr(module, "output_layer", None), "out_features", 0) == 1
        if module in _models or is_value_head:
            continue
        take_output_processor(module, user, "drop it")
        _models.add(module)
        head = _NotedHead()
        module.register_forward_pre_hook(head.ask, prepend=True, with_kwargs=True)
        module.register_forward_hook(head.shape)
        chunk.register_forward_hook(head.note)  # `Float16Module` inside it makes another tensor


class _NotedHead:
    """The hooks of one model, and the factors of its forward while that runs."""

    factors: OutputFactors | None = None

    def ask(self, module: Any, args: Any, keywords: dict[str, Any]) -> Any:
        return args, keywords | {"output_processor": self.keep}

    def keep(self, hidden: Tensor, weight: Tensor, transform: LogitTransform) -> Tensor:
        self.factors = OutputFactors(hidden.transpose(0, 1), weight, transform)
        return hidden[..., 0]

    def shape(self, module: Any, args: Any, output: Any) -> Any:
        if self.factors is None:  # an earlier pipeline stage
            return output
        batch, sequence, _ = self.factors.hidden.shape
        return output.view(sequence, batch).t().unsqueeze(-1)

    def note(self, module: Any, args: Any, output: Any) -> None:
        if self.factors is not None:
            output.megatron_pg_factors, self.factors = self.factors, None


def _install(name: str, args: Any, loss_path: str, model_path: str) -> None:
    """Exchange the function of a trainer of slime's family in every module that has it, after the proof."""
    user = f"--custom-megatron-init-path megatron_pg.integrations.fused_head.{name}"
    loss: Any = importlib.import_module(loss_path)
    trainer: Any = importlib.import_module(model_path)
    if texts := "; ".join(_violations(args, loss)):
        raise ValueError(f"{user}: {texts}")
    theirs, function = loss.get_log_probs_and_entropy, "get_log_probs_and_entropy"
    schedule = trainer.get_forward_backward_func
    if hasattr(theirs, "has_fused_head"):
        return
    values = (value for key, value in vars(args).items() if key != "custom_megatron_init_path")
    if any(str(value).startswith("megatron_pg.integrations.") for value in values):
        # Its proof runs the trainer's own function, which is exchanged below.
        importlib.import_module(f"megatron_pg.integrations.{name}").check(args)
    ours = functools.partial(_scores, user, loss.get_responses)
    ranks = parallel_state.get_context_parallel_world_size()
    device, lengths = torch.device(torch.cuda.current_device()), [4 * ranks, 6 * ranks]
    tokens = [torch.arange(length, device=device) % 7 for length in lengths]
    named: dict[str, Any] = {"args": args, "unconcat_tokens": tokens, "total_lengths": lengths}
    named |= {"response_lengths": [3, 3 * ranks], "with_entropy": True}
    is_pair = require_equal(
        user,
        functools.partial(theirs, **named),
        functools.partial(ours, **named),
        rows=10,
        device=device,
        has_entropy_gradient=bool(getattr(args, "entropy_coef", 0.0)),
    )

    @functools.wraps(theirs)
    def get_log_probs_and_entropy(logits: Tensor, **layout: Any) -> Any:
        scores = ours(logits, **layout)
        return (logits.new_empty(0), scores) if is_pair else scores

    @functools.wraps(schedule)
    def get_forward_backward_func(*others: Any, **settings: Any) -> Any:
        def run(*, model: Any, **named: Any) -> Any:
            leave_out_logits(model, user)
            return schedule(*others, **settings)(model=model, **named)

        return run

    get_log_probs_and_entropy.has_fused_head = True  # type: ignore[attr-defined]
    for path, module in list(sys.modules.items()):
        if path.startswith(f"{name}.") and vars(module).get(function) is theirs:
            setattr(module, function, get_log_probs_and_entropy)
    trainer.get_forward_backward_func = get_forward_backward_func
    if not dist.get_rank():
        print(f"megatron_pg: the fused head is on in {name}, which makes no logits", flush=True)


def _violations(args: Any, loss: Any) -> Iterator[str]:
    """Yield settings under which a trainer of slime's family reads logits elsewhere, or the proof does not hold."""
    setting = functools.partial(getattr, args)
    replays = hasattr(loss, "get_rollout_top_p_logprob_kwargs")
    if replays and (top_p := setting("rollout_top_p", 1.0)) != 1.0:
        yield f"--rollout-top-p {top_p:g} renormalizes log-probs over the nucleus, which takes logits: use 1"
    if setting("loss_type", None) == "custom_loss":
        yield "--loss-type custom_loss is a function of logits: drop one of the two"
    if setting("recompute_loss_function", False):
        yield "--recompute-loss-function saves the memory of logits, and there are none: drop it"
    if setting("allgather_cp", False):
        yield "--allgather-cp cuts tokens in another way: drop one of the two"
    if (layout := setting("qkv_format", None) or "thd") != "thd":
        yield f"--qkv-format {layout} cuts tokens in another way: use thd"
    if setting("overlap_moe_expert_parallel_comm", False):
        yield "--overlap-moe-expert-parallel-comm runs the model in parts: drop one of the two"
    if setting("true_on_policy_mode", False):
        yield "--true-on-policy-mode rounds logits as the rollout engine does: drop one of the two"


def _scores(
    user: str,
    get_responses: Callable[..., Any],
    logits: Tensor,
    *,
    args: Any,
    with_entropy: bool = False,
    entropy_requires_grad: bool | None = None,
    non_loss_data: bool = True,
    **layout: Any,
) -> dict[str, list[Tensor]]:
    """Compute what `get_log_probs_and_entropy` of slime and miles does, from the note of `logits`.

    The trainer's own `get_responses` cuts the numbers of the rows, so that prompts and padding are not multiplied.
    """
    factors = OutputFactors.noted(logits, user)
    if any(
        layout.pop(name, None) is not None for name in ("top_p_token_ids", "top_p_token_offsets")
    ):
        raise NotImplementedError(f"{user}: sets of top-p take logits: use --rollout-top-p 1")
    numbers = torch.arange(logits.shape[1], device=logits.device, dtype=torch.float32)
    unscaled = copy.copy(args)
    unscaled.rollout_temperature = 1.0
    pairs = list(get_responses(numbers[None, :, None], args=unscaled, **layout))
    sizes = [len(rows) for rows, _ in pairs]
    rows = torch.cat([rows[:, 0] for rows, _ in pairs]).long()
    targets = torch.cat([tokens[: len(rows)] for rows, tokens in pairs])
    log_probs, entropy = factors.scores(rows, targets, args.rollout_temperature or 1.0)
    scores = {"log_probs": list(torch.split(log_probs, sizes))}
    if with_entropy:
        has_gradient = getattr(args, "entropy_coef", 0.0) != 0
        if entropy_requires_grad is not None:
            has_gradient = entropy_requires_grad
        scores["entropy"] = list(torch.split(entropy if has_gradient else entropy.detach(), sizes))
    return scores


def require_equal(
    user: str,
    theirs: Callable[[Tensor], Any],
    ours: Callable[[Tensor], Any],
    *,
    rows: int,
    device: torch.device,
    has_entropy_gradient: bool = True,
) -> bool:
    """Compare scores and the gradients of both factors, of one product; every tensor-parallel rank calls it.

    The functions take a model's output [1, rows, ...] and give a dict with log-probs and entropy, or a pair that ends with it.
    Return True if theirs gives a pair.
    """
    group, generator = parallel_state.get_tensor_model_parallel_group(), torch.Generator()
    draw = functools.partial(torch.randn, generator=generator, dtype=torch.float32, device="cpu")
    generator.manual_seed(7)
    hidden, weights = draw(1, rows, 8), draw(16 * group.size(), 8)
    weight = weights.chunk(group.size())[group.rank()]
    pairs = []

    def run(function: Callable[[Tensor], Any], output: Callable[..., Tensor]) -> list[Tensor]:
        leaves = [leaf.to(device).requires_grad_() for leaf in (hidden, weight)]
        result = function(output(*leaves))
        pairs.append(isinstance(result, tuple))
        result = result[1] if pairs[-1] else result
        log_probs, entropy = (torch.cat([*result[name]]) for name in ("log_probs", "entropy"))
        entropy = entropy if has_entropy_gradient else entropy.detach()
        steps = torch.linspace(1, 2, len(log_probs), dtype=torch.float32, device=device)
        total = (steps * (log_probs + entropy)).sum()
        return [log_probs, entropy, *torch.autograd.grad(total, leaves)]

    with torch.enable_grad():
        expected = run(theirs, lambda hidden, weight: hidden @ weight.t())
        found = run(ours, lambda hidden, weight: OutputFactors(hidden, weight).stand_in())
    names = "log-probs", "entropy", "gradient of the hidden states", "gradient of the weight"
    errors = dict(zip(names, map(_difference, found, expected), strict=True))
    if not all(error <= TOLERANCE for error in errors.values()):
        numbers = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
        raise ValueError(
            f"{user}: this version of the trainer computes log-probs and entropy in another way than the fused head. Of the "
            f"largest number, the differences are: {numbers}. Drop the setting"
        )
    return pairs[0]


def _difference(found: Tensor, expected: Tensor) -> float:
    if found.shape != expected.shape:
        return float("nan")
    return ((found - expected).abs().max() / expected.abs().max()).item()
