"""A step of slime and miles on a small GPTModel: their `forward_only` and `train_one_step`, before
and after the fused head.

Of the trainer only Ray, the data source and the optimizer are left out. The optimizer is one that
keeps the gradients.
"""

import importlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from megatron_pg.integrations import fused_head
from megatron_pg.megatron import enable_cpu_runtime
from tests.distributed.models import ModelOptions, Sharding, gather_gradients, initialize_groups
from tests.distributed.one_step import build

from . import ranks, sources
from .ranks import Args
from .rollout import samples

MICRO_BATCHES = [[0, 3, 5, 7, 9, 18], [1, 2, 4, 6], [8, 10, 11, 12, 13, 14, 15, 16, 17]]
NUM_ROLLOUTS = 16


class Outcome(NamedTuple):
    """What a run left on this rank."""

    scores: dict[str, list[Tensor]]
    """Log-probs and entropy of the forward pass alone, of this rank's part of each response."""
    metrics: dict[str, float]
    gradients: dict[str, Tensor]
    """Whole gradients by whole names; on rank 0 alone."""
    columns: int
    """The largest last dimension of what the model gave."""


class Trainer(NamedTuple):
    loss: Any
    model: Any
    actor: Any
    cp_utils: Any
    data: Any


def import_trainer(name: str, on_cpu: bool = True) -> Trainer:
    sources.use(name)
    sources.stand_in_for(("polars", "mooncake"))
    if on_cpu:
        enable_cpu_runtime()
        sources.slime_on_cpu() if name == "slime" else ranks.round_no_gradients()
    if name == "slime":
        folders = ["slime.backends.megatron_utils"] * 5
    else:
        training = "miles.backends.training_utils"
        megatron = "miles.backends.megatron_utils"
        folders = [f"{training}.loss_hub", megatron, megatron, training, training]
    names = [
        "loss" if name == "slime" else "logit_processors",
        "model",
        "actor",
        "cp_utils",
        "data",
    ]
    paths = zip(folders, names, strict=True)
    if name == "miles":
        from miles.utils import dumper_utils

        # Of SGLang, which is not there: the settings of a dump that is off.
        dumper_utils.DumperConfig = SimpleNamespace(_kv_pairs_to_dict=lambda pairs: {})
    return Trainer(*(importlib.import_module(f"{folder}.{module}") for folder, module in paths))


def arguments(**settings: Any) -> Args:
    numbers = {"eps_clip": 0.2, "eps_clip_high": 0.28, "kl_loss_coef": 0.05, "entropy_coef": 0.02}
    on = dict.fromkeys(
        (
            "use_dynamic_batch_size",
            "use_kl_loss",
            "use_rollout_entropy",
            "check_for_nan_in_loss_and_grad",
        ),
        True,
    )
    words = {"advantage_estimator": "grpo", "loss_type": "policy_loss", "kl_loss_type": "k3"}
    sizes = {"log_probs_chunk_size": -1, "rollout_top_p": 1.0, "data_pad_size_multiplier": 4}
    sizes |= {"seq_length": 64, "micro_batch_size": 1, "qkv_format": "thd"}
    off = dict.fromkeys("calculate_per_token_loss true_on_policy_mode allgather_cp".split(), False)
    defaults = numbers | on | words | sizes | off | {"rollout_temperature": 0.7}
    return Args(**defaults | settings)


def rollout_data(cut: Any) -> dict[str, Any]:
    """The samples as this rank of slime and miles holds them, data parallelism aside."""
    everything = samples()

    def parts(field: str) -> list[Tensor]:
        return [
            cut(torch.tensor(getattr(s, field)), len(s.tokens), s.response_length)
            for s in everything
        ]

    masks = [torch.tensor(s.loss_mask) for s in everything]
    rollouts = [s.rollout_id for s in everything]
    sums = [
        sum(m.sum() for m, r in zip(masks, rollouts, strict=True) if r == own) for own in rollouts
    ]
    return {
        "tokens": [torch.tensor(s.tokens) for s in everything],
        "total_lengths": [len(s.tokens) for s in everything],
        "response_lengths": [s.response_length for s in everything],
        "loss_masks": masks,
        "log_probs": parts("old_log_probs"),
        "ref_log_probs": parts("ref_log_probs"),
        "rollout_log_probs": parts("rollout_log_probs"),
        "advantages": parts("advantages"),
        "rollout_mask_sums": [s.float() for s in sums],
    }


