"""Check of the network interfaces that NCCL uses for sockets: for set-up, and for all data if there is no RDMA."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from steptune.tuner.network.finding import NetworkFinding, note, ok, problem
from steptune.tuner.network.host import Host
from steptune.tuner.network.interfaces import speeds
from steptune.tuner.network.selection import Selection

NAME = "socket interfaces"
VARIABLE = "NCCL_SOCKET_IFNAME"
LAST_RESORT = ("lo", "docker")
"""Prefixes of interfaces that NCCL uses only if there is no other."""

Speeds = Mapping[str, int | None]


def examine(host: Host) -> Iterator[NetworkFinding]:
    up = speeds(host.tree)
    setting = host.settings.get(VARIABLE, "").strip()
    if not up:
        yield note(
            NAME,
            "no interface is up",
            effect="processes can communicate only within this host",
            fix="bring an interface up",
        )
    elif setting:
        yield _chosen(up, setting)
    else:
        yield _judged({name: up[name] for name in up if not name.startswith(LAST_RESORT)} or up)


def _chosen(up: Speeds, setting: str) -> NetworkFinding:
    selection = Selection.parse(setting)
    chosen = {name: speed for name, speed in up.items() if selection.takes(name)}
    if not chosen:
        return problem(
            NAME,
            f"{VARIABLE}={setting} matches none of the interfaces that are up: {', '.join(up)}",
            effect="NCCL fails with 'Bootstrap : no socket interface found'",
            fix=f"unset {VARIABLE}, or set it to one of these interfaces",
        )
    best, fastest = _fastest(up), _fastest(chosen)
    if 0 < fastest < best:
        better = ", ".join(name for name, speed in up.items() if speed == best)
        return note(
            NAME,
            f"{VARIABLE}={setting} chooses {_shown(chosen)}; {better} has {best / 1000:g} Gb/s",
            effect="without RDMA, the slower interface carries all data; with RDMA, only the connection set-up",
            fix=f"set {VARIABLE}={better}, unless RDMA carries the data",
        )
    return _judged(chosen)


def _judged(chosen: Speeds) -> NetworkFinding:
    if all(name.startswith("lo") for name in chosen):
        fix = f"bring up another interface, or set {VARIABLE} to it"
        return note(NAME, _shown(chosen), effect="the loopback interface reaches no other host", fix=fix)
    return ok(NAME, _shown(chosen))


def _fastest(interfaces: Speeds) -> int:
    return max(speed or 0 for speed in interfaces.values())


def _shown(interfaces: Speeds) -> str:
    known = {name: f"{speed / 1000:g} Gb/s" if speed else "speed not known" for name, speed in interfaces.items()}
    return ", ".join(f"{name} ({speed})" for name, speed in known.items())
