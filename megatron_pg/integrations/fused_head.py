"""The fused head inside slime, miles and verl: log-probs and entropy without logits.

    --custom-megatron-init-path megatron_pg.integrations.fused_head.slime      # or .miles
    actor_rollout_ref.model.external_lib=megatron_pg.integrations.verl_fused_head

The model returns [batch, sequence, 1] instead of logits, with the two factors of the product
attached. The trainer passes this to its loss. One function is replaced: `get_log_probs_and_entropy`
of slime and miles, `_lm_head_logits_processor` of verl (`verl_head`). Before the first step, both
versions score a few tokens, forward and backward, and a difference raises an error.
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
from megatron_pg.integrations.verify import difference, numbers
from megatron_pg.megatron.groups import chunks_of, unwrapped
from megatron_pg.megatron.output_layer import take_output_processor

TOLERANCE = 1e-2
"""Megatron's fused cross-entropy, which miles calls, rounds its gradient to bfloat16."""
_models: WeakSet[Any] = WeakSet()
"""The models that return no logits."""


class OutputFactors(NamedTuple):
    """The factors of logits that a model did not compute."""

    hidden: Tensor  # [batch, sequence, hidden], the same on every tensor-parallel rank
    weight: Tensor  # [v/tp, hidden]
    transform: LogitTransform = LogitTransform()  # of their product

    def stub(self) -> Tensor:
        """Return one component of the hidden states, [batch, sequence, 1] float32, with the factors
        attached.
        """
        output = self.hidden[..., :1].float()
        output.megatron_pg_factors = self  # type: ignore[attr-defined]
        return output

    @staticmethod
    def noted(output: Tensor, user: str) -> "OutputFactors":
        """Return the factors attached to a model's output."""
        factors: OutputFactors | None = getattr(output, "megatron_pg_factors", None)
        if factors is None:
            raise RuntimeError(
                f"{user}: the loss got a tensor {tuple(output.shape)} instead of the model's "
                "output: something in between changed it. Remove the flag"
            )
        return factors

    def scores(
        self, rows: Tensor | None, targets: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Return log-probs of `targets` and entropy, [tokens] each, at `rows` (None: all rows)."""
        hidden = self.hidden.flatten(0, 1)
        hidden = hidden if rows is None else hidden.index_select(0, rows)
        group = parallel_state.get_tensor_model_parallel_group()
        options = HeadOptions(
            tensor_parallel_group=group, temperature=temperature, transform=self.transform
        )
        log_probs, entropy = linear_log_probs_and_entropy(hidden, self.weight, targets, options)
        return log_probs, entropy


def slime(args: Any) -> None:
    """Install the fused head in slime, by its `--custom-megatron-init-path`.

    Every training process calls it, because it has tensor-parallel collectives. If an aggregation
    is on, it also runs `megatron_pg.integrations.slime.check`, because the flag takes only one
    function. Raises ValueError for flags under which slime reads logits elsewhere, and for a slime
    that computes different numbers.
    """
    folder = "slime.backends.megatron_utils"
    _install("slime", args, f"{folder}.loss", f"{folder}.model")


def miles(args: Any) -> None:
    """Install the fused head in miles. See `slime`."""
    folder = "miles.backends"
    loss = f"{folder}.training_utils.loss_hub.logit_processors"
    _install("miles", args, loss, f"{folder}.megatron_utils.model")


def leave_out_logits(model: Any, user: str) -> None:
    """Let the model return `OutputFactors.stub` instead of logits, unless it has a value head.

    Args:
        model: wrapped or not, or a virtual pipeline's list of chunks.
        user: the setting, for the errors of `take_output_processor`.
    """
    for chunk in chunks_of(model):
        module = unwrapped(chunk)
        is_value_head = getattr(getattr(module, "output_layer", None), "out_features", 0) == 1
        if module in _models or is_value_head:
            continue
        take_output_processor(module, user, "remove it")
        _models.add(module)
        head = _NotedHead()
        module.register_forward_pre_hook(head.ask, prepend=True, with_kwargs=True)
        module.register_forward_hook(head.shape)
        chunk.register_forward_hook(head.note)  # `Float16Module` inside it makes another tensor


class _NotedHead:
    """The hooks of one model, and the factors during its forward."""

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
    """Replace the function of slime or miles in every module that has it, after verification."""
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
        # `check` runs the trainer's function, which is replaced below.
        importlib.import_module(f"megatron_pg.integrations.{name}").check(args)
    ours = functools.partial(_scores, user, loss.get_responses)
    ranks = parallel_state.get_context_parallel_world_size()
    device, lengths = torch.device(torch.cuda.current_device()), [4 * ranks, 6 * ranks]
    tokens = [torch.arange(length, device=device) % 7 for length in lengths]
    named: dict[str, Any] = {"args": args, "unconcat_tokens": tokens, "total_lengths": lengths}
    named |= {"response_lengths": [3, 3 * ranks], "with_entropy": True}
    both = functools.partial(theirs, **named), functools.partial(ours, **named)
    is_pair = require_equal(user, *both, device, bool(getattr(args, "entropy_coef", 0.0)))

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


READ_LOGITS = {
    "recompute_loss_function": "saves the memory of logits, but there are none",
    "allgather_cp": "splits tokens differently",
    "overlap_moe_expert_parallel_comm": "runs the model in parts",
    "true_on_policy_mode": "rounds logits as the rollout engine does",
}
"""Settings that exclude the fused head."""


def _violations(args: Any, loss: Any) -> Iterator[str]:
    """Yield settings under which slime or miles reads logits elsewhere or splits tokens
    differently.
    """
    top_p = getattr(args, "rollout_top_p", 1.0)
    if hasattr(loss, "get_rollout_top_p_logprob_kwargs") and top_p != 1.0:
        yield f"--rollout-top-p {top_p:g} renormalizes log-probs over the nucleus: use 1"
    if getattr(args, "loss_type", None) == "custom_loss":
        yield "--loss-type custom_loss is a function of logits: remove it"
    if (layout := getattr(args, "qkv_format", None) or "thd") != "thd":
        yield f"--qkv-format {layout} splits tokens differently: use thd"
    for name, why in READ_LOGITS.items():
        if getattr(args, name, False):
            yield f"--{name.replace('_', '-')} {why}: remove it"


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
    """Compute `get_log_probs_and_entropy` of slime and miles from the factors attached to `logits`.

    The trainer's `get_responses` selects row numbers, so that prompts are not multiplied.
    """
    factors = OutputFactors.noted(logits, user)
    top_p = [layout.pop(name, None) for name in ("top_p_token_ids", "top_p_token_offsets")]
    if top_p != [None, None]:
        raise NotImplementedError(f"{user}: top-p sets require logits: use --rollout-top-p 1")
    row_numbers = torch.arange(logits.shape[1], device=logits.device, dtype=torch.float32)
    unscaled = copy.copy(args)
    unscaled.rollout_temperature = 1.0
    pairs = list(get_responses(row_numbers[None, :, None], args=unscaled, **layout))
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
    device: torch.device,
    has_entropy_gradient: bool = True,
) -> bool:
    """Verify the scores of ten rows and their gradients. Every tensor-parallel rank must call it.

    The functions take a model's output [1, 10, ...] and return a dict with log-probs and entropy,
    or a pair that ends with the dict. Returns True if `theirs` returns a pair.
    """
    group = parallel_state.get_tensor_model_parallel_group()
    weights = numbers(16 * group.size(), 8, seed=1).chunk(group.size())
    factors = (numbers(1, 10, 8, seed=0), weights[group.rank()])
    hidden, weight = leaves = [factor.to(device).requires_grad_() for factor in factors]

    def outcome(scores: Any) -> dict[str, Tensor]:
        log_probs, entropy = (torch.cat([*scores[name]]) for name in ("log_probs", "entropy"))
        entropy = entropy if has_entropy_gradient else entropy.detach()
        steps = torch.linspace(1, 2, len(log_probs), device=device)
        gradients = torch.autograd.grad((steps * (log_probs + entropy)).sum(), leaves)
        of_factors = dict(zip(("hidden gradient", "weight gradient"), gradients, strict=True))
        return {"log-prob": log_probs, "entropy": entropy, **of_factors}

    with torch.enable_grad():
        their_scores = theirs(hidden @ weight.t())
        is_pair = isinstance(their_scores, tuple)
        expected = outcome(their_scores[1] if is_pair else their_scores)
        found = outcome(ours(OutputFactors(hidden, weight).stub()))
    if text := difference(found, expected, TOLERANCE):
        raise ValueError(
            f"{user}: this version of the trainer computes log-probs and entropy differently from "
            f"the fused head: the {text}. Remove the setting"
        )
    return is_pair
