"""Settings of the queue, of leases and of workers; part of the service's `Settings`."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import BaseModel, Field, model_validator


class QueueSettings(BaseModel):
    max_running: int | None = Field(
        default=None,
        ge=0,
        description="Studies of one user that run at a time, where the user has no limit of their own.",
    )
    max_queued: int | None = Field(
        default=1000, ge=0, description="Studies of one user that wait, where the user has no limit of their own."
    )
    max_device_hours: float | None = Field(
        default=None,
        ge=0,
        description="Device hours of one user in 30 days, where the user has no limit of their own; the cores of a "
        "worker are one device.",
    )
    lease_s: float = Field(
        default=60.0,
        gt=0,
        description="A worker that was not heard of for so long is taken for dead; its study goes on.",
    )
    heartbeat_s: float = Field(default=10.0, gt=0, description="Seconds between signs of life of a worker.")
    alive_file: Path | None = Field(
        default=None,
        description="File that a worker touches with every sign of life, for health checks.",
    )
    poll_s: float = Field(default=1.0, gt=0, description="Seconds between looks of an idle worker at the queue.")
    drain_s: float = Field(
        default=300.0,
        ge=0,
        description="Seconds that a worker that was told to stop has to finish the trials it is running.",
    )
    max_losses: int = Field(
        default=5,
        ge=1,
        description="Workers that may break down with a study, one after the other without a trial completed, before "
        "the study has failed.",
    )

    hosts_wait_s: float = Field(
        default=600.0,
        ge=0,
        description="Seconds that a study waits for hosts of a Ray cluster while other studies take them; then it goes "
        "first there, and no other one begins.",
    )

    @model_validator(mode="after")
    def _several_heartbeats(self) -> Self:
        if self.lease_s < 3 * self.heartbeat_s:
            raise ValueError(
                f"lease_s is {self.lease_s:g}, with heartbeats every {self.heartbeat_s:g} s: one late heartbeat would "
                "end a lease; give at least three times heartbeat_s"
            )
        return self
