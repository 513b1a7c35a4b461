"""Products of exponentials for Hopper GPUs, on QuACK."""

MULTIPLE = 128
"""Rows and columns of exponentials come in multiples of it: a tile of the second and of the third
product."""
