"""Policy gradients with real models, on Megatron's own training loop: `torchrun examples/trainer
...`.
"""
