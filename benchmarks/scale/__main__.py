"""The costs of a step as curves: `python -m benchmarks.scale [planning] [batches]`, both by
default.

One core and no accelerator. Ranks that do not exist are played by a driver
(`benchmarks/scale/played.py`). Seconds are of the processor's clock, so that others may share the
machine; their caches are shared all the same.
"""

import argparse
import importlib

import torch

PARTS = ("planning", "batches")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], default=PARTS)
    torch.set_num_threads(1)
    for part in parser.parse_args().parts:
        importlib.import_module(f"benchmarks.scale.{part}").main()


if __name__ == "__main__":
    main()
