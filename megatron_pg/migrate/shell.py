"""Commands of a shell script, by tree-sitter's grammar of bash (MIT): words, variables, arrays, functions and branches.

Nothing is run. A variable that the script does not set counts as unset; a value that only a command could tell stays as
it is written, such as `$(nproc)`. Conditions that no variable decides are false, or one of them true: `read_script`.
"""

import fnmatch
import operator
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

INSTALL = "pip install tree-sitter tree-sitter-bash"
MAX_DEPTH = 12
"""Limit on functions, sourced files and quoted commands within one another."""
MAX_COMMANDS = 20_000
COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-lt": operator.lt,
    "-le": operator.le,
    "-gt": operator.gt,
    "-ge": operator.ge,
}
ARITHMETIC = re.compile(r"(?!.*(\*\*|//))[\d\s()+*/%-]+")
WORD = re.compile(r"(?:\$\{[^{}]*\}|\$\([^()]*\)+|`[^`]*`|\S)+")
UNKNOWN = re.compile(r"[$`]")
"""A value with one of these is not known."""

Node = Any
"""A node of tree-sitter's tree."""


class Command(NamedTuple):
    """One command of a script, with its words as the shell would pass them."""

    line: int
    words: list[str]


class Script(NamedTuple):
    """All commands of a script, in the order in which they would run."""

    commands: list[Command]
    undecided: list[tuple[int, str]]
    """Offset, and line with text, of each condition that no variable decides."""
    missing: list[str]
    """Sourced files that are not there."""


class _Return(Exception):
    """`return` of a function, or `exit` of the script."""


def read_script(path: Path, true: int | None = None) -> Script:
    """Read a script's commands; the undecided condition at the offset `true` holds, all others do not."""
    shell = _Shell(path, true)
    try:
        shell.source(path)
    except _Return:
        pass
    return Script(shell.commands, list(shell.undecided.items()), shell.missing)


def _parser() -> Any:
    try:
        import tree_sitter
        import tree_sitter_bash
    except ImportError as error:
        raise ImportError(f"reading a shell script needs tree-sitter: {INSTALL}") from error
    return tree_sitter.Parser(tree_sitter.Language(tree_sitter_bash.language()))


