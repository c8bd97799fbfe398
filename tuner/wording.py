"""Numbers in sentences for people."""

from __future__ import annotations


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """`1 trial`, `20 trials`."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"
