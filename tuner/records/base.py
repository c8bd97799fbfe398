"""Base of every record: frozen, keyword-only, plain data that refuses fields it does not know.

`SCHEMA_VERSION` changes whenever an older reader would misread a record.
"""

from __future__ import annotations

from typing import Any, dataclass_transform

import msgspec

SCHEMA_VERSION = 1


@dataclass_transform(frozen_default=True, kw_only_default=True)
class RecordMeta(msgspec.StructMeta):
    """Metaclass that makes every subclass frozen and keyword-only: msgspec does not inherit these options."""

    def __new__(
        mcls: type[RecordMeta], name: str, bases: tuple[type, ...], namespace: dict[str, Any], **options: Any
    ) -> RecordMeta:
        defaults = {"frozen": True, "kw_only": True, "forbid_unknown_fields": True}
        return super().__new__(mcls, name, bases, namespace, **{**defaults, **options})


class Record(msgspec.Struct, metaclass=RecordMeta):
    """Base of all records."""