class Recorder(SimpleNamespace):
    """An optimizer that takes no step, and keeps what `keep` reads of the gradients that it would
    take it with.
    """

    def zero_grad(self) -> None: ...

    def step(self) -> tuple[bool, float, None]:
        self.kept = self.keep()
        return True, 0.0, None


class Step(NamedTuple):
    """A step of slime or miles over data that this rank has."""

    name: str
    trainer: Trainer
    model: Any
    args: Args
    data: dict[str, Any]
    micro_batches: list[list[int]]
    num_rollouts: int

    def _iterator(self) -> Any:
        from megatron.training.global_vars import set_args

        set_args(self.args)
        return self.trainer.data.DataIterator(self.data, micro_batch_indices=self.micro_batches)

    def score(self, function: Any = None) -> dict[str, list[Tensor]]:
        """The forward pass alone, as for old and reference log-probs, or by another function of the
        actor's.
        """
        place = () if self.name == "slime" else (0,)
        inputs = self.args, self.model, [self._iterator()], [len(self.micro_batches)]
        function = function or self.trainer.actor.get_log_probs_and_entropy
        return self.trainer.model.forward_only(function, *inputs, *place)

    def train(self, recorder: Recorder) -> dict[str, Any]:
        """The training step; the reported metrics."""
        after = () if self.name == "slime" else (None, 0)
        scheduler = SimpleNamespace(step=lambda increment: None)
        counts = len(self.micro_batches), self.num_rollouts
        inputs = (self.args, 0, 0, [self._iterator()], self.model, recorder, scheduler, *counts)
        return self.trainer.model.train_one_step(*inputs, *after)[0]


def run(name: str, trainer: Trainer, model: Any, args: Args) -> Outcome:
    data = rollout_data(trainer.cp_utils.slice_log_prob_with_cp)
    step = Step(name, trainer, model, args, data, MICRO_BATCHES, NUM_ROLLOUTS)
    widths: list[int] = []
    hook = model[-1].register_forward_hook(lambda *given: widths.append(given[-1].shape[-1]))
    scores, recorder = step.score(), Recorder(keep=lambda: gather_gradients(model) or {})
    metrics = {key: float(value) for key, value in step.train(recorder).items()}
    hook.remove()
    return Outcome(scores, metrics, recorder.kept, max(widths))


class PatchedModel(GPTModel):
    """As slime and miles patch Megatron's: multi-token prediction runs where `mtp_kwargs` has
    labels, and else not.
    """

    def forward(self, *args: Any, mtp_kwargs: dict[str, Any] | None = None, **named: Any) -> Any:
        if mtp_kwargs:
            return super().forward(*args, **named)
        depths, self.config.mtp_num_layers, self.mtp_process = (
            self.config.mtp_num_layers,
            None,
            False,
        )
        try:
            return super().forward(*args, **named)
        finally:
            self.config.mtp_num_layers, self.mtp_process = depths, True


def theirs_and_ours(
    name: str, sharding: Sharding, options: ModelOptions, settings: list[dict[str, Any]]
) -> list[list[Outcome]]:
    """Of each of the settings the outcome of the trainer's own path, ours, and the mutants."""
    trainer = import_trainer(name)
    model = build(sharding, options)
    if with_mtp := bool(options.mtp_num_layers):
        model[0].module.__class__ = PatchedModel
    cases = [arguments(enable_mtp_training=with_mtp, **case) for case in settings]
    if name == "miles":
        miles_groups(cases[0])
    outcomes = [[run(name, trainer, model, args)] for args in cases]
    getattr(fused_head, name)(cases[0])
    for _ in right_and_mutants():
        for args, found in zip(cases, outcomes, strict=True):
            found.append(run(name, trainer, model, args))
    return outcomes


