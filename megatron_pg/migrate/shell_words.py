"""Words and conditions of a shell: quotes, expansions of parameters, arithmetic, and splitting at blanks, as bash has them."""

import fnmatch
import operator
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

ARITHMETIC = re.compile(r"(?!.*(\*\*|//))[\d\s()+*/%<>=!&|-]+")
PARAMETER = re.compile(
    r"\$\{?([#!]?)(\w+|[@*#?$!-])(\[[@*]\]|\[\d+\])?(?:(:?[-=+?]|,,|\^\^|##?|%%?)(.*))?\}?",
    re.DOTALL,
)
"""A mark, the name, an index, an operation such as `:-`, and what it is done with."""
WORD = re.compile(r"(?:\$\{[^{}]*\}|\$\([^()]*\)+|`[^`]*`|\S)+")
UNKNOWN = re.compile(r"[$`]")
"""A value with one of these is not known."""
COMPARISONS = {f"-{name}": getattr(operator, name) for name in "eq ne lt le gt ge".split()}
MAX_VARIABLES = 12
"""Limit on how often variables may stand for variables in arithmetic."""

Node = Any
"""A node of tree-sitter's tree."""
Piece = tuple[list[str], bool, bool]
"""Words that a part of a word stands for, and whether the first and the last of them go on in the neighbours."""


class Words:
    """Expands words with the variables as they are then. An array is a list, a scalar a list of one."""

    def __init__(self) -> None:
        self.values: dict[str, list[str]] = {}
        self.arguments: list[str] = []
        self.is_test = False
        """True while a test is read."""
        self.is_open = False
        """True once the test has asked for an unset variable or for what a command prints."""

    def decide(self, node: Node, usual: bool = False, text: str = "") -> bool:
        """Return what an open test counts as."""
        return usual

    def output(self, node: Node) -> str:
        """Return what a command substitution prints, or its own text where that is not known."""
        return text_of(node).strip()

    def text(self, node: Node) -> str:
        """Return the text of a word that is not split, such as an assignment's."""
        pieces = [(parts, True, True) for parts, _, _ in self._pieces(node, True)]
        return " ".join(_joined(pieces))

    def fields(self, node: Node) -> list[str]:
        """Return the words that a word stands for."""
        return [] if node.type == "comment" else _joined(self._pieces(node, False))

    def _pieces(self, node: Node, is_quoted: bool) -> Iterator[Piece]:
        """Yield the parts of a word: each with whether its first and last go on in the neighbour's."""
        kind = node.type
        if kind == "string":
            pieces = list(self._parts(node, True))
            # The string of an empty array, "${ARRAY[@]}", is no word; another is one.
            if not pieces or any(parts for parts, _, _ in pieces):
                yield from [([""], True, True), *pieces]
        elif kind in ("concatenation", "command_name"):
            yield from self._parts(node, is_quoted)
        elif kind in ("simple_expansion", "expansion"):
            yield from self._expansion(node, is_quoted)
        elif kind in ("arithmetic_expansion", "command_substitution"):
            yield from _split(self.output(node), is_quoted)
        elif kind in ("raw_string", "ansi_c_string"):
            yield [text_of(node).lstrip("$")[1:-1]], True, True
        else:
            yield [_unescaped(text_of(node), is_quoted)], True, True

    def _parts(self, node: Node, is_quoted: bool) -> Iterator[Piece]:
        source, start, is_string = node.text, node.start_byte, node.type == "string"
        end, last = start + is_string, node.end_byte - is_string
        for child in node.named_children:
            # Blanks between two children, and before a substitution, belong to no node or to the child.
            blank = len(child.text) - len(child.text.lstrip()) if child.named_child_count else 0
            gap = source[end - start : child.start_byte + blank - start].decode()
            if gap:
                yield [_unescaped(gap, is_string)], True, True
            if child.type == "string_content":
                yield [_unescaped(text_of(child), True)], True, True
            else:
                yield from self._pieces(child, is_quoted)
            end = child.end_byte
        if gap := source[end - start : last - start].decode():
            yield [_unescaped(gap, is_string)], True, True

    def _expansion(self, node: Node, is_quoted: bool) -> Iterator[Piece]:
        whole = node.text.decode().strip()
        match = PARAMETER.fullmatch(whole[:-1] if whole.startswith("${") else whole)
        if match is None:
            yield [whole], True, True
            return
        mark, name, index, operation, operand = match.groups()
        values, is_all = self._values(name, index)
        if mark == "#":
            yield [str(len(values or []) if is_all else len("".join(values or [])))], True, True
        elif mark:
            yield [whole], True, True
        elif operation and operation.strip(":") in ("-", "=", "+", "?"):
            is_set = values is not None and (operation[0] != ":" or any(values))
            test = f'[ -n "${name}" ]'
            if values and operation[0] == ":" and values[0][:2] == "$(":
                is_set = self.decide(node, True, test)
            elif values is None and operation[-1] == "+":
                is_set = self.decide(node, False, test)
            if is_set is (operation[-1] == "+") and operation[-1] != "?":
                after = [child.type for child in node.children].index(operation) + 1
                for child in node.children[after:-1]:
                    yield from _split(self.text(child), is_quoted or child.type == "string")
            elif operation[-1] == "?" and not is_set:
                yield [whole], True, True
            elif operation[-1] != "+":
                yield from self._all(values or [], is_all, is_quoted)
        elif values is None:
            self.is_open = True
            yield [[whole], [""]][self.is_test], True, True
        else:
            changed = [_changed(value, operation, operand) for value in values]
            yield from self._all(changed, is_all, is_quoted)

    def _values(self, name: str, index: str | None) -> tuple[list[str] | None, str]:
        """Return the values of a parameter, None where it is unset, and "@" or "*" where it stands for all of them."""
        if name in "@*":
            return self.arguments, name
        if name == "#":
            return [str(len(self.arguments))], ""
        if name.isdecimal() and name != "0":
            return self.arguments[int(name) - 1 :][:1] or None, ""
        values = self.values.get(name)
        if index in ("[@]", "[*]"):
            return values or [], index[1]
        position = int(index[1:-1]) if index else 0
        return (values[position : position + 1] or None) if values else values, ""

    def _all(self, values: Sequence[str], is_all: str, is_quoted: bool) -> Iterator[Piece]:
        if is_quoted and is_all:
            yield [" ".join(values)] if is_all == "*" else list(values), True, True
        for value in () if is_quoted and is_all else values:
            yield from _split(value, is_quoted)
            if is_all:
                yield [], False, False

    def _number(self, text: str) -> int | None:
        """Compute an arithmetic expression of known numbers."""

        def value(match: re.Match[str]) -> str:
            return "".join(self.values.get(match[1], [match[1]])[:1])

        for _ in range(MAX_VARIABLES):
            text = re.sub(r"\$?\{?\b([A-Za-z_]\w*)\}?", value, text)
        if not ARITHMETIC.fullmatch(text):
            return None
        try:
            python = text.replace("/", "//").replace("&&", " and ").replace("||", " or ")
            return int(eval(python))
        except (SyntaxError, ZeroDivisionError):
            return None

    def test(self, node: Node) -> bool | None:
        """Return whether a condition of `[ ]` or `[[ ]]` holds, None where that is not known."""
        words = [text_of(child) for child in node.children]
        if node.type == "parenthesized_expression":
            return self.test(node.named_children[0])
        if node.type == "unary_expression":
            operand = node.children[-1]
            if words[0] == "!":
                value = self.test(operand)
                return None if value is None else not value
            text = self.tested(operand)
            if text is None:  # a command is taken to print something
                self.is_open, text = True, "printed"
            known = words[0] in ("-z", "-n") and text is not None
            return (text == "") is (words[0] == "-z") if known else None
        if node.type == "binary_expression":
            left, right = node.children[0], node.children[-1]
            if words[1] in ("&&", "||", "-a", "-o"):
                is_or, sides = words[1] in ("||", "-o"), (self.test(left), self.test(right))
                return is_or if is_or in sides else None if None in sides else not is_or
            return _compare(self.tested(left), words[1], self.tested(right))
        text = self.tested(node)
        return None if text is None else text != ""

    def tested(self, node: Node) -> str | None:
        """Return the text of a word, in which an unset variable is empty; None where it is not known."""
        if node.type.endswith("_expression"):
            return None
        self.is_test = True
        text = self.text(node)
        self.is_test = False
        return None if UNKNOWN.search(text) else text


