"""Products of exponentials for Hopper GPUs, on QuACK."""
