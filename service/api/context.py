"""Services shared by all endpoints, made once by `steptune.service.app.create_app`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Path, Request
from sqlalchemy import Engine

from steptune.service.api.metrics import Metrics
from steptune.service.artifacts import ArtifactStore
from steptune.service.event_hub import EventHub
from steptune.service.kept import Kept
from steptune.service.page_copies import PageCopies
from steptune.service.queries.fleet import FleetSums
from steptune.service.queue import StudyQueue
from steptune.service.settings import Settings
from steptune.service.stream_limits import StreamLimits
from steptune.service.trial_source import MAX_LANE_BYTES, MAX_PROFILE_BYTES, KeptLanes, KeptProfiles, KeptRecords
from steptune.service.uploads import UploadSpace


@dataclass(frozen=True, kw_only=True)
class Services:
    """Services that the endpoints of one application share."""

    settings: Settings
    engine: Engine
    metrics: Metrics
    queue: StudyQueue
    artifacts: ArtifactStore
    events: EventHub
    streams: StreamLimits
    uploads: UploadSpace
    copies: PageCopies = field(default_factory=PageCopies)
    fleet: FleetSums = field(default_factory=FleetSums)
    records: KeptRecords = field(default_factory=KeptRecords)
    profiles: KeptProfiles = field(default_factory=lambda: Kept(MAX_PROFILE_BYTES))
    lanes: KeptLanes = field(default_factory=lambda: Kept(MAX_LANE_BYTES))


def services(request: Request) -> Services:
    """Return the services of a request's application. This is no FastAPI dependency: resolving one takes longer than a
    query.
    """
    found: Services = request.app.state.services
    return found


_ID = r"^[0-9a-z]{1,64}$"
StudyId = Annotated[str, Path(pattern=_ID, description="Id of a study.", examples=["01kabcdefghjkmnpqrstvwxyz0"])]
TrialId = Annotated[str, Path(pattern=_ID, description="Id of a trial.", examples=["01kabcdefghjkmnpqrstvwxyz1"])]
