"""Formatting of numbers and names in messages."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable

SIMILARITY = 0.7
"""Minimum similarity of two names (difflib's ratio) at which one counts as a typo of the other."""


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """Return a number with its noun: `1 trial`, `20 trials`."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def milliseconds(time_ns: float) -> str:
    """Format a time in milliseconds, `12.3 ms`, or from one second on in seconds, `1.03 s`."""
    return f"{time_ns / 1e6:.3g} ms" if time_ns < 0.9995e9 else f"{time_ns / 1e9:.3g} s"


LEAST_RATIO, MOST_RATIO = 0.01, 100.0
"""Minimum and maximum ratio at which an end of an interval is shown as a number; beyond them it is shown as `<0.01×` or
`>100×`.
"""


def ratio(value: float, sign: str = "×") -> str:
    """Format a ratio as `2.42×`; close to one with a third decimal.

    Args:
        sign: Suffix of the number: "x" in an ASCII text.
    """
    if not math.isfinite(value):
        return "unknown"
    return f"{value:.3f}{sign}" if abs(value - 1) < 0.095 else f"{value:.2f}{sign}"


def ratio_range(low: float, high: float, sign: str = "×") -> str:
    """Format an interval as `0.990× to 1.20×`; ends beyond the limits as `<0.01× to >100×`."""
    lower = f"<{LEAST_RATIO:g}{sign}" if low < LEAST_RATIO else ratio(low, sign)
    upper = f">{MOST_RATIO:g}{sign}" if high > MOST_RATIO else ratio(high, sign)
    return f"{lower} to {upper}"


def no_such(kind: str, name: str, known: Iterable[str]) -> str:
    """Return `there is no strategy 'precison': did you mean 'precision'?`. If no name is similar, list all known names
    instead.
    """
    return f"there is no {kind} {name!r}: {which_of(name, known)}"


def which_of(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """Return `did you mean 'precision'?`. If no name is similar, return `otherwise`; if `otherwise` is empty, list all
    known names.
    """
    names = list(known)
    close = near(name, names)
    if close:
        return f"did you mean {' or '.join(map(repr, close))}?"
    return otherwise or f"choose one of {', '.join(names)}"


def near(name: str, known: Iterable[str], similarity: float = SIMILARITY) -> list[str]:
    """Return at most two known names that are similar to a name."""
    names = {known_name.lower(): known_name for known_name in known}
    return [names[found] for found in difflib.get_close_matches(name.lower(), names, n=2, cutoff=similarity)]
