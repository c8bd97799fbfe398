"""Whoever locks the same number waits for the other."""

import re
from pathlib import Path

from steptune import service
from steptune.service import advisory_locks

SOURCES = Path(service.__file__).parent


def test_every_purpose_has_a_number_of_its_own() -> None:
    numbers = [value for name, value in vars(advisory_locks).items() if name.isupper()]
    assert len(numbers) > 1
    assert len(set(numbers)) == len(numbers)


def test_no_number_is_locked_that_is_not_listed() -> None:
    locked = [
        argument
        for path in SOURCES.rglob("*.py")
        for argument in re.findall(r"pg_\w*advisory\w*\(([^)]*)\)", path.read_text())
    ]
    assert locked
    assert all(argument.strip().startswith("advisory_locks.") for argument in locked)
