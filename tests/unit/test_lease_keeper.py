"""Belief of a worker about its lease, by its own clock."""

import time

import pytest

from steptune.service.fencing import Lease
from steptune.service.worker.clock import now_s
from steptune.service.worker.keeper import LeaseKeeper
from steptune.tuner.errors import LeaseLostError

LEASE = Lease(study_id="study", worker_id="worker", fence=1)


def keeper(queue: object = None, **changes) -> LeaseKeeper:
    """One whose threads are not started."""
    times = {"lease_s": 60.0, "heartbeat_s": 10.0, "claimed_s": now_s(), **changes}
    return LeaseKeeper(queue, LEASE, kill=lambda: None, **times)


@pytest.mark.skipif(not hasattr(time, "CLOCK_BOOTTIME"), reason="this system does not count the time of a suspension")
def test_a_lease_ends_while_the_machine_is_suspended(monkeypatch) -> None:
    """Only the clock that counts since the machine was started goes on then."""
    held = keeper()
    held.check_lease()
    real = time.clock_gettime
    monkeypatch.setattr(time, "clock_gettime", lambda clock: real(clock) + 3600 * (clock == time.CLOCK_BOOTTIME))
    with pytest.raises(LeaseLostError, match="could not be reached in time"):
        held.check_lease()


def test_the_heartbeats_of_a_worker_that_shall_end_say_so() -> None:
    beats: list[bool] = []

    class Queue:
        """Hears two heartbeats; the worker is told to stop between them."""

        def heartbeat(self, lease: Lease, *, draining: bool) -> str:
            beats.append(draining)
            if draining:
                raise LeaseLostError("that is enough")
            held.drain(now_s() + 60)
            return ""

    held = keeper(Queue(), heartbeat_s=0.001)
    held._beat()
    assert beats == [False, True]
