"""Check of the RDMA devices' ports: whether their links are up, and equally fast."""

from __future__ import annotations

from collections.abc import Iterator

from steptune.tuner.network.finding import NetworkFinding, note, ok, problem
from steptune.tuner.network.host import Host

NAME = "RDMA ports"


def examine(host: Host) -> Iterator[NetworkFinding]:
    if not host.rdma_devices:
        yield note(
            NAME,
            "no RDMA device",
            effect="hosts communicate through TCP sockets",
            fix="if the host has InfiniBand or RoCE, load its drivers and pass its devices to the container "
            "(--device /dev/infiniband)",
        )
        return
    for port in host.ports:
        shown = f"{port.name}: {port.state}, {port.link_layer}, {port.rate}"
        if port.is_active:
            yield ok(NAME, shown)
        elif len(host.active_ports) > 0 and port.is_ethernet and port.state == "DOWN":
            yield note(
                NAME,
                shown,
                effect="NCCL does not use this port",
                fix="if the port should carry traffic, connect its cable and bring it up",
            )
        else:
            yield problem(
                NAME,
                shown,
                effect="NCCL does not use this port; without any other port it falls back to TCP sockets",
                fix="DOWN: cable or transceiver, `ip link set ... up`; INIT or ARMED: no subnet manager (start opensm)",
            )
    if not host.ports:
        yield problem(
            NAME,
            f"{', '.join(host.rdma_devices)} without ports",
            effect="NCCL falls back to TCP sockets",
            fix="check the driver's messages (dmesg)",
        )
    yield from _slower(host)


def _slower(host: Host) -> Iterator[NetworkFinding]:
    """Yield findings about ports that are slower than the fastest port with the same link layer."""
    for layer in sorted({port.link_layer for port in host.active_ports}):
        rates = {
            port.name: port.gigabits_per_s
            for port in host.active_ports
            if port.link_layer == layer and port.gigabits_per_s is not None
        }
        fastest = max((rate for rate in rates.values() if rate), default=0.0)
        slow = [f"{name} at {rate:g} Gb/s" for name, rate in rates.items() if rate is not None and rate < fastest]
        if slow:
            yield note(
                NAME,
                f"{', '.join(slow)}; others at {fastest:g} Gb/s",
                effect="a ring over all ports runs at the rate of the slowest one",
                fix="if the link was trained below its rate, check cable, transceiver and switch port; if the "
                "port has another purpose, exclude it with NCCL_IB_HCA",
            )
