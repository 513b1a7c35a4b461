"""The costs of a step as curves over samples, tokens, ranks and micro-batches."""
