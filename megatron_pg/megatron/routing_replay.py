"""Routing replay (R3, arXiv:2510.11370): a router uses the experts that the rollout engine chose
for each token.

The experts' probabilities and their gradient are the router's. megatron-core 0.16.1 to 0.19.2 have
a hook for it, `TopKRouter.router_replay` (transformer/moe/router_replay.py). Its user must tell it
when a forward is a recomputation. `Replay` detects this, because a recomputation runs inside
autograd.
"""

import functools
from collections import deque
from typing import Any, Self

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from megatron_pg.loss.metrics import SumsReport
from megatron_pg.megatron.groups import ParallelGroups, chunks_of, unwrapped
from megatron_pg.megatron.varying_log_probs import drops_tokens
from megatron_pg.step.batch import PackedBatch
from megatron_pg.step.routed_experts import largest_expert, no_choice


class Replay:
    """The experts of one router for each micro-batch, which replaces Megatron's `RouterReplay`."""

    def __init__(self, router: Any) -> None:
        self._config, self.layer = router.config, router.layer_number - 1
        self._experts: Tensor | None = None
        self._waiting: deque[Tensor | None] = deque()
        """The experts of micro-batches that wait for recomputation, in the order of their backward
        passes."""
        self._is_asked = self._is_counted = self._recomputes = False
        self.agreement: Tensor | None = None
        """[2] float64 since the step began: choices that the router would also have made, and all
        choices."""

    def begin_step(self) -> None:
        """Reset for a new step, and read whether backward recomputes the layers."""
        granularity, modules = self._config.recompute_granularity, self._config.recompute_modules
        is_selected = granularity == "selective" and "moe" in (modules or ())
        self._recomputes = granularity == "full" or is_selected
        self.agreement = None
        self.clear()

    def clear(self) -> None:
        """Free experts on the device. A router that is not recomputed, as under `block`, leaves its
        waiting experts.
        """
        self._waiting.clear()
        self._experts = None

    def take(self, experts: Tensor | None) -> None:
        """Set the experts [tokens, k] of the next forward. None: the router chooses."""
        self._experts, self._is_counted = experts, torch.is_grad_enabled()
        self._is_asked = experts is None
        if self._recomputes and self._is_counted:
            self._waiting.append(experts)

    def require_asked(self) -> None:
        """Raise NotImplementedError if the router ran without reading its experts."""
        if not self._is_asked:
            raise NotImplementedError(
                f"--replay-routing: the router of layer {self.layer} ignored the given experts, "
                "because it or a module around it routes differently. Drop the flag, or choose "
                "with Megatron's topk_routing_with_score_function(router_replay=...)"
            )

    def _next(self, in_backward: bool) -> Tensor | None:
        """Return the experts of the micro-batch that runs forward, or is recomputed in backward."""
        return self._waiting.popleft() if in_backward else self._experts

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Any = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the scores [tokens, k] of the experts to use, and the experts. Megatron's router
        calls it.
        """
        values, own = default_compute_topk(
            scores, topk, num_groups=num_groups, group_topk=group_topk
        )
        self._is_asked = True
        in_backward = torch._C._current_graph_task_id() != -1
        chosen = self._next(in_backward)
        if chosen is None:
            return values, own
        has_choice = chosen[:, :1] != no_choice(chosen)
        experts = torch.where(has_choice, chosen.long(), own)
        if self._is_counted and not in_backward:
            same = (experts[:, :, None] == own[:, None, :]) & has_choice[:, :, None]
            counts = torch.stack([same.sum(), has_choice.sum() * topk]).double()
            self.agreement = counts if self.agreement is None else self.agreement + counts
        return scores.gather(1, experts), experts


class RoutingReplay:
    """The replay for all routers of this rank's chunks."""

    def __init__(self, model: Any, groups: ParallelGroups) -> None:
        """Let every chunk accept `routed_experts=` [local_tokens, layers, k]. Every rank and stage
        calls it.

        Raises:
            ValueError: the model has no experts.
            NotImplementedError: the model is neither GPTModel nor HybridModel, a router chooses in
                a fused kernel, in a CUDA graph or without top-k, experts drop tokens, a schedule
                runs layers outside of the model's forward, megatron-core is older than 0.16, or
                layers of experts lack Megatron's router. The model's forward raises it for a router
                that ignores the experts.
        """
        chunks = [unwrapped(chunk) for chunk in chunks_of(model)]
        self._config = config = chunks[0].config
        self._chunk = chunks[0]
        if not getattr(config, "num_moe_experts", None):
            raise ValueError(
                "--replay-routing requires a model with experts (--num-experts): drop the flag"
            )
        graph = getattr(config, "cuda_graph_impl", None)
        kind, capacity = config.moe_router_load_balancing_type, config.moe_expert_capacity_factor
        obstacles = {
            "--moe-router-fusion: the fused router cannot replay": (
                getattr(config, "moe_router_fusion", False)
            ),
            f"--cuda-graph-impl {graph}: a captured router would always use the captured "
            "micro-batch's experts": (graph not in (None, "none")),
            "--overlap-moe-expert-parallel-comm: its schedule runs layers without the model's "
            "forward, which "
            "sets the experts": getattr(config, "overlap_moe_expert_parallel_comm", False),
            f"--moe-router-load-balancing-type {kind}: this router does not use top-k": (
                kind in ("sinkhorn", "quantile_balancing")
            ),
            f"--moe-expert-capacity-factor {capacity}: experts would drop tokens that the engine "
            "routed to them": (drops_tokens(vars(config))),
        }
        for obstacle, is_present in obstacles.items():
            if is_present:
                raise NotImplementedError(f"--replay-routing with {obstacle}. Drop one of them")
        self._replays: list[Replay] = []
        for chunk in chunks:
            if not isinstance(chunk, GPTModel) and not hasattr(chunk, "hybrid_layer_pattern"):
                raise NotImplementedError(
                    "--replay-routing requires a GPTModel or HybridModel, found "
                    f"{type(chunk).__name__}: drop the flag"
                )
            # The engine makes no choices for the routers of multi-token prediction.
            routers = [m for m in chunk.decoder.modules() if hasattr(m, "apply_z_loss")]
            replays = [self._replay_of(router) for router in routers]
            places = layers_of_experts(chunk)
            layers = {layer.layer_number - 1 for layer in chunk.decoder.layers}
            if (found := {replay.layer for replay in replays}) != layers & {*places}:
                raise NotImplementedError(
                    f"--replay-routing: by the model's config, layers {sorted(layers & {*places})} "
                    "of this stage have experts, but Megatron's router is in layers "
                    f"{sorted(found)}: drop the flag"
                )
            if not hasattr(chunk, "_takes_routed_experts"):
                give = functools.partial(_give_experts, groups, replays)
                chunk._takes_routed_experts = chunk.register_forward_pre_hook(
                    give, with_kwargs=True
                )
                chunk.register_forward_hook(functools.partial(_require_asked, replays))
            self._replays += replays

    @classmethod
    def of_step(cls, is_on: bool, model: Any, groups: ParallelGroups) -> Self | None:
        """Begin a step's replay. Return None if it is off, when the model needs no experts."""
        if is_on and model is None:
            raise ValueError(
                "--replay-routing changes the model's routers: give PolicyStep the model="
            )
        for chunk in filter(None, map(unwrapped, chunks_of(model))):
            chunk._needs_routed_experts = is_on
        if not is_on:
            return None
        replay = cls(model, groups)
        for router in replay._replays:
            router.begin_step()
        return replay

    def clear(self) -> None:
        """Free all experts on the device."""
        for replay in self._replays:
            replay.clear()

    @staticmethod
    def _replay_of(router: Any) -> Replay:
        if not isinstance(router.router_replay, Replay):
            router.router_replay = Replay(router)
        replay: Replay = router.router_replay
        return replay

    def model_inputs(self, batch: PackedBatch) -> dict[str, Tensor | None]:
        """Return the keyword argument of the model's forward for a micro-batch, None for an empty
        one.

        Raises:
            ValueError: a sample's experts do not fit the model's layers, experts per token or
                number of experts. The message names the sample.
        """
        experts, config = batch.routed_experts, self._config
        if experts is None:
            return {"routed_experts": None}
        layers, topk = experts.shape[1:]
        places = layers_of_experts(self._chunk)
        if layers not in (config.num_layers, len(places)) or topk != config.moe_router_topk:
            raise ValueError(
                f"{batch.samples[0].name}: routed_experts has {layers} layers and {topk} experts "
                f"per token, expected {config.num_layers} layers (or the {len(places)} with "
                f"experts) and {config.moe_router_topk} experts, like the model"
            )
        samples: Any = batch.samples
        for sample in samples:
            if (largest := largest_expert(sample.routed_experts)) >= config.num_moe_experts:
                layer, position, _ = (sample.routed_experts == largest).nonzero()[0].tolist()
                raise ValueError(
                    f"{sample.name}: routed_experts has expert {largest} at layer {layer}, "
                    f"position {position}, but the model has {config.num_moe_experts} experts"
                )
        return {"routed_experts": experts}

    def report(self) -> SumsReport:
        """Report `router_agreement` and end the step: this rank's router choices equal to the
        engine's, and all choices.
        """
        counts = [r.agreement for r in self._replays if r.agreement is not None]
        for replay in self._replays:
            replay.begin_step()
        nothing = torch.zeros(1, 2, dtype=torch.float64, device="cpu")
        return SumsReport(torch.stack(counts).sum(0)[None] if counts else nothing, _agreement)


