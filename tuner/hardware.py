"""Hardware on which measurements depend: the machine's devices with their measured peak rates, and the versions of
software.

Functions that touch a device or torch run in a rank (the parent has no torch).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import platform
import shutil
import sys
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from steptune.tuner.device_links import device_links
from steptune.tuner.emulation import num_emulated_hosts, ranks_per_device, refuse_parts
from steptune.tuner.errors import ChoiceError, PlatformError
from steptune.tuner.records import Calibration, Device, Environment, HardwareProfile

if TYPE_CHECKING:
    import torch

SUPPORTED_PYTHONS = ((3, 11), (3, 12))
SUPPORTED_TORCH = ((2, 11), (2, 14))
"""Supported torch versions: the minimum, and the first version above it that is not supported."""
NO_TORCH = (
    "torch is not installed, but torch >= 2.11, < 2.14 is required: run pip install 'steptune[torch]', or install "
    "the build for your devices from https://pytorch.org/get-started/locally"
)
DEVICE_KINDS = ("cpu", "cuda")
CORES_VARIABLE = "STEPTUNE_CORES"
LINK_OF_PARTS = "loopback"
"""Kind of link between devices that are parts of GPUs. NCCL treats these devices as if they were on separate hosts."""
_MATRIX_SIZES = {"cpu": (256, 512, 1024), "cuda": (1024, 4096, 8192)}
_COPY_BYTES = {"cpu": 128 << 20, "cuda": 1 << 30}
_MIN_MEASURED_S = 0.05


def check_platform() -> None:
    """Refuse an unsupported platform, with the reason.

    Raises:
        PlatformError: The operating system, interpreter or torch version is not supported.
    """
    if sys.platform not in ("linux", "darwin"):
        raise PlatformError(f"{sys.platform} is not supported: Steptune runs on Linux, or on macOS (CPU only)")
    if sys.version_info[:2] not in SUPPORTED_PYTHONS:
        wanted = " or ".join(f"{a}.{b}" for a, b in SUPPORTED_PYTHONS)
        raise PlatformError(f"Python {platform.python_version()} is not supported: use Python {wanted}")
    version = torch_version()
    if version is None:
        raise PlatformError(NO_TORCH)
    low, high = SUPPORTED_TORCH
    if not low <= _numbers(version) < high:
        raise PlatformError(
            f"torch {version} is not supported: install torch >= {low[0]}.{low[1]}, < {high[0]}.{high[1]}"
        )


def torch_version() -> str | None:
    """Return the version of the installed torch, without importing it."""
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, int]:
    major, minor, *_ = version.split("+")[0].split(".")
    return int(major), int(minor)


def find_compiler() -> str | None:
    """Return the path of a C++ compiler that torch.compile can use on this machine."""
    names = [os.environ.get("CXX", ""), "g++", "clang++", "c++"]
    return next((path for name in names if name and (path := shutil.which(name))), None)


def allowed_cores() -> set[int]:
    """Return the cores that this process was allowed to use when it started.

    Where OMP_PROC_BIND is set, importing torch binds the main thread to one core, and its affinity no longer shows
    them. A trial server notes the cores before that in STEPTUNE_CORES.
    """
    noted = os.environ.get(CORES_VARIABLE)
    if noted:
        return {int(core) for core in noted.split(",")}
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(allowed_cores())


def unbind_thread() -> None:
    """Allow this thread to run on all cores again, if it was forked from a thread that OMP_PROC_BIND had bound to some
    of them.
    """
    if os.environ.get("OMP_PROC_BIND", "false").lower() == "false" or not hasattr(os, "sched_setaffinity"):
        return
    noted = os.environ.get(CORES_VARIABLE)
    os.sched_setaffinity(0, allowed_cores() if noted else range(os.cpu_count() or 1))


def cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def free_memory_bytes() -> int:
    """Return the bytes of memory available without swapping, within the container's limit if there is one."""
    free = int(psutil.virtual_memory().available)
    for limit, usage in _container_memory():
        free = min(free, max(0, limit - usage))
    return free


def memory_limit_bytes() -> int:
    """Return the bytes of memory of the machine, or of the container where that has less."""
    total = int(psutil.virtual_memory().total)
    for limit, _ in _container_memory():
        total = min(total, limit)
    return total


def _container_memory() -> Iterator[tuple[int, int]]:
    """Yield the limit and the use of the container's memory, in bytes, where there is a limit."""
    for limit_file, usage_file in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError):
            limit = int(Path(limit_file).read_text(encoding="ascii"))
            usage = int(Path(usage_file).read_text(encoding="ascii"))
            if limit < 1 << 60:
                yield limit, usage


# --- in a rank --------------------------------------------------------------------------------


