"""Databases as released versions left them."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

from alembic import command
from sqlalchemy import DateTime, Engine, MetaData, func, select

from steptune.service.connections import writing
from steptune.service.database import alembic_config

RELEASED = Path(__file__).parents[1] / "released"
REVISIONS = sorted(path.stem for path in RELEASED.glob("*.json"))
Rows = dict[str, list[dict[str, Any]]]


def upgrade_to(engine: Engine, revision: str) -> None:
    with writing(engine) as session:
        command.upgrade(alembic_config(session.connection()), revision)


def reflected(engine: Engine) -> MetaData:
    metadata = MetaData()
    metadata.reflect(engine)
    return metadata


def fill(engine: Engine, revision: str) -> Rows:
    """Brings an empty database to a released revision, with the rows that it held."""
    upgrade_to(engine, revision)
    rows: Rows = json.loads((RELEASED / f"{revision}.json").read_text())
    tables = reflected(engine).tables
    with writing(engine) as session:
        for name, table_rows in rows.items():
            times = {column.name for column in tables[name].columns if isinstance(column.type, DateTime)}
            for row in table_rows:
                parsed = {k: datetime.fromisoformat(v) if k in times and v else v for k, v in row.items()}
                session.execute(tables[name].insert().values(parsed))
        if engine.dialect.name == "postgresql":  # its counters did not see the rows that came with a number
            for name, column in (("events", "event_id"), ("artifacts", "artifact_id")):
                highest = max(row[column] for row in rows[name])
                session.execute(select(func.setval(func.pg_get_serial_sequence(name, column), highest)))
    return rows
