"""The command `megatron-pg` as a person types it: its help needs no torch, and a slip names the
nearest command.
"""

import subprocess
import sys

import pytest

import megatron_pg
from megatron_pg.cli import COMMANDS, main
from tests.fast.refusals import assert_words


@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_help_and_version_import_no_torch(flag):
    code = f"""
import sys
from megatron_pg.cli import main
try:
    main([{flag!r}])
except SystemExit as end:
    assert end.code == 0
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and "megatron-pg" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("word", "words"),
    [
        ("explian", "'explian' is not a command | Did you mean explain?"),
        ("chekc", "Did you mean check?"),
        ("train", "'train' is not a command (explain, check, migrate, integrations)"),
    ],
)
def test_an_unknown_command_names_the_nearest(word, words, capsys):
    with pytest.raises(SystemExit) as end:
        main([word])
    assert end.value.code == 2
    assert_words(words, capsys.readouterr().err)


def test_every_command_has_a_program():
    assert all(callable(load().main) for load in COMMANDS.values())


def test_the_package_exports_its_names_and_no_other():
    assert all(hasattr(megatron_pg, name) for name in megatron_pg.__all__)
    with pytest.raises(AttributeError, match="'megatron_pg' has no attribute 'Smaple'"):
        megatron_pg.Smaple  # noqa: B018
