"""`megatron-pg check` proves on the user's machines that the gradient does not depend on the
sharding.

Files in the order of the work: `options` reads the flags, `places` samples and names the ranks,
`job` joins the processes, `model` builds the tiny models with the values of `weights`, `placement`
finds the place of each parameter in the whole model, `cases` lists the rows, `samples` makes their
samples, `step` runs them, `reference` computes the expected results, `compare` measures the errors,
`diagnosis` says what is wrong, and `report` writes the results. `own_model` has the rows of the
user's model (`--model-provider`).
"""

import contextlib
import logging
import sys
import warnings
from collections.abc import Sequence

from megatron_pg.check.job import Launch, joined, prepare
from megatron_pg.check.options import parse_options
from megatron_pg.check.places import sampled_ranks
from megatron_pg.config.versions import UnsupportedMegatronError


def main(arguments: Sequence[str]) -> int:
    """Run the check in the job that a launcher started. Every rank calls it, and exits at once if
    it fails.

    Rank 0 prints the report on standard output. Library output goes to standard error. `arguments`
    is the command line after `megatron-pg check`.

    Returns:
        The exit status, equal on every rank: 0 when every row passes, 1 when one fails, 2 for
        invalid flags or an unsupported Megatron-Core. A rank that `--sample-groups` leaves out
        returns 0 at once.
    """
    # Every rank would warn about absent optional packages and deprecated names.
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.")
    logging.getLogger("megatron.core.models.gpt.gpt_model").setLevel(logging.ERROR)
    try:
        launch = Launch.from_environment()
        options, wants_json = parse_options(arguments, world_size=launch.world_size)
        sampled = launch.in_sample(sampled_ranks(options, launch.world_size))
        if sampled is None:
            return 0
        launch = sampled
        prepare(launch, options.device)
    except (ValueError, UnsupportedMegatronError) as error:
        print(f"megatron-pg check: {error}", file=sys.stderr, flush=True)
        return 2
    output = sys.stdout
    with joined(launch, options.device):
        # A custom function's module may import `megatron.training`, which logs to standard output.
        for handler in logging.getLogger().handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream is sys.stdout:
                handler.setStream(sys.stderr)
        with contextlib.redirect_stdout(sys.stderr):
            # These imports need Megatron, and on the CPU `enable_cpu_runtime`.
            from megatron_pg.check import report, step

            if options.model_provider is not None:
                from megatron_pg.check.own_model import run_own_check

                own = run_own_check(options)
                rows = own.rows
                write = report.as_json if wants_json else report.as_text
                beside = report.Beside(own.notes, own.traits, own.unproven)
                text = write(rows, options, launch.world_size, beside)
            elif options.all:
                checked = []
                for sharding in step.check_every_sharding(options):
                    checked.append(sharding)
                    if launch.rank == 0 and not wants_json:
                        print(report.summary(sharding, launch.world_size), file=output, flush=True)
                rows = [row for sharding in checked for row in sharding.rows]
                write_all = report.as_json_list if wants_json else report.verdict
                text = write_all(checked, launch.world_size)
            else:
                rows = step.run_check(options)
                write = report.as_json if wants_json else report.as_text
                text = write(rows, options, launch.world_size)
        if launch.rank == 0:
            print(text, flush=True)
    return 0 if all(row.passed for row in rows) else 1
