"""The network interfaces that NCCL uses for sockets: to set up connections, and for all data where there is no RDMA."""

from __future__ import annotations

from collections.abc import Iterator

from tuner.network.finding import NetworkFinding, note, ok, problem
from tuner.network.host import Host

NAME = "socket interfaces"
INTERFACES = "/sys/class/net"
VARIABLE = "NCCL_SOCKET_IFNAME"
FAST_MEGABITS = 10_000
LEFT_OUT = ("lo", "docker")
"""Prefixes that NCCL takes only if there is nothing else."""


def speeds(host: Host) -> dict[str, int | None]:
    """Megabits per second of the interfaces that are up; None where the kernel does not know."""
    found = {}
    for name in host.tree.names(INTERFACES):
        if host.tree.text(f"{INTERFACES}/{name}/operstate") in ("up", "unknown"):
            speed = host.tree.number(f"{INTERFACES}/{name}/speed")
            found[name] = speed if speed is not None and speed > 0 else None
    return found


def fast_interfaces(host: Host) -> list[str]:
    return [name for name, speed in speeds(host).items() if speed is not None and speed >= FAST_MEGABITS]


def chosen_interfaces(names: list[str], setting: str) -> list[str]:
    """By NCCL's rule: prefixes, `=` for whole names, `^` for all but those."""
    wanted = setting.strip()
    excluding = wanted.startswith("^")
    wanted = wanted.removeprefix("^")
    exact = wanted.startswith("=")
    patterns = [pattern for pattern in wanted.removeprefix("=").split(",") if pattern]

    def matches(name: str) -> bool:
        return any(name == pattern.partition(":")[0] if exact else name.startswith(pattern) for pattern in patterns)

    return [name for name in names if matches(name) != excluding]


def examine(host: Host) -> Iterator[NetworkFinding]:
    up = speeds(host)
    setting = host.settings.get(VARIABLE, "")
    if setting.strip():
        chosen = chosen_interfaces(list(up), setting)
        if not chosen:
            yield problem(
                NAME,
                f"{VARIABLE}={setting} matches none that is up: {', '.join(up) or 'there is none'}",
                effect="NCCL ends with 'Bootstrap : no socket interface found'",
                fix=f"unset {VARIABLE}, or name one of these",
            )
            return
    else:
        chosen = [name for name in up if not name.startswith(LEFT_OUT)] or list(up)
    if not chosen:
        yield note(NAME, "none is up", effect="only processes of this host can exchange", fix="raise an interface")
        return
    yield from _judged(up, chosen, setting)


def _judged(up: dict[str, int | None], chosen: list[str], setting: str) -> Iterator[NetworkFinding]:
    shown = ", ".join(f"{name} ({f'{up[name] / 1000:g} Gb/s' if (up[name] or 0) else 'speed not known'})" for name in chosen)
    if all(name.startswith("lo") for name in chosen):
        yield note(
            NAME, shown, effect="the loopback reaches no other host", fix=f"name another interface in {VARIABLE}"
        )
        return
    best = max((speed or 0 for speed in up.values()), default=0)
    fastest = max((up[name] or 0 for name in chosen), default=0)
    if setting.strip() and 0 < fastest < best:
        better = ", ".join(name for name, speed in up.items() if speed == best)
        yield note(
            NAME,
            f"{VARIABLE}={setting} chooses {shown}; {better} has {best / 1000:g} Gb/s",
            effect="without RDMA all data take the slower one; with RDMA only the set-up does",
            fix=f"{VARIABLE}={better}, unless RDMA carries the data",
        )
        return
    yield ok(NAME, shown)
