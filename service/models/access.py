"""Tables of access control: users, tokens, sessions, submitted workloads, stored answers, and the audit log."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import ForeignKey, Index, LargeBinary
from sqlalchemy.orm import Mapped, mapped_column

from steptune.service.models.base import COUNTER, Base


def _user_key() -> ForeignKey:
    return ForeignKey("users.user_id", ondelete="CASCADE")


class UserRow(Base):
    """A user who submits studies, with the user's quotas. NULL stands for the settings' default."""

    __tablename__ = "users"

    user_id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)
    scopes: Mapped[str]
    """Maximum scopes of the user's tokens and sessions, separated by spaces."""
    priority: Mapped[int] = mapped_column(server_default="0")
    max_running: Mapped[int | None]
    max_queued: Mapped[int | None]
    max_device_hours: Mapped[float | None]
    """Maximum device hours over the last 30 days."""
    max_artifact_bytes: Mapped[int | None]
    created_at: Mapped[datetime]
    disabled_at: Mapped[datetime | None]


class ApiTokenRow(Base):
    """A bearer token `stp_<token_id>_<secret>`; only the hash of the secret is kept."""

    __tablename__ = "api_tokens"
    __table_args__ = (Index(None, "user_id", "token_id"),)

    token_id: Mapped[str] = mapped_column(primary_key=True)
    user_id: Mapped[str] = mapped_column(_user_key())
    parent_id: Mapped[str | None] = mapped_column(ForeignKey("api_tokens.token_id", ondelete="CASCADE"), index=True)
    """The token with which this one was created. This token ends when its parent does."""
    name: Mapped[str]
    secret_sha256: Mapped[str]
    scopes: Mapped[str]
    created_at: Mapped[datetime]
    expires_at: Mapped[datetime | None]
    revoked_at: Mapped[datetime | None]
    last_used_at: Mapped[datetime | None]


class BrowserSessionRow(Base):
    """A browser session; only the hash of the cookie is kept."""

    __tablename__ = "browser_sessions"

    session_sha256: Mapped[str] = mapped_column(primary_key=True)
    user_id: Mapped[str] = mapped_column(_user_key(), index=True)
    token_id: Mapped[str | None] = mapped_column(ForeignKey("api_tokens.token_id", ondelete="CASCADE"), index=True)
    """The token with which the session was opened; the session ends with the token."""
    scopes: Mapped[str]
    created_at: Mapped[datetime]
    expires_at: Mapped[datetime] = mapped_column(index=True)


class WorkloadSourceRow(Base):
    """A workload as submitted: an uploaded file or archive, a zoo entry, or a module on the workers."""

    __tablename__ = "workload_sources"
    __table_args__ = (Index(None, "owner_id", "source_id"), Index(None, "owner_id", "digest"))

    source_id: Mapped[str] = mapped_column(primary_key=True)
    owner_id: Mapped[str] = mapped_column(_user_key())
    kind: Mapped[str]
    """Kind of the workload: "file", "archive", "zoo" or "module"."""
    name: Mapped[str]
    entry: Mapped[str]
    """Reference within the upload: "train.py:Workload", "zoo:synthetic", "package.module:Workload"."""
    digest: Mapped[str | None] = mapped_column(index=True)
    """Digest of the uploaded bytes, which are an artifact."""
    size_bytes: Mapped[int]
    created_at: Mapped[datetime]


class IdempotencyKeyRow(Base):
    """A request that may be sent again: its answer is kept for a day."""

    __tablename__ = "idempotency_keys"

    user_id: Mapped[str] = mapped_column(_user_key(), primary_key=True)
    key: Mapped[str] = mapped_column(primary_key=True)
    request_sha256: Mapped[str]
    """SHA-256 of the request's method, path and body; a request with the same key but another hash is refused."""
    status: Mapped[int | None]
    """HTTP status of the answer; NULL while the first request is running."""
    headers: Mapped[str | None]
    """Headers of the answer, as JSON. Until there is an answer: the id reserved for the resource that the request
    creates.
    """
    body: Mapped[bytes | None] = mapped_column(LargeBinary)
    created_at: Mapped[datetime] = mapped_column(index=True)


class AuditRow(Base):
    """Entry of the audit log. Rows are only added, and removed by age."""

    __tablename__ = "audit_log"
    __table_args__ = (Index(None, "user_id", "entry_id"), {"sqlite_autoincrement": True})

    entry_id: Mapped[int] = mapped_column(COUNTER, primary_key=True)
    at: Mapped[datetime] = mapped_column(index=True)
    user_id: Mapped[str | None]
    """The user who acted; NULL for actions of the service itself, and for those before authentication."""
    token_id: Mapped[str | None]
    action: Mapped[str]
    target: Mapped[str]
    outcome: Mapped[str]
    request_id: Mapped[str]
    detail: Mapped[str]
    """Details as JSON, never with secrets."""