def text_of(node: Node) -> str:
    return str(node.text.decode())


def _unescaped(text: str, is_quoted: bool) -> str:
    """Take the backslashes of a word away, or those of a quoted string."""
    text = text.replace("\\\n", "")
    return re.sub(r'\\(["\\$`])' if is_quoted else r"\\(.)", r"\1", text, flags=re.DOTALL)


def _split(text: str, is_quoted: bool) -> Iterator[Piece]:
    if is_quoted:
        yield [text], True, True
    else:
        yield WORD.findall(text), not text[:1].isspace(), not text[-1:].isspace()


def _joined(pieces: Iterable[Piece]) -> list[str]:
    words: list[str] = []
    is_open = False
    for parts, starts, ends in pieces:
        if parts and is_open and starts:
            words[-1] += parts[0]
            words += parts[1:]
        else:
            words += parts
        is_open = ends and (bool(parts) or is_open)
    return words


def _changed(value: str, operation: str | None, pattern: str | None) -> str:
    """Apply `${name,,}`, `${name^^}`, or the removal of a pattern from the start (#) or the end (%)."""
    if operation in (",,", "^^"):
        return value.lower() if operation == ",," else value.upper()
    if not operation or pattern is None:
        return value
    sizes = range(len(value) + 1)
    cuts = [(value[:n], value[n:]) for n in (sizes if operation != "##" else reversed(sizes))]
    if operation[0] == "%":
        cuts = [(tail, head) for head, tail in cuts]
        cuts = cuts if operation == "%%" else cuts[::-1]
    return next((rest for cut, rest in cuts if fnmatch.fnmatchcase(cut, pattern)), value)


def _compare(left: str | None, comparison: str, right: str | None) -> bool | None:
    if left is None or right is None:
        return None
    if comparison in ("=", "==", "!="):
        return fnmatch.fnmatchcase(left, right) is (comparison != "!=")
    try:
        return bool(COMPARISONS[comparison](int(left), int(right)))
    except (KeyError, ValueError):
        return None
