"""Samples of the texts that people read, for readers who judge them.

python docs/samples.py [--seed N] [--size N]       messages, then first lines of docstrings, each with its place
"""

from __future__ import annotations

import argparse
import ast
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from docstrings import ROOT, documented

PRODUCT = ("tuner", "service", "dashboards", "kernels")
LEAST_WORDS = 4
"""Shorter strings are mostly names and keys."""
WORD = re.compile(r"[A-Za-z][a-z'-]*[,.:;?!]?$")
MOSTLY = 0.6
"""Least share of words in a message: the rest may be values, names and signs."""


def messages(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of every string of several words that is neither a docstring nor code; values in braces."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if id(node) in alone or not isinstance(node, ast.Constant | ast.JoinedStr):
            continue
        if isinstance(node, ast.Constant) and (id(node) in inside or not isinstance(node.value, str)):
            continue
        text = _text(node)
        words = text.split()
        if (
            "import " not in text
            and len(words) >= LEAST_WORDS
            and sum(bool(WORD.match(word)) for word in words) >= MOSTLY * len(words)
        ):
            yield node.lineno, " ".join(words)


def _text(node: ast.Constant | ast.JoinedStr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    return "".join(
        str(part.value) if isinstance(part, ast.Constant) else f"{{{ast.unparse(part.value)}}}"
        for part in node.values
        if isinstance(part, ast.Constant | ast.FormattedValue)
    )


def first_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Line and first paragraph of every docstring."""
    for line, text in documented(path):
        yield line, " ".join(text.strip().split("\n\n")[0].split())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--size", type=int, default=100)
    arguments = parser.parse_args()
    paths = sorted(path for package in PRODUCT for path in (ROOT / package).rglob("*.py"))
    for title, texts_of in (("Messages", messages), ("Docstrings", first_lines)):
        found = [(f"{path.relative_to(ROOT)}:{line}", text) for path in paths for line, text in texts_of(path)]
        drawn = random.Random(arguments.seed).sample(found, min(arguments.size, len(found)))
        sys.stdout.write(f"# {title}: {len(drawn)} of {len(found)}\n\n")
        sys.stdout.writelines(f"{number}. {place}: {text}\n" for number, (place, text) in enumerate(drawn, 1))
        sys.stdout.write("\n")


if __name__ == "__main__":
    main()
