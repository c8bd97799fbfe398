"""Durations, sizes, bandwidths and latencies, parsed from the user's notation."""

from __future__ import annotations

import re

from steptune.tuner.errors import BudgetError, ChoiceError

_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0}
_UNITS_BYTES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_UNITS_NS = {"ns": 1.0, "us": 1e3, "µs": 1e3, "μs": 1e3, "ms": 1e6, "s": 1e9}


def parse_duration_s(text: str) -> float:
    """Parse a duration such as "90s", "5m" or "1h30m", and return seconds.

    Raises:
        BudgetError: It is not a duration, or not positive.
    """
    stripped = text.strip().lower()
    if re.fullmatch(r"\d+(\.\d+)?", stripped):
        raise BudgetError(f"{text!r} has no unit: write {stripped}s, {stripped}m or {stripped}h")
    if re.fullmatch(r"(\d+(\.\d+)?[smh])+", stripped):
        seconds = sum(
            float(number) * _UNITS_S[unit] for number, _, unit in re.findall(r"(\d+(\.\d+)?)([smh])", stripped)
        )
    else:
        raise BudgetError(f"{text!r} is not a duration: write 90s, 5m or 1h30m")
    if seconds <= 0:
        raise BudgetError(f"{text!r} is not a positive duration")
    return seconds


def parse_bytes(text: str) -> int:
    """Parse a size such as "8g", "512m" or "1000000", and return bytes.

    Raises:
        ChoiceError: It is not a size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    if match is None or float(match[1]) <= 0:
        raise ChoiceError(f"{text!r} is not a size: write a number of bytes, or 512m, or 8g")
    return int(float(match[1]) * _UNITS_BYTES[match[2]])


def parse_bandwidth(text: str) -> float:
    """Parse a bandwidth such as "25gbps" or "100 Mbit/s" (bits), or "400GBps" or "3.1 GB/s" (bytes), and return bytes
    per second. Prefixes are powers of 1000.

    Raises:
        ChoiceError: It is not a bandwidth.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgtKMGT]?)(bits?|b|B)(?:ps|/s)", text.strip())
    if match is None or float(match[1]) <= 0:
        raise ChoiceError(f"{text!r} is not a bandwidth: write bits as 25gbps, or bytes as 400GBps")
    return float(match[1]) * _PREFIXES[match[2].lower()] / (1 if match[3] == "B" else 8)


def parse_latency_ns(text: str) -> float:
    """Parse a latency such as "20us", "0.1ms" or "500ns", and return nanoseconds.

    Raises:
        ChoiceError: It is not a latency.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(ns|us|µs|μs|ms|s)", text.strip().lower())
    if match is None:
        raise ChoiceError(f"{text!r} is not a latency: write 20us, or 0.1ms, or 500ns")
    return float(match[1]) * _UNITS_NS[match[2]]
