"""Runner of trials on this machine: one trial server per study and load-time environment."""

from __future__ import annotations

import itertools
import math
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from steptune.tuner.errors import (
    BaselineError,
    BudgetError,
    RunnerError,
    WorkloadError,
)
from steptune.tuner.hardware import free_memory_bytes
from steptune.tuner.protocols import Progress, ProgressListener
from steptune.tuner.records import (
    Attempt,
    Deadlines,
    Environment,
    Failure,
    FailureKind,
    HardwareProfile,
    MeasureSettings,
    Purpose,
    Topology,
    TrialResult,
    TrialSpec,
    WorkloadFacts,
    new_id,
)
from steptune.tuner.trials.connection import NO_SANDBOX, default_start_method
from steptune.tuner.trials.failures import is_crash_of_profiler, repeats_after
from steptune.tuner.trials.group import GroupRun
from steptune.tuner.trials.host_group import HostGroup
from steptune.tuner.trials.inspection import CheckRequest, InspectRequest
from steptune.tuner.trials.jobs import Job
from steptune.tuner.trials.memory import CONTEXT_BYTES
from steptune.tuner.trials.messages import Preload, TaskDone, TaskProgress
from steptune.tuner.trials.rank import DescribeRequest
from steptune.tuner.trials.reference import ReferenceRequest
from steptune.tuner.trials.sandbox import Sandbox
from steptune.tuner.trials.server_pool import ServerPool
from steptune.tuner.trials.study_files import StudyFiles
from steptune.tuner.trials.topology import TopologyRequest

MEMORY_MARGIN = 0.10
"""Share of the free memory that trials must leave free."""
TASK_DEADLINE_S = 900.0
MAX_RENEWALS = 10
"""Time, as a multiple of a task's deadline, during which progress reports restart the deadline. It is limited because
user code could report progress without end.
"""


@dataclass
class _Task:
    """Job that is not a trial, with its last activity, and its answer (None until the job has answered)."""

    entry: str
    job: Job
    doing: str
    answer: bytes | None = None


@dataclass
class _Beside:
    """Task that runs the guard's reference while the next group of trials starts."""

    request: ReferenceRequest
    task: _Task
    until_s: float
    """Time on the monotonic clock at which the task is abandoned."""

    @property
    def made(self) -> bool:
        return self.task.job.failure is None and self.task.answer is not None


