"""Real Megatron-Core on gloo processes; every test here is compared with one unsharded process."""
