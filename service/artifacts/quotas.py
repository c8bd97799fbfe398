"""The quota of bytes, where something is added to them. Those of studies are the queue's."""

from __future__ import annotations

from sqlalchemy.orm import Session

from steptune.service.artifacts.retention import user_artifact_bytes
from steptune.service.models import UserRow
from steptune.tuner.errors import QuotaExceededError


def check_artifact_bytes(session: Session, user_id: str, default_limit: int | None) -> None:
    """Check what a user keeps, in the transaction that has just added to it.

    Args:
        session: With the new row.
        user_id: Whose it is; of several that add at once, one waits for the other.
        default_limit: Where the user has no limit of their own; None for none.

    Raises:
        QuotaExceededError: It is too much now.
    """
    user = session.get_one(UserRow, user_id, with_for_update=True)
    limit = default_limit if user.max_artifact_bytes is None else user.max_artifact_bytes
    if limit is None:
        return
    size = user_artifact_bytes(session, user_id)
    if size > limit:
        raise QuotaExceededError(
            f"uploads, traces and logs would take {size} bytes, and the limit is {limit}: delete workloads or studies "
            "that are not needed, or ask an administrator for more",
            quota="max_artifact_bytes",
            value=size,
            limit=limit,
        )
