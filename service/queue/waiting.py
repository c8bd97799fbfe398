"""Why nobody runs a study, for the person who waits for it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

import msgspec
from sqlalchemy.orm import Session

from steptune.service.models import HardwareProfileRow, QueueEntryRow, StudyRow
from steptune.service.queue.claiming import is_named, runs_scripts
from steptune.service.queue.records import BEGUN, Quotas, WorkerInfo, kind_of
from steptune.service.queue.usage import Usage, limits_by_owner, usage_by_owner
from steptune.tuner.records import Study, StudyState
from steptune.tuner.workloads.reference import is_command

Entry = tuple[StudyRow, QueueEntryRow]


def waits_for(
    session: Session, entries: Sequence[Entry], workers: Sequence[WorkerInfo], quotas: Quotas, now: datetime
) -> list[str]:
    """For each study what it waits for; empty where it runs, or has ended.

    Args:
        workers: All that the service knows.
    """
    waiting = [entry for entry in entries if is_waiting(*entry, now)]
    alive = [worker for worker in workers if worker.state not in ("gone", "draining")]
    usage = usage_by_owner(session, now) if waiting else {}
    limits = limits_by_owner(session, {study.owner_id: None for study, _ in waiting}, quotas)

    def reason(study: StudyRow, entry: QueueEntryRow) -> str:
        if not is_waiting(study, entry, now):
            return ""
        message = msgspec.json.decode(study.record, type=Study).message
        if _is_held(entry, now):
            return f"hosts of the cluster: {message}" if message else "hosts that its worker asks a cluster for"
        if not alive:
            return "a worker: none is running; `steptune worker` starts one"
        missing = _missing_hardware(session, study, entry, alive)
        if missing:
            return missing
        exceeded = limits[study.owner_id].exceeded_by(usage.get(study.owner_id, Usage()))
        return exceeded or f"a worker{_hosts(study)} to be free{f'; last: {message}' if message else ''}"

    return [reason(*entry) for entry in entries]


def is_waiting(study: StudyRow, entry: QueueEntryRow, now: datetime) -> bool:
    """Say whether a study waits for a worker or for its worker's reservation: it is queued, or its worker died."""
    lost = entry.lease_until is not None and not _is_held(entry, now)
    state = StudyState(study.state)
    return state in BEGUN and (state is StudyState.QUEUED or lost)


def _is_held(entry: QueueEntryRow, now: datetime) -> bool:
    return entry.lease_until is not None and entry.lease_until > now


def _missing_hardware(session: Session, study: StudyRow, entry: QueueEntryRow, alive: Sequence[WorkerInfo]) -> str:
    """Hardware that no worker has; empty where one would do."""
    kind, wanted, count = kind_of(entry.required_device_kind), entry.required_hardware, entry.num_devices
    fitting = [worker for worker in alive if kind in (None, worker.device_kind) and worker.num_devices >= count]
    if not fitting:
        return f"a worker with {_devices(kind, count)}"
    if is_command(study.workload):
        fitting = [worker for worker in fitting if runs_scripts(worker.isolation)]
        if not fitting:
            return (
                "a worker that runs scripts: those that are there isolate trials, and scripts run under "
                "`steptune worker --isolation none` only"
            )
    if wanted is not None:
        fitting = [worker for worker in fitting if is_named(wanted, worker.hardware_fingerprint, worker.hardware_label)]
        return "" if fitting else f"a worker with hardware {wanted!r}"
    begun = study.hardware_fingerprint
    # A study of fewer devices than a worker has sees another profile than the worker's; those are told apart there.
    if begun is None or any(begun == w.hardware_fingerprint or w.num_devices != count for w in fitting):
        return ""
    profile = session.get(HardwareProfileRow, begun)
    return f"a worker with the hardware on which it was begun: {profile.label if profile else ''} ({begun})"


def _hosts(study: StudyRow) -> str:
    num_hosts = msgspec.json.decode(study.record, type=Study).settings.num_hosts
    return f" whose cluster reserves {num_hosts} hosts" if num_hosts > 1 else ""


def _devices(kind: str | None, count: int) -> str:
    if kind is None:
        return f"{count} devices" if count > 1 else "a device"
    return f"{count} {kind} devices" if count > 1 else f"a {kind} device"
