"""Garbage collection: removal of files to which no row refers."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

from sqlalchemy import CompoundSelect, Engine, select, union

from steptune.service.artifacts.store import ArtifactStore
from steptune.service.connections import reading
from steptune.service.models import ArtifactRow, WorkloadSourceRow
from steptune.tuner.records import Record

ABANDONED_S = 24 * 3600.0
"""Minimum seconds without a write after which an unfinished file counts as abandoned by a dead process. If the process
is alive, it gets an error and loses nothing.
"""
_BATCH = 200


class Collected(Record):
    num_files: int = 0
    size_bytes: int = 0


def collect_garbage(engine: Engine, artifacts: ArtifactStore, *, grace_s: float, dry_run: bool = False) -> Collected:
    """Remove files that are older than the grace period and to which no row refers.

    Files within `ArtifactStore.putting` are safe whatever the grace period, which protects files that are put first
    and recorded later.

    Args:
        grace_s: Grace period in seconds, by the clock of the file store, which may be another host's.
        dry_run: Whether files are only counted, not removed.

    Raises:
        CollectionBusyError: Files are being put without a pause. What was removed before stays removed.
    """
    now_s = artifacts.clock_s()
    before_s = now_s - grace_s
    old = (file for file in artifacts.list() if file.modified_s < before_s)
    num_files = size_bytes = 0
    while sizes := {file.name: file.size_bytes for file in islice(old, _BATCH)}:
        free = _unreferenced(engine, sizes)
        if free and not dry_run:
            with artifacts.lock.exclusive():
                # Again, now that nothing is being put: a row may have come, or the same content anew.
                free = {digest for digest in _unreferenced(engine, free) if artifacts.is_older(digest, before_s)}
                for digest in free:
                    artifacts.delete(digest)
        num_files += len(free)
        size_bytes += sum(sizes[digest] for digest in free)
    if not dry_run:
        artifacts.delete_abandoned(min(before_s, now_s - ABANDONED_S))
    return Collected(num_files=num_files, size_bytes=size_bytes)


def _unreferenced(engine: Engine, digests: Iterable[str]) -> set[str]:
    given = set(digests)
    users: CompoundSelect[Any] = union(
        select(ArtifactRow.digest).where(ArtifactRow.digest.in_(given)),
        select(WorkloadSourceRow.digest).where(WorkloadSourceRow.digest.in_(given)),
    )
    with reading(engine) as session:
        return given.difference(digest for (digest,) in session.execute(users))