class _Shell:
    """Walks the tree with the variables as they are then: the last assignment wins. An array is a list, a scalar of one."""

    def __init__(self, path: Path, true: int | None) -> None:
        self.parser = _parser()
        self.path, self.true = path, true
        self.folder = os.getcwd()
        self.values: dict[str, list[str]] = {"0": [str(path)], "BASH_SOURCE": [str(path)]}
        self.arguments: list[str] = []
        self.functions: dict[str, Node] = {}
        self.commands: list[Command] = []
        self.undecided: dict[int, str] = {}
        self.missing: list[str] = []
        self.depth = self.offset = self.line = 0
        self.is_test = False

    def source(self, path: Path) -> None:
        """Walk the commands of a file."""
        kept, self.values["BASH_SOURCE"] = self.values["BASH_SOURCE"], [str(path)]
        self.walk_text(path.read_text())
        self.values["BASH_SOURCE"] = kept

    def walk_text(self, text: str) -> None:
        """Walk the commands of a file, or of a quoted command."""
        if self.depth >= MAX_DEPTH:
            raise ValueError(f"line {self.line}: more than {MAX_DEPTH} commands in one another")
        self.depth += 1
        self.offset += 1 << 24  # conditions of two files have different offsets
        self.walk(self.parser.parse(text.encode()).root_node)
        self.depth -= 1

    def walk(self, node: Node) -> bool | None:
        """Walk a statement; return its status, or None for a status that is not known."""
        method = getattr(self, f"walk_{node.type}", None)
        if method is not None:
            return method(node)
        return self._each(node)

    def _each(self, node: Node) -> bool | None:
        status = None
        for child in node.named_children:
            status = self.walk(child)
        return status

    def _is_true(self, node: Node, status: bool | None) -> bool:
        if status is None:
            key = self.offset + node.start_byte
            text = _text(node).partition("\n")[0]
            self.undecided.setdefault(key, f"line {self._line(node)}, `{text}`")
            return key == self.true
        return status

    def _line(self, node: Node) -> int:
        return node.start_point[0] + 1 if self.depth == 1 else self.line

    # Statements

    def walk_comment(self, node: Node) -> None: ...

    def walk_heredoc_redirect(self, node: Node) -> None: ...

    def walk_file_redirect(self, node: Node) -> None: ...

    def walk_function_definition(self, node: Node) -> None:
        name, body = node.child_by_field_name("name"), node.child_by_field_name("body")
        self.functions[_text(name)] = body

    def walk_variable_assignment(self, node: Node) -> bool:
        name, value = node.child_by_field_name("name"), node.child_by_field_name("value")
        if name.type == "subscript":
            self._set_item(*map(_text, name.named_children), "" if value is None else self.text(value))
            return True
        old = self.values.get(_text(name), [])
        is_array = value is not None and value.type == "array"
        if is_array:
            new = [word for child in value.named_children for word in self.fields(child)]
        else:
            new = ["" if value is None else self.text(value)]
        if any(child.type == "+=" for child in node.children):
            new = old + new if is_array else ["".join([*old[:1], *new])]
        self.values[_text(name)] = new
        return True

    def _set_item(self, name: str, index: str, value: str) -> None:
        if index.isdecimal() and int(index) < MAX_COMMANDS:
            items = self.values.setdefault(name, [])
            items += [""] * (int(index) + 1 - len(items))
            items[int(index)] = value

    def walk_unset_command(self, node: Node) -> None:
        for child in node.named_children:
            self.values.pop(_text(child), None)

    def walk_subshell(self, node: Node) -> None:
        kept, folder = dict(self.values), self.folder
        self._each(node)
        self.values, self.folder = kept, folder

    def walk_if_statement(self, node: Node) -> bool:
        then = [child.type for child in node.children].index("then")
        conditions = list(filter(_is_named, node.children[:then]))
        status = [self.walk(condition) for condition in conditions][-1]
        is_true = self._is_true(conditions[-1], status)
        for child in filter(_is_named, node.children[then:]):
            if child.type == "else_clause" and not is_true:
                self._each(child)
            elif child.type == "elif_clause" and not is_true:
                is_true = self.walk_if_statement(child)
                if is_true:
                    break
            elif child.type not in ("elif_clause", "else_clause") and is_true:
                self.walk(child)
        return is_true

    def walk_while_statement(self, node: Node) -> None:
        condition = node.child_by_field_name("condition")
        if self._is_true(condition, self.walk(condition)):
            self.walk(node.child_by_field_name("body"))

    def walk_for_statement(self, node: Node) -> None:
        name, body = node.child_by_field_name("variable"), node.child_by_field_name("body")
        for child in node.children_by_field_name("value"):
            for word in self.fields(child):
                self.values[_text(name)] = [word]
                self.walk(body)

    def walk_case_statement(self, node: Node) -> None:
        word, *items = node.named_children
        value = self._tested(word)
        for item in items:
            patterns = item.children_by_field_name("value")
            texts = [self.text(pattern) for pattern in patterns]
            holds = any(fnmatch.fnmatchcase(value or "", text) for text in texts)
            if self._is_true(item, None if value is None and "*" not in texts else holds):
                for child in item.named_children:
                    if child not in patterns:
                        self.walk(child)
                return

    def walk_list(self, node: Node) -> bool | None:
        left, right = node.named_children[0], node.named_children[-1]
        status = self.walk(left)
        if status is None and left.type in ("test_command", "negated_command"):
            status = self._is_true(left, None)
        is_and = any(child.type == "&&" for child in node.children)
        # A command whose status is not known counts as one that succeeds.
        if (status is not False) is is_and:
            return self.walk(right)
        return status

    def walk_negated_command(self, node: Node) -> bool | None:
        status = self.walk(node.named_children[0])
        return None if status is None else not status

    def walk_redirected_statement(self, node: Node) -> bool | None:
        return self.walk(node.named_children[0])

    def walk_test_command(self, node: Node) -> bool | None:
        tests = [child for child in node.children if child.type not in ("[", "]", "[[", "]]")]
        return self._test(tests[0]) if len(tests) == 1 else None

    def walk_compound_statement(self, node: Node) -> bool | None:
        if node.children[0].type == "((":
            return _as_bool(self._number(_text(node)[2:-2]))
        return self._each(node)

    def walk_command(self, node: Node) -> bool | None:
        self.line = self._line(node)
        settings = [n for n in node.named_children if n.type == "variable_assignment"]
        arguments = [n for n in node.named_children if n not in settings]
        words = [word for child in arguments for word in self.fields(child)]
        if words and (words[0] in ("source", ".", "eval") or words[0] in self.functions):
            for setting in settings:
                self.walk(setting)
        return self._run(words) if words else None

    def _run(self, words: list[str]) -> bool | None:
        if len(self.commands) >= MAX_COMMANDS:
            raise ValueError(f"more than {MAX_COMMANDS} commands")
        name, *rest = words
        if name in self.functions and self.depth < MAX_DEPTH:
            return self._call(self.functions[name], rest)
        if name in ("exit", "return"):
            raise _Return
        if name in ("true", ":", "false"):
            return name != "false"
        if name in ("source", ".") and rest:
            path = Path(self.folder, rest[0])
            self.source(path) if path.is_file() else self.missing.append(rest[0])
        elif name == "cd" and rest:
            self.folder = os.path.normpath(os.path.join(self.folder, rest[-1]))
        elif name == "shift":
            del self.arguments[:1]
        elif name == "set" and rest[:1] == ["--"]:
            self.arguments = rest[1:]
        elif name == "exec" and rest:
            self._run(rest)
            raise _Return
        elif name == "eval":
            self.walk_text(" ".join(rest))
        elif name in ("bash", "sh") and rest and Path(self.folder, rest[0]).is_file():
            kept, self.arguments = self.arguments, rest[1:]
            self.source(Path(self.folder, rest[0]))
            self.arguments = kept
        elif quoted := _quoted_command(words):
            self.walk_text(quoted)
        else:
            self.commands.append(Command(self.line, words))
        return None

    def _call(self, body: Node, words: list[str]) -> None:
        kept, self.arguments = self.arguments, words
        line, self.depth = self.line, self.depth + 1
        try:
            self.walk(body)
        except _Return:
            pass
        self.arguments, self.depth, self.line = kept, self.depth - 1, line

    # Conditions

    def _test(self, node: Node) -> bool | None:
        words = [_text(child) for child in node.children]
        if node.type == "parenthesized_expression":
            return self._test(node.named_children[0])
        if node.type == "unary_expression":
            operand = node.children[-1]
            if words[0] == "!":
                value = self._test(operand)
                return None if value is None else not value
            text = self._tested(operand)
            known = words[0] in ("-z", "-n") and text is not None
            return (text == "") is (words[0] == "-z") if known else None
        if node.type == "binary_expression":
            left, right = node.children[0], node.children[-1]
            if words[1] in ("&&", "||", "-a", "-o"):
                return _both(words[1] in ("&&", "-a"), self._test(left), self._test(right))
            return _compare(self._tested(left), words[1], self._tested(right))
        text = self._tested(node)
        return None if text is None else text != ""

    def _tested(self, node: Node) -> str | None:
        if node.type.endswith("_expression"):
            return None
        self.is_test = True
        text = self.text(node)
        self.is_test = False
        return None if UNKNOWN.search(text) else text

    # Words

    def text(self, node: Node) -> str:
        """Return the text of a word that is not split, such as an assignment's."""
        pieces = [(parts, True, True) for parts, _, _ in self._pieces(node, True)]
        return " ".join(_joined(pieces))

    def fields(self, node: Node) -> list[str]:
        """Return the words that a word stands for."""
        return [] if node.type == "comment" else _joined(self._pieces(node, False))

    def _pieces(self, node: Node, is_quoted: bool) -> Iterator["Piece"]:
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
            yield from _split(self._output(node), is_quoted)
        elif kind in ("raw_string", "ansi_c_string"):
            yield [_text(node).lstrip("$")[1:-1]], True, True
        else:
            yield [_unescaped(_text(node), is_quoted)], True, True

    def _parts(self, node: Node, is_quoted: bool) -> Iterator["Piece"]:
        source, start, is_string = node.text, node.start_byte, node.type == "string"
        end, last = start + is_string, node.end_byte - is_string
        for child in node.named_children:
            # Blanks between two children, and before a substitution, belong to no node or to the child.
            blank = len(child.text) - len(child.text.lstrip()) if child.named_child_count else 0
            gap = source[end - start : child.start_byte + blank - start].decode()
            if gap:
                yield [_unescaped(gap, is_string)], True, True
            if child.type == "string_content":
                yield [_unescaped(_text(child), True)], True, True
            else:
                yield from self._pieces(child, is_quoted)
            end = child.end_byte
        if gap := source[end - start : last - start].decode():
            yield [_unescaped(gap, is_string)], True, True

    def _expansion(self, node: Node, is_quoted: bool) -> Iterator["Piece"]:
        whole = node.text.decode().strip()
        match = re.fullmatch(
            r"\$\{?([#!]?)(\w+|[@*#?$!-])(\[[@*]\]|\[\d+\])?(?:(:?[-=+?]|,,|\^\^|##?|%%?)(.*))?\}?",
            whole[:-1] if whole.startswith("${") else whole,
            re.DOTALL,
        )
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
            if is_set is (operation[-1] == "+") and operation[-1] != "?":
                after = [child.type for child in node.children].index(operation) + 1
                for child in node.children[after:-1]:
                    yield from _split(self.text(child), is_quoted or child.type == "string")
            elif operation[-1] == "?" and not is_set:
                yield [whole], True, True
            elif operation[-1] != "+":
                yield from self._all(values or [], is_all, is_quoted)
        elif values is None:
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

    def _all(self, values: Sequence[str], is_all: str, is_quoted: bool) -> Iterator["Piece"]:
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

        for _ in range(MAX_DEPTH):
            text = re.sub(r"\$?\{?\b([A-Za-z_]\w*)\}?", value, text)
        if not ARITHMETIC.fullmatch(text):
            return None
        try:
            return int(eval(text.replace("/", "//")))
        except (SyntaxError, ZeroDivisionError):
            return None

    def _output(self, node: Node) -> str:
        """Return what a substitution prints, if it only asks for numbers, folders and names; else its own text."""
        whole = _text(node).strip()
        # In the default of a variable the grammar takes $((1 + 2)) for a command.
        if whole.startswith("$(("):
            number = self._number(whole[3:-2])
            return whole if number is None else str(number)
        shell = _Shell(self.path, self.true)
        shell.values, shell.folder, shell.depth = dict(self.values), self.folder, self.depth
        shell._each(node)
        outputs = [_printed(command.words, shell.folder) for command in shell.commands]
        if len(outputs) != 1 or outputs[0] is None or UNKNOWN.search(outputs[0]):
            return whole
        return outputs[0]


