"""Check of NCCL's environment variables for values that cost bandwidth."""

from __future__ import annotations

from collections.abc import Iterator

from steptune.tuner.network.finding import NetworkFinding, ok, problem
from steptune.tuner.network.host import Host
from steptune.tuner.network.selection import Selection
from steptune.tuner.network.settings import SUBJECT, settings_findings

NAME = SUBJECT
HCA = "NCCL_IB_HCA"


def examine(host: Host) -> Iterator[NetworkFinding]:
    settings = host.settings
    found = settings_findings(settings)
    yield from found
    chosen = settings.get(HCA, "").strip()
    if chosen and host.ports and not any(Selection.parse(chosen).takes(p.device, p.number) for p in host.ports):
        yield problem(
            NAME,
            f"{HCA}={chosen} matches none of {', '.join(port.name for port in host.ports)}",
            effect="InfiniBand and RoCE are not used: hosts communicate through TCP sockets",
            fix=f"unset {HCA}, or set it to devices that exist",
        )
    elif not found:
        harmless = ", ".join(f"{name}={value}" for name, value in sorted(settings.items()))
        yield ok(NAME, harmless or "none is set")
