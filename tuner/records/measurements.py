"""Measurements of a trial without a profiler (windows, startup, memory), and the settings of the windows."""

from __future__ import annotations

from steptune.tuner.records.base import Record


class MeasureSettings(Record):
    """Settings for timing the windows of a group of trials.

    Attributes:
        min_rounds: Minimum number of rounds before the measurement may stop.
        max_rounds: Maximum number of rounds.
    """

    window_s: float = 0.2
    """Target length, in seconds, of one window of each trial in the group."""
    min_rounds: int = 5
    max_rounds: int = 60
    half_width: float = 0.01
    """Target precision: measuring stops when, for every trial, the 95 % half-width of its mean rate (or of its ratio to
    the group's first trial) is below this share of the rate (or ratio).
    """
    cap_s: float = 10.0
    """Seconds after which no further round is started."""
    foreign_cpu_share: float = 0.10
    """Maximum share of the cores that processes outside the group may use during a window for it to count as quiet."""
    quiet_machine: bool = False
    """True if only windows in which the machine was quiet count. If False and there are too few such windows, all
    windows count, and are marked.
    """


class InputActivity(Record):
    """Activity, during a window, of the processes that make batches: the loader workers, or the main process if there
    are none.

    Attributes:
        num_workers: Worker processes; 0 where the main thread makes batches.
    """

    num_workers: int
    wait_ns: int
    """Time that the main thread spends in the loader's `next()`."""
    runnable_share: float
    """Share of their time that the loader workers spend computing or waiting for a core rather than sleeping. Without
    workers, the main thread's share of `wait_ns`.
    """
    read_bytes_per_s: float
    """Bytes per second read from storage; reads from the page cache are not counted."""


class DeviceReading(Record):
    """Driver's readings of a rank's device during a window; None for a reading that the driver does not provide.

    Attributes:
        sm_clock_mhz: SM clock at the end of the window.
        power_w: Mean power over the window, from the energy counter; without that counter, power at the end of the
            window.
        power_limit_w: Power limit that the driver enforces.
        temperature_c: Temperature at the end of the window, in °C.
        limits: Reasons for a reduced clock at the beginning or the end of the window, as named in
            `trials/device_state.py`.
    """

    sm_clock_mhz: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    temperature_c: int | None = None
    limits: tuple[str, ...] = ()
    slowed_share: float | None = None
    """Share of the window in which thermal throttling slowed the device down."""
    foreign_share: float | None = None
    """Share of the device's time that other programs used."""


class Window(Record):
    """Timing window: consecutive whole steps, timed without the profiler.

    Attributes:
        num_steps: Whole steps in it.
        num_samples: Samples in it.
        num_units: Samples or tokens in it, by the workload's unit.
        duration_ns: Time from the start of its first step to the end of its last one, on the slowest rank.
        step_p20_ns: 20th percentile of the step times; like the next two, of the rank where it is largest.
        step_p50_ns: Median of the steps' times.
        step_p80_ns: 80th percentile of the steps' times.
        queue_depth_end: Batches that the loader held ready or in flight at the end of the window.
        input: Activity of the processes that make batches; None where it was not recorded.
    """

    round: int
    """Number of the round in which the trials of a group took turns, one window each."""
    position: int
    """Index of the window's first batch in the study's fixed order of batches; -1 for a stream."""
    num_steps: int
    num_samples: int
    num_units: int
    duration_ns: int
    step_p20_ns: int
    step_p50_ns: int
    step_p80_ns: int
    queue_depth_start: int
    """Number of batches that the loader had ready or in flight at the start of the window."""
    queue_depth_end: int
    foreign_cpu_share: float
    """CPU time used by other processes during the window, as a share of all cores."""
    void: str | None = None
    """Reason why the window does not count; None if it does."""
    marked: str | None = None
    """Reason why the machine was not quiet during a window that counts nevertheless; None otherwise."""
    input: InputActivity | None = None
    device: DeviceReading | None = None
    """Readings of the first rank's device; None on a CPU, and where nothing could be read."""

    @property
    def units_per_s(self) -> float:
        return self.num_units * 1e9 / self.duration_ns

    @property
    def step_time_ns(self) -> float:
        return self.duration_ns / self.num_steps


class Startup(Record):
    """Time spent before the first measured window, by part.

    Attributes:
        warm_up_ns: Time of the steps before the first window.
        warm_up_steps: Number of these steps.
        steady: Whether the step times had become steady by the first window.
        compile_cold: Whether the candidate was compiled without anything from the cache.
    """

    build_ns: int
    """Time from the request until the job is built; includes `user_code_ns`."""
    user_code_ns: int
    """Part of `build_ns` inside the user's import, model and dataset code."""
    first_step_ns: int
    """Time from the request to the start of the first warm-up step."""
    warm_up_ns: int
    warm_up_steps: int
    steady: bool
    compile_ns: int = 0
    """Excess time of the warm-up over the same number of steady steps: compilation and CUDA graph capture."""
    compile_cold: bool = False


class MemoryPeak(Record):
    """Peak memory of one rank; on a CPU only `resident_bytes` is nonzero.

    Attributes:
        rank: Number of the rank.
        allocated_bytes: Memory allocated by tensors on the device.
        reserved_bytes: Memory reserved by torch's allocator on the device.
        device_bytes: Memory of the whole process on the device.
    """

    rank: int
    resident_bytes: int
    """Peak resident memory of the rank together with the processes that it started."""
    allocated_bytes: int = 0
    reserved_bytes: int = 0
    device_bytes: int = 0
