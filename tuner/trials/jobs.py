"""Jobs that a parent runs under its trial servers, and how each job ended."""

from __future__ import annotations

import selectors
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from steptune.tuner.errors import RunnerError
from steptune.tuner.records import Deadlines, Failure, FailureKind, Phase
from steptune.tuner.trials.failures import failure_of_exit
from steptune.tuner.trials.messages import (
    Failed,
    FromRank,
    FromServer,
    JobEnded,
    Kill,
    PhaseBegan,
    RankExited,
    RankMessage,
    Reported,
    ServerReady,
    Start,
    TaskDone,
    Tell,
    decoder_of,
    encode,
)
from steptune.tuner.trials.watch import Watch

STARTING = (Phase.BUILD, Phase.GUARD, Phase.WARM_UP)
"""Phases that a trial enters by itself. It enters the later phases on command."""
END_TIMEOUT_S = 15.0
MAX_JOB_MESSAGES = 10_000
MAX_JOB_BYTES = 256 << 20
"""Maximum bytes of a job's messages; a job sends a few dozen, one of which is a profile of 100 kB."""


class Source(Protocol):
    """Source of the messages of jobs."""

    def fileno(self) -> int: ...

    def take_messages(self) -> list[FromServer]: ...


class Server(Source, Protocol):
    """Server that runs jobs: a trial server, or the trial servers of several hosts together."""

    def send(self, message: Any) -> None: ...


@dataclass
class Job:
    """Job: a task, or the ranks of a trial."""

    job_id: str
    server: Server
    deadlines: Deadlines
    inbox: deque[FromRank] = field(default_factory=deque)
    phase: Phase = Phase.BUILD
    active_since_s: float | None = field(default_factory=time.monotonic)
    """Start of the current phase, or None while the job waits for a command: waiting belongs to no phase and has no
    deadline.
    """
    phases_ns: dict[str, int] = field(default_factory=dict)
    rank_phases: dict[int, Phase] = field(default_factory=dict)
    """Phase of each rank; the ranks of a trial may differ by up to one step."""
    failure: Failure | None = None
    consequence: bool = False
    """True if the failure may follow from another rank's failure that is not known yet."""
    finished_ranks: set[int] = field(default_factory=set)
    """Ranks that have sent their last message."""
    failed_ranks: set[int] = field(default_factory=set)
    """Ranks that have reported a failure."""
    num_messages: int = 0
    num_bytes: int = 0
    ended: bool = False
    killed: bool = False

    def enter(self, phase: Phase) -> None:
        """Stop the clock of the current phase and begin the next one. A job that waits for a command keeps waiting."""
        active = self.active_since_s is not None
        self.pause()
        self.phase = phase
        if active:
            self.resume()

    def pause(self) -> None:
        """Stop the phase's clock: the job waits for a command."""
        if self.active_since_s is not None:
            spent = int((time.monotonic() - self.active_since_s) * 1e9)
            self.phases_ns[self.phase.value] = self.phases_ns.get(self.phase.value, 0) + spent
            self.active_since_s = None

    def resume(self) -> None:
        self.active_since_s = time.monotonic()

    def phase_of(self, rank: int) -> Phase:
        return self.rank_phases.get(rank, self.phase)

    def left_behind(self) -> dict[int, Phase]:
        """Return the ranks that are in an earlier phase than rank 0, with their phases."""
        order = list(Phase)
        return {r: phase for r, phase in self.rank_phases.items() if order.index(phase) < order.index(self.phase)}

    @property
    def phase_limit_s(self) -> float:
        """Maximum seconds of the current phase; the phases before the first window share one limit."""
        limit_s, starting_s = self.deadlines.of(self.phase), self.deadlines.starting_s
        if starting_s is None or self.phase not in STARTING:
            return limit_s
        before_s = sum(ns for name, ns in self.phases_ns.items() if name != self.phase.value) / 1e9
        return min(limit_s, max(0.0, starting_s - before_s))

    def active_for(self, seconds: float) -> bool:
        return self.active_since_s is not None and time.monotonic() - self.active_since_s > seconds


