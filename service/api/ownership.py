"""What a caller may see: their own, or everything for administrators. Another's thing is not there."""

from __future__ import annotations

from sqlalchemy import Engine

from service.access.principal import Principal
from service.api.problems import not_found
from service.queries.studies import owner_of_study
from service.queries.trials import owner_of_trial


def check_study(engine: Engine, study_id: str, principal: Principal) -> None:
    """
    Raises:
        Refusal: 404.
    """
    exists, owner_id = owner_of_study(engine, study_id)
    if not exists or not principal.may_see(owner_id):
        raise not_found("study", study_id)


def check_trial(engine: Engine, trial_id: str, principal: Principal) -> None:
    """
    Raises:
        Refusal: 404.
    """
    exists, owner_id = owner_of_trial(engine, trial_id)
    if not exists or not principal.may_see(owner_id):
        raise not_found("trial", trial_id)
