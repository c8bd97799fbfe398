"""The network interfaces of a host, from /sys/class/net."""

from __future__ import annotations

from steptune.tuner.network.tree import Tree

INTERFACES = "/sys/class/net"


def speeds(tree: Tree) -> dict[str, int | None]:
    """Return the speeds, in Mbit/s, of the interfaces that are up; None where the kernel does not know the speed."""
    found = {}
    for name in tree.names(INTERFACES):
        if tree.text(f"{INTERFACES}/{name}/operstate") in ("up", "unknown"):
            speed = tree.number(f"{INTERFACES}/{name}/speed")
            found[name] = speed if speed is not None and speed > 0 else None
    return found


def mtu_bytes(tree: Tree, interface: str) -> int | None:
    return tree.number(f"{INTERFACES}/{interface}/mtu")
