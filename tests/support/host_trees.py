"""A host's files in a folder, as Linux shows them: GPUs and NICs behind one PCIe switch, all in order."""

from __future__ import annotations

import os
import struct
from pathlib import Path

SWITCH = "pci0000:00/0000:00:01.0/0000:01:00.0"
"""A root port and a switch's upstream port."""
GPU = f"{SWITCH}/0000:02:00.0/0000:03:00.0"
NIC = f"{SWITCH}/0000:02:01.0/0000:04:00.0"
DRIVER = "NVRM version: NVIDIA UNIX {kind} for x86_64  {version}  Release Build"


def write(root: Path, path: str, text: str | bytes) -> Path:
    """A file of the host."""
    file = root / path.lstrip("/")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return file


def link(root: Path, path: str, target: str) -> None:
    """A relative link of the host, as sysfs has them."""
    file = root / path.lstrip("/")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.symlink_to(os.path.relpath(root / target.lstrip("/"), file.parent))


def config_space(*, acs: int | None = None, device_control: int = 0x10) -> bytes:
    """A PCI Express function's registers: one capability at 0x40, one extended capability at 0x100."""
    config = bytearray(4096)
    struct.pack_into("<H", config, 0x06, 0x10)
    config[0x34] = 0x40
    config[0x40:0x42] = bytes((0x10, 0x00))
    struct.pack_into("<H", config, 0x48, device_control)
    if acs is not None:
        struct.pack_into("<I", config, 0x100, 0x1_000D | (0 << 20))
        struct.pack_into("<H", config, 0x106, acs)
    return bytes(config)


def add_function(root: Path, path: str, *, kind: str, vendor: str = "0x8086", config: bytes | None = None) -> None:
    """A PCI function at this place under /sys/devices."""
    folder = f"/sys/devices/{path}"
    write(root, f"{folder}/class", f"{kind}\n")
    write(root, f"{folder}/vendor", f"{vendor}\n")
    write(root, f"{folder}/numa_node", "0\n")
    write(root, f"{folder}/config", config_space() if config is None else config)
    link(root, f"/sys/bus/pci/devices/{path.rpartition('/')[2]}", folder)


def add_gpu(root: Path, path: str = GPU) -> None:
    add_function(root, path, kind="0x030200", vendor="0x10de")
    address = path.rpartition("/")[2]
    write(root, f"/proc/driver/nvidia/gpus/{address}/information", "Model: \t\t NVIDIA H100\n")


def add_nic(root: Path, name: str = "mlx5_0", path: str = NIC, **port: str) -> None:
    """An RDMA device with one port."""
    add_function(root, path, kind="0x020700", vendor="0x15b3")
    folder = f"/sys/devices/{path}/infiniband/{name}"
    shown = {"state": "4: ACTIVE", "link_layer": "InfiniBand", "rate": "400 Gb/sec (4X NDR)", **port}
    for attribute, value in shown.items():
        write(root, f"{folder}/ports/1/{attribute}", f"{value}\n")
    link(root, f"{folder}/device", f"/sys/devices/{path}")
    link(root, f"/sys/class/infiniband/{name}", folder)
    write(root, f"/dev/infiniband/uverbs{name.rpartition('_')[2]}", "")


def add_interface(root: Path, name: str, *, mtu: int = 9000, speed: int = 100_000, state: str = "up") -> None:
    folder = f"/sys/class/net/{name}"
    write(root, f"{folder}/mtu", f"{mtu}\n")
    write(root, f"{folder}/speed", f"{speed}\n")
    write(root, f"{folder}/operstate", f"{state}\n")


def add_gids(root: Path, gids: dict[int, tuple[str, str]], *, name: str = "mlx5_0", path: str = NIC) -> None:
    """Addresses of a RoCE port with their kinds, and its interface."""
    folder = f"/sys/devices/{path}/infiniband/{name}/ports/1"
    write(root, f"{folder}/gid_attrs/ndevs/0", "eth1\n")
    write(root, f"{folder}/gids/15", "0000:0000:0000:0000:0000:0000:0000:0000\n")
    for index, (value, kind) in gids.items():
        write(root, f"{folder}/gids/{index}", f"{value}\n")
        write(root, f"{folder}/gid_attrs/types/{index}", f"{kind}\n")


def set_iommu(root: Path, kind: str, *paths: str) -> None:
    """The type of the IOMMU's groups of these functions."""
    for number, path in enumerate(paths):
        group = f"/sys/kernel/iommu_groups/{number}"
        write(root, f"{group}/type", f"{kind}\n")
        link(root, f"/sys/devices/{path}/iommu_group", group)


def healthy_host(root: Path) -> Path:
    """InfiniBand, one GPU and one NIC behind a switch, and nothing amiss."""
    add_function(root, "pci0000:00/0000:00:01.0", kind="0x060400", config=config_space(acs=0))
    add_function(root, SWITCH, kind="0x060400")
    add_function(root, f"{SWITCH}/0000:02:00.0", kind="0x060400", config=config_space(acs=0))
    add_function(root, f"{SWITCH}/0000:02:01.0", kind="0x060400", config=config_space(acs=0))
    add_gpu(root)
    add_nic(root)
    add_interface(root, "eth0")
    set_iommu(root, "identity", GPU, NIC)
    write(root, "/sys/module/nvidia_peermem/version", "580.65.06\n")
    write(root, "/proc/modules", "nvidia_peermem 16384 0 - Live 0x0\nib_core 471040 9 nvidia_peermem, Live 0x0\n")
    write(root, "/proc/sys/kernel/osrelease", "5.15.0-91-generic\n")
    write(root, "/proc/driver/nvidia/version", DRIVER.format(kind="x86_64 Kernel Module", version="580.65.06"))
    write(root, "/proc/cmdline", "BOOT_IMAGE=/vmlinuz root=/dev/sda1 intel_iommu=on iommu=pt\n")
    write(root, "/proc/self/limits", LIMITS.format(locked="unlimited            unlimited           "))
    write(root, "/proc/self/environ", b"PATH=/usr/bin\0HOME=/root\0NCCL_DEBUG=INFO\0")
    return root


LIMITS = """\
Limit                     Soft Limit           Hard Limit           Units
Max processes             2062607              2062607              processes
Max locked memory         {locked} bytes
"""