def hook_beside_head(name: str) -> tuple[str, bool]:
    """Turn on an aggregation's hook and the head together; the reducer that the hook gives, and
    whether the head is on.
    """
    trainer = import_trainer(name)
    initialize_groups(Sharding())
    package = importlib.import_module(f"megatron_pg.integrations.{name}")
    trainer_hook = getattr(package, name.upper())
    init = f"megatron_pg.integrations.fused_head.{name}"
    path = trainer_hook.path("prompt_mean").split()[-1]
    paths = {trainer_hook.hook: path, "custom_megatron_init_path": init}
    sizes = {
        "global_batch_size": NUM_ROLLOUTS,
        "n_samples_per_prompt": 4,
        "train_backend": "megatron",
    }
    args = arguments(regularizer_aggregation="sample_mean", **paths, **sizes)
    if name == "miles":
        miles_groups(args)
    getattr(fused_head, name)(args)
    trainer_hook.turn_on("prompt_mean", args)
    is_on = hasattr(trainer.loss.get_log_probs_and_entropy, "has_fused_head")
    return args.custom_pg_loss_reducer_function_path, is_on


def right_and_mutants() -> Iterator[str]:
    """Exchange what the head computes: nothing first, then mistakes that the comparison must
    see.
    """
    right = fused_head.OutputFactors.scores

    def without_temperature(self: Any, rows: Any, targets: Tensor, temperature: float) -> Any:
        return right(self, rows, targets, 1.0)

    def next_row(self: Any, rows: Any, targets: Tensor, temperature: float) -> Any:
        numbers = torch.arange(self.hidden.shape[1]) if rows is None else rows
        return right(self, (numbers + 1) % self.hidden.shape[1], targets, temperature)

    for scores in (right, without_temperature, next_row):
        fused_head.OutputFactors.scores = scores
        yield scores.__name__


def miles_groups(args: Args) -> None:
    from megatron.training.global_vars import set_args
    from miles.backends.megatron_utils.parallel import create_megatron_parallel_state
    from miles.backends.training_utils import parallel
    from miles.utils.ft_utils.process_group_utils import GroupInfo

    set_args(args)
    alone = GroupInfo(rank=0, size=1, group=None)
    parallel.set_parallel_state(create_megatron_parallel_state(indep_dp=alone))


def critic_before_and_after(name: str) -> list[list[Any]]:
    """Of the trainer's critic, with its own value head: values, the value loss and every gradient,
    without the head and with it.
    """
    trainer = import_trainer(name)
    model = build(Sharding(), ModelOptions())
    args = arguments(loss_type="value_loss", value_clip=0.2)
    if name == "miles":
        miles_groups(args)
    provider = importlib.import_module(f"{name}.backends.megatron_utils.model_provider")
    chunk = model[0].module
    chunk.output_layer = provider.LinearForLastLayer(
        input_size=chunk.config.hidden_size, output_size=1, config=chunk.config
    )
    data = rollout_data(trainer.cp_utils.slice_log_prob_with_cp)
    data |= {"values": data["log_probs"], "returns": data["advantages"]}
    step = Step(name, trainer, model, args, data, MICRO_BATCHES, NUM_ROLLOUTS)

    def gradients() -> list[Tensor]:
        return [chunk.output_layer.weight.grad.clone(), model[0].buffers[0].grad_data.clone()]

    outcomes = []
    for put_in in (lambda args: None, getattr(fused_head, name)):
        put_in(args)
        chunk.output_layer.weight.grad, recorder = None, Recorder(keep=gradients)
        values = step.score(trainer.actor.get_values)["values"]
        metrics = step.train(recorder)
        outcomes.append([*values, torch.tensor(float(metrics["value_loss"])), *recorder.kept])
    return outcomes
