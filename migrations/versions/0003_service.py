"""Add users and their tokens, uploaded workloads, the queue, workers and their devices

Revision ID: 0003
Revises: 0002
Created: 2026-11-21
"""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

COUNTER = sa.BigInteger().with_variant(sa.Integer, "sqlite")
STUDY_INDEXES = (
    ("state", "study_id"),
    ("owner_id", "study_id"),
    ("owner_id", "state", "study_id"),
    ("workload_id", "study_id"),
    ("workload", "study_id"),
    ("hardware_fingerprint", "study_id"),
)


def upgrade() -> None:
    _create_access()
    _create_queue()
    _extend_studies()


def _text(name: str, *, nullable: bool = False, default: str | None = None) -> sa.Column[Any]:
    return sa.Column(name, sa.Text(), nullable=nullable, server_default=default)


def _int(name: str, *, nullable: bool = False, default: str | None = None) -> sa.Column[Any]:
    return sa.Column(name, sa.BigInteger(), nullable=nullable, server_default=default)


def _float(name: str, *, nullable: bool = False, default: str | None = None) -> sa.Column[Any]:
    return sa.Column(name, sa.Double(), nullable=nullable, server_default=default)


def _time(name: str, *, nullable: bool = False) -> sa.Column[Any]:
    return sa.Column(name, sa.DateTime(timezone=True), nullable=nullable)


def _refers(table: str, column: str, to: str, ondelete: str | None = None) -> sa.ForeignKeyConstraint:
    return sa.ForeignKeyConstraint([column], [to], name=f"fk_{table}_{column}", ondelete=ondelete)


def _key(table: str, *columns: str) -> sa.PrimaryKeyConstraint:
    return sa.PrimaryKeyConstraint(*columns, name=f"pk_{table}")


def _index(table: str, *columns: str) -> None:
    op.create_index(f"ix_{table}_{'_'.join(columns)}", table, list(columns))


def _create_access() -> None:
    op.create_table(
        "users",
        _text("user_id"),
        _text("name"),
        _text("scopes"),
        _int("priority", default="0"),
        _int("max_running", nullable=True),
        _int("max_queued", nullable=True),
        _float("max_device_hours", nullable=True),
        _int("max_artifact_bytes", nullable=True),
        _time("created_at"),
        _time("disabled_at", nullable=True),
        _key("users", "user_id"),
        sa.UniqueConstraint("name", name="uq_users_name"),
    )
    op.create_table(
        "api_tokens",
        _text("token_id"),
        _text("user_id"),
        _text("parent_id", nullable=True),
        _text("name"),
        _text("secret_sha256"),
        _text("scopes"),
        _time("created_at"),
        _time("expires_at", nullable=True),
        _time("revoked_at", nullable=True),
        _time("last_used_at", nullable=True),
        _key("api_tokens", "token_id"),
        _refers("api_tokens", "user_id", "users.user_id", "CASCADE"),
        _refers("api_tokens", "parent_id", "api_tokens.token_id", "CASCADE"),
    )
    _index("api_tokens", "user_id", "token_id")
    _index("api_tokens", "parent_id")
    op.create_table(
        "browser_sessions",
        _text("session_sha256"),
        _text("user_id"),
        _text("token_id", nullable=True),
        _text("scopes"),
        _time("created_at"),
        _time("expires_at"),
        _key("browser_sessions", "session_sha256"),
        _refers("browser_sessions", "user_id", "users.user_id", "CASCADE"),
        _refers("browser_sessions", "token_id", "api_tokens.token_id", "CASCADE"),
    )
    for column in ("user_id", "token_id", "expires_at"):
        _index("browser_sessions", column)
    op.create_table(
        "workload_sources",
        _text("source_id"),
        _text("owner_id"),
        _text("kind"),
        _text("name"),
        _text("entry"),
        _text("digest", nullable=True),
        _int("size_bytes"),
        _time("created_at"),
        _key("workload_sources", "source_id"),
        _refers("workload_sources", "owner_id", "users.user_id", "CASCADE"),
    )
    _index("workload_sources", "owner_id", "source_id")
    _index("workload_sources", "owner_id", "digest")
    _index("workload_sources", "digest")
    op.create_table(
        "idempotency_keys",
        _text("user_id"),
        _text("key"),
        _text("request_sha256"),
        _int("status", nullable=True),
        _text("headers", nullable=True),
        sa.Column("body", sa.LargeBinary(), nullable=True),
        _time("created_at"),
        _key("idempotency_keys", "user_id", "key"),
        _refers("idempotency_keys", "user_id", "users.user_id", "CASCADE"),
    )
    _index("idempotency_keys", "created_at")
    op.create_table(
        "audit_log",
        sa.Column("entry_id", COUNTER, nullable=False),
        _time("at"),
        _text("user_id", nullable=True),
        _text("token_id", nullable=True),
        _text("action"),
        _text("target"),
        _text("outcome"),
        _text("request_id"),
        _text("detail"),
        _key("audit_log", "entry_id"),
        sqlite_autoincrement=True,
    )
    _index("audit_log", "at")
    _index("audit_log", "user_id", "entry_id")


