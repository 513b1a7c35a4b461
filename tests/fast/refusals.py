"""Calls that must be refused, and the words that their errors must have."""

from collections.abc import Callable
from typing import Any

import pytest


def refusal(
    call: Callable[..., Any], *arguments: Any, error: type[Exception] = ValueError, **keywords: Any
) -> str:
    with pytest.raises(error) as raised:
        call(*arguments, **keywords)
    return str(raised.value)


def assert_words(words: str, text: str) -> None:
    """The text has each of the words, between which there are bars."""
    for word in words.split(" | "):
        assert word in text, f"{word!r} is not in {text!r}"


def assert_refused(words: str, call: Callable[..., Any], *arguments: Any, **keywords: Any) -> None:
    assert_words(words, refusal(call, *arguments, **keywords))
