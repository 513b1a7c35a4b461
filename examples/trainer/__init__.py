"""Training of real models on Megatron's own parts: `examples/trainer/`."""
