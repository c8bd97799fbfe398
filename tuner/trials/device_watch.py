"""Reading the state of the device that a rank uses, by NVML.

The device is found by its UUID: NVML counts all devices of the machine, CUDA those in CUDA_VISIBLE_DEVICES. A look
costs a fraction of a millisecond and lies outside of the timed stretch. What cannot be read is said once, with the
reason, and voids nothing.

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
    """Looks at one device."""

    @property
    def unmeasured(self) -> tuple[str, ...]:
        """Properties that the driver does not tell, and why."""

    def look(self, since_us: int | None = None) -> DeviceState:
        """
        Args:
            since_us: Microseconds since 1970 from which the use by processes is told; None leaves it out.
        """
        ...

    def own_processes(self) -> frozenset[int]:
        """Processes of the study, as the driver numbers them."""


class DeviceWatch:
    """Judges the windows of one trial by its device.

    Args:
        look: None where there is nothing to look at, or no way to.

    Attributes:
        unmeasured: What cannot be read, and why.
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
        """Begin a window."""
        self._before = self._look.look() if self._look else None

    def end(self) -> tuple[DeviceReading | None, str | None]:
        """End a window; return what it showed, and why it does not count or None."""
        if self._look is None or self._before is None:
            return None, None
        after = self._look.look(self._before.at_us)
        reading = reading_between(self._before, after, self._look.own_processes())
        if self._first_limit_w is None:
            self._first_limit_w = reading.power_limit_w
        return reading, why_void(reading, self._first_limit_w)


def watch_device(device: torch.device) -> DeviceWatch:
    """Watch the device of this rank. Nothing is watched on a CPU: `contention` reads its counters."""
    if device.type != "cuda":
        return DeviceWatch()
    try:
        import pynvml
    except ImportError:
        return DeviceWatch(unmeasured=(NOT_INSTALLED,))
    try:
        return DeviceWatch(NvmlLook(pynvml, uuid_of(device)))
    except pynvml.NVMLError as error:
        return DeviceWatch(unmeasured=(f"the state of the device: NVML does not know it ({error})",))


class NvmlLook:
    """One device as NVML shows it.

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
            thermal_ns=self._asked("time slowed down from heat", self._thermal_ns),
            uses=self._asked("use by other processes", lambda: self._uses(since_us)) if told else None,
        )

    def own_processes(self) -> frozenset[int]:
        """All that descend from whoever started this rank's trial server: the trials that take turns with it."""
        try:
            server = psutil.Process(os.getppid())
            parent = server.parent()
            root = server if parent is None or parent.pid == 1 else parent
            return frozenset({root.pid, os.getpid(), *(child.pid for child in root.children(recursive=True))})
        except psutil.Error:
            return frozenset({os.getpid()})

    def _asked(self, what: str, ask: Callable[[], Any]) -> Any:
        """An answer, or None; why there is none is noted once."""
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
        """The driver keeps samples by itself: one figure for each process over all of them since then."""
        nvml = self._nvml
        try:
            samples = nvml.nvmlDeviceGetProcessUtilization(self._handle, since_us)
        except nvml.NVMLError_NotFound:  # no process used the device
            return ()
        return tuple(
            Use(pid=int(s.pid), share=min(100, int(s.smUtil)) / 100, at_us=int(s.timeStamp)) for s in samples if s.pid
        )

    def _is_seen(self) -> bool:
        """Say whether the driver numbers processes as this one is numbered: in a PID namespace of its own it is not."""
        what = "use by other processes"
        running = self._asked(what, lambda: self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle))
        if running is None:
            return False
        if os.getpid() in {int(process.pid) for process in running}:
            return True
        self._missing[what] = "the driver numbers processes otherwise than this container or sandbox does"
        return False
