"""The web application: middleware, resources, and shared services."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from steptune._version import __version__
from steptune.service.access.authentication import Access
from steptune.service.api import (
    artifacts,
    audit,
    events,
    health,
    inventory,
    lanes,
    login,
    outcomes,
    session,
    studies,
    tokens,
    trials,
    users,
    workloads,
)
from steptune.service.api.access_middleware import AccessMiddleware
from steptune.service.api.context import Services
from steptune.service.api.metrics import Metrics
from steptune.service.api.middleware import PREFIX, BodyLimitMiddleware, RequestMiddleware
from steptune.service.api.openapi import document
from steptune.service.api.problems import add_handlers
from steptune.service.artifacts import open_artifacts
from steptune.service.connections import create_engine_for
from steptune.service.event_hub import EventHub
from steptune.service.pages import ROUTERS
from steptune.service.queue import open_queue
from steptune.service.settings import Settings
from steptune.service.stream_limits import StreamLimits
from steptune.service.uploads import UploadSpace

RESOURCES = (
    trials,
    lanes,
    studies,
    outcomes,
    workloads,
    artifacts,
    events,
    inventory,
    session,
    tokens,
    users,
    audit,
)
"""Routers of the resources, the most requested first: the path of a request is matched in this order."""
TAGS = {
    "workloads": "Workloads to tune.",
    "studies": "Searches for the fastest configuration of a workload.",
    "trials": "Trials of a study, with the breakdown of their time.",
    "outcomes": "Results of a study.",
    "files": "Traces, timelines, logs.",
    "workers": "Machines that run studies.",
    "events": "Live events.",
    "session": "The user of a request, and browser logins.",
    "tokens": "Tokens for programs.",
    "users": "Users, permissions and quotas.",
    "audit": "Who did what.",
    "operations": "Health and metrics, for operators of the service.",
}


def create_app(settings: Settings) -> FastAPI:
    """Build the application for these settings. It opens no connection before its first request.

    Raises:
        StoreError: The database's URL cannot be read.
    """
    engine = create_engine_for(settings.database_url)
    app = FastAPI(
        title="Steptune",
        version=__version__,
        openapi_url=f"{PREFIX}/openapi.json",
        docs_url=None,  # they load their scripts from elsewhere
        redoc_url=None,
        lifespan=_lifespan,
        generate_unique_id_function=lambda route: route.name,
        openapi_tags=[{"name": name, "description": text} for name, text in TAGS.items()],
    )
    queue = open_queue(engine, settings)
    metrics = Metrics(engine, queue)
    app.state.access = Access(engine, settings)
    app.state.services = Services(
        settings=settings,
        engine=engine,
        metrics=metrics,
        queue=queue,
        artifacts=open_artifacts(settings),
        events=EventHub(engine, settings.event_poll_s),
        streams=StreamLimits(settings),
        uploads=UploadSpace(settings.data_directory / "uploads"),
    )
    for module in RESOURCES:
        app.include_router(module.router, prefix=PREFIX)
    app.include_router(health.router)
    app.include_router(login.router)
    for router in ROUTERS:
        app.include_router(router)
    add_handlers(app)
    app.add_middleware(
        BodyLimitMiddleware, max_bytes=settings.max_body_bytes, max_upload_bytes=settings.max_upload_bytes
    )
    app.add_middleware(AccessMiddleware, access=app.state.access)
    app.add_middleware(RequestMiddleware, metrics=metrics, base_path=settings.base_path)
    app.openapi = lambda: document(app)  # type: ignore[method-assign]
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    services: Services = app.state.services
    yield
    await services.events.stop()
    services.engine.dispose()
