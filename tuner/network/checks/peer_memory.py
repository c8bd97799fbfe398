"""Check that a NIC can read and write a GPU's memory: through nvidia_peermem, nv_peer_mem or DMA-BUF.

NCCL looks for the modules' version files, and else asks the kernel for DMA-BUF, which needs NVIDIA's open kernel
modules (515 or newer, with CUDA 11.7) and Linux 5.12. EFA's driver has a way of its own, and says so in sysfs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from steptune.tuner.network.finding import NetworkFinding, note, ok, problem
from steptune.tuner.network.host import Host
from steptune.tuner.network.rdma import DEVICES as RDMA_DEVICES

NAME = "GPUDirect RDMA"
VERSION_FILES = {
    "nvidia_peermem": "/sys/module/nvidia_peermem/version",
    "nv_peer_mem": "/sys/kernel/mm/memory_peers/nv_mem/version",
    "nv_peer_mem (nc)": "/sys/kernel/mm/memory_peers/nv_mem_nc/version",
}
MODULES = ("nvidia_peermem", "nv_peer_mem")
MODULE_LISTS = ("/proc/modules", "/lsmod.txt")
OLDEST_KERNEL = (5, 12)
OLDEST_DRIVER = 515


def examine(host: Host) -> Iterator[NetworkFinding]:
    if not host.has_gpu or not host.rdma_devices:
        missing = "no NVIDIA GPU" if not host.has_gpu else "no RDMA device"
        yield note(NAME, f"not checked: the host has {missing}")
        return
    way = next((name for name, path in VERSION_FILES.items() if host.tree.exists(path)), None) or _listed_module(host)
    if way:
        yield ok(NAME, f"{way} is loaded")
        return
    own = [device for device in host.rdma_devices if "NVIDIA" in _own_way(host, device)]
    if own:
        yield ok(NAME, f"the driver of {', '.join(own)} accesses GPU memory by its own mechanism")
        return
    missing = _missing_for_dma_buf(host)
    if not missing:
        yield ok(NAME, "available through DMA-BUF (open kernel modules, Linux 5.12 or newer)")
        return
    yield problem(
        NAME,
        f"neither nvidia_peermem nor nv_peer_mem is loaded, and DMA-BUF cannot be used: {missing}",
        effect="every message between hosts is copied through host memory, at about half the bandwidth of the NIC",
        fix="install nvidia-peermem after the RDMA drivers and run modprobe nvidia-peermem (at every boot: "
        "/etc/modules-load.d/), or use NVIDIA's open kernel modules on Linux 5.12 or newer",
    )


def _listed_module(host: Host) -> str | None:
    names = {line.split(maxsplit=1)[0] for path in MODULE_LISTS for line in _lines(host, path)}
    return next((module for module in MODULES if module in names), None)


def _own_way(host: Host, device: str) -> str:
    return host.tree.text(f"{RDMA_DEVICES}/{device}/device/p2p") or ""


def _lines(host: Host, path: str) -> list[str]:
    return [line for line in (host.tree.text(path) or "").splitlines() if line.strip()]


def _missing_for_dma_buf(host: Host) -> str:
    """Return what the host lacks for DMA-BUF; empty where it can be used."""
    if host.settings.get("NCCL_DMABUF_ENABLE", "").strip() == "0":
        return "NCCL_DMABUF_ENABLE=0"
    kernel = re.match(r"(\d+)\.(\d+)", host.tree.text("/proc/sys/kernel/osrelease") or "")
    if not kernel:
        return "the version of the kernel is unknown"
    if (int(kernel[1]), int(kernel[2])) < OLDEST_KERNEL:
        return f"Linux {kernel[0]} is older than 5.12"
    driver = host.tree.text("/proc/driver/nvidia/version")
    if driver is None:
        return "the NVIDIA driver is not loaded"
    if "Open Kernel Module" not in driver:
        return "the driver uses the proprietary kernel modules"
    version = re.search(r"\b(\d{3,4})\.\d+(\.\d+)?\b", driver)
    if version and int(version[1]) < OLDEST_DRIVER:
        return f"driver {version[0]} is older than {OLDEST_DRIVER}"
    return ""
