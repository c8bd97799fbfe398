"""Keeper that extends a lease, and ends the work under it if the lease cannot be extended.

A thread sends heartbeats. The worker believes itself to hold a study only as long as its own clock says that the
lease, counted from before the last heartbeat that succeeded, has not ended: the lease in the database is then still
valid, for it counts from a later time. When that time is over, the processes of the trials are killed at once, whatever
the main thread is doing; before, a database that cannot be reached is only waited for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from steptune.service.fencing import Lease
from steptune.service.queue import StudyQueue
from steptune.service.worker.clock import now_s
from steptune.tuner.errors import LeaseLostError, StoreError, StoreUnavailableError
from steptune.tuner.records import StudyState
from steptune.tuner.search.view import StudyInterrupt

SAFE_SHARE = 0.85
"""Share of an expiring lease after which trials are killed; the rest of the lease leaves time to kill them."""
RETRY_S = 0.5
WATCH_S = 1.0
"""Seconds between checks of the clock. One long wait would not count the time for which the machine is suspended."""
Answer = TypeVar("Answer")


class LeaseKeeper:
    """Keeper of one claim's lease, from the claim to its release. Use it as a context.

    Args:
        kill: Kills all processes of trials; called from the keeper's thread.
        on_beat: Called after each heartbeat that succeeded, from the keeper's thread.
        claimed_s: `now_s()` before the claim was made.
    """

    def __init__(
        self,
        queue: StudyQueue,
        lease: Lease,
        *,
        lease_s: float,
        heartbeat_s: float,
        claimed_s: float,
        kill: Callable[[], None],
        on_beat: Callable[[], None] = lambda: None,
    ) -> None:
        self._queue = queue
        self._lease = lease
        self._safe_s = SAFE_SHARE * lease_s
        self._heartbeat_s = heartbeat_s
        self._held_until_s = claimed_s + self._safe_s
        self._kill = kill
        self._on_beat = on_beat
        self._lost = ""
        self._requested = ""
        self._told = False
        self._drain_until_s: float | None = None
        self._ended = threading.Event()
        self._beats = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._watch = threading.Thread(target=self._watch_clock, name="lease", daemon=True)

    def __enter__(self) -> LeaseKeeper:
        self._beats.start()
        self._watch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._watch.join()
        self._beats.join(self._heartbeat_s)  # it may wait for a database that does not answer

    def drain(self, deadline_s: float) -> None:
        """Drain the worker: no new trials start, and running trials may continue until `deadline_s`, a time of the
        clock `now_s`. The next heartbeat reports that the worker drains.

        Called from signal handlers: sets values and takes no lock.
        """
        if self._drain_until_s is None or deadline_s < self._drain_until_s:
            self._drain_until_s = deadline_s

    def check_lease(self) -> None:
        """Check that this worker still holds the study.

        Raises:
            LeaseLostError: The lease is over.
        """
        if self._lost or now_s() > self._held_until_s:
            raise LeaseLostError(self._lost or _cut_off(self._lease))

    def check(self) -> None:
        """Check the lease; called repeatedly while trials run.

        Raises:
            LeaseLostError: The lease is over; again at every call.
            StudyInterrupt: The user asked for it, or the worker must stop and cannot wait; raised once.
        """
        self.check_lease()
        if self._told:
            return
        drained = self._drain_until_s is not None and now_s() > self._drain_until_s
        if self._requested or drained:
            self._told = True
            raise _interrupt(self._requested)

    def check_between_trials(self) -> None:
        """Check the lease before trials begin.

        Raises:
            As `check`; StudyInterrupt also if the worker must stop.
        """
        self.check()
        if self._drain_until_s is not None and not self._told:
            self._told = True
            raise _interrupt("")

    def persist(self, ask: Callable[[], Answer]) -> Answer:
        """Query the database; while it is busy or restarting, retry for as long as the lease lasts.

        Raises:
            LeaseLostError: The lease is over.
        """
        while True:
            self.check_lease()
            try:
                return ask()
            except StoreUnavailableError:
                self._ended.wait(RETRY_S)

    def _beat(self) -> None:
        wait_s = self._heartbeat_s
        while not self._ended.wait(wait_s):
            began_s = now_s()
            wait_s = self._heartbeat_s
            try:
                self._requested = self._queue.heartbeat(self._lease, draining=self._drain_until_s is not None)
                self._held_until_s = began_s + self._safe_s
            except LeaseLostError as error:
                self._lose(str(error))
                return
            except StoreError:
                wait_s = min(RETRY_S, self._heartbeat_s)
            else:
                self._on_beat()

    def _watch_clock(self) -> None:
        while not self._ended.wait(min(WATCH_S, max(0.05, self._held_until_s - now_s()))):
            if now_s() > self._held_until_s:
                self._lose(_cut_off(self._lease))
            if self._lost:
                return

    def _lose(self, why: str) -> None:
        """Give up the claim, so that nothing more is measured on devices that another worker may hold."""
        self._lost = self._lost or why
        if not self._ended.is_set():
            self._kill()


def _interrupt(requested: str) -> StudyInterrupt:
    if requested == "cancel":
        return StudyInterrupt(StudyState.CANCELLED, recommends=True)
    return StudyInterrupt(StudyState.PAUSED if requested == "pause" else StudyState.QUEUED)


def _cut_off(lease: Lease) -> str:
    return f"the database could not be reached in time, and the lease on study {lease.study_id} has expired"