Piece = tuple[list[str], bool, bool]


def _text(node: Node) -> str:
    return str(node.text.decode())


def _is_named(node: Node) -> bool:
    return bool(node.is_named)


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


def _both(is_and: bool, left: bool | None, right: bool | None) -> bool | None:
    if (left is not is_and and left is not None) or (right is not is_and and right is not None):
        return not is_and
    return None if None in (left, right) else is_and


def _compare(left: str | None, comparison: str, right: str | None) -> bool | None:
    if left is None or right is None:
        return None
    if comparison in ("=", "==", "!="):
        return fnmatch.fnmatchcase(left, right) is (comparison != "!=")
    try:
        return COMPARISONS[comparison](int(left), int(right))
    except (KeyError, ValueError):
        return None


def _as_bool(number: int | None) -> bool | None:
    return None if number is None else number != 0


def _quoted_command(words: Sequence[str]) -> str | None:
    """Find the command in `bash -c "command"`, whatever program stands before it."""
    for shell, options, command in zip(words, words[1:], words[2:], strict=False):
        if os.path.basename(shell) in ("bash", "sh") and re.fullmatch(r"-\w*c", options):
            return command
    return None


def _printed(words: Sequence[str], folder: str) -> str | None:
    name, *rest = words
    names = [word for word in rest if not word.startswith("-")]
    if name == "pwd":
        return folder
    if name == "echo":
        return " ".join(rest)
    if len(names) == 1 and name in ("dirname", "basename"):
        return os.path.dirname(names[0]) or "." if name == "dirname" else os.path.basename(names[0])
    if len(names) == 1 and name in ("realpath", "readlink"):
        return os.path.normpath(os.path.join(folder, names[0]))
    return None
