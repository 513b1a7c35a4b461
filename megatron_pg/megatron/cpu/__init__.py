"""Unmodified Megatron-Core on a CPU: runtime and layers in plain torch."""
