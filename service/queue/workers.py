"""Rows of workers, and their conversion for readers."""

from __future__ import annotations

import json
from datetime import datetime, timedelta

from sqlalchemy import select
from sqlalchemy.orm import Session

from steptune.service.alike import record_like
from steptune.service.models import HardwareProfileRow, QueueEntryRow, WorkerRow
from steptune.service.places import Slot
from steptune.service.queue.records import WorkerInfo


def known_workers(session: Session, now: datetime, lease_s: float) -> list[WorkerInfo]:
    """Return all known workers, the newest first. A worker without a heartbeat for the length of a lease is gone."""
    held = select(QueueEntryRow.worker_id, QueueEntryRow.study_id).where(QueueEntryRow.lease_until > now)
    studies = {row.worker_id: row.study_id for row in session.execute(held)}
    query = (
        select(WorkerRow, HardwareProfileRow.label)
        .outerjoin(HardwareProfileRow, HardwareProfileRow.fingerprint == WorkerRow.hardware_fingerprint)
        .order_by(WorkerRow.worker_id.desc())
    )
    silent = now - timedelta(seconds=lease_s)
    return [
        worker_of(worker, label or "", studies.get(worker.worker_id), gone=worker.heartbeat_at < silent)
        for worker, label in session.execute(query)
    ]


def worker_of(worker: WorkerRow, label: str, study_id: str | None, *, gone: bool) -> WorkerInfo:
    return record_like(
        WorkerInfo,
        worker,
        state="gone" if gone else worker.state,
        hardware_label=label,
        slots=tuple(Slot(kind=kind, number=number) for kind, number in json.loads(worker.devices)),
        study_id=study_id,
    )
