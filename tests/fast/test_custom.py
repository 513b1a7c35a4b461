"""Functions by import path: both spellings, and an error with its cause for everything else."""

import os

import pytest

from megatron_pg.config.custom import CUSTOM_FUNCTIONS, load_custom_function, named_keywords
from tests.fast.refusals import assert_refused, assert_words

REDUCER = "custom_pg_loss_reducer_function_path"
REDUCER_PARAMETERS, REDUCER_KEYWORDS = CUSTOM_FUNCTIONS[REDUCER]

LOSSES = """
import functools

def loss(config, tokens, log_probs):
    return -log_probs

def any_names(a, b, c=None, *rest, d=1, **more):
    return a

def two(config, batch):
    return config

def four(config, tokens, log_probs, advantages):
    return config

def keyword_only(config, tokens, log_probs, *, scale):
    return config

class Loss:
    def __call__(self, config, tokens, log_probs):
        return config

instance = Loss()
partial = functools.partial(four, advantages=None)
number = 3
"""


REDUCERS = """
import functools

def alone(total_lengths, response_lengths, loss_masks, per_token): ...
def with_rank(total_lengths, response_lengths, loss_masks, per_token, cp_rank): ...
def with_both(total_lengths, response_lengths, loss_masks, per_token, *, cp_size, cp_rank=None): ...
def with_any(total_lengths, response_lengths, loss_masks, per_token, **keywords): ...
def with_rank_only_by_position(total, response, masks, per_token, cp_rank=0, /): ...
def with_rank_too_early(total_lengths, response_lengths, cp_rank, cp_size): ...

with_size_given = functools.partial(with_both, cp_size=1)
"""
MODULES = {
    "__init__": "",
    "losses": LOSSES,
    "reducers": REDUCERS,
    "lacks_import": "import no_such_dependency\n",
    "wrong_syntax": "def loss(:\n",
    "raises": "raise RuntimeError('no licence')\n",
}


@pytest.fixture(autouse=True)
def package(tmp_path, monkeypatch):
    """An importable package ``custom_pkg`` with good and broken modules."""
    root = tmp_path / "custom_pkg"
    root.mkdir()
    for name, text in MODULES.items():
        (root / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)


def load(path):
    return load_custom_function("custom_policy_loss_path", path)


@pytest.mark.parametrize("path", ["custom_pkg.losses.loss", "custom_pkg.losses:loss"])
def test_both_spellings_give_the_function(path):
    assert load(path)(None, None, 2) == -2


@pytest.mark.parametrize("name", ["any_names", "instance", "partial"])
def test_anything_that_takes_the_arguments_will_do(name):
    assert load(f"custom_pkg.losses.{name}")("config", None, None) == "config"


def test_a_module_without_a_package():
    assert load("os:spawnv") is os.spawnv


SPELLINGS = "pkg.mod.fn"
ARGUMENTS = "(config, tokens, log_probs)"
# (path, words that the message must have, type of the cause)
REFUSED = [
    ("", f"{SPELLINGS} | pkg.mod:fn | ''", None),
    ("loss", f"{SPELLINGS} | 'loss'", None),
    ("custom_pkg.losses.", SPELLINGS, None),
    ("custom_pkg.losses:", SPELLINGS, None),
    (":loss", SPELLINGS, None),
    (".losses.loss", SPELLINGS, None),
    ("custom_pkg/losses.py:loss", SPELLINGS, None),
    ("custom_pkg:losses:loss", SPELLINGS, None),
    ("no_such_package.loss", "no_such_package | ModuleNotFoundError | "
                             "PYTHONPATH", ModuleNotFoundError),
    ("custom_pkg.no_such.loss", "custom_pkg.no_such | ModuleNotFoundError", ImportError),
    ("custom_pkg.lacks_import.loss", "no_such_dependency", ModuleNotFoundError),
    ("custom_pkg.wrong_syntax.loss", "SyntaxError", SyntaxError),
    ("custom_pkg.raises.loss", "RuntimeError: no licence", RuntimeError),
    ("custom_pkg.losses.no_such", "custom_pkg.losses | losses.py | 'no_such'", None),
    ("custom_pkg.losses.number", f"3 | int | {ARGUMENTS}", None),
    ("custom_pkg.losses", "custom_pkg | losses", None),
    ("custom_pkg.losses.two", f"{ARGUMENTS} | (config, batch)", TypeError),
    ("custom_pkg.losses.four", f"{ARGUMENTS} | (config, tokens, log_probs, advantages)", TypeError),
    ("custom_pkg.losses.keyword_only", "scale", TypeError),
    ("builtins.max", "cannot read the function's signature | Python function", ValueError),
]  # fmt: skip


@pytest.mark.parametrize(("path", "words", "cause"), REFUSED)
def test_refusals_name_flag_path_and_cause(path, words, cause):
    with pytest.raises(ValueError) as refusal:
        load(path)
    assert_words(f"--custom-policy-loss-path | {path} | {words}", str(refusal.value))
    assert isinstance(refusal.value.__cause__, cause or type(None))


@pytest.mark.parametrize(("name", "named"), [
    ("alone", ()),
    ("with_rank", ("cp_rank",)),
    ("with_both", ("cp_rank", "cp_size")),
    ("with_size_given", ("cp_rank", "cp_size")),
    ("with_any", ()),
    ("with_rank_only_by_position", ()),
])  # fmt: skip
def test_a_reducer_is_given_the_keywords_that_its_signature_names(name, named):
    """They count as given when the signature is checked."""
    function = load_custom_function(REDUCER, f"custom_pkg.reducers.{name}")
    assert named_keywords(function, REDUCER_KEYWORDS) == named
    function(*REDUCER_PARAMETERS, **dict.fromkeys(named, 0))


def test_a_keyword_in_the_place_of_a_positional_argument_is_refused():
    path = "custom_pkg.reducers.with_rank_too_early"
    load_custom_function("custom_tis_function_path", path)  # four arguments too, and no keywords
    words = "multiple values for argument 'cp_rank'"
    assert_refused(words, load_custom_function, REDUCER, path)
