"""Commands of a shell script, by tree-sitter's grammar of bash (MIT): words, variables, arrays, functions and branches.

Nothing is run. A variable that the script does not set counts as unset; a value that only a command could tell stays as
it is written, such as `$(nproc)`. Conditions that no variable decides are false, or one of them true: `read_script`.
"""

import fnmatch
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron_pg.migrate.shell_words import UNKNOWN, Node, Words, text_of

INSTALL = "pip install tree-sitter tree-sitter-bash"
MAX_DEPTH = 12
"""Limit on functions, sourced files and quoted commands within one another."""
MAX_COMMANDS = 20_000


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


class _Exit(Exception):
    """`exit` of a script."""


class _Return(_Exit):
    """`return` of a function."""


def read_script(path: Path, true: int | None = None) -> Script:
    """Read a script's commands; the undecided condition at the offset `true` holds, all others do not."""
    shell = _Shell(path, true)
    try:
        shell.source(path)
    except _Exit:
        pass
    return Script(shell.commands, list(shell.undecided.items()), shell.missing)


def _parser() -> Any:
    try:
        import tree_sitter
        import tree_sitter_bash
    except ImportError as error:
        raise ImportError(f"reading a shell script needs tree-sitter: {INSTALL}") from error
    return tree_sitter.Parser(tree_sitter.Language(tree_sitter_bash.language()))


class _Shell(Words):
    """Walks the tree in the order in which it would run, so that the last assignment wins."""

    def __init__(self, path: Path, true: int | None) -> None:
        super().__init__()
        self.parser = _parser()
        self.path, self.true = path, true
        self.folder = os.getcwd()
        self.values = {"0": [str(path)], "BASH_SOURCE": [str(path)]}
        self.functions: dict[str, Node] = {}
        self.commands: list[Command] = []
        self.undecided: dict[int, str] = {}
        self.missing: list[str] = []
        self.depth = self.offset = self.line = 0

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
        method: Callable[[Node], bool | None] = getattr(self, f"walk_{node.type}", self._each)
        return method(node)

    def _each(self, node: Node) -> bool | None:
        status = None
        for child in node.named_children:
            status = self.walk(child)
        return status

    def _is_true(self, node: Node, status: bool | None) -> bool:
        if status is None:
            key = self.offset + int(node.start_byte)
            text = text_of(node).partition("\n")[0]
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
        self.functions[text_of(name)] = body

    def walk_variable_assignment(self, node: Node) -> bool:
        name, value = node.child_by_field_name("name"), node.child_by_field_name("value")
        if name.type == "subscript":
            array, index = map(text_of, name.named_children)
            self._set_item(array, index, "" if value is None else self.text(value))
            return True
        old = self.values.get(text_of(name), [])
        is_array = value is not None and value.type == "array"
        if is_array:
            new = [word for child in value.named_children for word in self.fields(child)]
        else:
            new = ["" if value is None else self.text(value)]
        if any(child.type == "+=" for child in node.children):
            new = old + new if is_array else ["".join([*old[:1], *new])]
        self.values[text_of(name)] = new
        return True

    def _set_item(self, name: str, index: str, value: str) -> None:
        if index.isdecimal() and int(index) < MAX_COMMANDS:
            items = self.values.setdefault(name, [])
            items += [""] * (int(index) + 1 - len(items))
            items[int(index)] = value

    def walk_unset_command(self, node: Node) -> None:
        for child in node.named_children:
            self.values.pop(text_of(child), None)

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
                self.values[text_of(name)] = [word]
                self.walk(body)

    def walk_case_statement(self, node: Node) -> None:
        word, *items = node.named_children
        value = self.tested(word)
        patterns = [item.children_by_field_name("value") for item in items]
        if value is None:
            # The last item is often an error: of a word that is not known the first one is taken.
            holds = [self._is_true(item, None) for item in items]
            holds[0] = holds[0] or not any(holds)
        else:
            texts = [[self.text(pattern) for pattern in each] for each in patterns]
            holds = [any(fnmatch.fnmatchcase(value, text) for text in each) for each in texts]
        if any(holds):
            chosen = holds.index(True)
            for child in items[chosen].named_children:
                if child not in patterns[chosen]:
                    self.walk(child)

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
        return self.test(tests[0]) if len(tests) == 1 else None

    def walk_compound_statement(self, node: Node) -> bool | None:
        if node.children[0].type == "((":
            return _as_bool(self._number(text_of(node)[2:-2]))
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
            self._call(lambda: self.walk(self.functions[name]), rest)
            return None
        if name in ("exit", "return"):
            raise _Exit if name == "exit" else _Return
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
            raise _Exit
        elif name == "eval":
            self.walk_text(" ".join(rest))
        elif name in ("bash", "sh") and rest and Path(self.folder, rest[0]).is_file():
            self._call(lambda: self.source(Path(self.folder, rest[0])), rest[1:], _Exit)
        elif quoted := _quoted_command(words):
            self.walk_text(quoted)
        else:
            self.commands.append(Command(self.line, words))
        return None

    def _call(self, body: Callable[[], Any], words: list[str], ends: type[_Exit] = _Return) -> None:
        kept, depth = (self.arguments, self.line), self.depth
        self.arguments, self.depth = words, depth + 1
        try:
            body()
        except ends:
            pass
        (self.arguments, self.line), self.depth = kept, depth

    def output(self, node: Node) -> str:
        """Return what a substitution prints, if it only asks for numbers, folders and names; else its own text."""
        whole = text_of(node).strip()
        # In the default of a variable the grammar takes $((1 + 2)) for a command.
        if whole.startswith("$(("):
            number = self._number(whole[3:-2])
            return whole if number is None else str(number)
        shell = _Shell(self.path, self.true)
        shell.values, shell.folder, shell.depth = dict(self.values), self.folder, self.depth
        shell._call(lambda: shell._each(node), self.arguments, _Exit)
        output: str | None = None
        for command in shell.commands:
            output = (
                _printed(command.words, shell.folder)
                if output is None
                else _edited(command.words, output)
            )
            if output is None or UNKNOWN.search(output):
                return whole
        return whole if output is None else output


def _is_named(node: Node) -> bool:
    return bool(node.is_named)


def _as_bool(number: int | None) -> bool | None:
    return None if number is None else number != 0


def _quoted_command(words: Sequence[str]) -> str | None:
    """Find the command in `bash -c "command"`, whatever program stands before it."""
    for shell, options, command in zip(words, words[1:], words[2:], strict=False):
        if os.path.basename(shell) in ("bash", "sh") and re.fullmatch(r"-\w*c", options):
            return command
    return None


def _edited(words: Sequence[str], text: str) -> str | None:
    """Return what `sed 's#old#new#'` makes of a line that is piped to it, with words that are no pattern."""
    script = re.fullmatch(r"s(\W)([\w /-]+)\1([\w /.-]*)\1(g?)", " ".join(words[1:]))
    if words[0] != "sed" or script is None:
        return None
    return text.replace(script[2], script[3], -1 if script[4] else 1)


def _printed(words: Sequence[str], folder: str) -> str | None:
    name, *rest = words
    names = [word for word in rest if not word.startswith("-")]
    if name == "pwd":
        return folder
    if name == "echo":
        return " ".join(rest)
    if len(names) == 1 and name == "dirname":
        return os.path.dirname(names[0]) or "."
    if names and name == "basename":
        return os.path.basename(names[0]).removesuffix(names[-1] if names[1:] else "")
    if len(names) == 1 and name in ("realpath", "readlink"):
        return os.path.normpath(os.path.join(folder, names[0]))
    return None
