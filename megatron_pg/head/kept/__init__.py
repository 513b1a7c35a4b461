"""Log-probabilities over the set of tokens that each token was sampled from."""
