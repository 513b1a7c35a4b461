"""The command line of our own programs: a refusal is one line, said by one rank of a job where that is possible.

A parser of somebody else's is left as it is (`fields.add_args`).
"""

import argparse
import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from megatron_pg.config.rows import did_you_mean
from megatron_pg.config.settings_file import READ, text_of_words, with_switches, words_of_file

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

    With Megatron's flags argparse's own error is 700 lines long, from every rank. It reads the file of `--config`
    (`config.settings_file`) where it has that flag.
    """

    presets: Sequence[str] = ()
    """Words that go before those of the file, such as the flags of a checkpoint's model."""
    words: Sequence[str] = ()
    """The words that were parsed, without the presets: those of the file, then those of the command line."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse the presets, the words of the file and the words, in this order: the last one wins."""
        actions = self._option_string_actions
        self.words = list(sys.argv[1:] if args is None else args)
        if READ in actions:
            before = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
            before.add_argument(READ, dest="file")
            if (file := before.parse_known_args(self.words)[0].file) is not None:
                try:
                    self.words = [*words_of_file(Path(file), actions), *self.words]
                except ValueError as error:
                    self.error(str(error))
        words = with_switches([*self.presets, *self.words], actions)
        self.words = with_switches(self.words, actions)
        parsed = super().parse_known_args(words, namespace)
        if READ in actions and parsed[0].write_config and os.environ.get("RANK", "0") == "0":
            Path(parsed[0].write_config).write_text(text_of_words(self.words))
        return parsed

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
