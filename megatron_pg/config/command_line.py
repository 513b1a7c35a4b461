"""The argument parser of this package's programs: flags in a YAML file, errors in one line.

Other parsers stay unchanged (`settings.add_args`).
"""

import argparse
import json
import os
import re
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from megatron_pg.config.values import did_you_mean

READ, WRITE = "--config", "--write-config"
FIRST_WAIT_SECONDS, NEXT_WAIT_SECONDS = 5.0, 1.0
"""Seconds that a node's rank 1 waits before it prints an error, and more per further rank."""


def exit_refused(message: str, status: int = 1) -> NoReturn:
    """Print an error and end the process. Every rank that finds the error calls it.

    Rank 0 of a node prints at once and exits, and torchrun then ends the other ranks. A rank that
    outlives its wait prints the message too, because rank 0 may be far behind.
    """
    if local_rank := _local_rank():
        # The launcher must be able to end the wait.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(FIRST_WAIT_SECONDS + NEXT_WAIT_SECONDS * (local_rank - 1))
    print(message, file=sys.stderr, flush=True)
    sys.exit(status)


class ProgramParser(argparse.ArgumentParser):
    """Parser that reads flags from a file and reports errors in one line with the nearest flag.

    With Megatron's flags argparse's own error is 700 lines long, printed by every rank.
    """

    presets: Sequence[str] = ()
    """Words that precede the file's words, such as the flags of a checkpoint's model."""
    words: Sequence[str] = ()
    """The parsed words without the presets: the file's, then the command line's."""

    def add_config_args(self) -> None:
        """Add `--config` and `--write-config`."""
        add = self.add_argument_group("settings in a file").add_argument
        text = "Read flags from a YAML file, such as `lr: 1e-5`. "
        text += "Flags on the command line win. --no-X unsets a flag X."
        add(READ, metavar="FILE", help=text)
        text = "Write this command's flags, including those from --config, to a YAML file."
        add(WRITE, metavar="FILE", help=text)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse the presets, the file's words and the given words. The last one wins."""
        actions, self.words = self._option_string_actions, sys.argv[1:] if args is None else args
        for action in self._actions:
            for flag in action.option_strings if action.nargs == 0 else ():
                is_optional = isinstance(action, argparse.BooleanOptionalAction)
                value = not flag.startswith("--no-") if is_optional else action.const
                if isinstance(value, bool):
                    no = f"--no-{flag[2:]}"
                    undo = argparse._StoreConstAction([no], action.dest, not value)
                    actions.setdefault(no, undo)
        if READ in actions:
            before = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
            before.add_argument(READ, dest="file")
            if (file := before.parse_known_args(self.words)[0].file) is not None:
                try:
                    self.words = [*words_of_file(Path(file), actions), *self.words]
                except ValueError as error:
                    self.error(f"{READ} {file}: {error}")
        parsed = super().parse_known_args([*self.presets, *self.words], namespace)
        if READ in actions and parsed[0].write_config and os.environ.get("RANK", "0") == "0":
            Path(parsed[0].write_config).write_text(text_of_words(self.words))
        return parsed

    def error(self, message: str) -> NoReturn:
        """Print one line, with the nearest flag for an unknown one, and end the process."""
        if message.startswith("unrecognized arguments"):
            flags = {flag.removeprefix("--"): flag for flag in self._option_string_actions}
            for word in re.findall(r"(?<!\S)--([\w-]+)", message):
                message += did_you_mean(word, (), flags)
        exit_refused(f"{self.prog}: error: {message}", status=2)

    def _print_message(self, message: str, file: Any = None) -> None:
        if _local_rank() == 0:
            super()._print_message(message, file)


def words_of_file(path: Path, actions: Mapping[str, argparse.Action]) -> list[str]:
    """Return the flags of a YAML file as words of a command line, for argparse to check.

    `actions` has the known flags.

    Raises:
        ValueError: the file cannot be read, or a key is invalid. The message names the key.
    """
    import yaml  # not needed by a command line without a file

    try:
        text = path.read_text()
        # Words stay as written because YAML reads 010 as 8. Within braces types are JSON's.
        settings, typed = yaml.load(text, yaml.BaseLoader), yaml.safe_load(text)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"cannot read the file: {error}") from error
    if not isinstance(settings, dict):
        kind = type(settings).__name__
        raise ValueError(f"contains {kind}, not lines such as `loss-aggregation: prompt_mean`")
    words = []
    for (key, value), typed_value in zip(settings.items(), typed.values(), strict=True):
        flag, dashed = f"--{key}", f"--{key.replace('_', '-')}"
        flag = dashed if flag not in actions and dashed in actions else flag
        action = actions.get(flag)
        is_switch = action is not None and action.nargs == 0
        if flag in (READ, WRITE):
            raise ValueError(f"{key} belongs on the command line")
        if value == "":
            raise ValueError(f"{key} has no value. Remove the line to use the default.")
        if is_switch and value not in ("true", "false"):
            raise ValueError(f"{key} must be true or false, not {value!r}")
        if is_switch or (action is None and value == "true"):
            words.append(flag if value == "true" else flag.replace("--", "--no-", 1))
        elif isinstance(value, list):
            words += [flag, *value]
        else:  # one word with an equals sign, because the value may begin with a dash
            value = json.dumps(typed_value) if isinstance(value, dict) else value
            words.append(f"{flag}={value}")
    return words


def text_of_words(words: Sequence[str]) -> str:
    """Return the flags among words as a YAML file. The last occurrence of a flag wins."""
    import yaml

    class Dumper(yaml.SafeDumper):  # type: ignore[misc]
        yaml_implicit_resolvers: Any = {}  # words stay as written

    values: dict[str, list[str]] = {}
    for word in words:
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            values.pop(flag, None)
            last = values[flag] = [value] if equals else []
        elif values:
            last.append(word)
    settings = {
        flag.removeprefix("--"): words if words[1:] else "".join(words) or "true"
        for flag, words in values.items()
        if flag not in (READ, WRITE)
    }
    return str(yaml.dump(settings, Dumper=Dumper, sort_keys=False))


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))
