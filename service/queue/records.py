"""Records of the queue about studies and workers."""

from __future__ import annotations

from datetime import datetime

from msgspec.structs import replace

from steptune.service.fencing import Lease
from steptune.service.places import CORE, CUDA, Slot
from steptune.tuner.records import HardwareProfile, Record, Study, StudyState

SCRIPT = "script"
"""Kind of an upload that is a training script with its command."""
BEGUN = (StudyState.QUEUED, StudyState.RUNNING)
"""States in which the queue has a study in hand."""
AND = " and "
"""Separator between the places of several hosts."""
OVER_HOSTS = " over hosts"
"""Follows the device kind that a study over several hosts requires: versions that know one host only compare the whole
text with their own kind, and leave such a study alone."""
ENDED = (StudyState.COMPLETED, StudyState.FAILED, StudyState.CANCELLED)
"""States that a study leaves only where a user wants it to go on."""


class Quotas(Record):
    """Quotas of a user, where nothing else was set for them. None is no limit."""

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
    """Grows with every change: the ETag."""
    priority: int
    required_device_kind: str | None
    required_hardware: str | None
    num_devices: int
    """Devices of each host."""
    num_hosts: int
    place: str
    """Hosts, hashed, and devices that the last claim took."""
    waits_for: str
    """Reason why nobody runs it, for people; empty where somebody does, or nobody has to."""
    requested: str
    """Request to its worker: "", "cancel" or "pause"."""
    worker_id: str | None
    """Worker that holds it."""
    fence: int
    lease_until: datetime | None
    num_claims: int
    """Number of times that a worker began to run it; looking for hosts does not count."""
    num_lost: int
    """Workers that died with it since a trial was last completed."""
    device_seconds: float
    """Devices times the time that workers held it, up to the end of the last claim."""
    queued_at: datetime
    claimed_at: datetime | None
    """Time at which it got its present devices; None while it waits for a reservation."""
    ended_at: datetime | None

    @property
    def holds(self) -> bool:
        """Say whether its devices are its own now."""
        return self.state is StudyState.RUNNING and not self.waits_for

    @property
    def hosts(self) -> tuple[str, ...]:
        """Hosts, hashed, that it holds now, the first one first."""
        return tuple(part.split(" ")[0] for part in self.place.split(AND)) if self.holds and self.place else ()


class WorkerInfo(Record):
    """A worker, as the service knows it."""

    worker_id: str
    name: str
    host_id: str
    state: str
    """"idle", "busy", "draining" or "gone"."""
    hardware_fingerprint: str | None
    hardware_label: str
    device_kind: str
    slots: tuple[Slot, ...]
    isolation: str
    version: str
    started_at: datetime
    heartbeat_at: datetime
    cluster: str = ""
    """Cluster whose hosts it reserves; empty for none, and while it is not known."""
    study_id: str | None = None
    """The study that it holds."""

    @property
    def num_devices(self) -> int:
        """Number of devices of a worker; all its cores are one device."""
        return sum(slot.kind == CUDA for slot in self.slots) if self.device_kind == CUDA else 1


class WorkerOffer(Record):
    """Offer of a worker when it arrives.

    A study gets all of the worker's cores and the first of its GPUs, as many as it asked for.
    """

    worker_id: str
    name: str
    host_id: str
    profile: HardwareProfile
    """Profile of the trial, with all of its devices."""
    cores: tuple[int, ...]
    gpus: tuple[int, ...] = ()
    isolation: str = "none"
    version: str = ""
    max_hosts: int = 1
    """Hosts that a study may be on: more where a cluster reserves those beside this one."""
    reserves: bool = False
    """True where a claim still has to get its devices from a cluster."""
    cluster: str = ""
    """Identity of the cluster; empty until it has told."""

    @property
    def slots(self) -> tuple[Slot, ...]:
        return self.slots_for(len(self.gpus))

    @property
    def num_devices(self) -> int:
        return len(self.gpus) if self.profile.device_kind == CUDA else 1

    def slots_for(self, num_devices: int) -> tuple[Slot, ...]:
        """Slots of a study of so many devices."""
        gpus = self.gpus[:num_devices] if self.profile.device_kind == CUDA else ()
        return (*(Slot(kind=CORE, number=n) for n in self.cores), *(Slot(kind=CUDA, number=n) for n in gpus))

    def profile_for(self, num_devices: int) -> HardwareProfile:
        """The hardware profile that a study of so many devices sees."""
        if self.profile.device_kind != CUDA:
            return self.profile
        return replace(self.profile, devices=self.profile.devices[:num_devices])


def stored_kind(kind: str | None, num_hosts: int) -> str | None:
    """Return the kind of device that a study requires as its queue entry keeps it."""
    return f"{kind or ''}{OVER_HOSTS}" if num_hosts > 1 else kind


def kind_of(stored: str | None) -> str | None:
    """Return the kind of device that a queue entry requires; None for any."""
    return None if stored is None else stored.removesuffix(OVER_HOSTS) or None


class Source(Record):
    """Upload of a user."""

    kind: str
    """"file", "archive" or "script"; "zoo" and "module" are on every worker."""
    entry: str
    digest: str | None


class Claim(Record):
    """A study that is this worker's until the lease ends."""

    lease: Lease
    study: Study
    owner_id: str | None
    source: Source | None
    other_hardware: bool
    """True where it may go on with hardware on which it was not begun."""
    slots: tuple[Slot, ...]
    place: str
    """Place where it runs now."""
