"""Log-probabilities and entropy of target tokens, from vocabulary-parallel logits or from hidden
states.

The plain head: `from_logits` is an autograd function around two row passes in torch (`rows_torch`)
or Triton (`rows_triton`). `from_hidden` puts the output layer in front of them, chunk by chunk
(`output_layer`), or runs only that layer, and computes the gradients of its factors
(`factor_gradients`). `backend` chooses the implementation.

Extensions, which the plain head does not import: `kept` restricts each row to the tokens that it
was sampled from, `distill` compares it with a teacher, `centering` with the sampler, and `hopper`
stores exponentials instead of logits. `log_probs` combines them.
"""

from megatron_pg.head.centering import Centering
from megatron_pg.head.distill.divergence import Divergence
from megatron_pg.head.distill.teacher import TopKTeacher, WholeTeacher
from megatron_pg.head.from_hidden import float32_logits, linear_token_loss
from megatron_pg.head.log_probs import (
    linear_log_probs_and_entropy,
    log_probs_and_entropy,
    log_probs_and_score,
)
from megatron_pg.head.output_layer import HeadOptions, LogitTransform
from megatron_pg.head.ragged import Ragged
from megatron_pg.head.vocabulary_shard import VocabularyShard

__all__ = [
    "Centering",
    "Divergence",
    "HeadOptions",
    "LogitTransform",
    "Ragged",
    "TopKTeacher",
    "VocabularyShard",
    "WholeTeacher",
    "float32_logits",
    "linear_log_probs_and_entropy",
    "linear_token_loss",
    "log_probs_and_entropy",
    "log_probs_and_score",
]
