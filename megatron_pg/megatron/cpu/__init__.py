"""Unmodified Megatron-Core on a CPU: the runtime, and layers in plain torch."""
