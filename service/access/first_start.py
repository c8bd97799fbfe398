"""The first token of a new service, with which an administrator sets up everything else."""

from __future__ import annotations

from datetime import UTC, datetime

from sqlalchemy import Engine, func, select

from steptune.service import advisory_locks
from steptune.service.access.open_access import LOCAL_USER
from steptune.service.access.tokens import issue_in
from steptune.service.access.users import add_user
from steptune.service.connections import writing
from steptune.service.models import UserRow
from steptune.service.settings.scopes import Scope

FIRST_ADMIN = "admin"


def first_admin_token(engine: Engine, *, days: float) -> str | None:
    """Create an administrator if there are no users yet, and return the administrator's token; else None. The token
    must be shown immediately, because it cannot be recovered.

    Of several processes that start at once, one gets it.

    Args:
        engine: Engine of a database whose schema has been checked.
        days: Lifetime of the token in days.
    """
    with writing(engine) as session:
        if session.get_bind().dialect.name == "postgresql":  # SQLite has one writer anyway
            session.execute(select(func.pg_advisory_xact_lock(advisory_locks.FIRST_START)))
        if session.scalar(select(UserRow.user_id).where(UserRow.name != LOCAL_USER).limit(1)) is not None:
            return None
        user = add_user(session, FIRST_ADMIN, {Scope.ADMIN})
        _, bearer = issue_in(
            session, user.user_id, name="first start", scopes={Scope.ADMIN}, days=days, now=datetime.now(UTC)
        )
        return bearer.text
