"""Tables of the queue: waiting studies, workers, and the devices that studies hold.

A study is run by the worker whose fencing number its queue entry carries, until the lease ends. Times are the
database's own, so that clocks of hosts need not agree.
"""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import ForeignKey, Index
from sqlalchemy.orm import Mapped, mapped_column

from steptune.service.models.base import COUNTER, Base, study_key


class QueueEntryRow(Base):
    """Queue entry of a study that was submitted to the service. The study's state (queued, running, …) is in the
    study's own row.
    """

    __tablename__ = "queue_entries"
    __table_args__ = (Index(None, "source_id", "study_id"),)

    study_id: Mapped[str] = mapped_column(study_key(), primary_key=True)
    source_id: Mapped[str | None] = mapped_column(ForeignKey("workload_sources.source_id"))
    """Source that was uploaded; NULL for a zoo entry or a module on the worker."""
    version: Mapped[int] = mapped_column(server_default="1")
    """Version for the ETag; grows with every change that a reader can see."""
    priority: Mapped[int] = mapped_column(server_default="0")
    """Priority among the user's own studies, higher first."""
    required_device_kind: Mapped[str | None]
    """Required kind of device: "cpu" or "cuda"."""
    required_hardware: Mapped[str | None]
    """Required hardware: a fingerprint of a hardware profile, or a part of its label."""
    num_devices: Mapped[int] = mapped_column(server_default="1")
    place: Mapped[str] = mapped_column(server_default="")
    """Host and devices that the last claim took."""
    requested: Mapped[str] = mapped_column(server_default="")
    """Request of the user for a running study: "", "cancel" or "pause"."""
    worker_id: Mapped[str | None] = mapped_column(ForeignKey("workers.worker_id", ondelete="SET NULL"), index=True)
    fence: Mapped[int] = mapped_column(server_default="0")
    """Fencing number; grows with every claim, and a writer with an older number is refused."""
    lease_until: Mapped[datetime | None]
    num_claims: Mapped[int] = mapped_column(server_default="0")
    num_lost: Mapped[int] = mapped_column(server_default="0")
    """Number of claims whose worker died since a trial was last completed."""
    device_seconds: Mapped[float] = mapped_column(server_default="0")
    """Device seconds: number of devices times the seconds for which workers held the study."""
    queued_at: Mapped[datetime]
    claimed_at: Mapped[datetime | None]
    waits_since: Mapped[datetime | None] = mapped_column(index=True)
    """Time at which the study began to wait for hosts that the cluster's present nodes can provide; NULL where it does
    not wait for any.
    """
    asked_by: Mapped[str | None]
    """The worker that last requested hosts for the study."""
    ended_at: Mapped[datetime | None] = mapped_column(index=True)


class DeletedUsageRow(Base):
    """Device time of a deleted study. While it is recent, it counts towards its owner's quota and for the order in
    which users take turns.
    """

    __tablename__ = "deleted_usage"

    usage_id: Mapped[int] = mapped_column(COUNTER, primary_key=True)
    owner_id: Mapped[str] = mapped_column(ForeignKey("users.user_id", ondelete="CASCADE"), index=True)
    device_seconds: Mapped[float]
    ended_at: Mapped[datetime] = mapped_column(index=True)
    """Time at which the study ended, or at which it was deleted without having ended."""


class WorkerRow(Base):
    __tablename__ = "workers"

    worker_id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str]
    """Name given by whoever started the worker, or generated; never a host's name."""
    host_id: Mapped[str]
    """Hashed id of the machine: workers on one host share its devices."""
    state: Mapped[str]
    """State of the worker: "idle", "busy", "draining" or "gone"."""
    hardware_fingerprint: Mapped[str | None] = mapped_column(ForeignKey("hardware_profiles.fingerprint"), index=True)
    device_kind: Mapped[str]
    devices: Mapped[str]
    """Slots that the worker may claim, as JSON: [["core", 0], ["cuda", 1]]."""
    isolation: Mapped[str]
    cluster: Mapped[str] = mapped_column(server_default="")
    """Cluster in which the worker reserves hosts; empty for none, and until the cluster has reported its identity."""
    version: Mapped[str]
    started_at: Mapped[datetime]
    heartbeat_at: Mapped[datetime] = mapped_column(index=True)


class ResourceSlotRow(Base):
    """A core or a device of a host, and the study that holds it."""

    __tablename__ = "resource_slots"

    host_id: Mapped[str] = mapped_column(primary_key=True)
    kind: Mapped[str] = mapped_column(primary_key=True)
    """Kind of the slot: "core" or "cuda"."""
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    study_id: Mapped[str | None] = mapped_column(ForeignKey("studies.study_id", ondelete="SET NULL"), index=True)
    fence: Mapped[int] = mapped_column(server_default="0")
    """Fencing number of the claim that took the slot; the slot is free once that claim is over."""
