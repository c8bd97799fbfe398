"""Tests that take long: `make test` leaves them out, `make long` runs them.

    python tests/support/long_tests.py JUNIT.xml      # writes tests/long.txt anew from a run of all of them

A test is long if it takes more than `LONG_S` seconds on two cores. The shortest test of a file stays where all of them
are long, if it ends within `SHORT_FORM_S`: what a file is about is tried in every run.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree

import pytest

LIST = Path(__file__).parent.parent / "long.txt"
LONG_S = 4.0
SHORT_FORM_S = 90.0
GROUP = re.compile(r"@[^\]@]+$|(?<=\])@[^\]@]+\]$")
"""Suffix that xdist puts behind the name of a test that shares its worker with others."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests of the list.

    Raises:
        pytest.UsageError: All tests were collected, and a file lacks one that the list has of it.
    """
    listed = frozenset(LIST.read_text(encoding="utf-8").splitlines())
    missing = set(listed)
    for item in items:
        if item.nodeid in listed:
            item.add_marker(pytest.mark.long)
            missing.discard(item.nodeid)
    files = {item.nodeid.partition("::")[0] for item in items}  # a file that needs what is not installed has no tests
    missing = {name for name in missing if name.partition("::")[0] in files}
    if missing and config.args == ["tests"]:
        raise pytest.UsageError(f"{LIST.name} has {len(missing)} tests that are not there, among them {min(missing)}")


def long_tests(times_s: Iterable[tuple[str, float]]) -> list[str]:
    """Return the node ids of the long tests, sorted.

    Args:
        times_s: Node id of each test, and its seconds.
    """
    by_file: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for name, seconds in times_s:
        by_file[name.partition("::")[0]].append((seconds, name))
    found: list[str] = []
    for tests in by_file.values():
        long = sorted(test for test in tests if test[0] > LONG_S)
        stays = len(long) == len(tests) and long[0][0] <= SHORT_FORM_S
        found += [name for _, name in long[int(stays) :]]
    return sorted(found)


def times_of(report: Path) -> Iterable[tuple[str, float]]:
    """Yield node id and seconds of each test of a JUnit report, set-up included."""
    for case in ElementTree.parse(report).iter("testcase"):  # pytest wrote it
        parts = case.get("classname", "").split(".")
        module = [part for part in parts if not part[:1].isupper()]
        if module != [""]:
            path = "/".join(module) + ".py"
            name = GROUP.sub("", case.get("name", ""))
            yield "::".join([path, *parts[len(module) :], name]), float(case.get("time", 0))


if __name__ == "__main__":
    LIST.write_text("".join(f"{name}\n" for name in long_tests(times_of(Path(sys.argv[1])))), encoding="utf-8")
