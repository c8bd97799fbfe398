"""Measurement of the links between the ranks of a study: a short job with the same ranks, before its trials.

Three links are timed: inside hosts (all hosts at the same time), between hosts (one group for each local rank, with
that rank of every host; all groups at the same time, so that they share the network as in two-level reductions), and a
flat ring over all ranks. Identical groups are measured once.

A topology that an earlier study measured is checked by one small and one larger message on every link, and kept unless
one of them takes three times as long, or a third: the same hardware may be on another network.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steptune.tuner.emulation import num_emulated_hosts
from steptune.tuner.network.collective_costs import ALL_REDUCE
from steptune.tuner.network.link_fit import fit_link
from steptune.tuner.network.rank_order import numbered
from steptune.tuner.records import CollectiveTiming, HardwareProfile, Link, Record, Topology
from steptune.tuner.records.topology import EMULATED_NETWORK
from steptune.tuner.training.hosts import host_of_ranks, members_of, ring_group
from steptune.tuner.trials.coordination import Coordinator
from steptune.tuner.trials.link_probe import LinkProbe
from steptune.tuner.trials.messages import Channel, TaskProgress
from steptune.tuner.trials.rank_device import rank_device
from steptune.tuner.trials.study_files import StudyFiles

if TYPE_CHECKING:
    import torch

MOST_CHECKED_BYTES = 4 << 20
TOLERANCE = 3.0
"""Maximum factor by which a timing may exceed, or fall below, the timing of the same message in an earlier study."""
SLOWEST_KINDS = ("SYS", "NODE", "PHB", "PXB", "PIX")
"""Kinds of connections between devices, as `nvidia-smi topo -m` names them, slowest first. NVLink ("NV18") is faster
than all of them.
"""


class TopologyRequest(Record):
    """Request of the parent to measure the links between ranks.

    Attributes:
        hardware: Hardware profile of this machine.
        known: Topology from an earlier study; None to measure anew.
        seconds: Time limit for the messages, apart from those that must be sent on a slow link.
        run_id: Name of the folder in which the ranks of this run meet.
    """

    study_directory: str
    hardware: HardwareProfile
    known: Topology | None
    seconds: float
    run_id: str = ""


@dataclass(frozen=True, kw_only=True)
class _Scope:
    """Link to be timed.

    Attributes:
        groups: Ranks of each group that runs at the same time.
        own_group: Process group of this rank.
        num_sharing: Number of groups that share the link.
    """

    kind: str
    groups: list[tuple[int, ...]]
    own_group: Any
    num_sharing: int = 1


def measure_topology(request: TopologyRequest, rank: int, num_ranks: int, channel: Channel) -> Topology:
    """Join the other ranks and time their links; every rank returns the same result."""
    device = rank_device(request.hardware.device_kind, rank)
    directory = StudyFiles(Path(request.study_directory)).trial_directory(request.run_id)
    return probe_links(request, Coordinator(rank, num_ranks, channel, directory, device), device)


def probe_links(request: TopologyRequest, coordinator: Coordinator, device: torch.device) -> Topology:
    """Time the links between ranks that have joined one another."""
    scopes = _scopes(request.hardware)
    probes = {name: LinkProbe(scope.groups, scope.own_group, coordinator, device) for name, scope in scopes.items()}
    host_of_rank = numbered(host_of_ranks())
    known = request.known
    if known is not None and known.host_of_rank == host_of_rank:
        coordinator.send(TaskProgress(text="checking the links between ranks"))
        if all(_is_as_known(probe, _link_named(known, name)) for name, probe in probes.items()):
            return known
    coordinator.send(TaskProgress(text="measuring the links between ranks"))
    seconds = request.seconds / len(probes)
    links = {
        name: fit_link(probe.timings(seconds), kind=scopes[name].kind, num_sharing=scopes[name].num_sharing)
        for name, probe in probes.items()
    }
    return Topology(
        host_of_rank=host_of_rank,
        inside=links.get("inside"),
        between=links.get("between"),
        whole=links.get("whole") or links.get("inside") or links["between"],
        backend="nccl" if device.type == "cuda" else "gloo",
        hardware_fingerprint=request.hardware.fingerprint,
        measured_at=coordinator.agree(datetime.now(UTC).isoformat(timespec="seconds")),
    )


def _scopes(hardware: HardwareProfile) -> dict[str, _Scope]:
    """Return the links to be timed; if hosts have different numbers of ranks, only the link between all ranks."""
    import torch.distributed as dist

    hosts = members_of(host_of_ranks())
    everyone = [tuple(range(dist.get_world_size()))]
    near, far = kind_inside(hardware), "network" if num_emulated_hosts() == 1 else EMULATED_NETWORK
    if len(hosts) == 1:
        return {"inside": _Scope(kind=near, groups=everyone, own_group=dist.group.WORLD)}
    whole = _Scope(kind=f"{near} and {far}", groups=everyone, own_group=ring_group())
    if len({len(ranks) for ranks in hosts}) != 1:
        return {"whole": whole}
    ranks_per_host = len(hosts[0])
    if ranks_per_host == 1:
        return {"between": _Scope(kind=far, groups=everyone, own_group=dist.group.WORLD)}
    inside, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in hosts])
    places = list(zip(*hosts, strict=True))
    between, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in places])
    return {
        "inside": _Scope(kind=near, groups=hosts, own_group=inside),
        "between": _Scope(kind=far, groups=places, own_group=between, num_sharing=ranks_per_host),
        "whole": whole,
    }


def kind_inside(hardware: HardwareProfile) -> str:
    """Return the kind of link that limits a ring inside a host: the slowest connection between its devices."""
    if hardware.device_kind == "cpu":
        return "loopback"
    kinds = sorted(set(hardware.links.values()))
    slowest = [kind for slow in SLOWEST_KINDS for kind in kinds if kind.startswith(slow)]
    return next(iter(slowest or kinds), "unknown")


def _link_named(topology: Topology, name: str) -> Link:
    link = {"inside": topology.inside, "between": topology.between, "whole": topology.whole}[name]
    assert link is not None, "the same ranks on the same hosts have the same links"
    return link


def _is_as_known(probe: LinkProbe, link: Link) -> bool:
    """Say whether the times of a small and a larger message agree with those that an earlier study measured; every rank
    returns the same answer.
    """
    reduced = [timing for timing in link.timings if timing.collective == ALL_REDUCE]
    chosen = [reduced[0], *[timing for timing in reduced[1:] if timing.message_bytes <= MOST_CHECKED_BYTES][-1:]]
    return all(_agree(probe.timing(ALL_REDUCE, known.message_bytes), known) for known in chosen)


def _agree(timing: CollectiveTiming, known: CollectiveTiming) -> bool:
    return 1 / TOLERANCE < timing.duration_ns / known.duration_ns < TOLERANCE
