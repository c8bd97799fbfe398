"""What every endpoint has at hand, as dependencies; made once, by `service.app.create_app`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, Path, Request
from sqlalchemy import Engine

from service.api.metrics import Metrics
from service.artifacts import ArtifactStore
from service.event_hub import EventHub
from service.queue import StudyQueue
from service.settings import Settings
from service.uploads import UploadSpace


@dataclass(frozen=True, kw_only=True)
class Services:
    """What the endpoints of one application share."""

    settings: Settings
    engine: Engine
    metrics: Metrics
    queue: StudyQueue
    artifacts: ArtifactStore
    events: EventHub
    uploads: UploadSpace


async def _services(request: Request) -> Any:
    return request.app.state.services


Service = Annotated[Services, Depends(_services)]

_ID = r"^[0-9a-z]{1,64}$"
StudyId = Annotated[str, Path(pattern=_ID, description="Id of a study.", examples=["01kabcdefghjkmnpqrstvwxyz0"])]
TrialId = Annotated[str, Path(pattern=_ID, description="Id of a trial.", examples=["01kabcdefghjkmnpqrstvwxyz1"])]
