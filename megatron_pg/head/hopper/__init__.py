"""Products of exponentials for Hopper GPUs, on QuACK."""

MULTIPLE = 128
"""Rows and columns of exponentials are multiples of this tile size of the second and third
product."""
