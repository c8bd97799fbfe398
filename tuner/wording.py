"""Numbers and names in sentences for people."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable

SIMILARITY = 0.7
"""Least similarity of two names, in difflib's ratio, for one to count as a typo of the other."""


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """`1 trial`, `20 trials`."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def milliseconds(time_ns: float) -> str:
    """`12.3 ms`; from a second on `1.03 s`."""
    return f"{time_ns / 1e6:.3g} ms" if time_ns < 0.9995e9 else f"{time_ns / 1e9:.3g} s"


LEAST_RATIO, MOST_RATIO = 0.01, 100.0
"""Ends of an interval are not told beyond these."""


def ratio(value: float, sign: str = "×") -> str:
    """`2.42×`; near one with a third decimal, where the second says little.

    Args:
        sign: Put behind the number: "x" where a text is ASCII.
    """
    if not math.isfinite(value):
        return "unknown"
    return f"{value:.3f}{sign}" if abs(value - 1) < 0.095 else f"{value:.2f}{sign}"


def ratio_range(low: float, high: float, sign: str = "×") -> str:
    """`0.990× to 1.20×`; of two blocks that differ much `<0.01× to >100×`, whose digits would say nothing."""
    lower = f"<{LEAST_RATIO:g}{sign}" if low < LEAST_RATIO else ratio(low, sign)
    upper = f">{MOST_RATIO:g}{sign}" if high > MOST_RATIO else ratio(high, sign)
    return f"{lower} to {upper}"


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
    """Return at most two known names that a person may have meant."""
    names = {known_name.lower(): known_name for known_name in known}
    return [names[found] for found in difflib.get_close_matches(name.lower(), names, n=2, cutoff=similarity)]
