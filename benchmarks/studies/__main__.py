"""Runs studies, and goes on with them.

    python -m benchmarks.studies sanity --out DIR --cores 24 --seconds 300

The runs of a study that its table in DIR lacks are started in order of importance, all arms of a
seed before those of the next, as many at a time as there are cores. A run that the time cuts off
leaves no row and is run again the next time.
"""

import argparse
import os
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
# torch.cuda.is_available then asks the driver's library, after which forked runs may still begin
# CUDA.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")


def main() -> None:
    from . import model_studies, pool  # after the settings above, which torch reads

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("studies", nargs="+", choices=["pair", "sanity", "numerics"])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--arms", nargs="+", help="these alone")
    parser.add_argument("--steps", type=int, help="fewer, to try an arm")
    parser.add_argument("--cores", type=int, default=os.cpu_count(), help="processes at a time")
    parser.add_argument("--gpus", default="0", help="numbers of GPUs, or cpu")
    parser.add_argument("--seconds", type=float, default=1e9, help="time budget")
    parser.add_argument(
        "--longest",
        type=float,
        default=0.0,
        help="seconds that a run takes of which the table has none like it: later than that before "
        "the end none starts",
    )
    args = parser.parse_args()
    began = time.monotonic()
    args.out.mkdir(parents=True, exist_ok=True)
    devices = [] if args.gpus == "cpu" else [int(number) for number in args.gpus.split(",")]
    for name in args.studies:
        jobs = model_studies.jobs(name, args.out, args.seeds, args.arms, args.steps, not devices)
        rest = args.seconds - (time.monotonic() - began)
        print(f"{name}: {len(jobs)} runs to do, {rest:.0f} s", flush=True)
        left = pool.run(jobs, args.cores, rest, args.longest, devices)
        done = len(jobs) - len(left)
        print(
            f"{name}: {done} done, {len(left)} left after {time.monotonic() - began:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