def default_device() -> str:
    """Return "cuda" where torch sees a CUDA device, else "cpu"."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def checked_device(wanted: str | None) -> str:
    """Return the requested kind of device, or the default kind if none is requested.

    Raises:
        ChoiceError: The kind is unknown, or this machine has no such device.
    """
    if wanted and wanted not in DEVICE_KINDS:
        raise ChoiceError(f"unknown kind of device {wanted!r}: use one of {', '.join(DEVICE_KINDS)}")
    if wanted == "cuda" and default_device() != "cuda":
        raise ChoiceError("torch finds no CUDA device here: leave --device out, or give --device cpu")
    return wanted or default_device()


def describe_hardware(kind: str) -> HardwareProfile:
    """Return the hardware profile for one kind of device."""
    import torch

    versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
    if kind == "cuda":
        versions["cuda"] = str(torch.version.cuda)
        versions["cudnn"] = str(torch.backends.cudnn.version())
        devices, links = _cuda_devices()
    else:
        refuse_parts("training does not run on GPUs")
        links = {}
        devices = (Device(kind="cpu", name=cpu_name(), memory_bytes=psutil.virtual_memory().total),)
    return HardwareProfile(
        devices=devices,
        num_cores=usable_cores(),
        cpu_name=cpu_name(),
        memory_bytes=psutil.virtual_memory().total,
        links=links,
        versions=versions,
    )


def first_difference(first: HardwareProfile, other: HardwareProfile) -> str:
    """Return the first difference between another host's hardware and the first host's; empty if their measurements are
    comparable. Memory sizes are not compared, because they differ slightly even between equal machines.
    """

    def parts(profile: HardwareProfile) -> dict[str, object]:
        devices = ", ".join(device.name for device in profile.devices)
        return {"devices": devices, "cores": profile.num_cores, "processor": profile.cpu_name, **profile.versions}

    found = parts(other)
    for name, value in parts(first).items():
        if found.get(name) != value:
            return f"{name} {found.get(name)} in place of {value}"
    return ""


def uuid_of(device: torch.device | int) -> str:
    """Return the UUID of a device as NVML writes it."""
    import torch

    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def _cuda_devices() -> tuple[tuple[Device, ...], dict[str, str]]:
    """Return the devices (the visible GPUs, or parts of them if ranks share GPUs) and the links between the devices."""
    import torch

    count = torch.cuda.device_count()
    sharing = ranks_per_device(count)
    if sharing == 1:
        return tuple(_cuda_device(n) for n in range(count)), device_links([uuid_of(n) for n in range(count)])
    devices = tuple(_cuda_device(number // sharing, sharing) for number in range(count * sharing))
    pairs = itertools.combinations(range(len(devices)), 2)
    return devices, {f"{a}-{b}": LINK_OF_PARTS for a, b in pairs}


def device_memory_bytes(device: torch.device | int) -> int:
    """Return the memory of a GPU in bytes, or of one part of it where ranks share GPUs."""
    import torch

    return int(torch.cuda.get_device_properties(device).total_memory) // ranks_per_device(torch.cuda.device_count())


def _cuda_device(number: int, sharing: int = 1) -> Device:
    import torch

    properties = torch.cuda.get_device_properties(number)
    return Device(
        kind="cuda",
        name=properties.name if sharing == 1 else f"{properties.name}, shared by {sharing} ranks",
        memory_bytes=device_memory_bytes(number),
        capability=f"{properties.major}.{properties.minor}",
    )


def describe_environment(kind: str, directory: Path, num_ranks: int = 1) -> Environment:
    """Describe the hardware, its measured peak rates, and the software that strategies need."""
    return Environment(
        hardware=describe_hardware(kind),
        calibration=calibrate(kind),
        compiler=find_compiler(),
        num_ranks=num_ranks,
        num_hosts=num_emulated_hosts(),
        free_disk_bytes=shutil.disk_usage(directory).free,
        free_memory_bytes=free_memory_bytes(),
    )


def calibrate(kind: str) -> Calibration:
    """Measure the peak rates that bounds use: the highest matmul rate of each dtype, and the copy bandwidth.

    Uses random data, and takes the fastest of several sizes and repeats: a peak, not an average.
    """
    import torch

    device = torch.device(kind)
    rates: dict[str, float] = {}
    dtypes = ["float32", "bfloat16", "float16"]
    for name in dtypes:
        rates[name] = _matmul_rate(device, getattr(torch, name), _MATRIX_SIZES[kind])
    if kind == "cuda":
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high")
        rates["tf32"] = _matmul_rate(device, torch.float32, _MATRIX_SIZES[kind])
        torch.set_float32_matmul_precision(before)
    return Calibration(matmul_flops_per_s=rates, copy_bytes_per_s=_copy_rate(device, _COPY_BYTES[kind]))


def _matmul_rate(device: object, dtype: object, sizes: tuple[int, ...]) -> float:
    import torch

    best = 0.0
    for size in sizes:
        left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))  # type: ignore[call-overload]
        seconds = _best_seconds(lambda a=left, b=right: a @ b, device)
        rate = 2 * size**3 / seconds
        best = max(best, rate)
        if seconds > _MIN_MEASURED_S:  # emulated arithmetic: larger products would take seconds
            break
    return best


def _copy_rate(device: object, num_bytes: int) -> float:
    import torch

    source = torch.rand(num_bytes // 4, device=device)  # type: ignore[call-overload]
    target = torch.empty_like(source)
    return 2 * num_bytes / _best_seconds(lambda: target.copy_(source), device)


def _best_seconds(function: object, device: object) -> float:
    import torch

    def run() -> float:
        began = time.perf_counter()
        function()  # type: ignore[operator]
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter() - began

    first = run()
    if first > _MIN_MEASURED_S:
        return min(first, run()) if first < 1.0 else first
    return min(run() for _ in range(max(3, min(20, int(_MIN_MEASURED_S / max(first, 1e-6))))))
