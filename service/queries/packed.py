"""Queries that return many rows as one value. Drivers release the interpreter lock for every row, which in a process
with several threads takes longer than reading the rows.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import msgspec
from sqlalchemy import Connection, Select, Text, cast, func, select

_decode = msgspec.json.Decoder(list[list[Any]]).decode


def packed_rows(
    connection: Connection, statement: Select[*tuple[Any, ...]], given: Mapping[str, Any]
) -> list[list[Any]]:
    """Return the rows of a statement, in its order. Times are text in ISO 8601; times without a zone are in UTC.

    Args:
        statement: Made once for all calls; its columns have different names.
        given: Parameters of the statement.
    """
    text = connection.scalar(_packed(statement, connection.dialect.name), given)
    return [] if text is None else _decode(text)


@functools.cache
def _packed(statement: Select[*tuple[Any, ...]], dialect: str) -> Select[*tuple[Any, ...]]:
    columns = statement.subquery("packed").columns
    if dialect == "sqlite":
        return select(func.json_group_array(func.json_array(*columns), type_=Text))
    return select(cast(func.json_agg(func.json_build_array(*columns)), Text))
