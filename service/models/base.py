"""Base of every table: names of constraints, times in UTC, and foreign keys to owners."""

from __future__ import annotations

from datetime import UTC, datetime

from sqlalchemy import BigInteger, DateTime, Double, ForeignKey, Integer, MetaData, Text, TypeDecorator
from sqlalchemy.engine import Dialect
from sqlalchemy.orm import DeclarativeBase


class UtcDateTime(TypeDecorator[datetime]):
    """Timezone-aware time in UTC. SQLite stores no zone, so that it is added when a value is read."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        assert value is None or value.tzinfo is not None, "a time stored in the database must have a time zone"
        return None if value is None else value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class Base(DeclarativeBase):
    metadata = MetaData(
        naming_convention={
            "pk": "pk_%(table_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s",
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        }
    )
    type_annotation_map = {datetime: UtcDateTime(), str: Text(), int: BigInteger(), float: Double()}  # noqa: RUF012


COUNTER = BigInteger().with_variant(Integer, "sqlite")
"""Integer type of row numbers: SQLite numbers rows by itself only where the column is exactly INTEGER."""


def study_key() -> ForeignKey:
    return ForeignKey("studies.study_id", ondelete="CASCADE")


def trial_key() -> ForeignKey:
    return ForeignKey("trials.trial_id", ondelete="CASCADE")
