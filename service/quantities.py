"""Durations and sizes as people write them."""

from __future__ import annotations

import re

from tuner.errors import BudgetError, ChoiceError

_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0}
_UNITS_BYTES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def parse_duration_s(text: str) -> float:
    """Seconds of "90", "90s", "5m", "1h30m".

    Raises:
        BudgetError: It is not a duration, or not positive.
    """
    stripped = text.strip().lower()
    if re.fullmatch(r"\d+(\.\d+)?", stripped):
        seconds = float(stripped)
    elif re.fullmatch(r"(\d+(\.\d+)?[smh])+", stripped):
        seconds = sum(
            float(number) * _UNITS_S[unit] for number, _, unit in re.findall(r"(\d+(\.\d+)?)([smh])", stripped)
        )
    else:
        raise BudgetError(f"{text!r} is not a duration: write seconds as 90 or 90s, or 5m, or 1h30m")
    if seconds <= 0:
        raise BudgetError(f"{text!r} is no time at all: give a positive duration")
    return seconds


def parse_bytes(text: str) -> int:
    """Bytes of "8g", "512m", "1000000".

    Raises:
        ChoiceError: It is not a size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    if match is None or float(match[1]) <= 0:
        raise ChoiceError(f"{text!r} is not a size: write bytes, or 512m, or 8g")
    return int(float(match[1]) * _UNITS_BYTES[match[2]])
