"""Check of a user's quota of stored bytes, made when files are added. The queue checks the quotas of studies."""

from __future__ import annotations

from sqlalchemy.orm import Session

from steptune.service.artifacts.retention import user_artifact_bytes
from steptune.service.models import UserRow
from steptune.tuner.errors import QuotaExceededError


def check_artifact_bytes(session: Session, user_id: str, default_limit: int | None) -> None:
    """Refuse the bytes that a transaction has just added if the user now exceeds the quota.

    Args:
        session: The transaction with the new row.
        user_id: Owner of the bytes; transactions that add at the same time wait for each other.
        default_limit: Limit for a user without one; None for unlimited.

    Raises:
        QuotaExceededError: The user keeps too many bytes now.
    """
    user = session.get_one(UserRow, user_id, with_for_update=True)
    limit = default_limit if user.max_artifact_bytes is None else user.max_artifact_bytes
    if limit is None:
        return
    size = user_artifact_bytes(session, user_id)
    if size > limit:
        raise QuotaExceededError(
            f"uploads, traces and logs would take {size} bytes, but the quota `max_artifact_bytes` is {limit}: delete "
            "workloads or studies that are not needed, or ask an administrator for more",
            quota="max_artifact_bytes",
            value=size,
            limit=limit,
        )
