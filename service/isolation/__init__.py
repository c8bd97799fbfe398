"""How far trials are kept from the machine that they run on. docs/isolation.md says what each level stops."""

from __future__ import annotations

import sys

from steptune.service.isolation.base import Available, Level, SandboxRequest, Unavailable
from steptune.service.isolation.bubblewrap import Bubblewrap
from steptune.service.isolation.limits import Limits
from steptune.service.isolation.none import NoIsolation
from steptune.service.isolation.resources import Resources
from steptune.tuner.errors import ChoiceError, IsolationUnavailable
from steptune.tuner.wording import no_such

LEVELS: tuple[Level, ...] = (Bubblewrap(), Limits(), NoIsolation())
"""The strongest first."""
STRONGEST = "strongest"

__all__ = [
    "LEVELS",
    "STRONGEST",
    "Available",
    "Level",
    "Resources",
    "SandboxRequest",
    "Unavailable",
    "choose",
    "level_named",
]


def level_named(name: str) -> Level:
    """The level of a name.

    Raises:
        ChoiceError: There is none.
    """
    for level in LEVELS:
        if level.name == name:
            return level
    raise ChoiceError(no_such("isolation level", name, (*(level.name for level in LEVELS), STRONGEST)))


def choose(name: str, python: str = sys.executable) -> Level:
    """The level that was named, or with "strongest" the first whose probe succeeds.

    Raises:
        ChoiceError: There is no such level.
        IsolationUnavailable: It was named and cannot be used here.
    """
    if name == STRONGEST:
        return next(level for level in LEVELS if isinstance(level.probe(python), Available))
    level = level_named(name)
    match level.probe(python):
        case Unavailable(reason=reason):
            raise IsolationUnavailable(
                f"isolation {name} cannot be used here: {reason}. `steptune doctor` lists the levels that can; choose "
                "another with --isolation or STEPTUNE_ISOLATION"
            )
        case Available():
            return level
