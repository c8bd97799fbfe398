"""The processes of a simulated fleet: workers as threads of a few of them, and one that times its own claims.

Each has a pipe to the simulation, over which it is told to end and sends its counts. A process that dies closes its
pipe, so that nobody waits for it; an event that processes share waits for all that sleep on it, the dead ones too.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from steptune.service.connections import create_engine_for
from steptune.service.isolation import choose
from steptune.service.places import CUDA
from steptune.service.queue import Claim, StudyQueue, WorkerOffer
from steptune.service.settings import Settings
from steptune.service.submission import new_study
from steptune.service.worker import loop
from steptune.service.worker.loop import Worker
from steptune.tuner.costs.categories import Category
from steptune.tuner.protocols import Progress
from steptune.tuner.records import Device, MeasureSettings, StudySettings, StudyState, TrialResult, new_id
from steptune.tuner.search.driver import StudyDriver
from steptune.tuner.trials.fake import FakeRunner, Surface, fake_environment

SURFACE = Surface(
    name="fleet",
    base_ms={Category.MATMUL: 40.0, Category.DATA_WAIT: 30.0, Category.OPTIMIZER: 10.0},
    factors={
        "loader": (Category.DATA_WAIT, (0.35, 0.15, 0.6)),
        "products": (Category.MATMUL, (1.3, 0.7)),
        "update": (Category.OPTIMIZER, (0.3, 1.0)),
    },
)
TICK_S = 2.0
"""Between two times that a running trial tells of its progress."""
PROBE_S = 0.5
NICE = 2
END_S = 120.0


class MemberLostError(RuntimeError):
    """A process of the fleet has ended before it was told to."""


class Member:
    """A process of the fleet.

    Args:
        target: What it does; its last argument is the process's end of the pipe.
    """

    def __init__(self, target: Callable[..., None], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=target, args=(*arguments, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def check(self) -> None:
        """Refuse to go on without it.

        Raises:
            MemberLostError: It has ended.
        """
        if not self.process.is_alive():
            raise MemberLostError(
                f"process {self.process.pid} of the fleet ended with {self.process.exitcode} before it was told to: "
                "its output says why"
            )

    def tell(self) -> None:
        """Tell it to end; it may be gone already."""
        with suppress(OSError):
            self._pipe.send("end")

    def counted(self) -> Any:
        """Return its counts once it has ended.

        Raises:
            MemberLostError: It ended without, or not in time.
        """
        try:
            found = self._pipe.recv() if self._pipe.poll(END_S) else None
        except (EOFError, OSError):
            found = None
        self.process.join(END_S if found is not None else 0)
        if found is None:
            self.process.kill()
            raise MemberLostError(f"process {self.process.pid} of the fleet has sent no counts: its output says why")
        return found


class PacedRunner(FakeRunner):
    """The runner's double, whose trials take their time.

    Args:
        check: Called while a trial runs, as the runner does; what it raises ends the trial.
        trial_s: Median of what a trial takes, in seconds.
    """

    def __init__(self, check: Any, *, trial_s: float, seed: int) -> None:
        super().__init__(SURFACE, noise_sd=0.01, seed=seed)
        self._check = check
        self._trial_s = trial_s
        self._pace = random.Random(seed)

    def kill(self) -> None:
        """Called when the lease is lost; the next `check` says so."""

    def run(self, specs: Any, purposes: Any, settings: MeasureSettings, group: str, listener: Any) -> list[TrialResult]:
        end = time.monotonic() + self._trial_s * self._pace.lognormvariate(0.0, 0.1)
        while (left := end - time.monotonic()) > 0:
            self._check()
            listener(Progress(trial_id=specs[0].trial_id, text="measuring", phase="measure"))
            time.sleep(min(TICK_S, left))
        return super().run(specs, purposes, settings, group, listener)


class TimedQueue(StudyQueue):
    """The queue, with how long claims take."""

    taken_s: list[float]
    idle_s: list[float]

    def claim(self, *arguments: Any, **options: Any) -> Claim | None:
        began_s = time.perf_counter()
        found = super().claim(*arguments, **options)
        (self.idle_s if found is None else self.taken_s).append(time.perf_counter() - began_s)
        return found


# --- workers ------------------------------------------------------------------------------------------


def run_workers(url: str, folder: str, first: int, count: int, options: dict[str, Any], pipe: Connection) -> None:
    """Run workers as threads of this process until it is told to end; then send what their claims took."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(NICE)
    sys.setswitchinterval(0.001)
    settings = Settings(
        _env_file=None,
        database_url=url,
        data_directory=Path(folder) / "data",
        lease_s=options["lease_s"],
        heartbeat_s=options["heartbeat_s"],
    )
    TimedQueue.taken_s, TimedQueue.idle_s = [], []
    numbers = iter(range(first * 1_000_000, (first + 1) * 1_000_000))

    @contextmanager
    def paced(*, check: Any, directory: Path, **_: Any) -> Iterator[PacedRunner]:
        directory.mkdir(parents=True, exist_ok=True)
        yield PacedRunner(check, trial_s=options["trial_s"], seed=next(numbers))

    loop.isolated_runner = paced  # type: ignore[assignment]
    loop.StudyDriver = functools.partial(StudyDriver, strategies=SURFACE.strategies)  # type: ignore[misc,assignment]
    loop.open_queue = lambda engine, _: TimedQueue(engine, lease_s=settings.lease_s)
    level = choose("none", sys.executable)
    engine = create_engine_for(url)
    workers = []
    for number in range(first, first + count):
        offer = WorkerOffer(
            worker_id=new_id(),
            name=f"worker{number}",
            host_id=f"host{number}",
            profile=fake_environment().hardware,
            cores=(0,),
        )
        workers.append(Worker(engine, settings, offer, level))
    threads = [threading.Thread(target=worker.run, name=f"worker{n}") for n, worker in enumerate(workers)]
    for thread in threads:
        thread.start()
        time.sleep(options["ramp_s"] / 2 / count)
    pipe.poll(None)
    for worker in workers:
        worker.stop(within_s=0)
    for thread in threads:
        thread.join(60)
    engine.dispose()
    pipe.send((TimedQueue.taken_s, len(TimedQueue.idle_s), time.process_time()))


def probe_claims(url: str, folder: str, owner_id: str, pipe: Connection) -> None:
    """Submit studies for hardware that this process alone has, claim them, and send what the claims took."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    engine = create_engine_for(url)
    queue = StudyQueue(engine)
    profile = replace(
        fake_environment().hardware, devices=(Device(kind=CUDA, name="probe", memory_bytes=1 << 30),), cpu_name="probe"
    )
    offer = WorkerOffer(worker_id=new_id(), name="probe", host_id="probe", profile=profile, cores=(0,), gpus=(0,))
    queue.register(offer)
    taken_s: list[float] = []
    while not pipe.poll(PROBE_S):
        study = new_study(new_id(), "zoo:synthetic", StudySettings(), Path(folder) / "data")
        queue.submit(study, owner_id=owner_id, required_device_kind=CUDA)
        began_s = time.perf_counter()
        claim = queue.claim(offer)
        taken_s.append(time.perf_counter() - began_s)
        assert claim is not None, "the probe's study is nobody else's"
        assert claim.lease.study_id == study.study_id, "the others need another kind of device"
        queue.release(claim.lease, StudyState.COMPLETED)
        queue.delete(study.study_id)
    engine.dispose()
    pipe.send(taken_s[1:])  # the first one compiles the statements, which a worker does once
