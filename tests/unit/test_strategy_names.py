"""Names of strategies as text in the product: only in a strategy's own folder and in stored formats."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import steptune.tuner
from steptune.tuner.strategies import STRATEGIES

TUNER = Path(str(steptune.tuner.__file__)).parent
NAMES = frozenset(strategy.name for strategy in STRATEGIES)
STORED = (
    "training/local_sgd.py",  # the key of its state in checkpoints
    "workloads/zoo/synthetic.py",  # a workload with a known best candidate, which states its current settings
)
"""Files of stored formats, with what they store."""
WORDS = {
    "compile": ("export/", "scripts/"),  # torch.compile, Module.compile, and torchtitan's section of this name
    "precision": ("export/", "scripts/"),  # an argument of Lightning's Trainer
    "attention_mask": ("workloads/adapters/",),  # a field of the batches of transformers
}
"""Words that other tools have as well, with the folders that speak to those tools; as a key of choices they count."""


def names_in(source: str, place: str) -> Iterator[tuple[int, str]]:
    """Line and name of each string that is a strategy's name, neither in its folder nor the word of another tool."""
    own = place.split("/")[1] if place.startswith("strategies/") else ""
    tree = ast.parse(source)
    keys = {id(key) for node in ast.walk(tree) for key in keys_of_choices(node)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or node.value not in NAMES or node.value == own:
            continue
        if id(node) in keys or not place.startswith(WORDS.get(node.value, ("nowhere/",))):
            yield node.lineno, node.value


def keys_of_choices(node: ast.AST) -> tuple[ast.AST, ...]:
    """The key in `choices[key]` and `choices.get(key)`."""
    match node:
        case (
            ast.Subscript(value=read, slice=key) | ast.Call(func=ast.Attribute(value=read, attr="get"), args=[key, *_])
        ):
            return (key,) if ast.unparse(read).endswith("choices") else ()
    return ()


def test_no_name_is_text_outside_its_folder() -> None:
    places = ((path, path.relative_to(TUNER).as_posix()) for path in sorted(TUNER.rglob("*.py")))
    found = [
        f"{place}:{line}: {name}"
        for path, place in places
        if place not in STORED
        for line, name in names_in(path.read_text(), place)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("place", STORED)
def test_every_file_of_a_stored_format_has_a_name(place: str) -> None:
    assert list(names_in((TUNER / place).read_text(), place))


@pytest.mark.parametrize(
    ("source", "place", "found"),
    [
        ("choices.get('compile', {})", "scripts/diff.py", ["compile"]),
        ("spec.choices['precision']", "export/lightning.py", ["precision"]),
        ("Trainer['precision']", "export/lightning.py", []),
        ("Trainer['precision']", "costs/bounds.py", ["precision"]),
        ("'sharding'", "export/lightning.py", ["sharding"]),
        ("'sharding'", "strategies/sharding/choice.py", []),
        ("'sharding'", "strategies/precision/choice.py", ["sharding"]),
    ],
)
def test_a_word_of_another_tool_counts_where_it_reads_choices(source: str, place: str, found: list[str]) -> None:
    assert [name for _, name in names_in(source, place)] == found


def test_every_strategy_is_a_folder() -> None:
    folder = TUNER / "strategies"
    assert {path.parent.name for path in folder.glob("*/strategy.py")} == NAMES
    assert all((folder / name / "choice.py").exists() for name in NAMES)
