"""Flags in a YAML file, and the flags of a command line as such a file.

A key is a flag without its dashes, its value one word, a list of words, or true or false for a flag that takes none. Megatron
makes its own parser, so a library with a parser class of its own has no place: the file becomes words of the command
line, and argparse judges them as it judges the words beside the file.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

READ, WRITE = "--config", "--write-config"


def add_settings_file_args(parser: argparse.ArgumentParser) -> None:
    """Add `--config` and `--write-config`; `config.program.ProgramParser` acts on them."""
    add = parser.add_argument_group("settings in a file").add_argument
    told = "Read flags from a YAML file, such as `lr: 1e-5`. Flags win, and --no-X undoes a flag X."
    add(READ, metavar="FILE", help=told)
    add(WRITE, metavar="FILE", help="Write the flags of this command, its --config's too, there.")


def words_of_file(path: Path, actions: Mapping[str, argparse.Action]) -> list[str]:
    """Return a file's settings as words of a command line.

    `actions` has the flags that are known, with their dashes. A key that is none of them becomes a flag all the same:
    the parser says of it what it says of a word. A ValueError names the file and the key.
    """
    import yaml  # not needed by a command line without a file

    try:
        text = path.read_text()
        # Words as they are written: YAML reads 010 as 8, and 12:30 as 750. Within a value in braces JSON's types count.
        words_of, typed = yaml.load(text, yaml.BaseLoader), yaml.safe_load(text)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{READ} {path} cannot be read: {error}") from error
    if not isinstance(words_of, dict):
        expected = "expected lines such as `loss-aggregation: prompt_mean`"
        raise ValueError(f"{READ} {path} holds {type(words_of).__name__}: {expected}")
    words = []
    for (key, value), typed_value in zip(words_of.items(), typed.values(), strict=True):
        flag = f"--{key}"
        if flag not in actions and (dashed := flag.replace("_", "-")) in actions:
            flag = dashed
        if flag in (READ, WRITE):
            raise ValueError(f"{READ} {path}: {key} belongs on the command line")
        value = json.dumps(typed_value) if isinstance(value, dict) else value
        words += _words(flag, value, actions.get(flag), f"{READ} {path}: {key}")
    return words


def _words(
    flag: str, value: str | list[str], action: argparse.Action | None, place: str
) -> list[str]:
    is_switch = action is not None and action.nargs == 0
    if is_switch and value not in ("true", "false"):
        raise ValueError(f"{place} takes no value: expected true or false, found {value!r}")
    if value == "":
        raise ValueError(f"{place} has no value: leave the line out for the default")
    if value == "true" and action is None:
        return [flag]
    # One word after a sign of equality: it may begin with a dash.
    return [flag, *value] if isinstance(value, list) else [f"{flag}={value}"]


def with_switches(words: Sequence[str], actions: Mapping[str, argparse.Action]) -> list[str]:
    """Carry out `--flag=true` and `--flag=false` of flags that take no value.

    False takes back what stands before it. So does `--no-flag`, where the parser has no such flag.
    """
    kept: list[str] = []
    for word in words:
        flag, equals, value = word.partition("=")
        if word not in actions and word.startswith("--no-") and not equals:
            flag, equals, value = word.replace("--no-", "--", 1), "=", "false"
        action = actions.get(flag)
        if not equals or action is None or action.nargs != 0 or value not in ("true", "false"):
            kept.append(word)
        elif value == "true":
            kept.append(flag)
        elif isinstance(action, argparse.BooleanOptionalAction):
            has_no = flag.startswith("--no-")
            kept += [o for o in action.option_strings if o.startswith("--no-") != has_no][:1]
        else:
            kept = [each for each in kept if each not in action.option_strings]
    return kept


def settings_of_words(words: Sequence[str]) -> dict[str, Any]:
    """Return the flags among words as the settings of a file; of a flag that stands there twice, the last."""
    values: dict[str, list[str]] = {}
    for word in words:
        if word.startswith("--"):
            key, equals, value = word.removeprefix("--").partition("=")
            values.pop(key, None)
            last = values[key] = [value] if equals else []
        elif values:
            last.append(word)
    own = [flag.removeprefix("--") for flag in (READ, WRITE)]
    return {
        key: [_plain(word) for word in words] if words[1:] else _plain(*words)
        for key, words in values.items()
        if key not in own
    }


def _plain(word: str | None = None) -> Any:
    """Return a word as YAML's number where that is written as the word is, and true for a flag without one."""
    if word is None:
        return True
    for number in (int, float):
        try:
            if str(number(word)) == word:
                return number(word)
        except ValueError:
            pass
    return word


def text_of_words(words: Sequence[str]) -> str:
    """Return the flags among words as the text of a YAML file."""
    import yaml

    return str(yaml.safe_dump(settings_of_words(words), sort_keys=False))