class LocalRunner:
    """`TrialRunner` that runs trials as processes on this machine.

    Args:
        workload: Reference of the workload (an absolute path for a file).
        directory: The study's directory.
        python: The user's interpreter.
        memory_limit_bytes: Maximum memory of a trial; None allows the free memory, less a margin.
        variables: Environment variables of tasks (a trial brings its own).
        sandbox: Sandbox around every trial server.
        task_deadline_s: Maximum seconds for one step of a task (inspecting the workload, running its reference).
        check: Function that is called a few times per second while anything runs; an exception in it ends all that
            runs.
        hosts: Group of all hosts of the ranks, if there are several; the caller closes it.
    """

    def __init__(  # noqa: PLR0913  named, most with a default
        self,
        *,
        workload: str,
        directory: Path,
        device: str = "",
        num_ranks: int = 1,
        seed: int = 0,
        python: str = sys.executable,
        memory_limit_bytes: int | None = None,
        variables: Mapping[str, str] | None = None,
        start_method: str | None = None,
        sandbox: Sandbox = NO_SANDBOX,
        listener: ProgressListener = lambda progress: None,
        task_deadline_s: float = TASK_DEADLINE_S,
        check: Callable[[], None] = lambda: None,
        hosts: HostGroup | None = None,
    ) -> None:
        self._workload = workload
        self._files = StudyFiles(directory)
        self._device = device
        self._num_ranks = num_ranks
        self._seed = seed
        self._memory_limit = memory_limit_bytes
        self._variables = dict(variables or {})
        self._sandbox = sandbox
        self._listener = listener
        self._task_deadline_s = task_deadline_s
        self._device_memory_bytes = 0
        self._check = check
        self._hosts = hosts
        self._given_up: tuple[float, str] | None = None
        """Time on the monotonic clock at which the running task is abandoned, and the task's name."""
        self._beside: _Beside | None = None
        self._pool = ServerPool(
            self._files,
            workload=workload,
            python=python,
            start_method=start_method or default_start_method(),
            sandbox=sandbox,
            hosts=hosts,
            look=self._look,
            describe=self._described,
        )
        self._board = self._pool.board
        directory.mkdir(parents=True, exist_ok=True)

    def _look(self) -> None:
        self._check()
        if self._hosts is not None:
            self._hosts.end_what_is_left()
        if self._given_up is not None and time.monotonic() > self._given_up[0]:
            doing, self._given_up = self._given_up[1], None  # once: its processes are still to be ended
            raise BudgetError(f"{doing} did not finish in the remaining time")

    @contextmanager
    def _given_up_after(self, longest_s: float | None, doing: str) -> Iterator[None]:
        self._given_up = None if longest_s is None else (time.monotonic() + longest_s, doing)
        try:
            yield
        finally:
            self._given_up = None

    # --- tasks --------------------------------------------------------------------------------

    def describe(self) -> Environment:
        self._pool.know_hosts()
        environment = self._described()
        self._device = environment.hardware.device_kind
        if self._device == "cuda":
            self._device_memory_bytes = environment.hardware.devices[0].memory_bytes
        return environment

    def _described(self) -> Environment:
        """Describe the environment of all hosts.

        Raises:
            RunnerError: The hosts differ.
        """
        num_hosts = 1 if self._hosts is None else self._hosts.num_hosts
        request = DescribeRequest(
            study_directory=str(self._files.directory), device=self._device, num_ranks=self._num_ranks
        )
        return msgspec.msgpack.decode(self._task("describe", request, num_ranks=num_hosts), type=Environment)

    def check(self) -> None:
        """Load the workload as a quick check, and report errors of the workload or the device.

        Raises:
            WorkloadError: The workload cannot be loaded, or the device does not exist.
        """
        self._task(
            "check",
            CheckRequest(
                workload=self._workload,
                device=self._device,
                num_ranks=self._num_ranks,
                memory_limit_bytes=self._memory_limit,
            ),
        )

    def measure_topology(self, hardware: HardwareProfile, known: Topology | None, seconds: float) -> Topology | None:
        if self._num_ranks == 1:
            return None
        request = TopologyRequest(
            study_directory=str(self._files.directory), hardware=hardware, known=known, seconds=seconds
        )
        return msgspec.msgpack.decode(self._task("topology", request, num_ranks=self._num_ranks), type=Topology)

    def inspect(self, longest_s: float | None = None) -> WorkloadFacts:
        request = InspectRequest(
            workload=self._workload,
            study_directory=str(self._files.directory),
            device=self._device or "cpu",
            seed=self._seed,
            num_ranks=self._num_ranks,
            memory_limit_bytes=self._memory_limit,
        )
        with self._given_up_after(longest_s, "inspecting the workload"):
            facts = msgspec.msgpack.decode(self._task("inspect", request), type=WorkloadFacts)
        for server in self._pool.servers.values():
            server.send(Preload(path=str(self._files.imports)))
        return facts

    def begin_reference(self, request: ReferenceRequest, longest_s: float) -> None:
        variables = {**self._variables, **request.environment_variables}
        task = self._begin_task("reference", request, variables, self._num_ranks, longest_s)
        self._beside = _Beside(request=request, task=task, until_s=time.monotonic() + longest_s)

    def make_reference(self, request: ReferenceRequest, longest_s: float | None = None) -> None:
        beside, self._beside = self._beside, None
        if beside is not None and beside.request == request and beside.made:
            return
        try:
            with self._given_up_after(longest_s, "running the guard's reference"):
                self._task("reference", request, request.environment_variables, self._num_ranks)
        except WorkloadError as error:
            failure: Failure | None = getattr(error, "failure", None)
            raise BaselineError(
                str(error), out_of_memory=failure is not None and failure.kind is FailureKind.OUT_OF_MEMORY
            ) from None

    def task(self, entry: str, request: Any) -> bytes:
        """Run an entry that is not a trial (such as "train") on the study's ranks, and return its answer in
        MessagePack.
        """
        return self._task(entry, request, num_ranks=self._num_ranks)

    def _task(self, entry: str, request: Any, variables: Mapping[str, str] | None = None, num_ranks: int = 1) -> bytes:
        """Run a task; repeat it if the environment ended it."""
        variables = {**self._variables, **(variables or {})}
        repeats = 0
        while True:
            task = self._begin_task(entry, request, variables, num_ranks)
            try:
                self._finish_task(task)
            finally:
                self._end([task.job])
            failure = task.job.failure
            if failure is None or repeats >= repeats_after(failure):
                break
            repeats += 1
            self._listener(Progress(trial_id="", text=f"{task.doing}: {failure.message}; repeating", phase=entry))
        if failure is not None:
            self._raise_failure(task.job, entry, task.doing)
        if task.answer is None:
            raise RunnerError(f"the {entry} task ended without an answer; see {self._files.logs}")
        return task.answer

    def _begin_task(
        self, entry: str, request: Any, variables: Mapping[str, str], num_ranks: int, longest_s: float = math.inf
    ) -> _Task:
        job_id = new_id()
        if num_ranks > 1:
            request = msgspec.structs.replace(request, run_id=job_id)
        job = self._pool.begin(
            variables,
            job_id=job_id,
            entry=entry,
            payload=request,
            deadlines=Deadlines(build_s=min(self._task_deadline_s, longest_s)),
            num_ranks=num_ranks,
            log=str(self._files.logs / f"{entry}.log"),
        )
        return _Task(entry=entry, job=job, doing=entry)

    def _finish_task(self, task: _Task, beside: Sequence[Job] = ()) -> None:
        """Wait until a task has ended, with or without an answer.

        Args:
            beside: Jobs that run at the same time, and end with their trial server.
        """
        began_s = time.monotonic()
        try:
            while (message := self._board.next_message(task.job)) is not None:
                if isinstance(message, TaskProgress):
                    if time.monotonic() - began_s < MAX_RENEWALS * self._task_deadline_s:
                        task.job.enter(task.job.phase)  # progress: the deadline begins anew
                    task.doing = message.text
                    self._listener(Progress(trial_id="", text=task.doing, phase=task.entry))
                elif isinstance(message, TaskDone):
                    task.answer = bytes(message.result)
        except RunnerError as error:
            self._outlive(error, [task.job, *beside])

    def _raise_failure(self, job: Job, entry: str, doing: str) -> None:
        failure = job.failure
        assert failure is not None
        if failure.kind is FailureKind.TIMEOUT:
            message = (
                f"{doing} did not end within {self._task_deadline_s:g} s: use a smaller global_batch or model, "
                "shorten the preparation, or allow more time with --phase-timeout"
            )
            failure = msgspec.structs.replace(failure, message=message)
        if failure.kind is FailureKind.OUT_OF_MEMORY and entry == "inspect":
            message = (
                f"the workload does not fit into memory while {doing}: {failure.message}. Use a smaller "
                "global_batch or model, a machine with more memory, or a larger --memory-limit"
            )
            failure = msgspec.structs.replace(failure, message=message)
        if failure.kind is FailureKind.INFRASTRUCTURE:
            raise RunnerError(f"{failure.message} (files and logs of the study: {self._files.directory})")
        if entry in ("describe", "topology"):
            raise RunnerError(failure.message)
        error = WorkloadError(failure.message)
        error.add_note(failure.traceback)
        error.failure = failure  # type: ignore[attr-defined]
        raise error

    # --- trials -------------------------------------------------------------------------------

    def run(
        self,
        specs: Sequence[TrialSpec],
        purposes: Sequence[Purpose],
        settings: MeasureSettings,
        group: str,
        listener: ProgressListener,
    ) -> list[TrialResult]:
        earlier: dict[str, tuple[Attempt, ...]] = {spec.trial_id: () for spec in specs}
        seed = self._seed + zlib.crc32(group.encode())
        for repeats in itertools.count():
            began, began_ns = datetime.now(UTC).isoformat(), time.monotonic_ns()
            run = GroupRun(self._board, self._start, settings, listener, seed=seed, before_windows=self._end_beside)
            crowded = self._beside is not None and not self._beside.task.job.ended
            self._run_group(run, specs, purposes, repeats)
            died = _ended_by_environment(run, repeats) or (_out_of_memory(run) if crowded else None)
            how = "repeating"
            if died is None and (died := _crashed_in_profiler(run)) is not None:
                specs = [msgspec.structs.replace(spec, profile=False, keep_trace=False) for spec in specs]
                how = "repeating without a profile"
            if died is None:
                break
            listener(Progress(trial_id=specs[0].trial_id, text=f"{died.message}; {how}"))
            failures = {member.spec.trial_id: member.job.failure for member in run.members}
            for spec in specs:
                failure = failures.get(spec.trial_id) or _died_beside(died)
                attempt = Attempt(failure=failure, began_at=began, duration_ns=time.monotonic_ns() - began_ns)
                earlier[spec.trial_id] += (attempt,)
        wanted = min(2, settings.min_rounds)
        return [
            member.result(group, wanted, self._sandbox.level, repeated=earlier[member.spec.trial_id])
            for member in run.members
        ]

    def _run_group(self, run: GroupRun, specs: Sequence[TrialSpec], purposes: Sequence[Purpose], repeats: int) -> None:
        """Run a group of trials to its end.

        Raises:
            RunnerError: Not all trials were started, and the group is not repeated.
        """
        try:
            run.run(specs, purposes)
        except RunnerError as error:
            self._outlive(error, [member.job for member in run.members])
            if len(run.members) < len(specs) and _ended_by_environment(run, repeats) is None:
                raise
        finally:
            beside = [self._beside.task.job] if self._beside is not None else []
            self._end([*(member.job for member in run.members), *beside])

    def _end_beside(self, jobs: Sequence[Job]) -> None:
        """Wait for the guard's reference that was started together with a group of trials, because nothing may be
        measured while it runs. A reference that takes too long is ended together with the group, and is run again when
        it is needed.

        Args:
            jobs: Jobs of the group, which end with their trial server.
        """
        if self._beside is None:
            return
        left_s = self._beside.until_s - time.monotonic()
        with suppress(BudgetError), self._given_up_after(left_s, "running the guard's reference"):
            self._finish_task(self._beside.task, beside=jobs)

    def _end(self, jobs: Sequence[Job]) -> None:
        """End all jobs of a group of trials, and clean up after them."""
        for job in jobs:
            try:
                self._board.end(job)
            except RunnerError as error:
                self._outlive(error, [job])
            self._board.forget(job)
        self._sandbox.tidy([server.temporary for server in self._pool.servers.values()])

    def _outlive(self, error: RunnerError, jobs: Sequence[Job]) -> None:
        """Remove trial servers that died. Their jobs have failed with them, and the next jobs get a new server.

        Raises:
            RunnerError: The error had another cause, or the server was killed on purpose.
        """
        dead = [] if self._pool.was_killed else self._pool.remove_dead()
        if not dead:
            raise error
        for job in jobs:
            if job.server in dead and job.failure is None:
                job.failure = Failure(kind=FailureKind.INFRASTRUCTURE, phase=job.phase, message=str(error))

    def fits_together(self, peaks_bytes: Sequence[int]) -> bool:
        """Say whether trials with these memory peaks can run at the same time, with a margin. A trial's peak is that of
        its rank that uses the most memory.

        On a CPU, all ranks of all trials share the memory; each device has its own memory, in which every process has a
        context beside its tensors.
        """
        if self._device_memory_bytes:
            needed = sum(peak + CONTEXT_BYTES for peak in peaks_bytes)
            return needed < (1 - MEMORY_MARGIN) * self._device_memory_bytes
        num_ranks = self._num_ranks if self._hosts is None else self._hosts.ranks_per_host
        limits = [free_memory_bytes(), *([self._memory_limit * num_ranks] if self._memory_limit else [])]
        return num_ranks * sum(peaks_bytes) < (1 - MEMORY_MARGIN) * min(limits)

    def _start(self, spec: TrialSpec) -> Job:
        limit = self._memory_limit
        if limit is None and spec.device == "cpu":
            limit = int((1 - MEMORY_MARGIN) * free_memory_bytes())
        spec = msgspec.structs.replace(
            spec, run_id=new_id(), requested_at_ns=time.monotonic_ns(), memory_limit_bytes=limit
        )
        return self._pool.begin(
            spec.environment_variables,
            job_id=spec.trial_id,
            entry="trial",
            payload=spec,
            deadlines=spec.deadlines,
            num_ranks=spec.num_ranks,
            log=str(self._files.logs / f"{spec.trial_id}.log"),
        )

    def kill(self) -> None:
        """Kill all trials at once, from any thread; threads that wait for them get a RunnerError."""
        self._pool.kill()

    def close(self) -> None:
        self._pool.close()


