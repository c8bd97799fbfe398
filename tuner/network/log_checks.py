"""Findings about a run's communication from NCCL's log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from steptune.tuner.errors import ChoiceError
from steptune.tuner.network.finding import Level, NetworkFinding, note, ok, problem, unknown
from steptune.tuner.network.known_warnings import KNOWN_WARNINGS, KnownWarning
from steptune.tuner.network.log import NcclLog, Said, Transport, read_logs
from steptune.tuner.network.settings import settings_findings
from steptune.tuner.wording import counted

LOG = "NCCL log"
BETWEEN = "between hosts"
INSIDE = "inside a host"
GPU_DIRECT = "GPUDirect RDMA"
SHOWN = 4
"""Maximum number of NICs, distances and messages to list."""
SWITCHES_OFF = ("NCCL_IB_DISABLE=", "NCCL_NET=")
"""Settings that switch RDMA off."""
HOW = "run with NCCL_DEBUG=INFO, and without NCCL_DEBUG_SUBSYS or with NCCL_DEBUG_SUBSYS=INIT,NET,GRAPH,ENV"


def examine_logs(paths: Sequence[Path]) -> tuple[NcclLog, list[NetworkFinding]]:
    """Return the record of a run's logs, and the findings about it.

    Raises:
        ChoiceError: A path does not exist, or is not a file.
    """
    for path in paths:
        if not path.exists():
            raise ChoiceError(f"{path} does not exist: give a file with the output of NCCL_DEBUG=INFO")
        if not path.is_file():
            raise ChoiceError(f"{path} is not a file: give a file with the output of NCCL_DEBUG=INFO")
    log, unreadable = read_logs(paths)
    findings = [unknown(LOG, str(error), fix="make it readable") for error in unreadable]
    return log, [*findings, *log_findings(log)]


def log_findings(log: NcclLog) -> list[NetworkFinding]:
    """Return the findings about a log; `unknown` where it contains no line of NCCL."""
    if log.num_lines == 0:
        return [unknown(LOG, "the log has no line from NCCL", fix=HOW), *_errors(log)]
    return [
        *_summary(log),
        *_between_hosts(log),
        *_gpu_direct(log),
        *_inside_hosts(log),
        *_relaxed_ordering(log),
        *settings_findings(log.settings),
        *_warnings(log),
        *_errors(log),
    ]


def _summary(log: NcclLog) -> Iterator[NetworkFinding]:
    if len(log.versions) > 1:
        yield problem(
            LOG,
            f"NCCL {' and '.join(log.versions)} in one run",
            effect="ranks with different versions of NCCL are incompatible: they hang, or fail at start-up",
            fix="use the same torch or NCCL on all hosts",
        )
    num_hosts = max(log.num_nodes, log.num_hosts)
    found = [
        f"NCCL {', '.join(log.versions) or 'of unknown version'}",
        counted(log.num_ranks, "rank") if log.num_ranks else "ranks not named",
        counted(num_hosts, "host") if num_hosts else "hosts not named",
        f"{counted(len(log.rings), 'ring')}, {counted(log.num_trees, 'tree')}" + (", NVLS" if log.uses_nvls else ""),
    ]
    if not log.paths:
        yield unknown(LOG, f"{'; '.join(found)}; the log names no connection", fix=HOW)
        return
    yield ok(LOG, "; ".join(found))


def _between_hosts(log: NcclLog) -> Iterator[NetworkFinding]:
    sockets = log.connections(Transport.SOCKET)
    if sockets:
        yield _over_sockets(log, sockets)
    over: Counter[str] = Counter()
    for path in log.paths:
        if path.transport in (Transport.RDMA, Transport.COLLNET):
            over[path.network] += path.num_connections
    if over:
        networks = ", ".join(f"{counted(count, 'connection')} over {network}" for network, count in over.items())
        nics = ", ".join(f"{nic.name}:{nic.port} {nic.link}" for nic in log.nics) or "NICs not named"
        yield ok(BETWEEN, f"{networks}; {nics}")


def _over_sockets(log: NcclLog, num_connections: int) -> NetworkFinding:
    switched_off = [
        finding.found for finding in settings_findings(log.settings) if finding.found.startswith(SWITCHES_OFF)
    ]
    if log.num_nodes == 1:
        cause = (
            "although all ranks are on one host: their containers are isolated from each other, or P2P and SHM are off"
        )
        fix = (
            "run all ranks in one container (or with --ipc=host, --pid=host); unset NCCL_P2P_DISABLE and "
            "NCCL_SHM_DISABLE"
        )
    elif switched_off:
        cause = " and ".join(switched_off)
        fix = "unset it"
    elif log.has_no_library:
        cause = "libibverbs cannot be loaded"
        fix = "install rdma-core (libibverbs1, ibverbs-providers) in the container"
    elif log.has_no_device:
        cause = "NCCL found no RDMA device"
        fix = (
            "run `steptune doctor --network` on the hosts to check device files, drivers and ports; without an "
            "RDMA device, use more sockets (NCCL_SOCKET_NTHREADS=4 NCCL_NSOCKS_PERTHREAD=4) and send less data"
        )
    elif log.nics:
        cause = f"although the hosts have NICs ({', '.join(nic.name for nic in log.nics[:SHOWN])})"
        fix = "look for NET/IB warnings, and check whether the hosts have different NICs"
    else:
        cause = "NCCL does not log the reason"
        fix = "run `steptune doctor --network` on the hosts to check device files, drivers, ports and settings"
    on = f" on {', '.join(log.interfaces)}" if log.interfaces else ""
    return problem(
        BETWEEN,
        f"{counted(num_connections, 'connection')} over TCP sockets{on}; {cause}",
        effect="every message goes through host memory and the kernel, at a fraction of RDMA's bandwidth",
        fix=fix,
    )


def _gpu_direct(log: NcclLog) -> Iterator[NetworkFinding]:
    without = log.connections(Transport.RDMA, Transport.COLLNET, gpu_direct=False)
    total = without + log.connections(Transport.RDMA, Transport.COLLNET, gpu_direct=True)
    cause, fix = _why_without(log)
    if total == 0 and not cause:
        return
    if total > 0 and without == 0:
        yield ok(GPU_DIRECT, f"on for every connection ({total})")
        return
    yield problem(
        GPU_DIRECT,
        (f"off for {without:,} of {counted(total, 'connection')}" if total else "off") + cause,
        effect="messages on these connections are copied through host memory, which costs bandwidth and CPU time",
        fix=fix,
    )


def _why_without(log: NcclLog) -> tuple[str, str]:
    unable = [nic for nic, able in log.gpu_direct.items() if not able]
    if unable:
        return (
            f"; {', '.join(unable[:SHOWN])} cannot",
            "run modprobe nvidia-peermem on every host, or use DMA-BUF with NVIDIA's open kernel modules on "
            "Linux 5.12 or newer",
        )
    if log.distances:
        places = [f"GPU {d.gpu} and NIC {d.nic} ({d.hops}, allowed {d.limit})" for d in log.distances[:SHOWN]]
        return (
            f"; too far apart: {', '.join(places)}",
            "move a NIC behind the GPU's PCIe switch; in a virtual machine, set NCCL_TOPO_FILE; or set "
            "NCCL_NET_GDR_LEVEL=SYS if it is measured to be faster",
        )
    return (
        "",
        "run `steptune doctor --network` on the hosts to check nvidia_peermem, affinity and ACS; for sending, "
        "see NCCL_NET_GDR_READ",
    )


def _inside_hosts(log: NcclLog) -> Iterator[NetworkFinding]:
    direct, through_memory = log.connections(Transport.P2P), log.connections(Transport.SHM)
    if direct:
        ways = Counter(path.way for path in log.paths if path.transport is Transport.P2P)
        yield ok(INSIDE, f"{counted(direct, 'connection')} from GPU to GPU ({', '.join(ways)})")
    if through_memory:
        yield note(
            INSIDE,
            f"{counted(through_memory, 'connection')} through host memory (SHM)",
            effect="host memory is slower than NVLink, and than PCIe behind one switch",
            fix="check `nvidia-smi topo -p2p r`: PCIe P2P is denied with ACS on or in a virtual machine, and GPUs "
            "on two sockets have no faster path without NVLink",
        )


def _relaxed_ordering(log: NcclLog) -> Iterator[NetworkFinding]:
    if log.nics and not any(nic.relaxed_ordering for nic in log.nics):
        yield note(
            "PCIe relaxed ordering",
            "NCCL's log does not mark the NICs with [RO]",
            effect="PCIe writes of the NIC stay in order, which is slower on many processors and in virtual machines",
            fix="unset NCCL_IB_PCI_RELAXED_ORDERING; use rdma-core 32 or newer and NCCL 2.12 or newer",
        )


def _warnings(log: NcclLog) -> Iterator[NetworkFinding]:
    known: dict[KnownWarning, list[Said]] = {}
    others: list[Said] = []
    for said in log.warnings:
        meaning = next((entry for entry in KNOWN_WARNINGS if entry.says(said.text)), None)
        if meaning is None:
            others.append(said)
        else:
            known.setdefault(meaning, []).append(said)
    for meaning in KNOWN_WARNINGS:
        if meaning in known:
            yield NetworkFinding(
                level=meaning.level,
                subject=meaning.subject,
                found=_quoted(known[meaning]),
                effect=meaning.effect,
                fix=meaning.fix,
            )
    if others:
        yield NetworkFinding(
            level=Level.PROBLEM,
            subject="NCCL warnings",
            found=_quoted(others),
            effect="not known here",
            fix="search for this text in NCCL's troubleshooting guide and issues",
        )


def _errors(log: NcclLog) -> Iterator[NetworkFinding]:
    if log.errors:
        yield problem(
            "NCCL errors",
            _quoted(list(log.errors)),
            effect="the run ended, or a rank hung",
            fix="give this check the logs of all ranks from all hosts: the first warning of any rank shows the cause",
        )


def _quoted(sayings: list[Said]) -> str:
    quoted = [f"{said.text}" + (f" ({said.count} times)" if said.count > 1 else "") for said in sayings[:SHOWN]]
    more = f"; {len(sayings) - SHOWN} more" if len(sayings) > SHOWN else ""
    return "; ".join(quoted) + more
