"""Edits of a Python source by its syntax tree: arguments of a call, lines after a statement, statements in a block.

Everything else stays as it is written, comments and line breaks included.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator, Mapping, Sequence

from steptune.tuner.errors import SteptuneError

Place = ast.expr | ast.stmt | ast.keyword
INDENT = "    "


class NotEditableError(SteptuneError):
    """Error for a source without a place for an edit, with the reason."""


class SourceFile:
    """Source file with pending edits.

    Raises:
        NotEditableError: The file is not valid Python.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self._source = text.encode()
        self._starts = [0]
        for line in self._source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._line_end = "\r\n" if b"\r\n" in self._source else "\n"
        self._edits: list[tuple[int, int, bytes]] = []
        try:
            self.tree = ast.parse(text)
        except SyntaxError as error:
            raise NotEditableError(f"it is not valid Python: {error.msg}") from None

    def edited(self) -> str:
        """Return the text with all edits.

        Raises:
            NotEditableError: The edits do not go together.
        """
        found, after = self._source, len(self._source) + 1
        in_order = sorted((begin, end, number, new) for number, (begin, end, new) in enumerate(self._edits))
        for begin, end, _, replacement in reversed(in_order):
            if end > after:
                raise NotEditableError("two changes affect the same statement")
            found, after = found[:begin] + replacement + found[end:], begin
        text = found.decode()
        try:
            ast.parse(text)
        except SyntaxError:
            raise NotEditableError("the call's syntax does not allow another argument") from None
        return text

    # --- finding --------------------------------------------------------------------------------

    def call(self, line: int, names: Sequence[str]) -> ast.Call:
        """Return the only call in a line whose function or class has one of these names."""
        calls = [node for node in ast.walk(self.tree) if isinstance(node, ast.Call)]
        found = [c for c in calls if last_name(c.func) in names and c.lineno <= line <= (c.end_lineno or c.lineno)]
        if len(found) != 1:
            raise NotEditableError(f"line {line} has {len(found) or 'no'} calls of {' or '.join(names)}")
        return found[0]

    def block_of(self, line: int) -> tuple[list[ast.stmt], int]:
        """Return the innermost block with a simple statement in a line, and the statement's position in it."""
        for body in _blocks(self.tree):
            for position, statement in enumerate(body):
                is_simple = isinstance(statement, ast.Assign | ast.AnnAssign | ast.Expr | ast.AugAssign)
                if is_simple and statement.lineno <= line <= (statement.end_lineno or statement.lineno):
                    return body, position
        raise NotEditableError(f"line {line} is not a separate assignment or call")

    def around(self, block: list[ast.stmt]) -> tuple[list[ast.stmt], int] | None:
        """Return the block that contains the `with` statement whose body is the given block, and its position; None if
        there is no such statement.
        """
        for body in _blocks(self.tree):
            for position, statement in enumerate(body):
                if isinstance(statement, ast.With) and statement.body is block:
                    return body, position
        return None

    def source_of(self, node: Place) -> str:
        return self._source[self._begin(node) : self._end(node)].decode()

    # --- editing --------------------------------------------------------------------------------

    def set_arguments(self, call: ast.Call, arguments: Mapping[str, object]) -> None:
        """Set keyword arguments of a call, adding those that are missing."""
        if any(keyword.arg is None for keyword in call.keywords) or any(isinstance(a, ast.Starred) for a in call.args):
            raise NotEditableError("its arguments come from a dictionary or list")
        present = {keyword.arg: keyword.value for keyword in call.keywords}
        added = []
        for name, value in arguments.items():
            if name not in present:
                added.append(f", {name}={value!r}")
            elif self.source_of(present[name]) != repr(value):
                self._replace(present[name], repr(value))
        last: list[Place] = sorted([*call.args, *call.keywords], key=self._end)
        if added and last:
            end = self._end(last[-1])
            self._edits.append((end, end, "".join(added).encode()))
        elif added:
            end = self._end(call) - len(")")
            self._edits.append((end, end, "".join(added).removeprefix(", ").encode()))

    def add_after(self, statement: ast.stmt, lines: Sequence[str]) -> None:
        """Add lines after a statement, in its block."""
        end = self._starts[statement.end_lineno or statement.lineno]
        before = b"" if self._source[:end].endswith(b"\n") else self._line_end.encode()
        margin = self._margin(statement)
        added = "".join(f"{margin}{line}{self._line_end}" for line in lines)
        self._edits.append((end, end, before + added.encode()))

    def put_under(self, statements: Sequence[ast.stmt], opening: str) -> None:
        """Put consecutive statements under a compound statement like `with ...:`.

        Raises:
            NotEditableError: Indentation would change the statements: they contain a string of several lines.
        """
        margin = self._margin(statements[0])
        begin = self._starts[statements[0].lineno - 1]
        end = self._starts[statements[-1].end_lineno or statements[-1].lineno]
        block = textwrap.indent(self._source[begin:end].decode(), "\t" if "\t" in margin else INDENT)
        if not _reads_as(block, statements):
            raise NotEditableError(
                f"the lines from line {statements[0].lineno} on cannot be indented without changing their meaning"
            )
        self._edits.append((begin, end, f"{margin}{opening}{self._line_end}{block}".encode()))

    def _margin(self, statement: ast.stmt) -> str:
        """Return the indentation of a statement that begins a line."""
        begin = self._starts[statement.lineno - 1]
        margin = self._source[begin : begin + statement.col_offset].decode()
        if margin.strip():
            raise NotEditableError(f"line {statement.lineno} holds several statements")
        return margin

    def _replace(self, node: Place, text: str) -> None:
        self._edits.append((self._begin(node), self._end(node), text.encode()))

    def _begin(self, node: Place) -> int:
        return self._starts[node.lineno - 1] + node.col_offset

    def _end(self, node: Place) -> int:
        assert node.end_lineno is not None, "every node of a parsed tree must have its positions"
        assert node.end_col_offset is not None, "every node of a parsed tree must have its positions"
        return self._starts[node.end_lineno - 1] + node.end_col_offset


def _reads_as(block: str, statements: Sequence[ast.stmt]) -> bool:
    """Say whether an indented text parses to exactly these statements."""
    try:
        (found,) = ast.parse(f"if True:\n{block}").body
    except (SyntaxError, ValueError):
        return False
    assert isinstance(found, ast.If), "the text must begin with an if statement"
    return [ast.dump(s) for s in found.body] == [ast.dump(s) for s in statements]


def _blocks(tree: ast.AST) -> Iterator[list[ast.stmt]]:
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            body = getattr(node, name, None)
            if isinstance(body, list):
                yield body


def last_name(function: ast.expr) -> str:
    """Return the last name of a function expression, such as `DataLoader` of `torch.utils.data.DataLoader`; empty if it
    has none.
    """
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def option_of(tree: ast.AST, value: ast.expr) -> tuple[str, str | None] | None:
    """Return the `argparse` option that sets a value like `args.workers`, and the option's `action` argument if given;
    None if no option is found.
    """
    if not isinstance(value, ast.Attribute):
        return None
    assigned = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)]
    if any(node.attr == value.attr for node in assigned):  # it is not what was typed
        return None
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or last_name(node.func) != "add_argument":
            continue
        given = {k.arg: k.value.value for k in node.keywords if isinstance(k.value, ast.Constant)}
        names = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
        options = [name for name in names if name.startswith("--")] or [n for n in names if n.startswith("-")]
        if options and given.get("dest", options[0].lstrip("-").replace("-", "_")) == value.attr:
            action = given.get("action")
            return options[0], action if isinstance(action, str) else None
    return None