def _ended_by_environment(run: GroupRun, repeats: int) -> Failure | None:
    """Return the failure that makes it necessary to repeat a group of trials; None if the group is not repeated.

    If the kernel killed a trial of several for lack of memory, the caller that grouped them may repeat it alone.
    """
    for member in run.members:
        failure = member.job.failure
        if failure is None or (failure.kind is FailureKind.OUT_OF_MEMORY and len(run.members) > 1):
            continue
        if repeats < repeats_after(failure):
            return failure
    return None


def _out_of_memory(run: GroupRun) -> Failure | None:
    """Return the failure of a trial that ran out of memory while the guard's reference ran too, or None."""
    for member in run.members:
        failure = member.job.failure
        if failure is not None and failure.kind is FailureKind.OUT_OF_MEMORY:
            message = f"{failure.message}; the guard's reference ran at the same time"
            return msgspec.structs.replace(failure, message=message)
    return None


def _crashed_in_profiler(run: GroupRun) -> Failure | None:
    """Return the failure of a trial that crashed while it was profiled, or None."""
    failures = (member.job.failure for member in run.members)
    return next((failure for failure in failures if failure is not None and is_crash_of_profiler(failure)), None)


def _died_beside(failure: Failure) -> Failure:
    """Return the failure of a trial that must be repeated because another trial of its group failed."""
    message = f"repeated because a trial interleaved with it failed ({failure.message})"
    return Failure(kind=FailureKind.INFRASTRUCTURE, phase=failure.phase, message=message)
