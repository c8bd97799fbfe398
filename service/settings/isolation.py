"""Settings of isolation; part of the service's `Settings`."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, Field


class IsolationSettings(BaseModel):
    isolation: str | None = Field(
        default=None,
        description="How trials are kept from this machine: none, limits, bubblewrap, or strongest (bubblewrap, else "
        "limits; never none). Not set, it is none for commands that a user types, and strongest for a worker, which "
        "must keep users of the service from each other unless none is named.",
    )
    isolation_network: bool = Field(
        default=False, description="Lets isolated trials use the network; loopback they may always use."
    )
    readable: tuple[Path, ...] = Field(
        default=(),
        description="Files and folders that isolated trials may read beside the workload's own folder: a JSON list.",
    )
    study_disk_bytes: int | None = Field(
        default=None,
        ge=0,
        description="Most bytes that the files of one isolated study may take; by default half of the free space.",
    )
    study_memory_bytes: int | None = Field(
        default=None,
        ge=1 << 28,
        description="Memory that all processes of one isolated study may take together, and those of all studies of "
        "one user on a machine; not set, four fifths of what the machine or its container has.",
    )
