"""Ids of studies, trials and whatever else is named once and for all."""

from __future__ import annotations

import secrets
import time

_CROCKFORD = "0123456789abcdefghjkmnpqrstvwxyz"


def new_id() -> str:
    """A sortable opaque id: 48 bits of milliseconds and 80 random bits (the layout of a ULID)."""
    number = (time.time_ns() // 1_000_000) << 80 | secrets.randbits(80)
    return "".join(_CROCKFORD[number >> shift & 31] for shift in range(125, -1, -5))
