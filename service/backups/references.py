"""The files that a database refers to."""

from __future__ import annotations

from sqlalchemy import Connection, inspect, text


def referenced_digests(connection: Connection) -> set[str]:
    """Return the digests of all artifacts and uploads to which a database refers; the database may have any of our
    schema versions.
    """
    tables = set(inspect(connection).get_table_names()) & {"artifacts", "workload_sources"}
    found: set[str] = set()
    for table in tables:
        query = text(f"SELECT DISTINCT digest FROM {table} WHERE digest IS NOT NULL")
        found.update(connection.scalars(query))
    return found
