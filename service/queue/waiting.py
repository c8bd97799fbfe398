"""Reason why a study waits, in words for its user."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime

import msgspec
from sqlalchemy.orm import Session

from steptune.service.models import HardwareProfileRow, QueueEntryRow, StudyRow
from steptune.service.queue.claiming import is_named, runs_scripts
from steptune.service.queue.draining import Due
from steptune.service.queue.records import BEGUN, Quotas, WorkerInfo, kind_of
from steptune.service.queue.usage import Usage, limits_by_owner, usage_by_owner
from steptune.tuner.records import Study, StudyState
from steptune.tuner.workloads.reference import is_command

Entry = tuple[StudyRow, QueueEntryRow]
FIRST = "; the study is next on the cluster, and others wait until it has begun"


def waits_for(
    session: Session,
    entries: Sequence[Entry],
    workers: Sequence[WorkerInfo],
    dues: Mapping[str, Due | None],
    quotas: Quotas,
    now: datetime,
) -> list[str]:
    """Return what each study waits for; empty where it runs, or has ended.

    Args:
        workers: All known workers.
        dues: The study that goes first on each of their clusters.
    """
    waiting = [entry for entry in entries if is_waiting(*entry, now)]
    alive = [worker for worker in workers if worker.state not in ("gone", "draining")]
    usage = usage_by_owner(session, now) if waiting else {}
    limits = limits_by_owner(session, {study.owner_id: None for study, _ in waiting}, quotas)

    def reason(study: StudyRow, entry: QueueEntryRow) -> str:
        if not is_waiting(study, entry, now):
            return ""
        message = msgspec.json.decode(study.record, type=Study).message
        first = study.study_id in {due.study_id for due in dues.values() if due is not None}
        if _is_held(entry, now):
            asked = (
                f"hosts of the cluster: {message}" if message else "hosts that its worker has requested from a cluster"
            )
            return f"{asked}{FIRST if first else ''}"
        if not alive:
            return "a worker (none is running: start one with `steptune worker`)"
        missing = _missing_hardware(session, study, entry, alive)
        if missing:
            return missing
        exceeded = limits[study.owner_id].exceeded_by(usage.get(study.owner_id, Usage()))
        if exceeded or (exceeded := _held_up(session, study, entry, alive, dues)):
            return exceeded
        last = f"; last: {message}" if message else ""
        return f"a worker{_hosts(study)} to be free{last}{FIRST if first else ''}"

    return [reason(*entry) for entry in entries]


def is_waiting(study: StudyRow, entry: QueueEntryRow, now: datetime) -> bool:
    """Say whether a study waits for a worker or for its worker's reservation: it is queued, or its worker died."""
    lost = entry.lease_until is not None and not _is_held(entry, now)
    state = StudyState(study.state)
    return state in BEGUN and (state is StudyState.QUEUED or lost)


def _is_held(entry: QueueEntryRow, now: datetime) -> bool:
    return entry.lease_until is not None and entry.lease_until > now


def _missing_hardware(session: Session, study: StudyRow, entry: QueueEntryRow, alive: Sequence[WorkerInfo]) -> str:
    """Name the required hardware that no worker has; empty where a worker has it."""
    kind, wanted, count = kind_of(entry.required_device_kind), entry.required_hardware, entry.num_devices
    fitting = _fitting(entry, alive)
    if not fitting:
        return f"a worker with {_devices(kind, count)}"
    if is_command(study.workload):
        fitting = [worker for worker in fitting if runs_scripts(worker.isolation)]
        if not fitting:
            return (
                "a worker that runs scripts: the present workers isolate trials, but scripts need `steptune "
                "worker --isolation none`"
            )
    if wanted is not None:
        fitting = [worker for worker in fitting if is_named(wanted, worker.hardware_fingerprint, worker.hardware_label)]
        return "" if fitting else f"a worker with hardware {wanted!r}"
    begun = study.hardware_fingerprint
    # A study of fewer devices than a worker has sees another profile than the worker's; those are told apart there.
    if begun is None or any(begun == w.hardware_fingerprint or w.num_devices != count for w in fitting):
        return ""
    profile = session.get(HardwareProfileRow, begun)
    return f"a worker with the hardware on which the study began: {profile.label if profile else ''} ({begun})"


def _held_up(
    session: Session,
    study: StudyRow,
    entry: QueueEntryRow,
    alive: Sequence[WorkerInfo],
    dues: Mapping[str, Due | None],
) -> str:
    """Return the reason why another study goes first at every worker that could run this study; empty where this study
    may begin.
    """
    fitting = {worker.cluster for worker in _fitting(entry, alive)}
    if _num_hosts(study) > 1:
        fitting.discard("")
    before = [due for cluster in fitting if (due := dues[cluster]) is not None and due.holds_up(session, study)]
    return before[0].reason if before and len(before) == len(fitting) else ""


def _fitting(entry: QueueEntryRow, alive: Sequence[WorkerInfo]) -> list[WorkerInfo]:
    """Return the workers of the required kind that have enough devices for a study."""
    kind, count = kind_of(entry.required_device_kind), entry.num_devices
    return [worker for worker in alive if kind in (None, worker.device_kind) and worker.num_devices >= count]


def _num_hosts(study: StudyRow) -> int:
    return msgspec.json.decode(study.record, type=Study).settings.num_hosts


def _hosts(study: StudyRow) -> str:
    num_hosts = _num_hosts(study)
    return f" whose cluster reserves {num_hosts} hosts" if num_hosts > 1 else ""


def _devices(kind: str | None, count: int) -> str:
    if kind is None:
        return f"{count} devices" if count > 1 else "a device"
    return f"{count} {kind} devices" if count > 1 else f"a {kind} device"
