"""Log-probabilities and entropy of target tokens, from vocabulary-parallel logits or from hidden states.

`log_probs_and_entropy` (`from_logits`) is an autograd function around two row passes, `row_statistics` and
`write_gradient`, in torch (`rows_torch`) or Triton (`rows_triton`, which launches `kernels`).
`linear_log_probs_and_entropy` and `linear_token_loss` (`from_hidden`) put the output layer in front of them, chunk by
chunk (`output_layer`); the second does all three products in one pass, in forward or in backward. `float32_logits` is the
output layer by itself. Over the tokens that a row was sampled from (`kept_set`) the first two take a `Ragged` of ids; the
second then multiplies the kept columns alone (`sparse_layer`, by `pairs_torch` or `pairs_triton` with `pairs_kernels`).
"""

from megatron_pg.head.distill.divergence import Divergence
from megatron_pg.head.distill.teacher import TopKTeacher, WholeTeacher
from megatron_pg.head.from_hidden import linear_log_probs_and_entropy, linear_token_loss
from megatron_pg.head.from_logits import log_probs_and_divergence, log_probs_and_entropy
from megatron_pg.head.output_layer import HeadOptions
from megatron_pg.head.plain_layer import float32_logits
from megatron_pg.head.ragged import Ragged
from megatron_pg.head.vocabulary_shard import VocabularyShard

__all__ = [
    "Divergence",
    "HeadOptions",
    "Ragged",
    "TopKTeacher",
    "VocabularyShard",
    "WholeTeacher",
    "float32_logits",
    "linear_log_probs_and_entropy",
    "linear_token_loss",
    "log_probs_and_divergence",
    "log_probs_and_entropy",
]
