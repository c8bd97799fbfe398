"""Check of the IOMMU, which must be off or pass the addresses of GPUs and NICs through."""

from __future__ import annotations

from collections.abc import Iterator

from steptune.tuner.network.finding import NetworkFinding, note, ok, problem, unknown
from steptune.tuner.network.host import Host

NAME = "IOMMU"
GROUPS = "/sys/kernel/iommu_groups"
COMMAND_LINE = "/proc/cmdline"
PASSING = "identity"
_EFFECT = "every direct access between GPU and NIC is translated on the way through the root complex, or fails"
_FIX = "boot with iommu=pt (with intel_iommu=on or amd_iommu=on where virtual machines need it), or turn it off"


def examine(host: Host) -> Iterator[NetworkFinding]:
    if not host.endpoints and not host.hides_pci:
        return
    types = {endpoint.address: endpoint.iommu_type for endpoint in host.endpoints if endpoint.iommu_type}
    translated = {address: kind for address, kind in types.items() if kind != PASSING}
    if translated:
        yield problem(
            NAME,
            "translates for " + ", ".join(f"{address} ({kind})" for address, kind in translated.items()),
            effect=_EFFECT,
            fix=_FIX,
        )
    elif types:
        yield ok(NAME, "passes the addresses of GPUs and NICs through")
    elif host.tree.exists(GROUPS) and not host.tree.names(GROUPS):
        yield ok(NAME, "off")
    else:
        yield _from_command_line(host)


def _from_command_line(host: Host) -> NetworkFinding:
    line = host.tree.text(COMMAND_LINE)
    if line is None:
        return unknown(NAME, f"{GROUPS} and {COMMAND_LINE} are not there", fix="copy them into the tree")
    words = set(line.split())
    if {"iommu=pt", "iommu.passthrough=1"} & words:
        return ok(NAME, "the kernel was booted with iommu=pt")
    if {"iommu=off", "intel_iommu=off", "amd_iommu=off"} & words:
        return ok(NAME, "turned off when the kernel was booted")
    on = sorted({"intel_iommu=on", "amd_iommu=on", "iommu=on", "iommu=force"} & words)
    if on:
        return problem(NAME, f"the kernel was booted with {' '.join(on)}, without iommu=pt", effect=_EFFECT, fix=_FIX)
    return note(
        NAME,
        "the kernel was booted without a word about it: its default holds",
        effect=f"if that is to translate: {_EFFECT}",
        fix=f"look into {GROUPS}/*/type; if DMA or DMA-FQ: {_FIX}",
    )
