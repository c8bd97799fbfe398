"""Descriptions of a class's fields, from its source: `Attributes:` of its docstring, and the strings below fields."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import sys
from pathlib import Path


def field_descriptions(documented: type) -> dict[str, str]:
    """Return descriptions by field, including those of base classes."""
    found: dict[str, str] = {}
    for base in reversed(documented.__mro__):
        if base.__module__.partition(".")[0] == "steptune":
            found.update(_texts_below(base.__module__).get(base.__name__, {}))
            found.update(attributes_section(base.__doc__ or ""))
    return found


def attributes_section(docstring: str) -> dict[str, str]:
    """Return the entries of a docstring's `Attributes:`, by name."""
    _, _, section = inspect.cleandoc(docstring).partition("Attributes:\n")
    entries: dict[str, str] = {}
    name = ""
    for line in section.splitlines():
        entry = re.match(r" {4}(\w+): (.*)", line)
        if entry:
            name = entry[1]
            entries[name] = entry[2]
        elif name and line.startswith(" " * 8):
            entries[name] += f" {line.strip()}"
        else:
            name = ""
    return entries


def summary_of(documented: type) -> str:
    """Return a docstring without its `Attributes:`, as one paragraph."""
    own = inspect.cleandoc(documented.__doc__ or "").partition("Attributes:\n")[0]
    return " ".join(own.split())


@functools.cache
def _texts_below(module: str) -> dict[str, dict[str, str]]:
    """Return the docstrings of fields (strings that follow a field's definition), by class and field."""
    path = sys.modules[module].__file__
    assert path is not None
    classes: dict[str, dict[str, str]] = {}
    for node in ast.parse(Path(path).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            classes[node.name] = {}
            for before, after in zip(node.body, node.body[1:], strict=False):
                if isinstance(before, ast.AnnAssign) and isinstance(before.target, ast.Name):
                    text = _string(after)
                    if text:
                        classes[node.name][before.target.id] = " ".join(text.split())
    return classes


def _string(node: ast.stmt) -> str:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return node.value.value
    return ""
