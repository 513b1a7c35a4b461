"""What `megatron-pg check` and `megatron-pg migrate` say of each mistake: python -m benchmarks.studies.instruments [MISTAKE ...]

Each check runs in two processes that have the mistake; the checksum's answer is in the table of the runs. A row that fails is
counted, and the first cause that is named is printed.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

CONTEXT = "--context-parallel-size 2"
FLAGS = {
    "micro_batch_mean": CONTEXT,
    "sequence_mean": CONTEXT,
    "local_denominator": "",
    "times_cp": CONTEXT,
    "forgotten_micro_batches": CONTEXT,
    "padding_routed": f"{CONTEXT} --num-experts 4",
}
"""Flags of the check; the other mistakes are settings, which a check of the arithmetic cannot know to be wrong."""
LINES = {
    "micro_batch_mean": "--trainer verl -- python -m verl.trainer.main_ppo actor_rollout_ref.actor.policy_loss.loss_mode=geo_mean",
    "sequence_mean": "-- python open_instruct/grpo_fast.py --masked_mean_axis 1",
    "divisor_1000": "--trainer slime --lengths 4,16 -- train.py --custom-pg-loss-reducer-function-path "
    "examples.DrGRPO.custom_reducer.get_pg_loss_reducer",
    "kl_beside_1000": "--trainer slime --lengths 4,16 -- train.py --use-kl-loss --kl-loss-coef 0.05 --kl-loss-type k3 "
    "--custom-pg-loss-reducer-function-path examples.DrGRPO.custom_reducer.get_pg_loss_reducer",
    "kl_other_mean": "--trainer nemo-rl -- python examples/run_grpo_math.py loss_fn.token_level_loss=true",
}
"""A launch line that has the mistake in a trainer that migrate reads, or the nearest to it."""


def checked(mistake: str) -> str:
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    command = [*launcher, "-m", "benchmarks.studies.instruments", "--broken", mistake]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = re.search(r"^\{.*\}$", done.stdout, re.MULTILINE | re.DOTALL)
    if not found:
        return f"no report (status {done.returncode}): {done.stderr.strip().splitlines()[-1:]}"
    rows = [
        row
        for row in json.loads(found[0])["rows"]
        if row["aggregation"] == "token_mean" or row["what"] in ("auxiliary loss", "router z loss")
    ]
    failed = [row for row in rows if not row["passed"]]
    causes = dict.fromkeys(str(row["diagnosis"]) for row in failed)
    return f"{len(failed)} of {len(rows)} rows fail" + "".join(f"\n    {cause}" for cause in causes)


def broken(mistake: str) -> int:
    from megatron_pg.megatron.cpu.runtime import enable_cpu_runtime

    enable_cpu_runtime()
    from megatron_pg.check import main as check

    from .mistakes import MISTAKES

    MISTAKES[mistake].apply()
    return check([*FLAGS[mistake].split(), "--device", "cpu", "--json"])


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["--broken"]:
        sys.exit(broken(arguments[1]))
    for mistake in FLAGS:
        if not arguments or mistake in arguments:
            print(f"check, {mistake}: {checked(mistake)}", flush=True)
    for mistake, line in LINES.items():
        if not arguments or mistake in arguments:
            command = [sys.executable, "-m", "megatron_pg", "migrate", *line.split()]
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, cwd=Path.cwd()
            )
            print(f"migrate, {mistake}: {line}\n{done.stdout or done.stderr}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
