"""Backup with PostgreSQL's own tools, in their custom format.

What is replaced is moved into a schema of its own first, and comes back if its successor cannot be loaded: the tools
know only the tables of the backup, and the database may have others that refer to those.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from sqlalchemy import Connection, Engine, func, inspect, select, text
from sqlalchemy.exc import ProgrammingError
from sqlalchemy.schema import CreateSchema, DropSchema

from steptune.service.backups.references import referenced_digests
from steptune.service.connections import place_of, writing
from steptune.tuner.errors import MissingDependencyError, StoreError

REPLACED = "steptune_replaced"
"""Name of the schema that holds the tables being replaced."""


def dump(engine: Engine, target: Path) -> set[str]:
    """Write the database into a file. Return the digests of all artifacts and uploads to which its rows refer at that
    moment.
    """
    tool = _tool("pg_dump")
    with engine.connect().execution_options(isolation_level="REPEATABLE READ") as connection:
        digests = referenced_digests(connection)
        snapshot = connection.scalar(select(func.pg_export_snapshot()))
        schema = connection.scalar(select(func.current_schema()))
        options = ["--format=custom", "--no-owner", "--no-privileges", f"--snapshot={snapshot}", f"--schema={schema}"]
        _run(engine, [tool, *options, f"--file={target}"])
    return digests


def load(engine: Engine, source: Path) -> None:
    """Replace the content of a database.

    Raises:
        StoreError: The tool refuses the file, or the database refuses the user; the previous content is kept.
    """
    tool = _tool("pg_restore")
    _run(engine, [tool, "--list", str(source)], connect=False)
    schema = _set_aside(engine)
    try:
        options = ["--no-owner", "--no-privileges", "--single-transaction", "--exit-on-error", f"--schema={schema}"]
        _run(engine, [tool, *options, str(source)])
    except BaseException:
        _replace(engine, schema, drop=False)
        raise
    _replace(engine, schema, drop=True)


def _set_aside(engine: Engine) -> str:
    """Move the present tables into another schema; return the name of the schema that held them."""
    with writing(engine) as session:
        connection = session.connection()
        schema = str(connection.scalar(select(func.current_schema())))
        if REPLACED in inspect(connection).get_schema_names():
            raise StoreError(
                f"{place_of(engine)} has a schema {REPLACED}, which an interrupted restore left behind: if you "
                f"want to keep its tables, move them back (ALTER TABLE {REPLACED}.… SET SCHEMA {schema}), then "
                "drop the schema"
            )
        if inspect(connection).get_table_names(schema):
            try:
                connection.execute(CreateSchema(REPLACED))
                _move(connection, schema, REPLACED)
            except ProgrammingError as error:
                raise StoreError(
                    f"{place_of(engine)} does not let this user replace its tables ({error.orig}): connect as its "
                    "owner, or restore into an empty database"
                ) from error
        return schema


def _replace(engine: Engine, schema: str, *, drop: bool) -> None:
    """Drop the tables that were moved aside, or move them back."""
    with writing(engine) as session:
        connection = session.connection()
        if REPLACED in inspect(connection).get_schema_names():
            if not drop:
                _move(connection, REPLACED, schema)
            connection.execute(DropSchema(REPLACED, cascade=drop))


def _move(connection: Connection, source: str, target: str) -> None:
    """Move tables with their indexes and sequences to another schema."""
    quote = connection.dialect.identifier_preparer.quote
    for table in inspect(connection).get_table_names(source):
        connection.execute(text(f"ALTER TABLE {quote(source)}.{quote(table)} SET SCHEMA {quote(target)}"))


def _tool(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        raise MissingDependencyError(
            f"{name} is not installed: install PostgreSQL's client tools (Debian: postgresql-client, no older than "
            "the server)"
        )
    return path


def _run(engine: Engine, command: list[str], *, connect: bool = True) -> None:
    """Run a tool on the database; the password is not on the command line, which other users can read."""
    from psycopg.conninfo import make_conninfo

    variables = dict(os.environ)
    if connect:
        several = {name: v if isinstance(v, str) else ",".join(v) for name, v in engine.url.query.items()}
        arguments = engine.url.translate_connect_args(username="user", database="dbname") | several
        password = arguments.pop("password", None)
        command = [*command, f"--dbname={make_conninfo(**arguments)}"]
        variables |= {"PGPASSWORD": password} if password else {}
    ended = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    if ended.returncode:
        reason = ended.stderr.strip().partition("\n")[0]
        raise StoreError(f"{Path(command[0]).name} failed for {place_of(engine)}: {reason}")
