"""One step of vime: its iterator, batch, log-probs and loss function around the protocol's adapter."""

import importlib
from functools import partial
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from tests.oracle import PlainSample

from .engines import GROUP, Case, fields_of, scheduled
from .logit_table import initialize, logits_of, share_of, table_under_ddp
from .sources import stand_in_for

VIME_PACKAGES = "ray httpx wandb vllm vllm_router torch_memory_saver".split()


def gradient(samples: list[PlainSample], case: Case) -> Tensor:
    """Their iterator, batch, log-probs and `loss_function`, with both functions by their import paths."""
    import torch._dynamo
    from megatron.core import tensor_parallel
    from megatron.core.fusions import fused_cross_entropy

    torch._dynamo.config.disable = True
    # Megatron's fused one, which vime imports when called, rounds its gradient to bfloat16 (0.19.2).
    fused_cross_entropy.fused_vocab_parallel_cross_entropy = lambda logits, tokens, group: (
        tensor_parallel.vocab_parallel_cross_entropy(logits, tokens)
    )
    stand_in_for(VIME_PACKAGES)
    theirs = "vime.backends.megatron_utils."
    data, losses = (importlib.import_module(theirs + name) for name in ("data", "loss"))
    load_function = importlib.import_module("vime.utils.misc").load_function
    initialize(1)
    torch.Tensor.cuda = lambda tensor: tensor  # type: ignore[method-assign,assignment]
    mine = share_of(samples, 1)
    count = len(samples[mine]) // 2
    settings = fields_of(case)
    args = SimpleNamespace(
        **{"loss_type": "custom_loss", "advantage_estimator": "grpo", "qkv_format": "thd"},
        **{"custom_loss_function_path": "megatron_pg.integrations.vime.loss", "use_kl_loss": True},
        **dict.fromkeys("calculate_per_token_loss use_tis use_opsm allgather_cp".split(), False),
        **dict.fromkeys(["recompute_loss_function"], False),
        **{
            name: settings[name]
            for name in "eps_clip eps_clip_high kl_loss_coef kl_loss_type".split()
        },
        **{"entropy_coef": 0.0, "rollout_temperature": 1.0, "log_probs_chunk_size": -1},
        **{"n_samples_per_prompt": GROUP, "megatron_pg": settings},
    )
    names = {
        "advantages": "advantages",
        "log_probs": "old_log_probs",
        "ref_log_probs": "ref_log_probs",
    }
    numbers = range(mine.start, mine.stop)
    rollout_data: dict[str, Any] = {
        "tokens": [torch.tensor(sample.tokens) for sample in samples[mine]],
        "loss_masks": [torch.tensor(sample.loss_mask, dtype=torch.int) for sample in samples[mine]],
        "total_lengths": [len(sample.tokens) for sample in samples[mine]],
        "response_lengths": [sample.response_length for sample in samples[mine]],
        "rollout_mask_sums": torch.tensor([float(sum(s.loss_mask)) for s in samples[mine]]),
        "sample_indices": list(numbers),
        "rollout_ids": [100 + number for number in numbers],
        "micro_batch_indices": [[at, at + 1] for at in range(0, 2 * count, 2)],
        "num_microbatches": [count],
        "global_batch_sizes": [len(samples)],
        **{
            name: [torch.tensor(getattr(sample, field)) for sample in samples[mine]]
            for name, field in names.items()
        },
    }
    load_function("megatron_pg.integrations.vime.prepare")(args, 0, rollout_data)
    (iterator,) = data.get_data_iterator(rollout_data)
    keys = "tokens loss_masks total_lengths response_lengths rollout_mask_sums max_seq_lens".split()
    model = table_under_ddp(logits_of(samples), per_token=False)

    def forward_step(numbers: Any, model: Any) -> Any:
        batch = data.get_batch(iterator, keys, 4, "thd", False)
        logits = model(batch["tokens"])
        if case.mutant == "windows":
            logits = logits.roll(1, 1)
        loss = partial(losses.loss_function, args, batch, count, len(samples))
        if case.mutant != "scale":
            return logits, loss
        return logits, lambda logits: (loss(logits)[0] / len(samples), *loss(logits)[1:])

    return scheduled(model, forward_step, count)
