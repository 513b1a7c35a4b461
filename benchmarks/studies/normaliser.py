"""Study 1, what a wrong normaliser costs: its arms, and the row of a finished run."""

import functools
import hashlib
import statistics
from pathlib import Path
from typing import Any

import torch

from . import pool, table
from .toy import SIZES, STEPS, Arm, Tasks, run_rank

TOKENS: dict[str, Any] = {"loss_aggregation": "token_mean"}
CONSTANT: dict[str, Any] = {"loss_aggregation": "constant", "loss_aggregation_divisor": 16}
KL: dict[str, Any] = {"kl_loss_coef": 0.05, "kl_loss_type": "k3", "regularizer_aggregation": "loss"}
APART: dict[str, Any] = KL | {"regularizer_aggregation": "sample_mean"}
ONE, WIDE = "one process", {"loss_aggregation": "constant", "loss_aggregation_divisor": 1000}

RIGHT = {
    "right": Arm(),
    "right CP 2": Arm("CP 2"),
    "right DP 2": Arm("DP 2"),
    "right constant": Arm(loss=CONSTANT),
    "right KL": Arm(loss=TOKENS | KL),
    "right constant KL": Arm(loss=CONSTANT | KL),
    "right experts": Arm("CP 2", experts=True),
}
WRONG = {
    "micro_batch_mean": ("right", Arm(mistake="micro_batch_mean")),
    "sequence_mean": ("right", Arm(mistake="sequence_mean")),
    "local_denominator": ("right DP 2", Arm("DP 2", mistake="local_denominator")),
    "times_cp": ("right CP 2", Arm("CP 2", mistake="times_cp")),
    "forgotten_micro_batches": ("right", Arm(mistake="forgotten_micro_batches")),
    "divisor_1000": ("right constant", Arm(loss=WIDE, mistake="divisor_1000")),
    "kl_other_mean": ("right KL", Arm(loss=TOKENS | APART, mistake="kl_other_mean")),
    "kl_beside_1000": ("right constant KL", Arm(loss=WIDE | APART, mistake="kl_beside_1000")),
    "padding_routed": ("right experts", Arm("CP 2", experts=True, mistake="padding_routed")),
}
"""Each mistake with the arm that is right and like it but for the mistake."""


def _cut_name(sharding: str, cut: str, per_token: bool, suffix: str = "") -> str:
    return f"{sharding}, {cut}, {'per token' if per_token else 'plain'}{suffix}"


CURVES = {
    _cut_name(sharding, cut, per_token): Arm(sharding, cut, per_token)
    for cut in ("few", "one", "many")
    for per_token in (False, True)
    for sharding in SIZES
}
"""The same training cut in thirty ways; the first is what the others are compared with."""
DOUBLE = {
    _cut_name(sharding, cut, per_token, ", float64"): Arm(sharding, cut, per_token, dtype=torch.float64)
    for sharding, cut, per_token in (
        (ONE, "few", False), (ONE, "many", True), ("CP 2", "many", False), ("TP 2", "few", True),
        ("PP 2", "many", False), ("DP 2", "few", True),
    )
}  # fmt: skip
ARMS: dict[str, Arm] = RIGHT | {name: arm for name, (_, arm) in WRONG.items()} | CURVES | DOUBLE
BLOCK = 8
"""Steps that a row has one mean of."""
AT = (1, 2, 4, 8, 16, 32, 64)
"""Steps whose gradient norm a row has in full."""


def digest(start: Path) -> str:
    """A name for the supervised weights in a file: runs that began from others are not compared."""
    parts = sorted(torch.load(start).items())
    raw = b"".join(name.encode() + part.numpy().tobytes() for name, part in parts)
    return hashlib.sha256(raw).hexdigest()[:8]


def row(name: str, seed: int, result: Any, seconds: float, start: str) -> dict[str, Any]:
    """The row of a finished or failed run."""
    arm = ARMS[name]
    failed = isinstance(result, str)
    steps = [] if failed else result[:-1]

    def blocks(column: str) -> str:
        values = [line[column] for line in steps]
        means = [statistics.mean(values[i : i + BLOCK]) for i in range(0, len(values), BLOCK)]
        return " ".join(f"{mean:.5g}" for mean in means)

    last: dict[str, Any] = {} if failed else result[-1]
    return {
        "arm": name,
        "seed": seed,
        "start": start,
        "status": "failed: " + result.strip().splitlines()[-1][:120] if failed else "done",
        "steps": len(steps),
        "micro_batches": f"{statistics.mean(x['micro_batches'] for x in steps):.1f}"
        if steps
        else "",
        "processes": arm.processes,
        "seconds": f"{seconds:.1f}",
        "held_out": last.get("held_out", ""),
        "weights_norm": f"{last['weights_norm']:.12g}" if last else "",
        "reward": blocks("reward"),
        "length": blocks("length"),
        "grad_norm": blocks("grad_norm"),
        "kl": blocks("kl"),
        "checksum_off_by": f"{max((abs(x['checksum'] - 1.0) for x in steps), default=0.0):.2g}",
        "mismatch": f"{max((x['mismatch'] for x in steps[::2]), default=0.0):.2g}",
        "grad_norm_at": " ".join(
            f"{steps[i - 1]['grad_norm']:.12g}" for i in AT if i <= len(steps)
        ),
        "answers": "".join(line["answers"] for line in steps),
    }


def jobs(out: Path, seeds: list[int], only: list[str] | None, steps: int = STEPS) -> list[pool.Job]:
    """The runs that the table lacks, all arms of a seed before the next, after the supervised models."""
    path, warm_folder = out / "normaliser.csv", out / "warm"
    rows = table.read(path)
    done = {(line["arm"], int(line["seed"])) for line in rows}
    names = [name for name in ARMS if not only or name in only]
    wanted = [(name, seed) for seed in seeds for name in names if (name, seed) not in done]
    warm_folder.mkdir(parents=True, exist_ok=True)
    starts, runs = {}, []
    tasks = functools.cache(lambda seed: Tasks(4096, 256, seed))
    for name, seed in wanted:
        arm = ARMS[name]
        start = warm_folder / f"{'experts' if arm.experts else 'dense'}-{seed}.pt"
        if not start.exists() and start not in starts:
            first = Arm(cut="one", experts=arm.experts)

            def keep(result: Any, seconds: float, start: Path = start) -> None:
                if not isinstance(result, str):
                    torch.save(result, start)

            function = functools.partial(run_rank, first, tasks(seed), seed, None, 0)
            starts[start] = pool.Job(f"supervised, {start.stem}", seed, 1, function, keep)

        def run(
            rank: int,
            folder: str,
            device: None,
            arm: Arm = arm,
            seed: int = seed,
            start: Path = start,
        ) -> Any:
            warm = {key: part.to(arm.dtype) for key, part in torch.load(start).items()}
            return run_rank(arm, tasks(seed), seed, warm, steps, rank, folder)

        def finish(
            result: Any, seconds: float, name: str = name, seed: int = seed, start: Path = start
        ) -> None:
            table.append(path, row(name, seed, result, seconds, digest(start)))
            if not isinstance(result, str):
                pool.write_lines(out / "normaliser_steps.jsonl", name, seed, result)

        tasks(seed)
        expected = table.seconds(rows, name)
        job = pool.Job(name, seed, arm.processes, run, finish, start.exists, seconds=expected)
        runs.append(job)
    return [*starts.values(), *runs]
