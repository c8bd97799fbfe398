"""The RDMA devices of a host and their ports, from /sys/class/infiniband."""

from __future__ import annotations

import re
from dataclasses import dataclass

from steptune.tuner.network.tree import Tree

DEVICES = "/sys/class/infiniband"
_ZERO_GID = "0000:0000:0000:0000:0000:0000:0000:0000"


@dataclass(frozen=True, kw_only=True)
class Gid:
    """One address (GID) of a port. `kind` is "IB/RoCE v1" or "RoCE v2"."""

    index: int
    value: str
    kind: str

    @property
    def is_link_local(self) -> bool:
        return self.value.startswith("fe80:")


@dataclass(frozen=True, kw_only=True)
class Port:
    """One port of an RDMA device.

    Attributes:
        state: State in the kernel's words: "ACTIVE", "DOWN", "INIT", "ARMED".
        rate: Rate in the kernel's words, such as "200 Gb/sec (4X HDR)".
        interface: Network interface of a RoCE port, if any.
    """

    device: str
    number: str
    state: str
    link_layer: str
    rate: str
    interface: str | None

    @property
    def name(self) -> str:
        return f"{self.device}:{self.number}"

    @property
    def is_active(self) -> bool:
        return self.state == "ACTIVE"

    @property
    def is_ethernet(self) -> bool:
        return self.link_layer == "Ethernet"

    @property
    def gigabits_per_s(self) -> float | None:
        match = re.match(r"\d+(\.\d+)?", self.rate)
        return float(match[0]) if match else None


def read_ports(tree: Tree) -> list[Port]:
    """Return all ports of all devices.

    Raises:
        UnreadableError: A file about a port cannot be read.
    """
    return [
        _port(tree, device, number)
        for device in tree.names(DEVICES)
        for number in tree.names(f"{DEVICES}/{device}/ports")
    ]


def _port(tree: Tree, device: str, number: str) -> Port:
    folder = f"{DEVICES}/{device}/ports/{number}"
    state = tree.text(f"{folder}/state") or "not shown"
    return Port(
        device=device,
        number=number,
        state=state.rpartition(":")[2].strip(),
        link_layer=tree.text(f"{folder}/link_layer") or "not shown",
        rate=tree.text(f"{folder}/rate") or "not shown",
        interface=tree.text(f"{folder}/gid_attrs/ndevs/0"),
    )


def read_gids(tree: Tree, port: Port) -> list[Gid]:
    """Return the addresses of a port that are in use: the addresses that have a kind.

    Raises:
        UnreadableError: An address cannot be read.
    """
    folder = f"{DEVICES}/{port.device}/ports/{port.number}"
    indices = sorted(int(name) for name in tree.names(f"{folder}/gids") if name.isdecimal())
    gids = [
        Gid(
            index=index,
            value=tree.text(f"{folder}/gids/{index}") or _ZERO_GID,
            kind=tree.text(f"{folder}/gid_attrs/types/{index}") or "not shown",
        )
        for index in indices
    ]
    return [gid for gid in gids if gid.value != _ZERO_GID]
