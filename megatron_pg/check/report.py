"""The report of a check, as text and as JSON."""

from collections.abc import Iterator, Mapping

from megatron_pg.config.versions import FIRST_UNSUPPORTED

KNOWN_MISTAKES: Mapping[tuple[tuple[int, int], tuple[int, int]], Mapping[str, str]] = {
    ((0, 15), (0, 16)): {
        "the auxiliary loss of experts counts 1/CP of its coefficient under context parallelism": "pull request 2217"
    },
    ((0, 15), (0, 17)): {
        "multi-token prediction without labels fails in the forward pass": "labels.clone() in models/gpt/gpt_model.py"
    },
    ((0, 15), (0, 18)): {
        "interleaved pipelines free activations that are still being sent, unless deallocate_pipeline_outputs is "
        "off": "pull request 4047"
    },
    ((0, 15), (0, 19)): {
        "in per-token mode the auxiliary and z losses of experts count 1/(TP CP) of their coefficients where tokens are "
        "split": "issue 1652, pull request 5047",
        "with --expert-model-parallel-size 1, experts whose expert-tensor-parallel size is not the tensor-parallel size are "
        "reduced over the wrong ranks": "pull request 5916",
        "the gradient norm may leave out grouped experts (--moe-grouped-gemm) under expert and tensor parallelism": "pull "
        "request 5916",
    },
    ((0, 15), FIRST_UNSUPPORTED): {
        "the gradient norm counts learned attention sinks on the first tensor-parallel rank alone": "issue 7452, pull request "
        "7530",
        "under tensor parallelism the rotary part of multi-latent attention's keys gets the gradient of one rank's heads "
        "(Transformer Engine's layers: without sequence parallelism)": "issue 1699, pull request 6839",
        "global_aux_loss divides the experts' tokens of all micro-batches so far by those of the last one": "pull request 7214",
    },
    ((0, 16), (0, 20)): {
        "the bias of experts fails beside a padding mask (PolicyStep counts their tokens)": "pull request 6114"
    },
    ((0, 16), FIRST_UNSUPPORTED): {
        "in per-token mode the losses of experts are multiplied by the tokens of all ranks that share a micro-batch, once "
        "padding is masked (PolicyStep makes them means over tokens)": "issue 7452, pull request 7481",
        "GPTModel cuts the padding mask over the global tensor-parallel group, and not over its own": "issue 7452",
        "under tensor parallelism without sequence parallelism, the output norm of GatedDeltaNet gets the gradient of one "
        "rank's heads": "issue 7452",
    },
    ((0, 17), (0, 19)): {
        "multi-token prediction without labels is not trained, and nothing says so": "pull request 3457"
    },
    ((0, 17), FIRST_UNSUPPORTED): {
        "rotary positions under hybrid context parallelism follow the model's group and not the micro-batch's (refused by "
        "PolicyStep)": "Attention.forward in transformer/attention.py"
    },
    ((0, 19), FIRST_UNSUPPORTED): {
        "multi-token prediction is a mean over the tokens of one context-parallel rank, prompts and padding included, and "
        "counts 1/CP of them (PolicyStep makes it the mean over the step's active tokens)": "pull requests 3959 and 7498",
        "in per-token mode multi-token prediction is multiplied by a rank's tokens before the shift over its tokens after it "
        "(refused by PolicyStep)": "issue 2417, issue 7452, pull request 3159",
        "multi-token prediction of a model that gathers its logits has a wrong loss under tensor parallelism (refused by "
        "PolicyStep)": "issue 7452",
    },
}
"""The mistakes, and an issue, pull request or file of github.com/NVIDIA/Megatron-LM, by the first wrong version and the
first right one (`FIRST_UNSUPPORTED` if none is known). They were read in 0.15.3 to 0.19.2, and measured where `check` can."""


def mistakes_in(version: tuple[int, int, int]) -> Iterator[str]:
    """Put the known mistakes of a version in words."""
    for (first, fixed), mistakes in KNOWN_MISTAKES.items():
        until = "" if fixed == FIRST_UNSUPPORTED else f", right from {fixed[0]}.{fixed[1]}"
        if first <= version[:2] < fixed:
            yield from (f"{what} ({source}{until})" for what, source in mistakes.items())
