"""Examination of a machine: what it offers to Steptune, and what would spoil measurements or make trials fail."""

from __future__ import annotations

import os
import shutil
import tempfile
from importlib import metadata
from pathlib import Path

import psutil

from steptune.dashboards import units
from steptune.service.isolation import LEVELS, Unavailable
from steptune.tuner.hardware import find_compiler, torch_version, usable_cores
from steptune.tuner.records import Environment, Record
from steptune.tuner.trials.connection import default_start_method
from steptune.tuner.trials.contention import foreign_share, read_cpu
from steptune.tuner.trials.runner import LocalRunner

MIN_SHARED_MEMORY_BYTES = 256 << 20
MIN_FREE_DISK_BYTES = 2 << 30
BUSY_SHARE = 0.10
LOOK_S = 1.0


class Examined(Record):
    """One examined property of the machine. `level` is "ok", "note" or "problem"."""

    level: str
    subject: str
    found: str
    advice: str = ""


def examine() -> list[Examined]:
    """Examine the machine and the installation, the hardware first."""
    with tempfile.TemporaryDirectory(prefix="steptune-") as folder:
        runner = LocalRunner(workload="zoo:synthetic", directory=Path(folder))
        try:
            environment = runner.describe()
        finally:
            runner.close()
    return [
        _device(environment),
        *_device_state(environment),
        _arithmetic(environment),
        *_versions(environment),
        _compiler(),
        _cores(),
        _neighbours(),
        _memory(environment),
        *_shared_memory(),
        _disk(environment),
        _start_method(),
        *_isolation(),
    ]


def _device(environment: Environment) -> Examined:
    hardware = environment.hardware
    if hardware.device_kind == "cuda":
        return Examined(level="ok", subject="device", found=hardware.label)
    return Examined(
        level="note", subject="device", found=hardware.label, advice="no CUDA device: workloads are tuned on the CPU"
    )


def _device_state(environment: Environment) -> list[Examined]:
    """Examine whether clocks, power, temperature and other processes of a CUDA device can be read."""
    if environment.hardware.device_kind != "cuda":
        return []
    try:
        found = f"nvidia-ml-py {metadata.version('nvidia-ml-py')}"
    except metadata.PackageNotFoundError:
        advice = "throttling and sharing of the device cannot be detected: pip install 'steptune[cuda]'"
        return [Examined(level="note", subject="device state", found="nvidia-ml-py is not installed", advice=advice)]
    return [Examined(level="ok", subject="device state", found=found)]


def _arithmetic(environment: Environment) -> Examined:
    rates = environment.calibration.matmul_flops_per_s
    found = ", ".join(f"{name} {units.significant(rate / 1e9)} GFLOP/s" for name, rate in rates.items())
    slow = [name for name, rate in rates.items() if rate < 0.5 * rates["float32"]]
    verb = "is" if len(slow) == 1 else "are"
    advice = (
        f"{' and '.join(slow)} {verb} emulated on this device and slower than float32, so no gain is expected"
        if slow
        else ""
    )
    return Examined(level="note" if slow else "ok", subject="arithmetic", found=found, advice=advice)


def _versions(environment: Environment) -> list[Examined]:
    versions = environment.hardware.versions
    found = ", ".join(f"{name} {version}" for name, version in versions.items())
    installed = torch_version()
    return [Examined(level="ok" if installed else "problem", subject="versions", found=found)]


def _compiler() -> Examined:
    compiler = find_compiler()
    if compiler:
        return Examined(level="ok", subject="C++ compiler", found=compiler)
    return Examined(
        level="problem",
        subject="C++ compiler",
        found="none",
        advice="torch.compile cannot be tried: install g++ (apt-get install g++), or set CXX",
    )


def _cores() -> Examined:
    usable, online = usable_cores(), os.cpu_count() or 1
    found = f"{usable} of {online}"
    if usable < online:
        return Examined(
            level="note", subject="cores", found=found, advice="this process is restricted to some of the cores"
        )
    return Examined(level="ok", subject="cores", found=found)


def _neighbours() -> Examined:
    """Examine how much other processes use the processor while we are idle."""
    import time

    before = read_cpu(time.perf_counter())
    time.sleep(LOOK_S)
    share = foreign_share(before, read_cpu(time.perf_counter()))
    found = f"other programs use {units.percent(share)} of the cores"
    if share > BUSY_SHARE:
        advice = (
            "stop other jobs: timing windows under load are used only if there are too few quiet windows, and they "
            "widen the confidence intervals"
        )
        return Examined(level="problem", subject="neighbours", found=found, advice=advice)
    return Examined(level="ok", subject="neighbours", found=found)


def _memory(environment: Environment) -> Examined:
    total, free = psutil.virtual_memory().total, environment.free_memory_bytes
    return Examined(level="ok", subject="memory", found=f"{units.memory(free)} of {units.memory(total)} free")


def _shared_memory() -> list[Examined]:
    shared = Path("/dev/shm")
    if not shared.exists():
        return []
    free = shutil.disk_usage(shared).free
    found = f"{units.memory(free)} in /dev/shm"
    if free < MIN_SHARED_MEMORY_BYTES:
        advice = (
            "there is too little shared memory for the batches of loader workers, which will fail: start the container "
            "with --shm-size=1g"
        )
        return [Examined(level="problem", subject="shared memory", found=found, advice=advice)]
    return [Examined(level="ok", subject="shared memory", found=found)]


def _disk(environment: Environment) -> Examined:
    free = environment.free_disk_bytes
    level = "ok" if free > MIN_FREE_DISK_BYTES else "problem"
    advice = (
        ""
        if level == "ok"
        else "initial states and traces may not fit on the disk: free space or set STEPTUNE_DATA_DIRECTORY"
    )
    return Examined(level=level, subject="disk", found=f"{units.memory(free)} free", advice=advice)


def _start_method() -> Examined:
    if default_start_method() == "fork":
        return Examined(level="ok", subject="trials", found="forked from a warm process")
    advice = "every trial starts a new Python interpreter: the results are the same, but each start takes longer"
    return Examined(level="note", subject="trials", found="spawned", advice=advice)


def _isolation() -> list[Examined]:
    """Examine the isolation levels, the strongest first, by trying each."""
    examined = []
    for level in LEVELS:
        subject = f"isolation {level.name}"
        match level.probe():
            case Unavailable(reason=reason):
                examined.append(Examined(level="note", subject=subject, found="not here", advice=reason))
            case _:
                examined.append(Examined(level="ok", subject=subject, found=f"limits {level.limits}"))
    return examined
