"""Isolation of trials from the machine on which they run. docs/isolation.md says what each level stops."""

from __future__ import annotations

import sys

from steptune.service.isolation.base import Available, Level, SandboxRequest, Unavailable
from steptune.service.isolation.bubblewrap import Bubblewrap
from steptune.service.isolation.limits import Limits
from steptune.service.isolation.none import NoIsolation
from steptune.service.isolation.resources import Resources
from steptune.tuner.errors import ChoiceError, IsolationUnavailableError
from steptune.tuner.wording import no_such

LEVELS: tuple[Level, ...] = (Bubblewrap(), Limits(), NoIsolation())
"""All isolation levels, the strongest first."""
STRONGEST = "strongest"
NONE = NoIsolation.name

__all__ = [
    "LEVELS",
    "NONE",
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
    """Return the level with a name.

    Raises:
        ChoiceError: There is no such level.
    """
    for level in LEVELS:
        if level.name == name:
            return level
    raise ChoiceError(no_such("isolation level", name, (*(level.name for level in LEVELS), STRONGEST)))


def choose(name: str, python: str = sys.executable, *, separating: bool = False) -> Level:
    """Return the named level; for "strongest", return the strongest level whose probe succeeds, but never "none".

    Args:
        separating: Whether trials must reach neither this process and its files nor other studies, as they belong to
            several users. "none" is accepted all the same if it is named.

    Raises:
        ChoiceError: There is no such level.
        IsolationUnavailableError: The named level cannot be used here, or no level can.
    """
    if name == STRONGEST:
        return _strongest(python, separating=separating)
    level = level_named(name)
    reason = _obstacle(level, python, separating=separating and level.name != NONE)
    if reason is not None:
        raise IsolationUnavailableError(
            f"isolation {name} cannot be used here: {reason}. `steptune doctor` lists the usable levels; choose one "
            "of them with --isolation or STEPTUNE_ISOLATION"
        )
    return level


def _strongest(python: str, *, separating: bool) -> Level:
    reasons = []
    for level in LEVELS:
        if level.name == NONE:
            continue
        reason = _obstacle(level, python, separating=separating)
        if reason is None:
            return level
        reasons.append(f"{level.name}: {reason}")
    raise IsolationUnavailableError(
        f"no isolation level can be used here ({'; '.join(reasons)}). Fix one of these problems, or give trials "
        "all rights of this user with --isolation none or STEPTUNE_ISOLATION=none"
    )


def _obstacle(level: Level, python: str, *, separating: bool) -> str | None:
    """Return the reason why a level cannot be used; None where it can."""
    if separating and not level.separates():
        return (
            "trials would run as the user of this process, and could read its passwords and change its database: "
            "start the process as root, or with the capabilities SETUID, SETGID, CHOWN and KILL, or "
            "use bubblewrap"
        )
    match level.probe(python):
        case Unavailable(reason=reason):
            return reason
        case Available():
            return None
