"""Check of PCIe relaxed ordering: whether a NIC may let its writes overtake one another."""

from __future__ import annotations

from collections.abc import Iterator

from steptune.tuner.network.finding import NetworkFinding, note, ok, unknown
from steptune.tuner.network.host import Host

NAME = "PCIe relaxed ordering"


def examine(host: Host) -> Iterator[NetworkFinding]:
    controls = {name: nic.control if nic is not None else None for name, nic in host.nics.items()}
    hidden = [name for name, control in controls.items() if control is None]
    strict = [name for name, control in controls.items() if control and control.relaxed_ordering is False]
    relaxed = [name for name, control in controls.items() if control and control.relaxed_ordering]
    if strict:
        yield note(
            NAME,
            f"not allowed for {', '.join(strict)}",
            effect="PCIe writes of the NIC stay in order, which is slower on many processors and in virtual machines",
            fix="allow relaxed ordering in the BIOS; for ConnectX, also run mlxconfig -d DEVICE set PCI_WR_ORDERING=1",
        )
    if hidden:
        yield unknown(
            NAME,
            f"the registers of {', '.join(hidden)} cannot be read",
            fix="run as root, or save the output of `sudo lspci -vvv` as lspci.txt in the examined directory",
        )
    if relaxed and not strict and not hidden:
        yield ok(NAME, f"allowed to {', '.join(relaxed)}")
