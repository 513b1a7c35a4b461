"""Time and memory of `megatron-pg check` on rank 0 of a large job, simulated in one process.

    python -m benchmarks.check_scale --ranks 512 [--sample-groups 4] [flags of check]

torch's fake process groups stand for the job: collectives return at once, and this driver plays the other ranks, whose slices
and scores are rank 0's own. So the seconds are rank 0's own work, and the verdict means nothing. Not in them: the network, and
the barrier in the store at the end of every `new_group`, `--ranks` writes each; the number of calls is printed.
"""

import argparse
import collections
import os
import resource
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_pg.megatron.cpu.runtime import enable_cpu_runtime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=512)
    args, flags = parser.parse_known_args()
    started = time.process_time()
    enable_cpu_runtime()
    from megatron_pg.check import compare, options, places, reference, report, step

    seconds: dict[str, float] = collections.Counter()
    calls: dict[str, int] = collections.Counter()

    def timed(module: Any, name: str) -> None:
        right = getattr(module, name)

        def run(*arguments: Any, **keywords: Any) -> Any:
            began = time.process_time()
            try:
                return right(*arguments, **keywords)
            finally:
                seconds[name] += time.process_time() - began
                calls[name] += 1

        setattr(module, name, run)

    os.environ.update(RANK="0", WORLD_SIZE=str(args.ranks))
    chosen, _ = options.parse_options(["--device", "cpu", *flags], world_size=args.ranks)
    ranks = places.sampled_ranks(chosen, args.ranks)
    sizes = ("tensor_model", "context", "pipeline_model")
    tensor, context, pipeline = (getattr(chosen, f"{name}_parallel_size") for name in sizes)
    data = len(ranks) // chosen.model_parallel_size

    def gather(value: Any, group: Any) -> list[Any]:
        """What the ranks would tell: rank 0's, under their own names."""
        if not (isinstance(value, tuple) and isinstance(value[0], places.Place)):
            return [value] * dist.get_world_size(group)
        everyone = []
        for rank in range(len(ranks)):
            cell = rank % tensor, rank // tensor % context, rank // (tensor * context) % data
            name = places.Place(
                ranks[rank], f"node{rank // 8}", (*cell, rank // (len(ranks) // pipeline))
            )
            everyone.append((name, [part._replace(place=name) for part in value[1]]))
        return everyone

    def score(model: Any, samples: Any, case: Any) -> Any:
        model._case = case
        for sample in samples[:: len(ranks)]:
            model._scores(sample, model._logits([sample])[0])
        scores = [(torch.full((s.response_length,), -1.0).double(),) * 2 for s in samples]
        return reference.with_log_probs(samples, [log_probs for log_probs, _ in scores]), scores

    right_group = dist.new_group

    def new_group(*arguments: Any, **keywords: Any) -> Any:
        keywords.pop("pg_options", None)
        calls["new_group"] += 1
        return right_group(*arguments, **keywords | {"backend": "fake"})

    dist.new_group = new_group
    compare.gather = gather
    reference.WholeModel.score = torch.no_grad()(score)  # type: ignore[method-assign]
    step.step_totals = lambda mine, **_: reference.step_totals(
        mine, allow_different_group_sizes=True
    )
    for name in ("initialize_groups", "_references", "train_step", "compare"):
        timed(step, name)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=len(ranks))
    rows = step.run_check(chosen)
    report.as_text(rows, chosen, len(ranks))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    parts = ", ".join(f"{name} {value:.1f}" for name, value in seconds.items())
    print(
        f"{args.ranks} ranks, checked on {len(ranks)}: {time.process_time() - started:.1f} s with imports ({parts}), {len(rows)} rows, "
        f"{calls['new_group']} calls of new_group, {peak:.2f} GiB"
    )


if __name__ == "__main__":
    main()
