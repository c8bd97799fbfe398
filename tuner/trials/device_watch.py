"""Readings of the state of a rank's device, by NVML.

The device is found by its UUID: NVML counts all devices of the machine, CUDA those in CUDA_VISIBLE_DEVICES. A reading
takes a fraction of a millisecond and lies outside of the timed stretch. A value that cannot be read is reported once,
with the reason, and voids no window.

Source: https://docs.nvidia.com/deploy/nvml-api/ , bindings: nvidia-ml-py (the extra `cuda`)
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import psutil

from steptune.tuner.hardware import uuid_of
from steptune.tuner.records import DeviceReading
from steptune.tuner.trials.device_state import DeviceState, Use, reading_between, why_void

if TYPE_CHECKING:
    import torch

NOT_INSTALLED = (
    "clocks, power, temperature, throttling and other processes of the device: nvidia-ml-py is not installed "
    "(pip install 'steptune[cuda]')"
)


class DeviceLook(Protocol):
    """Reader of one device's state."""

    @property
    def unmeasured(self) -> tuple[str, ...]:
        """Properties that the driver does not report, and why."""

    def look(self, since_us: int | None = None) -> DeviceState:
        """Read the state of the device.

        Args:
            since_us: Time (microseconds since 1970) from which the use by processes is read; None leaves it out.
        """
        ...

    def own_processes(self) -> frozenset[int]:
        """Return the process ids of the study, as the driver numbers them."""


class DeviceWatch:
    """Check of one trial's windows: the state of the device decides whether a window is valid.

    Args:
        look: Reader of the device; None on a CPU, and where the device cannot be read.

    Attributes:
        unmeasured: Properties that cannot be read, and why.
    """

    def __init__(self, look: DeviceLook | None = None, unmeasured: tuple[str, ...] = ()) -> None:
        self._look = look
        self._unmeasured = unmeasured
        self._before: DeviceState | None = None
        self._first_limit_w: float | None = None

    @property
    def unmeasured(self) -> tuple[str, ...]:
        return (*self._unmeasured, *(self._look.unmeasured if self._look else ()))

    def begin(self) -> None:
        """Read the device's state before a window."""
        self._before = self._look.look() if self._look else None

    def end(self) -> tuple[DeviceReading | None, str | None]:
        """End a window; return its reading, and the reason why the window is void, or None if it is valid."""
        if self._look is None or self._before is None:
            return None, None
        after = self._look.look(self._before.at_us)
        reading = reading_between(self._before, after, self._look.own_processes())
        if self._first_limit_w is None:
            self._first_limit_w = reading.power_limit_w
        return reading, why_void(reading, self._first_limit_w)


def watch_device(device: torch.device) -> DeviceWatch:
    """Return the `DeviceWatch` of this rank's device. On a CPU it reads nothing, because `contention` reads the
    processor's counters.
    """
    if device.type != "cuda":
        return DeviceWatch()
    try:
        import pynvml
    except ImportError:
        return DeviceWatch(unmeasured=(NOT_INSTALLED,))
    try:
        return DeviceWatch(NvmlLook(pynvml, uuid_of(device)))
    except pynvml.NVMLError as error:
        return DeviceWatch(unmeasured=(f"the state of the device: not reported by NVML ({error})",))


class NvmlLook:
    """Reader of one device's state by NVML.

    Args:
        nvml: The module `pynvml`.

    Raises:
        pynvml.NVMLError: The driver does not answer, or knows no such device.
    """

    def __init__(self, nvml: Any, uuid: str) -> None:
        nvml.nvmlInit()
        self._nvml = nvml
        self._handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        self._missing: dict[str, str] = {}
        self._sees_us = self._is_seen()

    @property
    def unmeasured(self) -> tuple[str, ...]:
        return tuple(f"{what} of the device: {why}" for what, why in self._missing.items())

    def look(self, since_us: int | None = None) -> DeviceState:
        nvml, handle = self._nvml, self._handle
        told = self._sees_us and since_us is not None
        return DeviceState(
            at_us=time.time_ns() // 1000,
            sm_clock_mhz=self._asked("clock", lambda: int(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))),
            power_w=self._asked("power", lambda: float(nvml.nvmlDeviceGetPowerUsage(handle)) / 1000),
            power_limit_w=self._asked(
                "power limit", lambda: float(nvml.nvmlDeviceGetEnforcedPowerLimit(handle)) / 1000
            ),
            temperature_c=self._asked(
                "temperature", lambda: int(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
            ),
            reasons=self._asked("throttling", lambda: int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))) or 0,
            energy_mj=self._asked("energy", lambda: int(nvml.nvmlDeviceGetTotalEnergyConsumption(handle))),
            thermal_ns=self._asked("time throttled by heat", self._thermal_ns),
            uses=self._asked("use by other processes", lambda: self._uses(since_us)) if told else None,
        )

    def own_processes(self) -> frozenset[int]:
        """Return the ids of the study's processes: the parent of this rank's trial server, and all of the parent's
        descendants. They include the trials that take turns with this one.
        """
        try:
            server = psutil.Process(os.getppid())
            parent = server.parent()
            root = server if parent is None or parent.pid == 1 else parent
            return frozenset({root.pid, os.getpid(), *(child.pid for child in root.children(recursive=True))})
        except psutil.Error:
            return frozenset({os.getpid()})

    def _asked(self, what: str, ask: Callable[[], Any]) -> Any:
        """Return the driver's answer, or None; the reason for a missing answer is recorded once."""
        if what in self._missing:
            return None
        try:
            return ask()
        except (self._nvml.NVMLError, AttributeError) as error:  # of the driver, or of an old nvidia-ml-py
            self._missing[what] = str(error)
            return None

    def _thermal_ns(self) -> int:
        nvml = self._nvml
        return int(nvml.nvmlDeviceGetViolationStatus(self._handle, nvml.NVML_PERF_POLICY_THERMAL).violationTime)

    def _uses(self, since_us: int | None) -> tuple[Use, ...]:
        """Return the use of the device by process since a time, from samples that the driver keeps."""
        nvml = self._nvml
        try:
            samples = nvml.nvmlDeviceGetProcessUtilization(self._handle, since_us)
        except nvml.NVMLError_NotFound:  # no process used the device
            return ()
        return tuple(
            Use(pid=int(s.pid), share=min(100, int(s.smUtil)) / 100, at_us=int(s.timeStamp)) for s in samples if s.pid
        )

    def _is_seen(self) -> bool:
        """Say whether the driver and this process use the same process ids, which is not so in a separate PID
        namespace.
        """
        what = "use by other processes"
        running = self._asked(what, lambda: self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle))
        if running is None:
            return False
        if os.getpid() in {int(process.pid) for process in running}:
            return True
        self._missing[what] = "the driver's process ids differ from those inside this container or sandbox"
        return False
