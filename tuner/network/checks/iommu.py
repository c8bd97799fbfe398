"""Check of the IOMMU, which must be off or pass the addresses of GPUs and NICs through."""

from __future__ import annotations

from collections.abc import Iterator

from steptune.tuner.network.finding import NetworkFinding, note, ok, problem, unknown
from steptune.tuner.network.host import Host

NAME = "IOMMU"
GROUPS = "/sys/kernel/iommu_groups"
COMMAND_LINE = "/proc/cmdline"
PASSING = "identity"
_EFFECT = "every direct access between GPU and NIC is translated in the root complex, or fails"
_FIX = (
    "boot with iommu=pt (and with intel_iommu=on or amd_iommu=on if virtual machines need the IOMMU), or turn the "
    "IOMMU off"
)


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
        yield ok(NAME, "passes addresses of GPUs and NICs through without translation")
    elif host.tree.exists(GROUPS) and not host.tree.names(GROUPS):
        yield ok(NAME, "off")
    else:
        yield _from_command_line(host)


def _from_command_line(host: Host) -> NetworkFinding:
    line = host.tree.text(COMMAND_LINE)
    if line is None:
        return unknown(NAME, f"{GROUPS} and {COMMAND_LINE} are missing", fix="copy both into the examined directory")
    words = set(line.split())
    if {"iommu=pt", "iommu.passthrough=1"} & words:
        return ok(NAME, "the kernel was booted with iommu=pt")
    if {"iommu=off", "intel_iommu=off", "amd_iommu=off"} & words:
        return ok(NAME, "turned off by the kernel's boot parameters")
    on = sorted({"intel_iommu=on", "amd_iommu=on", "iommu=on", "iommu=force"} & words)
    if on:
        return problem(NAME, f"the kernel was booted with {' '.join(on)}, without iommu=pt", effect=_EFFECT, fix=_FIX)
    return note(
        NAME,
        "the kernel's boot parameters do not mention the IOMMU, so the kernel's default applies",
        effect=f"if the default is translation, {_EFFECT}",
        fix=f"read {GROUPS}/*/type; if it is DMA or DMA-FQ, {_FIX}",
    )
