"""``megatron-pg check``: proves on the user's own machines that the gradient does not depend on the sharding."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import TextIO

from megatron_pg.check.job import Job, Launch, prepare
from megatron_pg.check.options import check_world_size, parse_options
from megatron_pg.config.versions import UnsupportedMegatronError


def main(arguments: Sequence[str]) -> int:
    """Runs the check in the job that its launcher has started; every rank calls it.

    Standard output gets the report, from rank 0, and nothing else: what libraries print goes to standard error.

    Args:
        arguments: the command line after ``megatron-pg check``.

    Returns:
        The exit status, equal on every rank: 0 when every row passes, 1 when one fails, 2 for flags that cannot be
        served and a Megatron-Core that is not supported. Where a rank raises, the process does not return: it ends with status 1, and so do the others.
    """
    _quiet_libraries()
    try:
        launch = Launch.from_environment()
        options, as_json = parse_options(arguments)
        check_world_size(options, launch.world_size)
        prepare(launch, options.device)
    except (ValueError, UnsupportedMegatronError) as error:
        print(f"megatron-pg check: {error}", file=sys.stderr, flush=True)
        return 2
    with _only_the_report_on_stdout() as stdout, Job(launch, options.device):
        # Importing them needs Megatron, and on the CPU its redirection.
        from megatron_pg.check import report
        from megatron_pg.check.step import run_check

        rows = run_check(options)
        write = report.as_json if as_json else report.as_text
        text = write(rows, options, launch.world_size)
        if launch.rank == 0:
            print(text, file=stdout, flush=True)
    return 0 if all(row.passed for row in rows) else 1


def _quiet_libraries() -> None:
    """Every rank would say which optional packages are absent and which names will change: not about the check."""
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.")
    logging.getLogger("megatron.core.models.gpt.gpt_model").setLevel(logging.ERROR)


@contextlib.contextmanager
def _only_the_report_on_stdout() -> Iterator[TextIO]:
    """Yields standard output; meanwhile whatever else is written there, from C too, goes to standard error."""
    sys.stdout.flush()
    with os.fdopen(os.dup(1), "w") as report:
        os.dup2(2, 1)
        try:
            yield report
        finally:
            sys.stdout.flush()
            os.dup2(report.fileno(), 1)
