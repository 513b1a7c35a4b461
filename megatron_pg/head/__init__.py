"""Log-probabilities and entropy of target tokens, from vocabulary-parallel logits or from hidden states."""

from megatron_pg.head.from_logits import log_probs_and_entropy

__all__ = ["log_probs_and_entropy"]
