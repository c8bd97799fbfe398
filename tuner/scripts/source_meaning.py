"""Meaning of names in a source, as far as its syntax tree shows."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from steptune.tuner.scripts.source_edits import last_name

SAME = ("to", "cuda", "cpu", "float", "double", "train", "eval", "prepare")
"""Methods and functions that return the module they are given; Accelerate's wrappers are recognised elsewhere."""

SCOPES = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp | ast.Lambda


def full_name(tree: ast.AST, function: ast.expr) -> str:
    """Return the full name of a function by the file's imports, such as `torch.optim.AdamW` for `optim.AdamW`; empty if
    no import provides it.
    """
    imported = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported.update({a.asname or a.name.partition(".")[0]: a.asname and a.name for a in node.names})
        elif isinstance(node, ast.ImportFrom) and not node.level:
            imported.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
    first, dot, rest = ast.unparse(function).partition(".")
    return f"{imported[first] or first}{dot}{rest}" if first in imported else ""


def knows_torch(tree: ast.AST, line: int) -> bool:
    """Say whether the name `torch` is defined at a line: by an import in the module or in the function that contains
    the line, or by a star import.
    """
    nodes = list(ast.walk(tree))
    stars = any(isinstance(node, ast.ImportFrom) and node.names[0].name == "*" for node in nodes)
    if stars and "torch" in names([tree], ast.Load):
        return True
    scopes = (tree, function_of(tree, line))
    here = [n for n in nodes if isinstance(n, ast.Import) and function_of(tree, n.lineno) in scopes]
    aliases = [alias for node in here for alias in node.names]
    return any(alias.name.partition(".")[0] == "torch" and alias.asname is None for alias in aliases)


def names(nodes: Iterable[ast.AST], context: type[ast.expr_context]) -> set[str]:
    """Return variables and attributes that are read or assigned, as written."""
    inside = [inner for node in nodes for inner in ast.walk(node)]
    return {ast.unparse(n) for n in inside if isinstance(n, ast.Name | ast.Attribute) and isinstance(n.ctx, context)}


def calls(nodes: Iterable[ast.AST]) -> Iterator[ast.Call]:
    """Yield all calls within these nodes."""
    return (inner for node in nodes for inner in ast.walk(node) if isinstance(inner, ast.Call))


def is_in_scope_of_its_own(tree: ast.AST, node: ast.AST) -> bool:
    """Say whether a node is inside a comprehension or a lambda, whose variables are local to it."""
    return any(node in ast.walk(scope) for scope in ast.walk(tree) if isinstance(scope, SCOPES))


def function_of(tree: ast.AST, line: int) -> ast.AST:
    """Return the innermost function that contains a line, or the whole file if none does."""
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    around = [n for n in functions if n.lineno <= line <= (n.end_lineno or n.lineno)]
    return max(around, key=lambda n: n.lineno, default=tree)


def is_called(tree: ast.AST, line: int, name: str) -> bool:
    """Say whether a line calls a variable or an attribute of this name."""
    return any(last_name(c.func) == name for c in calls([tree]) if c.lineno <= line <= (c.end_lineno or c.lineno))


def is_replaced(tree: ast.AST, line: int, name: str) -> bool:
    """Say whether a name that occurs in a line may refer to a different object elsewhere, because it is assigned after
    the line or wrapped in another function.
    """
    own = function_of(tree, line)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign) or name not in _last(names(node.targets, ast.Store)):
            continue
        is_here = function_of(tree, node.lineno) is own
        wraps = isinstance(node.value, ast.Call) and name in _last(names([node.value], ast.Load))
        if not _gives_back(node.value, name) and (node.lineno > line if is_here else wraps):
            return True
    return False


def _gives_back(value: ast.expr, name: str) -> bool:
    """Say whether a value is the object that a name refers to, perhaps moved to a device or set to a mode."""
    if isinstance(value, ast.Call) and last_name(value.func) in SAME:
        return last_name(value.func) == "prepare" or _gives_back(getattr(value.func, "value", value.func), name)
    return last_name(value) == name


def _last(found: Iterable[str]) -> set[str]:
    return {name.rpartition(".")[2] for name in found}
