"""Measurements of a trial without a profiler: windows, startup, memory; and how windows are taken."""

from __future__ import annotations

from steptune.tuner.records.base import Record


class MeasureSettings(Record):
    """Settings of the windows of a group of trials.

    Attributes:
        min_rounds: Rounds before the measurement may stop.
        max_rounds: Rounds after which it stops.
    """

    window_s: float = 0.2
    """Aimed-at length of one window of every trial of the group."""
    min_rounds: int = 5
    max_rounds: int = 60
    half_width: float = 0.01
    """Stop when the 95 % half-width of every trial's mean rate (or ratio to the first trial of the
    group) is below this share."""
    cap_s: float = 10.0
    """Seconds after which no further round is started."""
    foreign_cpu_share: float = 0.10
    """Share of the cores that processes outside the group may use during a window of a quiet machine."""
    quiet_machine: bool = False
    """True if only windows of a quiet machine count. Otherwise, where there are too few of these, all count, marked."""


class InputActivity(Record):
    """Activity of those who make batches (worker processes, or the main thread) during a window.

    Attributes:
        num_workers: Worker processes; 0 where the main thread makes batches.
    """

    num_workers: int
    wait_ns: int
    """Time of the main thread in the loader's `next()`."""
    runnable_share: float
    """Share of the makers' time (the main thread: of `wait_ns`) computing or queueing for a core, not sleeping."""
    read_bytes_per_s: float
    """Bytes from storage; what the page cache holds costs nothing and is not counted."""


class DeviceReading(Record):
    """Driver's readings of a rank's device during a window. None: it does not tell.

    Attributes:
        sm_clock_mhz: When the window ended.
        power_w: Mean over the window, from the energy used; without that counter, when the window ended.
        power_limit_w: What the driver holds the device to.
        temperature_c: When the window ended.
        limits: What held the clock down at either edge, as `trials/device_state.py` names it.
    """

    sm_clock_mhz: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    temperature_c: int | None = None
    limits: tuple[str, ...] = ()
    slowed_share: float | None = None
    """Share of the window in which heat slowed the device down."""
    foreign_share: float | None = None
    """Share of the device's time that processes of others used."""


class Window(Record):
    """One timed, unprofiled stretch of whole steps.

    Attributes:
        num_steps: Whole steps in it.
        num_samples: Samples in it.
        num_units: Samples or tokens in it, by the workload's unit.
        duration_ns: From its first step's beginning to its last one's end, on the slowest rank.
        step_p20_ns: 20th percentile of the steps' times; as the following, of the rank that has the largest.
        step_p50_ns: Median of the steps' times.
        step_p80_ns: 80th percentile of the steps' times.
        queue_depth_end: The same when it ended.
        input: What those who make batches did; None where it was not watched.
    """

    round: int
    """Windows of one round belong together: the trials of a group took turns in it."""
    position: int
    """Index of the first batch in the study's fixed order of batches (None-like -1: a stream)."""
    num_steps: int
    num_samples: int
    num_units: int
    duration_ns: int
    step_p20_ns: int
    step_p50_ns: int
    step_p80_ns: int
    queue_depth_start: int
    """Batches that the loader held ready or in flight when the window began, and when it ended."""
    queue_depth_end: int
    foreign_cpu_share: float
    """CPU time used by others, as a share of all cores, while the window ran."""
    void: str | None = None
    """Reason why the window does not count, or None."""
    marked: str | None = None
    """Reason why the machine was not quiet during a window that counts all the same, or None."""
    input: InputActivity | None = None
    device: DeviceReading | None = None
    """Reading of the first rank's device; None on a CPU, and where nothing could be read."""

    @property
    def units_per_s(self) -> float:
        return self.num_units * 1e9 / self.duration_ns

    @property
    def step_time_ns(self) -> float:
        return self.duration_ns / self.num_steps


class Startup(Record):
    """Time spent before the first measured window, by part.

    Attributes:
        warm_up_ns: Steps before the first window.
        warm_up_steps: How many there were.
        steady: Their times had settled.
        compile_cold: Nothing compiled for this candidate was cached.
    """

    build_ns: int
    """Time from the request to a built job, the next field included."""
    user_code_ns: int
    """Part of `build_ns` inside the user's import, model and dataset code."""
    first_step_ns: int
    """Time from the request to the beginning of the first warm-up step."""
    warm_up_ns: int
    warm_up_steps: int
    steady: bool
    compile_ns: int = 0
    """Warm-up beyond what the same number of steady steps takes: compilation and capture."""
    compile_cold: bool = False


class MemoryPeak(Record):
    """Peak memory of one rank. On a CPU only `resident_bytes` is not zero.

    Attributes:
        rank: The process.
        allocated_bytes: By tensors, on the device.
        reserved_bytes: By torch's allocator, on the device.
        device_bytes: Of the whole process, on the device.
    """

    rank: int
    resident_bytes: int
    """Memory of the rank and the processes it started, together."""
    allocated_bytes: int = 0
    reserved_bytes: int = 0
    device_bytes: int = 0
