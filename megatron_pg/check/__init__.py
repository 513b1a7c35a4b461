"""`megatron-pg check`: proves on the user's own machines that the gradient does not depend on the sharding.

The files in the order of the work: `options` are what is checked, `job` starts it, `model` and `sharded_parameters` are
what it is checked on, `step` runs it (its rows are the table of `cases`, its samples those of `samples`), `reference` says
what it should give, `compare` how far it is from that, `diagnosis` what that looks like (it asks a `finding`), and
`report` says so; `every_sharding` does it again and again.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import warnings
from collections.abc import Iterator, Sequence

from megatron_pg.check.job import Launch, joined, prepare
from megatron_pg.check.options import parse_options
from megatron_pg.config.versions import UnsupportedMegatronError


def main(arguments: Sequence[str]) -> int:
    """Runs the check in the job that its launcher has started; every rank calls it.

    Standard output gets the report, from rank 0, and nothing else: what libraries print goes to standard error.

    Args:
        arguments: the command line after `megatron-pg check`.

    Returns:
        The exit status, equal on every rank: 0 when every row passes, 1 when one fails, 2 for flags that cannot be
        served and a Megatron-Core that is not supported.

    Raises:
        SystemExit: with status 1, where this rank has failed.
    """
    # Every rank would say which optional packages are absent and which names will change: not about the check.
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.")
    logging.getLogger("megatron.core.models.gpt.gpt_model").setLevel(logging.ERROR)
    try:
        launch = Launch.from_environment()
        options, wants_json = parse_options(arguments, world_size=launch.world_size)
        prepare(launch, options.device)
    except (ValueError, UnsupportedMegatronError) as error:
        print(f"megatron-pg check: {error}", file=sys.stderr, flush=True)
        return 2
    with joined(launch, options.device):
        with _output_to_stderr():
            # Importing them needs Megatron, and on the CPU its redirection.
            from megatron_pg.check import every_sharding, report
            from megatron_pg.check.step import run_check

            if options.all:
                checked = every_sharding.check_every_sharding(options, launch.world_size)
                rows = [row for each in checked for row in each.rows]
                to_text = report.summary_as_json if wants_json else report.summary
                text = to_text(checked, launch.world_size)
            else:
                rows = run_check(options)
                to_text_of_one = report.as_json if wants_json else report.as_text
                text = to_text_of_one(rows, options, launch.world_size)
        if launch.rank == 0:
            print(text, flush=True)
    return 0 if all(row.passed for row in rows) else 1


@contextlib.contextmanager
def _output_to_stderr() -> Iterator[None]:
    """Standard output is the report's: what is printed meanwhile goes to standard error, and so does the log of whoever
    has taken standard output for it before (`megatron.training`, which the module of a custom function may import)."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.StreamHandler) and handler.stream is sys.stdout:
            handler.setStream(sys.stderr)
    with contextlib.redirect_stdout(sys.stderr):
        yield
