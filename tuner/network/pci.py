"""The PCI functions of a host: GPUs, NICs and the bridges between them.

They are read from sysfs where it exists (the configuration space beyond its first 64 bytes is shown to root only), else
from the output of `lspci -vvv`, kept in the tree as `lspci.txt`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from steptune.tuner.network.tree import Tree

DEVICES = "/sys/bus/pci/devices"
LSPCI = "/lspci.txt"
NVIDIA = 0x10DE
_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_LSPCI_HEAD = re.compile(r"((?:[0-9a-f]{4,}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]) (.+)")
_FLAG = re.compile(r"(\w+)([+-])")
_STATUS_OFFSET = 0x06
_HAS_CAPABILITIES = 0x10
_FIRST_CAPABILITY = 0x34
_PCI_EXPRESS = 0x10
_DEVICE_CONTROL = 0x08
_RELAXED_ORDERING = 1 << 4
_EXTENDED = 0x100
_ACS = 0x000D
_ACS_CONTROL = 0x06
ACS_FLAGS = {"SrcValid": 1 << 0, "ReqRedir": 1 << 2, "CmpltRedir": 1 << 3}
"""Flags of the control register that make a switch send traffic between GPUs and NICs up to the root complex."""


@dataclass(frozen=True, kw_only=True)
class Control:
    """State of a PCI function's control registers.

    Attributes:
        acs: Flags of `ACS_FLAGS` that are set; None where the function lacks the capability.
        relaxed_ordering: Whether relaxed ordering is enabled; None without PCI Express.
    """

    acs: frozenset[str] | None
    relaxed_ordering: bool | None


@dataclass(frozen=True, kw_only=True)
class Function:
    """One function of a PCI device.

    Attributes:
        path: Addresses from the root complex (`pci0000:00`) to this function; empty where sysfs does not show it.
        control: State of its control registers; None where they are not readable by this user.
    """

    address: str
    is_bridge: bool
    is_gpu: bool
    path: tuple[str, ...]
    numa_node: int | None
    iommu_type: str | None
    control: Control | None


class Pci:
    """PCI functions of a host."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree

    @cached_property
    def functions(self) -> dict[str, Function]:
        """PCI functions by address."""
        listed = self._listed
        found = {
            address: self._function(address, listed.get(address))
            for address in self._tree.names(DEVICES)
            if _ADDRESS.fullmatch(address)
        }
        return found or {address: shown.function(address) for address, shown in listed.items()}

    @property
    def gpus(self) -> list[Function]:
        return [function for function in self.functions.values() if function.is_gpu]

    def bridges_above(self, functions: list[Function]) -> list[Function]:
        """Return the bridges above these functions; all bridges where the path to them is unknown."""
        bridges = [function for function in self.functions.values() if function.is_bridge]
        above = {address for function in functions for address in function.path[:-1]}
        return [bridge for bridge in bridges if bridge.address in above] if above else bridges

    def _function(self, address: str, listed: _Listed | None) -> Function:
        folder = f"{DEVICES}/{address}"
        kind = _hexadecimal(self._tree.text(f"{folder}/class"))
        vendor = _hexadecimal(self._tree.text(f"{folder}/vendor"))
        real = self._tree.real(folder) or ""
        _, _, below = real.partition("sys/devices/")
        control = read_control(self._tree.data(f"{folder}/config") or b"")
        return Function(
            address=address,
            is_bridge=kind >> 8 == 0x0604,
            is_gpu=vendor == NVIDIA and kind >> 16 == 0x03,
            path=tuple(below.split("/")) if below else (),
            numa_node=self._tree.number(f"{folder}/numa_node"),
            iommu_type=self._tree.text(f"{folder}/iommu_group/type"),
            control=control or (listed.control if listed else None),
        )

    @cached_property
    def _listed(self) -> dict[str, _Listed]:
        return parse_lspci(self._tree.text(LSPCI) or "")


def read_control(config: bytes) -> Control | None:
    """Read the control registers from a configuration space in sysfs; None if sysfs shows only the beginning of that
    space.
    """
    if len(config) <= 64:
        return None
    express = _capability(config, _PCI_EXPRESS)
    acs = _extended_capability(config, _ACS)
    ordering = None
    if express is not None:
        ordering = bool(_word(config, express + _DEVICE_CONTROL) & _RELAXED_ORDERING)
    flags = None
    if acs is not None:
        value = _word(config, acs + _ACS_CONTROL)
        flags = frozenset(name for name, bit in ACS_FLAGS.items() if value & bit)
    return Control(acs=flags, relaxed_ordering=ordering)


def _word(config: bytes, offset: int) -> int:
    return int.from_bytes(config[offset : offset + 2], "little")


def _capability(config: bytes, wanted: int) -> int | None:
    if not _word(config, _STATUS_OFFSET) & _HAS_CAPABILITIES:
        return None
    offset, seen = config[_FIRST_CAPABILITY] & ~3, set[int]()
    while 64 <= offset < len(config) - 1 and offset not in seen:
        if config[offset] == wanted:
            return offset
        seen.add(offset)
        offset = config[offset + 1] & ~3
    return None


def _extended_capability(config: bytes, wanted: int) -> int | None:
    offset, seen = _EXTENDED, set[int]()
    while _EXTENDED <= offset <= len(config) - 4 and offset not in seen:
        header = int.from_bytes(config[offset : offset + 4], "little")
        if header & 0xFFFF == wanted:
            return offset
        seen.add(offset)
        offset = header >> 20
    return None


@dataclass(frozen=True, kw_only=True)
class _Listed:
    """Output of lspci for one function."""

    kind: str
    control: Control | None

    def function(self, address: str) -> Function:
        return Function(
            address=address,
            is_bridge=self.kind.startswith("PCI bridge"),
            is_gpu="NVIDIA" in self.kind and self.kind.startswith(("3D controller", "VGA compatible controller")),
            path=(),
            numa_node=None,
            iommu_type=None,
            control=self.control,
        )


def parse_lspci(text: str) -> dict[str, _Listed]:
    """Return the functions in the output of `lspci -vvv`, by address."""
    found: dict[str, _Listed] = {}
    block: list[str] = []
    head: re.Match[str] | None = None
    for line in [*text.splitlines(), ""]:
        starts = _LSPCI_HEAD.fullmatch(line)
        if head and (starts or not line.strip()):
            address = head[1] if head[1].count(":") > 1 else f"0000:{head[1]}"
            found[address] = _Listed(kind=head[2], control=_listed_control("\n".join(block)))
            head = None
        if starts:
            head, block = starts, []
        block.append(line)
    return found


def _listed_control(block: str) -> Control | None:
    if "Capabilities:" not in block or "<access denied>" in block:
        return None
    acs = re.search(r"ACSCtl:(.*)", block)
    ordering = re.search(r"\bRlxdOrd([+-])", block)
    flags = None
    if acs:
        flags = frozenset(name for name, sign in _FLAG.findall(acs[1]) if sign == "+" and name in ACS_FLAGS)
    return Control(acs=flags, relaxed_ordering=ordering[1] == "+" if ordering else None)


def _hexadecimal(text: str | None) -> int:
    try:
        return int(text or "", 16)
    except ValueError:
        return 0
