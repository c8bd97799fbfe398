"""Tests that take long, by the list `tests/long.txt`: `make test` leaves them out, `make long` runs them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

LIST = Path(__file__).parent.parent / "long.txt"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests of the list.

    Raises:
        pytest.UsageError: All tests were collected, and a file lacks one that the list has of it.
    """
    lines = LIST.read_text(encoding="utf-8").splitlines()
    listed = frozenset(line for line in lines if not line.startswith("#"))
    found: set[str] = set()
    for item in items:
        matching = listed.intersection(_names(item.nodeid))
        if matching:
            item.add_marker(pytest.mark.long)
            found |= matching
    files = {item.nodeid.partition("::")[0] for item in items}  # a file that needs what is not installed has no tests
    stale = {name for name in listed - found if name.partition("::")[0] in files}
    if stale and config.args == ["tests"]:
        raise pytest.UsageError(f"{LIST.name} has {len(stale)} tests that are not there, among them {min(stale)}")


def _names(node_id: str) -> Iterator[str]:
    """Yield the name of a case, and those of its test, class and file."""
    yield node_id
    name = node_id.partition("[")[0]
    while name:
        yield name
        name = name.rpartition("::")[0]
