"""Commands of a shell script, by tree-sitter's grammar of bash (MIT): words, variables, arrays, functions and branches.

Nothing is run. A variable that neither the script nor its caller sets counts as unset; a value that only a command could
tell stays as it is written, such as `$(nproc)`. A test that only a command or an unset variable decides is open: it counts
as false, or as it is where the variable is unset, and a command succeeds. `read_script` turns the open ones that it is told.
"""

import fnmatch
import os
import re
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron_pg.migrate.shell_words import UNKNOWN, Node, Words, text_of

INSTALL = "pip install tree-sitter tree-sitter-bash"
MAX_DEPTH = 12
"""Limit on functions, sourced files and quoted commands within one another."""
MAX_COMMANDS = 20_000
MAX_PASSES = 64
"""Limit on the passes of a `while` loop."""
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
Condition = tuple[str, int, int]
"""A test by its file's text and its place in it."""


class Command(NamedTuple):
    """One command of a script, with its words as the shell would pass them."""

    line: int
    words: list[str]


class Script(NamedTuple):
    """All commands of a script, in the order in which they would run."""

    commands: list[Command]
    undecided: dict[Condition, str]
    """Open tests, each with its line and the text that holds where it is turned."""
    missing: list[str]
    """Sourced files that are not there."""
    values: dict[str, list[str]]
    """Variables at the end."""
    end: int
    """Line of the `exit` that ends the script, or 0."""


class _Exit(Exception):
    """`exit` of a script."""


class _Return(_Exit):
    """`return` of a function."""


class _Break(Exception):
    """`break` of a loop."""


class _Continue(_Break):
    """`continue` of a loop."""


ENDS = {"return": _Return, "break": _Break, "continue": _Continue}


def read_script(
    path: Path, words: Sequence[str] = (), turned: Collection[Condition] = ()
) -> Script:
    """Read a script's commands, called with `words`: variables as `NAME=VALUE`, then its arguments."""
    shell, words = _Shell(path, turned), list(words)
    while words and (match := ASSIGNMENT.fullmatch(words[0])):
        shell.values[match[1]] = [match[2]]
        del words[0]
    shell.arguments = words
    try:
        shell.source(path)
    except (_Exit, _Break):
        pass
    return Script(shell.commands, shell.undecided, shell.missing, shell.values, shell.end)


