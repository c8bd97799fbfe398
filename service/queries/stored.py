"""Stored records on their way into messages: as JSON, without being turned into objects and back."""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

import msgspec


def stored(text: str) -> Any:
    """A stored record. What is not a finite number becomes null, as JSON has none."""
    if "NaN" not in text and "Infinity" not in text:
        return msgspec.Raw(text.encode())
    return msgspec.Raw(msgspec.json.encode(json.loads(text)))


def stored_list(texts: Iterable[str]) -> Any:
    """Stored records as a list."""
    return msgspec.Raw(b"[" + b",".join(bytes(stored(text)) for text in texts) + b"]")


def parts_of(text: str) -> Any:
    """The fields of a stored record by name; they go into a message as they are."""
    return json.loads(text)


def iso(time: datetime) -> str:
    return time.astimezone(UTC).isoformat()


def iso_or_none(time: datetime | None) -> str | None:
    return None if time is None else iso(time)
