"""Ownership: users may see what they own, administrators everything. For all else, the answer is "not found"."""

from __future__ import annotations

from sqlalchemy import Engine

from steptune.service.access.principal import Principal
from steptune.service.api.problems import not_found
from steptune.service.messages import WorkloadInfo
from steptune.service.queries.studies import study_owner
from steptune.service.queries.trials import trial_owner
from steptune.service.queries.workloads import find_workload


def check_study(engine: Engine, study_id: str, principal: Principal) -> str | None:
    """Refuse a study that the caller may not see; otherwise return the study's owner.

    Returns:
        The owner; None where there is none.

    Raises:
        RefusalError: 404.
    """
    owner = study_owner(engine, study_id)
    if not owner.exists or not principal.may_see(owner.owner_id):
        raise not_found("study", study_id)
    return owner.owner_id


def check_trial(engine: Engine, trial_id: str, principal: Principal) -> None:
    """Refuse a trial that the caller may not see.

    Raises:
        RefusalError: 404.
    """
    owner = trial_owner(engine, trial_id)
    if not owner.exists or not principal.may_see(owner.owner_id):
        raise not_found("trial", trial_id)


def own_workload(engine: Engine, workload_id: str, principal: Principal) -> WorkloadInfo:
    """Return one of the caller's uploaded workloads.

    Raises:
        RefusalError: 404.
    """
    workload = find_workload(engine, workload_id)
    if workload is None or not principal.may_see(workload.owner_id):
        raise not_found("workload", workload_id)
    return workload
