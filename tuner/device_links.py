"""Connections of this machine's GPUs, by NVML, in the words of `nvidia-smi topo -m`.

NV18 means 18 NVLinks, to the other GPU itself or to a switch to which both are connected. Without NVLink, the word says
what a transfer crosses on PCIe: PIX one switch, PXB several, PHB a host bridge, NODE several host bridges of one NUMA
node, SYS the interconnect between NUMA nodes. " (no peer access)" is added where one GPU cannot read the other's
memory: transfers then go through the host's.

Source: https://docs.nvidia.com/deploy/nvml-api/ , bindings: nvidia-ml-py (the extra `cuda`)
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

MAX_NVLINKS = 18
"""Maximum NVLinks of one GPU; the driver refuses a link that does not exist."""
PCIE_KINDS = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
"""Kinds of connection by NVML's nvmlGpuTopologyLevel_t; level 0 stands for two GPUs on one board."""
READ = 0
"""Value of NVML's nvmlGpuP2PCapsIndex_t for reading. The constant in NVML's Python bindings is a tuple, which the
function of these bindings rejects.
"""
SWITCH = 2
"""Value of NVML's nvmlIntNvLinkDeviceType_t for a switch."""
NO_PEER_ACCESS = " (no peer access)"


def device_links(uuids: Sequence[str]) -> dict[str, str]:
    """Return the kind of link between each pair of devices, as {"0-1": "NV18"}; empty for a single device, and where
    NVML is missing or refuses.

    Args:
        uuids: UUIDs of the devices in CUDA's order, as NVML writes them.
    """
    if len(uuids) < 2:
        return {}
    try:
        import pynvml
    except ImportError:
        return {}
    try:
        return links_between(pynvml, uuids)
    except pynvml.NVMLError:
        return {}


def links_between(nvml: Any, uuids: Sequence[str]) -> dict[str, str]:
    """Return the kind of link between each pair of devices, in the format of `device_links`.

    Args:
        nvml: The module `pynvml`.

    Raises:
        pynvml.NVMLError: The driver does not answer, or knows no such device.
    """
    nvml.nvmlInit()
    handles = [nvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids]
    return {f"{a}-{b}": _kind(nvml, handles[a], handles[b]) for a, b in itertools.combinations(range(len(handles)), 2)}


def _kind(nvml: Any, first: Any, second: Any) -> str:
    count = _num_nvlinks(nvml, first, second)
    kind = f"NV{count}" if count else PCIE_KINDS[int(nvml.nvmlDeviceGetTopologyCommonAncestor(first, second))]
    reads = nvml.nvmlDeviceGetP2PStatus(first, second, READ) == nvml.NVML_P2P_STATUS_OK
    return kind if reads else f"{kind}{NO_PEER_ACCESS}"


def _num_nvlinks(nvml: Any, first: Any, second: Any) -> int:
    """Return the number of NVLinks from one device to the other: direct ones, or those through a switch. The two
    devices may have different numbers of links to the switch.
    """
    second_bus = nvml.nvmlDeviceGetPciInfo(second).busId
    direct = _ends(nvml, first).count(second_bus)
    if direct:
        return direct
    return min(_ends(nvml, handle).count(None) for handle in (first, second))


def _ends(nvml: Any, handle: Any) -> list[Any]:
    """Return the PCI bus id of the device at the other end of each active NVLink; None for a switch."""
    found: list[Any] = []
    for number in range(MAX_NVLINKS):
        try:
            if not nvml.nvmlDeviceGetNvLinkState(handle, number):
                continue
            if nvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, number) == SWITCH:
                found.append(None)
            else:
                found.append(nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, number).busId)
        except nvml.NVMLError:  # there is no such link, on this device or at all
            break
    return found
