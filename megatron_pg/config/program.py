"""The command line of our own programs: a refusal is one line, said by one rank of a job where that is possible.

A parser of somebody else's is left as it is (`fields.add_args`).
"""

import argparse
import os
import re
import signal
import sys
import time
from typing import Any, NoReturn

from megatron_pg.config.rows import did_you_mean

FIRST_WAIT_SECONDS, NEXT_WAIT_SECONDS = 5.0, 1.0
"""The wait of a node's rank 1 before it says a refusal, and how much longer each further rank waits."""


def exit_refused(message: str, status: int = 1) -> NoReturn:
    """Print why the job is refused, and end the process. Every rank that finds the fault calls it.

    Rank 0 of a node prints at once. Its end makes torchrun end the other ranks, which wait for that. A rank that
    outlives its wait prints the message too, since rank 0 may be far behind: better twice than not at all.
    """
    if local_rank := _local_rank():
        # The wait is over when the launcher ends the rank.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(FIRST_WAIT_SECONDS + NEXT_WAIT_SECONDS * (local_rank - 1))
    print(message, file=sys.stderr, flush=True)
    sys.exit(status)


class ProgramParser(argparse.ArgumentParser):
    """A parser that refuses in one line, with the nearest flag, and prints its help once on a node.

    With Megatron's flags argparse's own error is 700 lines long, from every rank.
    """

    def error(self, message: str) -> NoReturn:
        if message.startswith("unrecognized arguments"):
            flags = {flag.removeprefix("--"): flag for flag in self._option_string_actions}
            for word in re.findall(r"(?<!\S)--([\w-]+)", message):
                message += did_you_mean(word, (), flags)
        exit_refused(f"{self.prog}: error: {message}", status=2)

    def _print_message(self, message: str, file: Any = None) -> None:
        if _local_rank() == 0:
            super()._print_message(message, file)


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))
