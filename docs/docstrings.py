"""Docstrings stand alone: an imperative or a noun phrase, never the rest of a sentence that the name began.

python docs/docstrings.py       status 1, with their places, where one does not
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("tuner", "service", "dashboards", "kernels", "migrations", "src", "benchmarks", "docs", "examples", "tests")
PRODUCT = ("tuner", "service", "dashboards", "kernels")
BEGINNINGS = ("Of", "What", "By", "Whether", "That", "Who", "Why")
CLAUSES = ("How", "Where", "Those", "Whose", "So", "They", "Called")
"""Beginnings that the docstrings of tests, which state behaviour in sentences, may have."""


def documented(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of every docstring in a file, those below fields and constants included."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for statement in node.body:
                if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                    text = statement.value.value
                    if isinstance(text, str) and text.strip():
                        yield statement.lineno, text


def dependent(text: str, beginnings: tuple[str, ...] = BEGINNINGS) -> bool:
    """Say whether a docstring begins in the middle of a sentence."""
    return text.split(maxsplit=1)[0].rstrip(",.:;") in beginnings


def main() -> None:
    places = [
        f"{path.relative_to(ROOT)}:{line}: a docstring begins with {text.split()[0]!r}: begin with a verb or a noun"
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        for line, text in documented(path)
        if dependent(text, BEGINNINGS + CLAUSES if package in PRODUCT else BEGINNINGS)
    ]
    sys.stdout.write("".join(f"{place}\n" for place in places))
    sys.exit(bool(places))


if __name__ == "__main__":
    main()
