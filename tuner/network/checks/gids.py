"""Check of the addresses of RoCE ports: RoCE v2 with an IP address is routable, v1 and link-local addresses are not."""

from __future__ import annotations

from collections.abc import Iterator

from steptune.tuner.network.finding import NetworkFinding, note, ok, problem
from steptune.tuner.network.host import Host
from steptune.tuner.network.rdma import Gid, Port, read_gids

NAME = "RoCE GID"
VARIABLE = "NCCL_IB_GID_INDEX"
V2 = "RoCE v2"
_EFFECT = (
    "connections time out (in ibv_modify_qp, or as completions with error 12), or switches do not forward their packets"
)


def examine(host: Host) -> Iterator[NetworkFinding]:
    for port in host.active_ports:
        if port.is_ethernet:
            yield _port(port, read_gids(host.tree, port), host.settings.get(VARIABLE, "").strip())


def _port(port: Port, gids: list[Gid], chosen: str) -> NetworkFinding:
    routable = [gid.index for gid in gids if gid.kind == V2 and not gid.is_link_local]
    indices = ", ".join(map(str, routable))
    if not routable:
        return problem(
            NAME,
            f"{port.name} has no RoCE v2 address other than link-local ones",
            effect=_EFFECT,
            fix=f"give {port.interface or 'its interface'} an IP address; in a container, make the interface "
            "available to it",
        )
    if chosen in ("", "-1"):
        return ok(NAME, f"{port.name}: RoCE v2 at index {indices}; NCCL 2.21 and newer choose it themselves")
    if chosen in map(str, routable):
        return ok(NAME, f"{port.name}: {VARIABLE}={chosen} is RoCE v2")
    gid = next((gid for gid in gids if str(gid.index) == chosen), None)
    if gid is not None and gid.kind == V2:
        return note(
            NAME,
            f"{port.name}: {VARIABLE}={chosen} is link-local",
            effect="hosts in other subnets cannot be reached",
            fix=f"unset {VARIABLE} (NCCL 2.21 or newer), or set it to {indices}",
        )
    held = f"is {gid.kind}" if gid is not None else "is not in use"
    return problem(
        NAME,
        f"{port.name}: {VARIABLE}={chosen} {held}",
        effect=_EFFECT,
        fix=f"unset {VARIABLE} (NCCL 2.21 or newer), or set it to {indices}",
    )
