"""Check of the bridges above GPUs and NICs for PCI Access Control Services, which route direct transfers through the
root complex.
"""

from __future__ import annotations

from collections.abc import Iterator

from steptune.tuner.network.finding import NetworkFinding, ok, problem, unknown
from steptune.tuner.network.host import Host
from steptune.tuner.wording import counted

NAME = "PCIe ACS"
SHOWN = 4
"""Maximum number of bridges to list."""


def examine(host: Host) -> Iterator[NetworkFinding]:
    if host.hides_pci:
        yield unknown(
            NAME, "some GPUs or NICs were not found on the PCI bus", fix="run the check on the host, not in a container"
        )
    if len(host.endpoints) < 2:
        return
    bridges = host.pci.bridges_above(host.endpoints)
    hidden = [bridge.address for bridge in bridges if bridge.control is None]
    redirecting = {
        bridge.address: bridge.control.acs for bridge in bridges if bridge.control is not None and bridge.control.acs
    }
    if redirecting:
        named = [f"{address} {' '.join(sorted(flags))}" for address, flags in list(redirecting.items())[:SHOWN]]
        more = f" and {len(redirecting) - SHOWN} more" if len(redirecting) > SHOWN else ""
        yield problem(
            NAME,
            f"on, on {len(redirecting)} of {counted(len(bridges), 'bridge')}: {', '.join(named)}{more}",
            effect="direct traffic between GPUs and NICs goes through the root complex, which is slow and can hang",
            fix="on bare metal, turn ACS off in the BIOS (VT-d or AMD-Vi as well), or at every boot with "
            "setpci -s ADDRESS ECAP_ACS+0x6.w=0000; virtual machines need ACS, so use address translation (ATS) there",
        )
    if hidden:
        yield unknown(
            NAME,
            f"the registers of {len(hidden)} of {counted(len(bridges), 'bridge')} cannot be read",
            fix="run as root, or save the output of `sudo lspci -vvv` as lspci.txt in the examined directory",
        )
    if bridges and not redirecting and not hidden:
        yield ok(NAME, f"off on every bridge above GPUs and NICs ({len(bridges)})")
