"""Settings of the queue, of leases and of workers; part of the service's `Settings`."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import BaseModel, Field, model_validator


class QueueSettings(BaseModel):
    max_running: int | None = Field(
        default=None,
        ge=0,
        description="Maximum number of running studies of one user who has no limit of their own.",
    )
    max_queued: int | None = Field(
        default=1000, ge=0, description="Maximum number of waiting studies of one user who has no limit of their own."
    )
    max_device_hours: float | None = Field(
        default=None,
        ge=0,
        description="Maximum device hours in 30 days of one user who has no limit of their own; all cores of a worker "
        "count as one device.",
    )
    lease_s: float = Field(
        default=60.0,
        gt=0,
        description="Seconds without a heartbeat after which a worker counts as dead; another worker then continues "
        "its study.",
    )
    heartbeat_s: float = Field(default=10.0, gt=0, description="Seconds between heartbeats of a worker.")
    alive_file: Path | None = Field(
        default=None,
        description="File that a worker touches with every heartbeat, for health checks.",
    )
    poll_s: float = Field(default=1.0, gt=0, description="Seconds between two queries of the queue by an idle worker.")
    drain_s: float = Field(
        default=300.0,
        ge=0,
        description="Seconds that a worker has to finish its running trials when it is told to stop.",
    )
    max_losses: int = Field(
        default=5,
        ge=1,
        description="Number of consecutive workers that die while running a study, with no trial completed, after "
        "which the study fails.",
    )

    hosts_wait_s: float = Field(
        default=600.0,
        ge=0,
        description="Seconds that a study waits for hosts of a Ray cluster while other studies take them; after that, "
        "no other study begins on the cluster before this one.",
    )

    @model_validator(mode="after")
    def _several_heartbeats(self) -> Self:
        if self.lease_s < 3 * self.heartbeat_s:
            raise ValueError(
                f"lease_s must be at least three times heartbeat_s ({self.heartbeat_s:g}), got "
                f"{self.lease_s:g}: otherwise one late heartbeat would end a lease"
            )
        return self