class _Shell(Words):
    """Walks the tree in the order in which it would run, so that the last assignment wins."""

    def __init__(self, path: Path, turned: Collection[Condition]) -> None:
        super().__init__()
        try:
            import tree_sitter
            import tree_sitter_bash
        except ImportError as error:
            raise ImportError(f"reading a shell script needs tree-sitter: {INSTALL}") from error
        self.parser = tree_sitter.Parser(tree_sitter.Language(tree_sitter_bash.language()))
        self.path, self.turned = path, turned
        self.folder = os.getcwd()
        self.values = {"0": [str(path)], "BASH_SOURCE": [str(path)], "PWD": [self.folder]}
        self.functions: dict[str, Node] = {}
        self.commands: list[Command] = []
        self.undecided: dict[Condition, str] = {}
        self.missing: list[str] = []
        self.locals: list[dict[str, list[str] | None]] = []
        """Values that the local variables of the functions in progress hide."""
        self.origin = ""
        self.depth = self.line = self.end = 0

    def source(self, path: Path) -> None:
        """Walk the commands of a file."""
        kept, self.values["BASH_SOURCE"] = self.values["BASH_SOURCE"], [str(path)]
        self.walk_text(path.read_text())
        self.values["BASH_SOURCE"] = kept

    def walk_text(self, text: str) -> None:
        """Walk the commands of a file, or of a quoted command."""
        if self.depth >= MAX_DEPTH:
            raise ValueError(f"line {self.line}: more than {MAX_DEPTH} commands in one another")
        kept, self.origin = self.origin, text
        self.depth += 1
        self.walk(self.parser.parse(text.encode()).root_node)
        self.depth, self.origin = self.depth - 1, kept

    def walk(self, node: Node) -> bool | None:
        """Walk a statement; return its status, or None for a status that is not known."""
        if node.type in ("comment", "heredoc_redirect", "file_redirect"):
            return None
        method: Callable[[Node], bool | None] = getattr(self, f"walk_{node.type}", self._each)
        return method(node)

    def _each(self, node: Node) -> bool | None:
        status = None
        for child in node.named_children:
            status = self.walk(child)
        return status

    def decide(self, node: Node, usual: bool = False, text: str = "") -> bool:
        """Return what an open test counts as: its usual status, or the other where it is turned."""
        key = (self.origin, int(node.start_byte), int(node.end_byte))
        text = "! " * usual + (text or text_of(node).strip().partition("\n")[0])
        self.undecided.setdefault(key, f"line {self._line(node)}, `{text}`")
        return usual is not (key in self.turned)

    def _is_true(self, node: Node) -> bool:
        status = self.walk(node)
        return self.decide(node) if status is None else status

    def _line(self, node: Node) -> int:
        return node.start_point[0] + 1 if self.depth == 1 else self.line

    # Statements

    def walk_function_definition(self, node: Node) -> None:
        name, body = node.child_by_field_name("name"), node.child_by_field_name("body")
        self.functions[text_of(name)] = body

    def walk_variable_assignment(self, node: Node) -> bool:
        name, value = node.child_by_field_name("name"), node.child_by_field_name("value")
        if name.type == "subscript":
            array, index = map(text_of, name.named_children)
            if index.isdecimal() and int(index) < MAX_COMMANDS:
                items = self.values.setdefault(array, [])
                items += [""] * (int(index) + 1 - len(items))
                items[int(index)] = "" if value is None else self.text(value)
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

    def walk_declaration_command(self, node: Node) -> bool:
        if self.locals and node.children[0].type in ("local", "declare", "typeset"):
            for child in node.named_children:
                name = text_of(child.child_by_field_name("name") or child)
                self.locals[-1].setdefault(name, self.values.get(name))
        self._each(node)
        return True

    def walk_unset_command(self, node: Node) -> None:
        for child in node.named_children:
            self.values.pop(text_of(child), None)

    def walk_subshell(self, node: Node) -> None:
        kept, folder = dict(self.values), self.folder
        self._each(node)
        self.values, self.folder = kept, folder

    def walk_if_statement(self, node: Node) -> bool:
        then = [child.type for child in node.children].index("then")
        *before, condition = (child for child in node.children[:then] if child.is_named)
        for child in before:
            self.walk(child)
        is_true = self._is_true(condition)
        for child in (child for child in node.children[then:] if child.is_named):
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
        condition, body = node.child_by_field_name("condition"), node.child_by_field_name("body")
        is_until = node.children[0].type == "until"
        for _ in range(MAX_PASSES):
            before = dict(self.values), list(self.arguments)
            if self._is_true(condition) is is_until or not self._pass(body):
                break
            if before == (self.values, self.arguments):
                break

    def walk_for_statement(self, node: Node) -> None:
        name, body = node.child_by_field_name("variable"), node.child_by_field_name("body")
        words = [w for child in node.children_by_field_name("value") for w in self.fields(child)]
        for word in words:
            self.values[text_of(name)] = [word]
            if not self._pass(body):
                break

    def _pass(self, body: Node) -> bool:
        """Walk the body of a loop once; return False where it ends the loop."""
        try:
            self.walk(body)
        except _Break as end:
            return isinstance(end, _Continue)
        return True

    def walk_case_statement(self, node: Node) -> None:
        word, *items = node.named_children
        self.is_open = False
        value, is_open = self.tested(word), self.is_open
        patterns = [item.children_by_field_name("value") for item in items]
        texts = [[self.text(pattern) for pattern in each] for each in patterns]
        # The last item is often an error: of a word that is not known the first one is taken.
        holds = [
            value is None or any(fnmatch.fnmatchcase(value, text) for text in each)
            for each in texts
        ]
        first = holds.index(True) if True in holds else None
        others = [i for i in range(len(items)) if i != first] if value is None or is_open else []
        chosen = next((i for i in others if self.decide(items[i])), first)
        if chosen is None or (value is None and chosen == 0 and not self.decide(items[0], True)):
            return
        for child in items[chosen].named_children:
            if child not in patterns[chosen]:
                self.walk(child)

    def walk_list(self, node: Node) -> bool | None:
        left, right = node.named_children[0], node.named_children[-1]
        status = self.walk(left)
        if status is None:
            tests = left.type in ("test_command", "negated_command")
            status = self.decide(left, not tests and not text_of(left).startswith("test "))
        is_and = any(child.type == "&&" for child in node.children)
        return self.walk(right) if status is is_and else status

    def walk_negated_command(self, node: Node) -> bool | None:
        status = self.walk(node.named_children[0])
        return None if status is None else not status

    def walk_redirected_statement(self, node: Node) -> bool | None:
        return self.walk(node.named_children[0])

    def walk_test_command(self, node: Node) -> bool | None:
        tests = [child for child in node.children if child.type not in ("[", "]", "[[", "]]")]
        self.is_open = False
        status = self.test(tests[0]) if len(tests) == 1 else None
        return self.decide(node, status) if self.is_open and status is not None else status

    def walk_compound_statement(self, node: Node) -> bool | None:
        if node.children[0].type == "((":
            number = self._number(text_of(node)[2:-2])
            return None if number is None else number != 0
        return self._each(node)

    def walk_command(self, node: Node) -> bool | None:
        self.line = self._line(node)
        settings = [n for n in node.named_children if n.type == "variable_assignment"]
        arguments = [n for n in node.named_children if n not in settings]
        self.is_test = text_of(node).startswith("test ")
        words = [word for child in arguments for word in self.fields(child)]
        self.is_test = False
        if not words:
            return None
        names = (text_of(setting.child_by_field_name("name")) for setting in settings)
        kept = {name: self.values.get(name) for name in names}
        for setting in settings:
            self.walk(setting)
        status = self._run(words)
        self._restore(kept)
        return status

    def _restore(self, kept: Mapping[str, list[str] | None]) -> None:
        for name, value in kept.items():
            self.values.pop(name, None)
            if value is not None:
                self.values[name] = value

    def _run(self, words: list[str]) -> bool | None:
        if len(self.commands) >= MAX_COMMANDS:
            raise ValueError(f"more than {MAX_COMMANDS} commands")
        name, *rest = words
        if name in self.functions and self.depth < MAX_DEPTH:
            self._call(lambda: self.walk(self.functions[name]), rest)
            return None
        if name == "exit":
            self.end = self.line
            raise _Exit
        if name in ENDS:
            raise ENDS[name]
        if name in ("true", ":", "false"):
            return name != "false"
        if name == "test":
            text = f"[ {shlex.join(rest)} ]"
            return self.walk_test_command(self.parser.parse(text.encode()).root_node.children[0])
        if name in ("source", ".") and rest:
            path = Path(self.folder, rest[0])
            self.source(path) if path.is_file() else self.missing.append(rest[0])
        elif name == "cd" and rest:
            self.folder = os.path.normpath(os.path.join(self.folder, rest[-1]))
            self.values["PWD"] = [self.folder]
        elif name == "shift":
            del self.arguments[: int(rest[0]) if rest and rest[0].isdecimal() else 1]
        elif name == "set" and rest[:1] == ["--"]:
            self.arguments = rest[1:]
        elif name == "exec" and rest:
            self._run(rest)
            raise _Exit
        elif name == "eval":
            self.walk_text(" ".join(rest))
        elif name in ("bash", "sh") and rest and Path(self.folder, rest[0]).is_file():
            kept = dict(self.values)
            self._call(lambda: self.source(Path(self.folder, rest[0])), rest[1:], _Exit)
            self.values = kept
        elif quoted := _quoted_command(words):
            self.walk_text(quoted)
        else:
            self.commands.append(Command(self.line, words))
        return None

    def _call(self, body: Callable[[], Any], words: list[str], ends: type[_Exit] = _Return) -> None:
        kept, depth = (self.arguments, self.line), self.depth
        self.arguments, self.depth = words, depth + 1
        self.locals.append({})
        try:
            body()
        except ends:
            self.end = 0
        self._restore(self.locals.pop())
        (self.arguments, self.line), self.depth = kept, depth

    def output(self, node: Node) -> str:
        """Return what a substitution prints, if it only asks for numbers, folders and names; else its own text."""
        whole = text_of(node).strip()
        # In the default of a variable the grammar takes $((1 + 2)) for a command.
        if whole.startswith("$(("):
            number = self._number(whole[3:-2])
            return whole if number is None else str(number)
        shell = _Shell(self.path, self.turned)
        shell.values, shell.folder, shell.depth = dict(self.values), self.folder, self.depth
        shell._call(lambda: shell._each(node), self.arguments, _Exit)
        output: str | None = None
        for command in shell.commands:
            output = _printed(command.words, shell.folder, output)
            if output is None or UNKNOWN.search(output):
                return whole
        return whole if output is None else output


