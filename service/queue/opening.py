"""The queue with the limits that the settings give."""

from __future__ import annotations

from sqlalchemy import Engine

from service.queue.repository import StudyQueue
from service.queue.settings import QueueSettings


def open_queue(engine: Engine, settings: QueueSettings) -> StudyQueue:
    """The queue on a database whose schema was checked."""
    return StudyQueue(engine, quotas=settings.quotas, lease_s=settings.lease_s, max_losses=settings.max_losses)
