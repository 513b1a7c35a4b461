"""A character tokenizer in which a task's constant opening is one token."""

from __future__ import annotations

import string
from collections.abc import Sequence


class CharacterTokenizer:
    """Letters, digits and punctuation, one token each, and a few whole pieces.

    A piece is a constant text that opens every question: spending one token on it, and not fifty, is most
    of what makes a CPU run short.

    Attributes:
        padding: token that fills a batch of prompts on the left.
        separator: token between the question and the answer.
        end: token that ends an answer.
        vocabulary_size: number of tokens.
    """

    padding, separator, end = 0, 1, 2

    def __init__(self, pieces: Sequence[str] = ()) -> None:
        characters = string.ascii_letters + string.digits + string.punctuation + " "
        self._pieces = sorted(pieces, key=len, reverse=True)
        self._texts = ["", "", "", *self._pieces, *characters]
        self._tokens = {text: token for token, text in enumerate(self._texts) if text}

    @property
    def vocabulary_size(self) -> int:
        return len(self._texts)

    def encode(self, text: str) -> list[int]:
        """Tokens of `text`, longest piece first.

        Raises:
            ValueError: a character has no token.
        """
        tokens = []
        position = 0
        while position < len(text):
            piece = next((p for p in self._pieces if text.startswith(p, position)), text[position])
            if piece not in self._tokens:
                raise ValueError(f"no token for {piece!r} at character {position} of {text!r}")
            tokens.append(self._tokens[piece])
            position += len(piece)
        return tokens

    def encode_prompt(self, question: str) -> list[int]:
        """The question and the separator, after which the answer is expected."""
        return [*self.encode(question), self.separator]

    def encode_answer(self, answer: str) -> list[int]:
        """The answer and the end token."""
        return [*self.encode(answer), self.end]

    def decode_answer(self, tokens: Sequence[int]) -> str | None:
        """The text before the end token; None where the answer was not ended."""
        if self.end not in tokens:
            return None
        return "".join(self._texts[token] for token in tokens[: list(tokens).index(self.end)])
