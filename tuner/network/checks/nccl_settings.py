"""NCCL's variables that this host sets to its disadvantage."""

from __future__ import annotations

from collections.abc import Iterator

from tuner.network.finding import NetworkFinding, ok, problem
from tuner.network.host import Host
from tuner.network.settings import SUBJECT, settings_findings

NAME = SUBJECT
HCA = "NCCL_IB_HCA"


def examine(host: Host) -> Iterator[NetworkFinding]:
    settings = host.settings
    found = settings_findings(settings)
    yield from found
    chosen = settings.get(HCA, "").strip()
    if chosen and host.rdma_devices and not _matches(host, chosen):
        yield problem(
            NAME,
            f"{HCA}={chosen} matches none of {', '.join(port.name for port in host.ports) or 'no port'}",
            effect="InfiniBand and RoCE are not used: hosts exchange through TCP sockets",
            fix=f"unset {HCA}, or name devices that are there",
        )
    elif not found:
        harmless = ", ".join(f"{name}={value}" for name, value in sorted(settings.items()))
        yield ok(NAME, harmless or "none is set")


def _matches(host: Host, setting: str) -> bool:
    """By NCCL's rule: prefixes of devices with an optional port, `=` for whole names, `^` for all but those."""
    excluding = setting.startswith("^")
    wanted = setting.removeprefix("^")
    exact = wanted.startswith("=")
    pairs = [pattern.partition(":") for pattern in wanted.removeprefix("=").split(",") if pattern]

    def matches(device: str, number: str) -> bool:
        return any(
            (device == name if exact else device.startswith(name)) and (not port or port == number)
            for name, _, port in pairs
        )

    return any(matches(port.device, port.number) != excluding for port in host.ports)