def _quoted_command(words: Sequence[str]) -> str | None:
    """Find the command in `bash -c "command"`, whatever program stands before it."""
    for shell, options, command in zip(words, words[1:], words[2:], strict=False):
        if os.path.basename(shell) in ("bash", "sh") and re.fullmatch(r"-\w*c", options):
            return command
    return None


def _printed(words: Sequence[str], folder: str, piped: str | None) -> str | None:
    """Return what a command prints, with the text that is piped to it: of `sed`, for words that are no pattern."""
    name, *rest = words
    names = [word for word in rest if not word.startswith("-")]
    if piped is not None:
        script = re.fullmatch(r"sed s(\W)([\w /-]+)\1([\w /.-]*)\1(g?)", " ".join(words))
        return script and piped.replace(script[2], script[3], -1 if script[4] else 1)
    if name == "pwd":
        return folder
    if name == "echo":
        return " ".join(rest)
    if name == "seq" and all(word.lstrip("-").isdecimal() for word in rest) and 0 < len(rest) < 4:
        first, step = int(rest[0]) if rest[1:] else 1, int(rest[1]) if rest[2:] else 1
        return " ".join(map(str, range(first, int(rest[-1]) + (step > 0 or -1), step or 1)))
    if len(names) == 1 and name == "dirname":
        return os.path.dirname(names[0]) or "."
    if names and name == "basename":
        return os.path.basename(names[0]).removesuffix(names[-1] if names[1:] else "")
    if len(names) == 1 and name in ("realpath", "readlink"):
        return os.path.normpath(os.path.join(folder, names[0]))
    return None
