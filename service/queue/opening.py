"""The queue, with the limits from the settings."""

from __future__ import annotations

from sqlalchemy import Engine

from steptune.service.queue.records import Quotas
from steptune.service.queue.repository import StudyQueue
from steptune.service.settings import Settings


def open_queue(engine: Engine, settings: Settings) -> StudyQueue:
    """Open the queue on a database whose schema was checked."""
    quotas = Quotas(
        max_running=settings.max_running, max_queued=settings.max_queued, max_device_hours=settings.max_device_hours
    )
    return StudyQueue(
        engine,
        quotas=quotas,
        lease_s=settings.lease_s,
        max_losses=settings.max_losses,
        hosts_wait_s=settings.hosts_wait_s,
    )
