"""Two trials or studies side by side."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Annotated
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from steptune.dashboards.comparison import Side, comparison_context
from steptune.dashboards.site import Site
from steptune.service.access.principal import Principal
from steptune.service.api.context import Services, services
from steptune.service.api.ownership import check_study, check_trial
from steptune.service.api.problems import not_found
from steptune.service.comparing import compared, trial_in, with_result
from steptune.service.pages.routing import PageRoute, Reader, shared_page, site_of
from steptune.service.queries.studies import study_owner
from steptune.service.queries.study_list import ListQuery, list_page
from steptune.service.queries.trials import trial_owner
from steptune.service.queries.versions import study_version, trial_version
from steptune.service.store import SqlStudyStore
from steptune.service.trial_source import KeptTrials
from steptune.tuner.errors import StoreError
from steptune.tuner.profiling.comparison import ComparisonError
from steptune.tuner.records import Study, Trial

router = APIRouter(include_in_schema=False, route_class=PageRoute)
TOP = 30
NUM_KNOWN = 20
SideName = Annotated[str, Query(max_length=100, pattern=r"^[0-9a-z: ]*$")]


@router.get("/compare")
def compare_page(request: Request, principal: Reader, a: SideName = "", b: SideName = "") -> Response:
    """Show a form for two trials or studies, and below it the changes from A to B."""
    service = services(request)
    a, b = a.strip(), b.strip()
    owner_id = None if principal.is_admin else principal.user_id
    if a and not b and study_owner(service.engine, a).exists:
        a, b = f"{a}:baseline", f"{a}:best"
    known = list_page(service.engine, ListQuery(owner_id=owner_id), NUM_KNOWN).studies

    def context(site: Site) -> dict[str, object]:
        shown: dict[str, object] = {"comparison": None, "problem": ""}
        if a and b:
            shown |= _shown(service, principal, site, a, b)
        elif a:
            shown["problem"] = f"{a} is not a study: name a second trial to compare it with."
        swapped = urlencode({"a": b, "b": a})
        return {"title": "Compare", "current": "/compare", "a": a, "b": b, "swapped": swapped, "known": known, **shown}

    return shared_page(
        request,
        site_of(request, principal),
        "compare.html",
        key=(a, b, owner_id),
        version=(known, *(_version(service, principal, one) for one in (a, b) if a and b)),
        context=context,
    )


def _version(service: Services, principal: Principal, reference: str) -> Hashable:
    """Return the version of a referenced study or trial; a trial's version is that of its study.

    Raises:
        RefusalError: There is no such study or trial, or it is another user's.
    """
    name, _, which = reference.partition(":")
    if not which and trial_owner(service.engine, name).exists:
        check_trial(service.engine, name, principal)
        return trial_version(service.engine, name)
    check_study(service.engine, name, principal)
    return study_version(service.engine, name)


def _shown(service: Services, principal: Principal, site: Site, a: str, b: str) -> dict[str, object]:
    try:
        before, after = (_meant(service, principal, reference) for reference in (a, b))
        source = KeptTrials(SqlStudyStore(service.engine), service.artifacts, service.records)
        answer = source.recommendation(before[0].study_id)
        comparison = compared(before, after, answer, analysis_of=source.trial_analysis, top=TOP, labels=("A", "B"))
    except (StoreError, ComparisonError) as error:
        text = str(error)
        return {"comparison": None, "problem": f"{text[:1].upper()}{text[1:]}."}
    sides = (
        Side(name, study, trial, site.study_url(study.study_id), site.trial_url(trial.trial_id))
        for name, (study, trial) in (("A", before), ("B", after))
    )
    return {"problem": "", **comparison_context(comparison, *sides)}


def _meant(service: Services, principal: Principal, reference: str) -> tuple[Study, Trial]:
    """Return the trial to compare on one side; a study stands for its recommended configuration, else the leading one,
    else its baseline.

    Raises:
        RefusalError: There is no such study or trial, or it is another user's.
        StoreError: There is no such trial in it, or it is not complete.
    """
    store = SqlStudyStore(service.engine)
    name, _, which = reference.partition(":")
    if not which and trial_owner(service.engine, name).exists:
        check_trial(service.engine, name, principal)
        trial = with_result(store.trial(name))
        return store.get_study(trial.study_id), trial
    if not name:
        raise not_found("study", reference)
    check_study(service.engine, name, principal)
    study = store.get_study(name)
    if which:
        return study, trial_in(store, study, which)
    try:
        return study, trial_in(store, study, "best")
    except StoreError:
        return study, trial_in(store, study, "baseline")