def _agreement(reduced: Tensor) -> dict[str, float]:
    # Over all ranks, a layer's tokens are counted once, or all equally often.
    same, count = reduced[0].tolist()
    return {"router_agreement": same / count} if count else {}


def layers_of_experts(chunk: Any) -> list[int]:
    """List the whole model's layers with experts, from 0."""
    config = chunk.config
    frequency = config.moe_layer_freq
    if (pattern := getattr(chunk, "hybrid_layer_pattern", None)) is not None:
        # In HybridModel's pattern, E is a layer with experts, | separates stages, and / precedes
        # multi-token prediction.
        layers = pattern.split("/")[0].replace("|", "")
        frequency = [kind == "E" for kind in layers]
    elif isinstance(frequency, int):
        frequency = [int(layer % frequency == 0) for layer in range(config.num_layers)]
    return [layer for layer, is_mixture in enumerate(frequency) if is_mixture]


def _give_experts(
    groups: ParallelGroups, replays: list[Replay], chunk: Any, args: Any, keywords: dict[str, Any]
) -> tuple[Any, Any]:
    is_trained = torch.is_grad_enabled() and chunk.training
    if "routed_experts" not in keywords and is_trained and chunk._needs_routed_experts:
        raise ValueError(
            "--replay-routing requires routed_experts in every call of the model: call it with "
            "**head.model_inputs, or add **head.model_arguments. With routed_experts=None, the "
            "routers choose"
        )
    experts, config = keywords.pop("routed_experts", None), chunk.config
    if experts is not None and config.sequence_parallel:
        experts = experts.chunk(groups.tensor_size)[groups.tensor_rank]
    for replay in replays:
        if experts is None:
            replay.take(None)
        else:
            has_all_layers = experts.shape[1] == config.num_layers
            place = replay.layer if has_all_layers else layers_of_experts(chunk).index(replay.layer)
            replay.take(experts[:, place])
    return args, keywords


def _require_asked(replays: list[Replay], chunk: Any, args: Any, output: Any) -> None:
    for replay in replays:
        replay.require_asked()
