"""Helpers of train_grpo.py: everything that is not the loss."""