def _create_queue() -> None:
    op.create_table(
        "workers",
        _text("worker_id"),
        _text("name"),
        _text("host_id"),
        _text("state"),
        _text("hardware_fingerprint", nullable=True),
        _text("device_kind"),
        _text("devices"),
        _text("isolation"),
        _text("version"),
        _time("started_at"),
        _time("heartbeat_at"),
        _key("workers", "worker_id"),
        _refers("workers", "hardware_fingerprint", "hardware_profiles.fingerprint"),
    )
    _index("workers", "hardware_fingerprint")
    _index("workers", "heartbeat_at")
    op.create_table(
        "queue_entries",
        _text("study_id"),
        _text("source_id", nullable=True),
        _int("version", default="1"),
        _int("priority", default="0"),
        _text("required_device_kind", nullable=True),
        _text("required_hardware", nullable=True),
        _int("num_devices", default="1"),
        _text("place", default=""),
        _text("requested", default=""),
        _text("worker_id", nullable=True),
        _int("fence", default="0"),
        _time("lease_until", nullable=True),
        _int("num_claims", default="0"),
        _int("num_lost", default="0"),
        _float("device_seconds", default="0"),
        _time("queued_at"),
        _time("claimed_at", nullable=True),
        _time("ended_at", nullable=True),
        _key("queue_entries", "study_id"),
        _refers("queue_entries", "study_id", "studies.study_id", "CASCADE"),
        _refers("queue_entries", "source_id", "workload_sources.source_id"),
        _refers("queue_entries", "worker_id", "workers.worker_id", "SET NULL"),
    )
    _index("queue_entries", "source_id", "study_id")
    for column in ("worker_id", "ended_at"):
        _index("queue_entries", column)
    op.create_table(
        "deleted_usage",
        sa.Column("usage_id", COUNTER, nullable=False),
        _text("owner_id"),
        _float("device_seconds"),
        _time("ended_at"),
        _key("deleted_usage", "usage_id"),
        _refers("deleted_usage", "owner_id", "users.user_id", "CASCADE"),
    )
    for column in ("owner_id", "ended_at"):
        _index("deleted_usage", column)
    op.create_table(
        "resource_slots",
        _text("host_id"),
        _text("kind"),
        _int("number"),
        _text("study_id", nullable=True),
        _int("fence", default="0"),
        _key("resource_slots", "host_id", "kind", "number"),
        _refers("resource_slots", "study_id", "studies.study_id", "SET NULL"),
    )
    _index("resource_slots", "study_id")


def _extend_studies() -> None:
    """Add the columns one by one: copying the table, as batch mode does, would delete rows that refer to it on
    SQLite.
    """
    op.execute("ALTER TABLE studies ADD COLUMN owner_id TEXT CONSTRAINT fk_studies_owner_id REFERENCES users (user_id)")
    op.add_column("studies", _text("title", default=""))
    op.add_column("trial_attempts", _int("fence", default="0"))
    op.add_column("trial_attempts", _text("worker_id", nullable=True))
    for column in ("workload_id", "hardware_fingerprint", "state"):
        op.drop_index(f"ix_studies_{column}", "studies")
    for columns in STUDY_INDEXES:
        _index("studies", *columns)
    op.add_column("events", _text("owner_id", nullable=True))  # studies had no owners
    _index("events", "owner_id", "event_id")
    op.drop_index("ix_trials_study_id_state", "trials")
    _index("trials", "study_id", "state", "sequence")
    for column in ("study_id", "trial_id"):
        op.drop_index(f"ix_artifacts_{column}", "artifacts")
        _index("artifacts", column, "artifact_id")
