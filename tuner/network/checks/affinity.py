"""Check of each GPU's distance from its nearest NIC: GPUDirect RDMA is used up to PXB, unless NCCL_NET_GDR_LEVEL
differs.

The distances are those of `nvidia-smi topo -m`: from its output, kept in the tree as `nvidia-smi-topo.txt`, or from the
paths in sysfs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from steptune.tuner.network.finding import NetworkFinding, note, ok, problem, unknown
from steptune.tuner.network.host import Host
from steptune.tuner.network.pci import Function

NAME = "GPU-NIC affinity"
TOPOLOGY = "/nvidia-smi-topo.txt"
DISTANCES = ("PIX", "PXB", "PHB", "NODE", "SYS")
"""Distances in `nvidia-smi topo -m`, nearest first."""
DIRECT = ("PIX", "PXB")
_OLD_LEVELS = {"1": "PIX", "2": "PXB", "3": "PHB", "4": "SYS", "5": "SYS"}
_WITHOUT_NODE = {"PIX": 0, "PXB": 1, "PHB": 2, "NODE": 3, "SYS": 3}
"""Order of the distances without NODE: NCCL does not have NODE, and counts everything beyond a host bridge as SYS."""


def examine(host: Host) -> Iterator[NetworkFinding]:
    if not host.has_gpu or not host.rdma_devices:
        return
    table = host.tree.text(TOPOLOGY)
    distances = parse_topology(table) if table else _from_sysfs(host)
    if not distances:
        yield unknown(
            NAME,
            f"{TOPOLOGY.strip('/')} lists no pair of a GPU and a NIC"
            if table
            else "the PCIe location of GPUs and NICs is unknown",
            fix="keep the symbolic links of /sys in the copy, or save the output of `nvidia-smi topo -m` as "
            f"{TOPOLOGY.strip('/')}",
        )
        return
    level = _level(host.settings)
    nearest = {gpu: min(row.items(), key=lambda item: DISTANCES.index(item[1])) for gpu, row in distances.items()}
    near = {gpu: place for gpu, place in nearest.items() if place[1] in DIRECT}
    if near:
        yield ok(NAME, "; ".join(f"{gpu} {place} {nic}" for gpu, (nic, place) in near.items()))
    far = {gpu: place for gpu, place in nearest.items() if gpu not in near}
    if not far:
        return
    found = "; ".join(f"{gpu} {place} {nic}" for gpu, (nic, place) in far.items())
    if all(_WITHOUT_NODE[place] <= _WITHOUT_NODE[level] for _, place in far.values()):
        yield note(
            NAME,
            f"{found}, with GPUDirect RDMA allowed to {level}",
            effect="messages cross the CPU, which is slower than a single PCIe switch and, on some CPUs, slower "
            "than copies through host memory",
            fix="measure the speed with and without NCCL_NET_GDR_LEVEL",
        )
        return
    yield problem(
        NAME,
        f"{found}: no NIC behind the same PCIe switch",
        effect="NCCL does not use GPUDirect RDMA beyond distance PXB, so messages are copied through host memory",
        fix="move a NIC behind the GPU's PCIe switch; in a virtual machine, give NCCL the real topology "
        "(NCCL_TOPO_FILE); or set NCCL_NET_GDR_LEVEL=SYS if it is measured to be faster",
    )


def _level(settings: Mapping[str, str]) -> str:
    value = settings.get("NCCL_NET_GDR_LEVEL", "").strip().upper()
    value = _OLD_LEVELS.get(value, value)
    return value if value in DISTANCES else "PXB"


def _from_sysfs(host: Host) -> dict[str, dict[str, str]]:
    nics = {name: nic for name, nic in host.nics.items() if nic is not None and nic.path}
    return {
        gpu.address: {name: distance(gpu, nic) for name, nic in nics.items()}
        for gpu in host.pci.gpus
        if gpu.path and nics
    }


def distance(first: Function, second: Function) -> str:
    """Return the distance between two PCI functions with known paths."""
    shared = 0
    for one, other in zip(first.path, second.path, strict=False):
        if one != other:
            break
        shared += 1
    if shared == 0:
        same_node = first.numa_node == second.numa_node and first.numa_node not in (None, -1)
        return "NODE" if same_node else "SYS"
    if shared == 1:
        return "PHB"
    # Below the shared port: a switch has one port on the way to each, two switches have more.
    ports = max(len(first.path), len(second.path)) - shared - 1
    return "PIX" if ports <= 1 else "PXB"


def parse_topology(text: str) -> dict[str, dict[str, str]]:
    """Return the distance of every GPU to every NIC, by name, from the output of `nvidia-smi topo -m`."""
    lines = re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()
    header = next((line.split() for line in lines if "GPU0" in line.split()), [])
    legend = dict(re.findall(r"^\s*(NIC\d+)\s*:\s*(\S+)", "\n".join(lines), re.MULTILINE))
    columns = {
        index: legend.get(name, name) for index, name in enumerate(header) if re.match(r"(NIC\d+|mlx\d+_\d+)$", name)
    }
    found: dict[str, dict[str, str]] = {}
    for line in lines:
        name, *cells = line.split() or [""]
        if not re.fullmatch(r"GPU\d+", name) or name not in header or "X" not in cells:
            continue
        row = {nic: cells[index] for index, nic in columns.items() if index < len(cells)}
        known = {nic: cell for nic, cell in row.items() if cell in DISTANCES}
        if known:
            found[name] = known
    return found
