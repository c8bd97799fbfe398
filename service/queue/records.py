"""Records of the queue on studies and workers."""

from __future__ import annotations

from datetime import datetime

from msgspec.structs import replace

from steptune.service.fencing import Lease
from steptune.service.places import CORE, CUDA, Slot
from steptune.tuner.records import HardwareProfile, Record, Study, StudyState

SCRIPT = "script"
"""Kind of upload for a training script with its command."""
BEGUN = (StudyState.QUEUED, StudyState.RUNNING)
"""States of studies that are in the queue or held by a worker."""
AND = " and "
"""Separator between hosts in the text that lists the hosts and devices of a study."""
OVER_HOSTS = " over hosts"
"""Suffix of the device kind that a study over several hosts requires. Older versions of Steptune, which support only
one host, compare the whole text with their own kind, and so leave such a study alone.
"""
ENDED = (StudyState.COMPLETED, StudyState.FAILED, StudyState.CANCELLED)
"""States of ended studies; a study leaves them only if a user resumes it."""


class Quotas(Record):
    """Default quotas of a user. None is no limit."""

    max_running: int | None = None
    max_queued: int | None = None
    max_device_hours: float | None = None
    """Maximum device hours over the last 30 days."""


class QueueEntry(Record):
    """A study in the service, as its owner sees it."""

    study_id: str
    owner_id: str | None
    title: str
    state: StudyState
    message: str
    source_id: str | None
    version: int
    """Version for the ETag; grows with every change."""
    priority: int
    required_device_kind: str | None
    required_hardware: str | None
    num_devices: int
    """Number of devices on each host."""
    num_hosts: int
    place: str
    """Hosts (as hashes) that the last claim took, with their devices."""
    waits_for: str
    """Reason why the study waits, in words for its user; empty if it does not wait."""
    requested: str
    """Pending request of the user to the worker: "", "cancel" or "pause"."""
    worker_id: str | None
    """Worker that holds the study."""
    fence: int
    lease_until: datetime | None
    num_claims: int
    """Number of times that a worker began to run the study; the search for hosts does not count."""
    num_lost: int
    """Number of workers that died with the study since a trial was last completed."""
    device_seconds: float
    """Device seconds, up to the end of the last claim: number of devices times the seconds for which workers held the
    study.
    """
    queued_at: datetime
    claimed_at: datetime | None
    """Time at which the study got its present devices; None while it waits for a reservation."""
    ended_at: datetime | None

    @property
    def holds(self) -> bool:
        """Say whether the study holds its devices now."""
        return self.state is StudyState.RUNNING and not self.waits_for

    @property
    def hosts(self) -> tuple[str, ...]:
        """Return the hashed hosts that the study holds now, its worker's host first."""
        return tuple(part.split(" ")[0] for part in self.place.split(AND)) if self.holds and self.place else ()


class WorkerInfo(Record):
    """A worker's record in the queue: its machine, its devices, and the study that it holds."""

    worker_id: str
    name: str
    host_id: str
    state: str
    """State of the worker: "idle", "busy", "draining" or "gone"."""
    hardware_fingerprint: str | None
    hardware_label: str
    device_kind: str
    slots: tuple[Slot, ...]
    isolation: str
    version: str
    started_at: datetime
    heartbeat_at: datetime
    cluster: str = ""
    """Cluster in which the worker reserves hosts; empty for none, and while the cluster's identity is not known."""
    study_id: str | None = None
    """The study that the worker holds."""

    @property
    def num_devices(self) -> int:
        """Return the number of a worker's devices; all its cores count as one device."""
        return sum(slot.kind == CUDA for slot in self.slots) if self.device_kind == CUDA else 1


class WorkerOffer(Record):
    """Devices and hardware that a worker offers when it registers.

    A study gets all of the worker's cores and the first of its GPUs, as many as it asked for.
    """

    worker_id: str
    name: str
    host_id: str
    profile: HardwareProfile
    """Hardware profile of the worker, with all of its devices."""
    cores: tuple[int, ...]
    gpus: tuple[int, ...] = ()
    isolation: str = "none"
    version: str = ""
    max_hosts: int = 1
    """Maximum number of hosts of a study: more than one where a cluster reserves further hosts."""
    reserves: bool = False
    """True where a claim still has to get its devices from a cluster."""
    cluster: str = ""
    """Identity of the cluster; empty until the cluster has reported it."""

    @property
    def slots(self) -> tuple[Slot, ...]:
        return self.slots_for(len(self.gpus))

    @property
    def num_devices(self) -> int:
        return len(self.gpus) if self.profile.device_kind == CUDA else 1

    def slots_for(self, num_devices: int) -> tuple[Slot, ...]:
        """Return the slots that a study with this number of devices takes: all cores of the worker, and that many of
        its GPUs.
        """
        gpus = self.gpus[:num_devices] if self.profile.device_kind == CUDA else ()
        return (*(Slot(kind=CORE, number=n) for n in self.cores), *(Slot(kind=CUDA, number=n) for n in gpus))

    def profile_for(self, num_devices: int) -> HardwareProfile:
        """Return the hardware profile that a study with this number of devices sees."""
        if self.profile.device_kind != CUDA:
            return self.profile
        return replace(self.profile, devices=self.profile.devices[:num_devices])


def stored_kind(kind: str | None, num_hosts: int) -> str | None:
    """Return the device kind that a study requires, in the form of its queue entry."""
    return f"{kind or ''}{OVER_HOSTS}" if num_hosts > 1 else kind


def kind_of(stored: str | None) -> str | None:
    """Return the kind of device that a queue entry requires; None for any."""
    return None if stored is None else stored.removesuffix(OVER_HOSTS) or None


class Source(Record):
    """An uploaded workload."""

    kind: str
    """Kind of the workload: "file", "archive" or "script" for uploads; "zoo" and "module" are on every worker."""
    entry: str
    digest: str | None


class Claim(Record):
    """A study that belongs to this worker until the lease ends."""

    lease: Lease
    study: Study
    owner_id: str | None
    source: Source | None
    other_hardware: bool
    """True where the study may continue on other hardware than it began on."""
    slots: tuple[Slot, ...]
    place: str
    """Hosts and devices on which the study runs now, as text."""
