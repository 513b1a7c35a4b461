"""The costs of a step as curves: `python -m benchmarks.scale [planning] [batches]`, both by
default.

It needs one core and no accelerator. A driver (`benchmarks/scale/played.py`) simulates the other
ranks. Seconds are processor time, so the machine may be shared, but the caches are shared too.
"""

import argparse
import importlib

import torch

PARTS = ("planning", "batches")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", choices=PARTS, default=[])
    torch.set_num_threads(1)
    for part in parser.parse_args().parts or PARTS:
        importlib.import_module(f"benchmarks.scale.{part}").main()


if __name__ == "__main__":
    main()
