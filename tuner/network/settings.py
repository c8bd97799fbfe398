"""NCCL's environment variables: where a host sets them, and which of their values cost bandwidth.

NCCL takes a variable from the environment, else from `~/.nccl.conf`, else from `/etc/nccl.conf`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from steptune.tuner.network.finding import Level, NetworkFinding
from steptune.tuner.network.tree import Tree

SUBJECT = "NCCL settings"
ENVIRONMENT = "/proc/self/environ"
_ASSIGNMENT = re.compile(r"\s*(NCCL_\w+)\s*=(.*)")
_HOME = re.compile(r"^HOME=(.+)$", re.MULTILINE)
_OFF = {"0", "LOC", "NVL"}
"""Values of NCCL_NET_GDR_LEVEL for which every NIC is too far away, so that GPUDirect RDMA is never used."""


def read_settings(tree: Tree) -> dict[str, str]:
    """Return the NCCL settings of this process. In a copy of a host's files, they are those of the process whose
    /proc/self/environ was copied.

    Raises:
        UnreadableError: One of the files cannot be read.
    """
    environment = (tree.text(ENVIRONMENT) or "").replace("\0", "\n")
    found = _assignments(tree.text("/etc/nccl.conf") or "")
    if home := _HOME.search(environment):
        found.update(_assignments(tree.text(f"{home[1]}/.nccl.conf") or ""))
    found.update(_assignments(environment))
    return found


def _assignments(text: str) -> dict[str, str]:
    matches = (_ASSIGNMENT.fullmatch(line) for line in text.splitlines())
    return {match[1]: match[2].strip() for match in matches if match}


@dataclass(frozen=True, kw_only=True)
class Costly:
    """Environment variable with values that cost bandwidth.

    Attributes:
        where: Returns whether a value costs bandwidth.
    """

    variable: str
    where: Callable[[str], bool]
    effect: str
    fix: str
    level: Level = Level.PROBLEM

    def finding(self, value: str) -> NetworkFinding:
        return NetworkFinding(
            level=self.level,
            subject=SUBJECT,
            found=f"{self.variable}={value}",
            effect=self.effect,
            fix=self.fix,
        )


def _is_on(value: str) -> bool:
    return value.strip() not in ("", "0")


def _is_zero(value: str) -> bool:
    return value.strip() == "0"


def _is_set(value: str) -> bool:
    return bool(value.strip())


COSTLY = (
    Costly(
        variable="NCCL_IB_DISABLE",
        where=_is_on,
        effect="InfiniBand and RoCE are not used: hosts communicate through TCP sockets",
        fix="unset NCCL_IB_DISABLE",
    ),
    Costly(
        variable="NCCL_NET",
        where=lambda value: value.strip().lower() == "socket",
        effect="hosts communicate through TCP sockets, even where they have RDMA NICs",
        fix="unset NCCL_NET, or NCCL_NET=IB",
    ),
    Costly(
        variable="NCCL_NET_GDR_LEVEL",
        where=lambda value: value.strip().upper() in _OFF,
        effect="GPUDirect RDMA is off: every message is copied through host memory",
        fix="unset NCCL_NET_GDR_LEVEL (PXB is the default)",
    ),
    Costly(
        variable="NCCL_IB_GDR_LEVEL",
        where=_is_set,
        effect="this name of NCCL_NET_GDR_LEVEL is obsolete since NCCL 2.4",
        fix="set NCCL_NET_GDR_LEVEL instead",
        level=Level.NOTE,
    ),
    Costly(
        variable="NCCL_NET_GDR_READ",
        where=_is_zero,
        effect="GPUDirect RDMA is off for sending: data is copied through host memory",
        fix="unset NCCL_NET_GDR_READ",
    ),
    Costly(
        variable="NCCL_DMABUF_ENABLE",
        where=_is_zero,
        effect="GPUDirect RDMA works through nvidia_peermem only, not through DMA-BUF",
        fix="unset NCCL_DMABUF_ENABLE, or load nvidia_peermem",
        level=Level.NOTE,
    ),
    Costly(
        variable="NCCL_IB_PCI_RELAXED_ORDERING",
        where=_is_zero,
        effect="PCIe writes of the NIC stay in order, which is slower on many processors and in virtual machines",
        fix="unset NCCL_IB_PCI_RELAXED_ORDERING (by default, NCCL uses relaxed ordering where it is supported)",
    ),
    Costly(
        variable="NCCL_P2P_DISABLE",
        where=_is_on,
        effect="GPUs of one host communicate through host memory, not through NVLink or PCIe",
        fix="unset NCCL_P2P_DISABLE",
    ),
    Costly(
        variable="NCCL_P2P_LEVEL",
        where=lambda value: value.strip().upper() in {"0", "LOC"},
        effect="GPUs of one host communicate through host memory, not through NVLink or PCIe",
        fix="unset NCCL_P2P_LEVEL",
    ),
    Costly(
        variable="NCCL_SHM_DISABLE",
        where=_is_on,
        effect="GPUs of one host without a direct path communicate through the network",
        fix="unset NCCL_SHM_DISABLE; if /dev/shm was too small, enlarge it (--shm-size=1g)",
    ),
    Costly(
        variable="NCCL_ALGO",
        where=_is_set,
        effect="NCCL uses one algorithm for all message sizes instead of choosing by size and topology",
        fix="unset NCCL_ALGO, unless this value was measured to be faster for this job",
        level=Level.NOTE,
    ),
    Costly(
        variable="NCCL_PROTO",
        where=_is_set,
        effect="NCCL uses one protocol for all message sizes instead of choosing by size",
        fix="unset NCCL_PROTO, unless this value was measured to be faster for this job",
        level=Level.NOTE,
    ),
)
"""Table of variables with values that cost bandwidth; docs/networks.md lists them."""


def settings_findings(settings: Mapping[str, str]) -> list[NetworkFinding]:
    """Return findings about the variables with values that cost bandwidth, in the table's order."""
    return [
        entry.finding(settings[entry.variable])
        for entry in COSTLY
        if entry.variable in settings and entry.where(settings[entry.variable])
    ]
