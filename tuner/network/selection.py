"""Interfaces that NCCL_SOCKET_IFNAME and NCCL_IB_HCA select: prefixes, `=` for whole names, `^` to exclude."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Selection of network interfaces or ports by one of NCCL's environment variables.

    Attributes:
        names: Pairs of a name (or its prefix) and a port; an empty port selects all ports.
    """

    names: tuple[tuple[str, str], ...]
    exact: bool
    excluding: bool

    @classmethod
    def parse(cls, setting: str) -> Selection:
        """Parse the value of NCCL_SOCKET_IFNAME or NCCL_IB_HCA."""
        wanted = setting.strip()
        excluding = wanted.startswith("^")
        wanted = wanted.removeprefix("^")
        exact = wanted.startswith("=")
        parts = (part.strip().partition(":") for part in wanted.removeprefix("=").split(","))
        return cls(names=tuple((name, port) for name, _, port in parts if name), exact=exact, excluding=excluding)

    def takes(self, name: str, port: str = "") -> bool:
        """Say whether the selection includes this interface or port."""
        named = any(
            (name == wanted if self.exact else name.startswith(wanted)) and wanted_port in ("", port)
            for wanted, wanted_port in self.names
        )
        return named != self.excluding