class JobBoard:
    """Distributor that passes the servers' messages to the jobs that they concern.

    Args:
        check: Function that is called a few times per second while jobs run; an exception in it ends the wait for them.
    """

    def __init__(self, watch: Watch | None = None, check: Callable[[], None] = lambda: None) -> None:
        self._watch = watch
        self._readers = ThreadPoolExecutor(max_workers=1, thread_name_prefix="quota")
        self._reading: tuple[list[Job], Future[Failure | None]] | None = None
        self._check = check
        self._selector = selectors.DefaultSelector()
        self._jobs: dict[str, Job] = {}
        self._decoder = decoder_of(FromRank)

    def add_server(self, server: Source) -> None:
        self._selector.register(server, selectors.EVENT_READ)

    def remove_server(self, server: Source) -> None:
        """Stop listening to a server. Call this before closing it, because its descriptor may be used again."""
        self._selector.unregister(server)

    def lose_server(self, server: Server) -> None:
        """Record that a server is gone, and that its jobs are gone with it."""
        self.remove_server(server)
        for job in self._jobs.values():
            if job.server is server:
                job.pause()
                job.ended = True

    def start(
        self,
        server: Server,
        *,
        job_id: str,
        entry: str,
        payload: Any,
        deadlines: Deadlines,
        num_ranks: int = 1,
        log: str = "",
    ) -> Job:
        job = Job(job_id=job_id, server=server, deadlines=deadlines)
        server.send(Start(job=job_id, entry=entry, payload=msgspec.Raw(encode(payload)), num_ranks=num_ranks, log=log))
        self._jobs[job_id] = job
        return job

    def tell(self, job: Job, command: Any) -> None:
        """Send a command to rank 0; the phase's deadline restarts."""
        job.pause()
        job.resume()
        job.server.send(Tell(job=job.job_id, command=msgspec.Raw(encode(command))))

    def next_message(self, job: Job) -> FromRank | None:
        """Return the next message of a job, or None when it has ended. Kill a job that exceeds its phase's deadline;
        its failure then names the limit.
        """
        while True:
            if job.inbox:
                return job.inbox.popleft()
            if job.ended:
                return None
            limit = job.phase_limit_s
            if job.active_for(limit) and not job.killed:
                self._fail(job, _overran(job, limit), consequence=True)
                self.kill(job)
            elif job.killed and job.active_for(END_TIMEOUT_S):
                raise RunnerError(f"job {job.job_id} could not be ended within {END_TIMEOUT_S:g} s")
            self._check()
            self._look_at_quota()
            self._pump(0.25)

    def kill(self, job: Job) -> None:
        """Kill a job's processes; `next_message` reports its end."""
        if not job.ended and not job.killed:
            job.killed = True
            job.pause()
            job.resume()
            job.server.send(Kill(job=job.job_id))

    def end(self, job: Job) -> None:
        """Kill a job if it still runs, and wait until all of its processes are gone."""
        self.kill(job)
        while self.next_message(job) is not None:
            pass

    def forget(self, job: Job) -> None:
        self._jobs.pop(job.job_id, None)

    def running(self) -> list[Job]:
        return [job for job in self._jobs.values() if not job.ended]

    def _look_at_quota(self) -> None:
        """End every running job when the trials together exceed their quota, because it is unknown which one uses too
        much.

        Another thread reads what they use, so that deadlines hold meanwhile: if hundreds of busy processes share the
        cores, the reading takes minutes.
        """
        running = [job for job in self.running() if not job.killed]
        if self._reading is None:
            if self._watch and running:
                self._reading = running, self._readers.submit(self._watch.exceeded, running[0].phase)
            return
        jobs, reading = self._reading
        if not reading.done():
            return
        self._reading = None
        failure = reading.result()
        if failure is None:
            return
        left = [job for job in jobs if not job.ended and not job.killed]
        for job in left:
            self._fail(job, msgspec.structs.replace(failure, phase=job.phase))
            self.kill(job)
        if not left and self._watch is not None:
            self._watch.count_again()

    def _pump(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(timeout_s):
            server: Any = key.fileobj
            for message in server.take_messages():
                if not isinstance(message, ServerReady) and message.job in self._jobs:
                    self._deliver(self._jobs[message.job], message)

    def _deliver(self, job: Job, message: RankMessage | RankExited | JobEnded) -> None:
        match message:
            case JobEnded():
                job.pause()
                job.ended = True
            case RankExited():
                self._exited(job, message)
            case RankMessage():
                said = self._understood(job, message)
                if said is None:
                    return
                if isinstance(said, Reported | TaskDone):
                    job.finished_ranks.add(message.rank)
                match said:
                    case PhaseBegan():
                        job.rank_phases[message.rank] = said.phase
                        if message.rank == 0:
                            job.enter(said.phase)
                            job.inbox.append(said)
                    case Failed():
                        job.failed_ranks.add(message.rank)
                        self._fail(job, said.failure, consequence=said.consequence)
                    case _:
                        job.inbox.append(said)

    def _understood(self, job: Job, message: RankMessage) -> FromRank | None:
        """Decode a rank's message; None if it is invalid, because user code can write anything into the connection."""
        job.num_messages += 1
        job.num_bytes += len(message.message)
        try:
            if job.num_messages > MAX_JOB_MESSAGES or job.num_bytes > MAX_JOB_BYTES:
                raise msgspec.DecodeError(
                    f"a job may send at most {MAX_JOB_MESSAGES} messages and {MAX_JOB_BYTES} bytes, got "
                    f"{job.num_messages} messages with {job.num_bytes} bytes in total"
                )
            said: FromRank = self._decoder.decode(message.message)
            return said
        except msgspec.DecodeError as error:
            self._fail(job, _not_understood(job.phase, message.rank, str(error)))
            self.kill(job)
            return None

    def _exited(self, job: Job, message: RankExited) -> None:
        """Record the exit of a rank. If the rank ended without a report, its exit is taken as the cause of the other
        ranks' broken connections.
        """
        if message.violation:
            self._fail(job, _not_understood(job.phase, message.rank, message.violation))
        finished = message.code == 0 and message.rank in job.finished_ranks
        if finished or message.violation or message.rank in job.failed_ranks or message.killed or job.killed:
            return
        job.failure = failure_of_exit(
            code=message.code,
            signal_number=message.signal,
            out_of_memory=message.out_of_memory,
            phase=job.phase_of(message.rank),
            rank=message.rank,
        )
        if message.code == 0:  # the server took it for a good end and lets the other ranks wait
            self.kill(job)

    @staticmethod
    def _fail(job: Job, failure: Failure, *, consequence: bool = False) -> None:
        """Record the failure of a job. The first reported failure is kept, unless it may be the consequence of one that
        is reported later.
        """
        if job.failure is None or (job.consequence and not consequence):
            job.failure, job.consequence = failure, consequence


def _overran(job: Job, limit_s: float) -> Failure:
    message = f"the {job.phase.value} phase did not end within {limit_s:g} s"
    behind = job.left_behind()
    if behind:
        ranks = ", ".join(f"rank {rank} in {phase.value}" for rank, phase in sorted(behind.items()))
        message += f": the other ranks waited for {ranks}"
    return Failure(kind=FailureKind.TIMEOUT, phase=job.phase, rank=min(behind, default=0), message=message)


def _not_understood(phase: Phase, rank: int, why: str) -> Failure:
    return Failure(
        kind=FailureKind.WORKLOAD_ERROR,
        phase=phase,
        rank=rank,
        message=f"the process wrote invalid data to Steptune's control socket ({why}): the workload must not close or "
        "write to file descriptors that it did not open",
    )
