"""Numbers and names in sentences for people."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

SIMILARITY = 0.7
"""How alike two names are at least, in difflib's ratio, for one to be a mistyped other."""


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """`1 trial`, `20 trials`."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def no_such(kind: str, name: str, known: Iterable[str]) -> str:
    """`there is no strategy 'precison': did you mean 'precision'?`; all known names where none is close."""
    return f"there is no {kind} {name!r}: {which_of(name, known)}"


def which_of(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """`did you mean 'precision'?`; where nothing is close, all known names, or another advice."""
    names = list(known)
    close = near(name, names)
    if close:
        return f"did you mean {' or '.join(map(repr, close))}?"
    return otherwise or f"choose one of {', '.join(names)}"


def near(name: str, known: Iterable[str], similarity: float = SIMILARITY) -> list[str]:
    """At most two known names that a person may have meant."""
    names = {known_name.lower(): known_name for known_name in known}
    return [names[found] for found in difflib.get_close_matches(name.lower(), names, n=2, cutoff=similarity)]
