"""Messages of the interface beyond the engine's records: summaries, pages, and records with their ids.

A message may hold a stored record as JSON (`service.queries.stored`), so that it is not read and written again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from steptune.tuner.records import (
    Attempt,
    Candidate,
    Effect,
    Environment,
    Failure,
    FailureKind,
    Finding,
    GuardVerdict,
    HardwareProfile,
    MemoryPeak,
    Purpose,
    Record,
    Startup,
    StudySettings,
    StudyState,
    TrialState,
    Verdict,
    WorkloadFacts,
)
from steptune.tuner.trace_records import SpanPlace, Timeline

Item = TypeVar("Item")
Other = TypeVar("Other")


class Page(Record, Generic[Item]):
    """Part of a list, in the order that the operation states.

    Attributes:
        items: The items, at most `limit`.
        next_cursor: Cursor of the next page; null on the last one.
    """

    items: tuple[Item, ...]
    next_cursor: str | None

    def each(self, make: Callable[[Item], Other]) -> Page[Other]:
        """Return the same page of a list with every item converted."""
        return Page(items=tuple(map(make, self.items)), next_cursor=self.next_cursor)


class StudySummary(Record):
    """A study in a list.

    Attributes:
        study_id: Sortable by time.
        title: Title given by its owner.
        workload: Reference of the workload.
        workload_id: The uploaded workload, where there is one.
        owner_id: Its owner; null for studies of the command line.
        state: State of the study.
        created_at: When it was submitted (ISO 8601, UTC).
        hardware_fingerprint: Fingerprint of the hardware profile on which it runs; null until it ran.
        priority: Priority among the owner's studies; higher ones are run first.
        worker_id: The worker that runs it.
        verdict: Verdict of its recommendation; null until there is one.
        gain: Rate of the recommendation over the baseline's; null unless the verdict is "faster".
    """

    study_id: str
    title: str
    workload: str
    workload_id: str | None
    owner_id: str | None
    state: StudyState
    created_at: str
    hardware_fingerprint: str | None
    priority: int
    worker_id: str | None
    verdict: Verdict | None
    gain: float | None


class StudyQueueState(Record):
    """State of a submitted study in the queue, and its requirements on workers.

    Attributes:
        version: Grows with every change; part of the ETag.
        required_device_kind: "cpu", "cuda", or null for any.
        required_hardware: A fingerprint of a hardware profile, or a part of its label; null for any.
        num_devices: Devices that it holds while it runs.
        waits_for: Why no worker runs it, in words; empty where one does, or none has to.
        requested: Pending request of its owner while it runs: "", "cancel" or "pause".
        num_claims: Number of times that a worker began to run it.
        num_lost: Number of workers that died with it since a trial was last completed.
        device_seconds: Devices times the time that workers held them for it.
        queued_at: When it was last queued.
        claimed_at: When its worker got its present devices; null while the worker waits for a cluster.
        ended_at: When it ended.
    """

    version: int
    required_device_kind: str | None
    required_hardware: str | None
    num_devices: int
    waits_for: str
    requested: str
    num_claims: int
    num_lost: int
    device_seconds: float
    queued_at: str
    claimed_at: str | None
    ended_at: str | None


class StudyDetail(StudySummary):
    """A study.

    Attributes:
        message: Explanation of its state.
        settings: Settings of the request.
        facts: Facts about the workload; null until it was inspected.
        environment: The hardware and software on which it runs; null until it ran.
        num_trials: Number of trials in each state.
        queue: Its state in the queue; null for studies of the command line.
        source_digest: Digest of the workload's code.
        steptune_version: Version of Steptune that began it.
        tags: Tags by which its owner finds it.
        notes: Notes of its owner.
    """

    message: str
    settings: StudySettings
    facts: WorkloadFacts | None
    environment: Environment | None
    num_trials: dict[str, int]
    queue: StudyQueueState | None
    source_digest: str
    steptune_version: str
    tags: tuple[str, ...] = ()
    notes: str = ""


class TrialSummary(Record):
    """A trial in a list.

    Attributes:
        trial_id: Sortable by time.
        study_id: The study that it belongs to.
        sequence: Its number in the study, in the order in which trials began.
        candidate: Choices of the trial that differ from today's.
        candidate_key: Identity of the candidate.
        purpose: Purpose of the run.
        group: Group of trials that were alive at the same time and took turns.
        replicate: Number of this start of the candidate, from 0.
        state: State of the trial.
        failure_kind: Why it failed; null where it did not.
        started_at: When it began (ISO 8601, UTC).
        step_time_ns: Step time over its clean windows, including epoch restarts; null without any.
        units_per_s: Samples or tokens per second over its clean windows, epoch restarts included; null without any.
        num_windows: Number of clean windows.
        gain: Rate of this run over the reference's when it completed, by rounds where they took turns; null if not
            measured. Deprecated as a figure of the configuration, whose speed the recommendation states.
    """

    trial_id: str
    study_id: str
    sequence: int
    candidate: Candidate
    candidate_key: str
    purpose: Purpose
    group: str
    replicate: int
    state: TrialState
    failure_kind: FailureKind | None
    started_at: str
    step_time_ns: float | None
    units_per_s: float | None
    num_windows: int
    gain: float | None


class TrialAttempt(Record):
    """One attempt to run a trial, in a new process.

    Attributes:
        number: Number of the attempt, from 1.
        outcome: How it ended; "running" until then.
        worker_id: The worker that ran it; null without a queue.
        started_at: When it began (ISO 8601, UTC).
        ended_at: When it ended.
    """

    number: int
    outcome: TrialState
    worker_id: str | None
    started_at: str
    ended_at: str | None


class TrialDetail(TrialSummary):
    """A trial with its outcome. Windows, breakdown, kernels and other details have separate paths below the trial's.

    Attributes:
        attempts: Process starts of the trial.
        repeated: Runs before the last one, with their ends, which say nothing about the candidate.
        failure: Why it ended early; null where it did not.
        guard_passed: Whether it is still the same training; null where that was not checked.
        startup: Division of the time before the first window.
        memory: Peak memory by rank.
        effects: Whether its choices took effect.
        contended: Whether other programs used the machine, so that there are fewer clean windows than requested.
        unmeasured: Readings of the devices that could not be had, and why.
        isolation: How its processes were isolated; null until it ended.
        interpreter: How its interpreter was started; null until it ended.
        phases_ns: Nanoseconds of each phase.
        epoch_restart_ns: Cost of starting an epoch; null where it was not measured.
    """

    attempts: tuple[TrialAttempt, ...]
    repeated: tuple[Attempt, ...]
    failure: Failure | None
    guard_passed: bool | None
    startup: Startup | None
    memory: tuple[MemoryPeak, ...]
    effects: tuple[Effect, ...]
    contended: bool
    unmeasured: tuple[str, ...]
    isolation: str | None
    interpreter: str | None
    phases_ns: dict[str, int]
    epoch_restart_ns: int | None


class Health(Record):
    """Answer of a health check.

    Attributes:
        status: "ok" or "ready".
    """

    status: str


class BreakdownCategory(Record):
    """Time of one category in the profiled steps.

    Attributes:
        category: Name of the category.
        ns: Nanoseconds in all profiled steps.
        share: Share of the time of the profiled steps.
        rescaled_ns: Nanoseconds per step, rescaled to the unprofiled step; null where that is unknown.
    """

    category: str
    ns: int
    share: float
    rescaled_ns: int | None


class DeviceBreakdown(Record):
    """Breakdown of one device of one rank. The categories sum exactly to the time of the profiled steps.

    Attributes:
        rank: The process.
        device: The device of the process, or its CPU.
        num_steps: Profiled steps.
        step_time_ns: Time of all profiled steps together.
        categories: Time by category, the longest first.
    """

    rank: int
    device: str
    num_steps: int
    step_time_ns: int
    categories: tuple[BreakdownCategory, ...]


class TrialBreakdown(Record):
    """Breakdown of a trial's profiled steps.

    Attributes:
        trial_id: The trial.
        devices: One breakdown for each device of each rank; empty where nothing was profiled.
        problems: Why the profile cannot be trusted; empty where it can. With any, shares of categories are no verdict.
    """

    trial_id: str
    devices: tuple[DeviceBreakdown, ...]
    problems: tuple[str, ...] = ()


class TrialFinding(Record):
    """A finding and the trial in which it was made.

    Attributes:
        trial_id: The trial.
        finding: What its breakdown shows.
    """

    trial_id: str
    finding: Finding


class TrialGuard(Record):
    """Verdict of the guard on a trial: whether it is still the same training as the reference.

    Attributes:
        trial_id: The trial.
        verdict: Verdict with its checks and curves; null where the trial was not checked.
    """

    trial_id: str
    verdict: GuardVerdict | None


class TrialTimeline(Record):
    """Activity of the devices in the profiled steps, at a resolution that suffices to draw a timeline.

    Attributes:
        trial_id: The trial.
        timelines: One for each device.
    """

    trial_id: str
    timelines: tuple[Timeline, ...]


class TrialSpans(Record):
    """The longest events with a given name in the timeline of a trial.

    Attributes:
        trial_id: The trial.
        name: Name of a kernel, an operator or another event.
        spans: The events, the longest first.
    """

    trial_id: str
    name: str
    spans: tuple[SpanPlace, ...]


class ArtifactInfo(Record):
    """A file that belongs to a study or a trial.

    Attributes:
        artifact_id: Number of the file.
        study_id: The study.
        trial_id: The trial; null for a file of the whole study.
        kind: "trace", "timeline", "log", …
        digest: SHA-256 of its content, in hexadecimal digits.
        size_bytes: Bytes of the stored file.
        created_at: When it was recorded (ISO 8601, UTC).
    """

    artifact_id: int
    study_id: str
    trial_id: str | None
    kind: str
    digest: str
    size_bytes: int
    created_at: str


class ExportFormat(Record):
    """A format in which a recommendation can be exported.

    Attributes:
        name: Name for `exports/{name}`.
        summary: Description of the format.
        version: The library, with its version, for which the file is written.
        usage: How to use the file.
        file_name: Usual name of the file.
        media_type: Media type of the file.
        not_expressible: What of this recommendation the format cannot express, one sentence each.
        carries: Part of the gain that the file carries; empty where none is claimed.
    """

    name: str
    summary: str
    version: str
    usage: str
    file_name: str
    media_type: str
    not_expressible: tuple[str, ...]
    carries: str = ""


class ExportList(Record):
    """The formats in which a study's recommendation can be exported.

    Attributes:
        items: All formats.
    """

    items: tuple[ExportFormat, ...]


class WorkloadInfo(Record):
    """A workload as submitted.

    Attributes:
        workload_id: Sortable by time.
        owner_id: Its owner.
        kind: "file", "archive", "script", "zoo" or "module".
        name: Name given by its owner, or that of the uploaded file.
        entry: The reference within it: "train.py:Workload", "zoo:synthetic", "package.module:Workload", or a script's
            command: "-- python train.py".
        digest: SHA-256 of the upload, in hexadecimal digits; null without one.
        size_bytes: Bytes of the upload.
        created_at: When it was submitted (ISO 8601, UTC).
    """

    workload_id: str
    owner_id: str
    kind: str
    name: str
    entry: str
    digest: str | None
    size_bytes: int
    created_at: str


class WorkerSlot(Record):
    """A core or a device that a worker may use.

    Attributes:
        kind: "core" or "cuda".
        number: Number of the core or device on its host.
    """

    kind: str
    number: int


class WorkerSummary(Record):
    """A worker: a process that runs studies.

    Attributes:
        worker_id: Sortable by time.
        name: Name given by whoever started it, or generated.
        host_id: Hashed id of its machine: workers on one host share its devices.
        state: "idle", "busy", "draining" or "gone".
        hardware_fingerprint: Fingerprint of its hardware profile.
        hardware_label: Description of the hardware.
        device_kind: "cpu" or "cuda".
        slots: Cores and devices that it may use.
        isolation: Isolation level of its trials.
        version: Version of Steptune.
        started_at: When it began (ISO 8601, UTC).
        heartbeat_at: Time of its last heartbeat.
        study_id: The study that it runs; null where there is none, or it is not yours to see.
    """

    worker_id: str
    name: str
    host_id: str
    state: str
    hardware_fingerprint: str | None
    hardware_label: str
    device_kind: str
    slots: tuple[WorkerSlot, ...]
    isolation: str
    version: str
    started_at: str
    heartbeat_at: str
    study_id: str | None


class ReservationSummary(Record):
    """A study that holds devices, or waits for some.

    Attributes:
        study_id: The study.
        title: Title given by its owner.
        holds: Whether it holds the devices now; else it waits.
        num_hosts: Hosts that it needs.
        num_devices: Devices that it needs on each.
        hosts: Hashed ids of the hosts that it holds, its worker's host first.
        since: When it got them, or was queued (ISO 8601, UTC).
        waits_for: Why it waits, in words; empty where it holds them.
    """

    study_id: str
    title: str
    holds: bool
    num_hosts: int
    num_devices: int
    hosts: tuple[str, ...]
    since: str
    waits_for: str


class HardwareSummary(Record):
    """A hardware profile: the hardware and software on which measurements depend.

    Attributes:
        fingerprint: Identity of the profile.
        device_kind: "cpu" or "cuda".
        label: Description of the hardware.
        profile: The complete profile.
    """

    fingerprint: str
    device_kind: str
    label: str
    profile: HardwareProfile


class Caller(Record):
    """Identity of the caller.

    Attributes:
        user_id: The user.
        name: The user's name.
        scopes: Scopes of this token or session.
        token_id: The token that was sent; null for a login that is not by token.
        method: How the caller showed who they are: "token", "session" or "open".
        expires_at: When the token or session ends; null for never.
    """

    user_id: str
    name: str
    scopes: tuple[str, ...]
    token_id: str | None
    method: str
    expires_at: str | None
