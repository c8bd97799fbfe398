"""Check of the MTU of RoCE and of fast Ethernet interfaces: an Ethernet MTU of 1500 bytes limits RoCE messages to 1024
bytes each.
"""

from __future__ import annotations

from collections.abc import Iterator

from steptune.tuner.network.finding import NetworkFinding, note, ok, problem, unknown
from steptune.tuner.network.host import Host
from steptune.tuner.network.interfaces import mtu_bytes, speeds

NAME = "MTU"
FOR_ROCE_OF_4096 = 4200
"""Minimum bytes of an Ethernet frame that carries RoCE's largest message with its headers."""
FAST_MEGABITS_PER_S = 10_000
"""Minimum speed, in Mbit/s, at which the packet rate limits TCP."""


def examine(host: Host) -> Iterator[NetworkFinding]:
    judged = set()
    for port in host.active_ports:
        if not port.is_ethernet:
            continue
        mtu = mtu_bytes(host.tree, port.interface) if port.interface else None
        if mtu is None:
            yield unknown(
                NAME,
                f"the network interface of {port.name} is unknown",
                fix="run `ibv_devinfo`; active_mtu should be 4096",
            )
            continue
        judged.add(port.interface)
        shown = f"{mtu} bytes on {port.interface}, of {port.name}"
        if mtu >= FOR_ROCE_OF_4096:
            yield ok(NAME, shown)
            continue
        yield problem(
            NAME,
            shown,
            effect="RoCE sends packets of at most 1024 bytes instead of 4096, which means more headers and more "
            "work for the NIC",
            fix=f"run ip link set {port.interface} mtu 9000 on both hosts, and set the same MTU on every switch "
            "between them",
        )
    for interface, speed in speeds(host.tree).items():
        mtu = mtu_bytes(host.tree, interface)
        if interface in judged or (speed or 0) < FAST_MEGABITS_PER_S or mtu is None or mtu > 1500:
            continue
        yield note(
            NAME,
            f"{mtu} bytes on {interface}",
            effect="TCP sockets send six times as many packets as with an MTU of 9000 bytes",
            fix=f"run ip link set {interface} mtu 9000 on both hosts, and set the same MTU on every switch "
            "between them",
        )
