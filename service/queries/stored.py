"""Stored records in messages: passed on as JSON, without conversion to objects and back."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import msgspec

from steptune.service.alike import AnyRecord, shared

_parts = msgspec.json.Decoder(dict[str, msgspec.Raw])


def stored(text: str) -> Any:
    """Return a stored record. Numbers that are not finite become null, as JSON has none."""
    if "NaN" not in text and "Infinity" not in text:
        return msgspec.Raw(text.encode())
    return msgspec.Raw(msgspec.json.encode(json.loads(text)))


def parts_of(text: str) -> dict[str, Any]:
    """Return the fields of a stored record by name, as JSON, to be put into a message unchanged."""
    return _parts.decode(stored(text))


def value_of(part: Any) -> Any:
    """Return the value of a field from `parts_of`; None where it is missing."""
    return None if part is None else msgspec.json.decode(part)


def message(kind: type[AnyRecord], source: object, **given: Any) -> AnyRecord:
    """Build a message from the given fields and, for all others, from the source's fields of the same names. Times
    become text.
    """
    values = shared(kind.__struct_fields__, [source], given)
    return kind(**{name: iso(value) if isinstance(value, datetime) else value for name, value in values.items()})


def iso(time: datetime | str) -> str:
    """Write a time in UTC. Text without a zone counts as UTC."""
    if isinstance(time, str):
        if len(time) == 32 and time.endswith("+00:00"):  # as PostgreSQL writes it
            return time
        if len(time) == 26 and time[10] == " ":  # as SQLite has it
            return f"{time[:10]}T{time[11:]}+00:00"
        time = datetime.fromisoformat(time)
        time = time.replace(tzinfo=UTC) if time.tzinfo is None else time
    return time.astimezone(UTC).isoformat()
