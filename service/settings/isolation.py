"""Settings of isolation; part of the service's `Settings`."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, Field


class IsolationSettings(BaseModel):
    isolation: str | None = Field(
        default=None,
        description="Isolation of trials from this machine: none, limits, bubblewrap, or strongest (bubblewrap, else "
        "limits; never none). The default is none for commands that a user types. The default "
        "for a worker is strongest, because a worker must separate the users of the service unless none is set.",
    )
    isolation_network: bool = Field(
        default=False, description="Let isolated trials use the network; loopback is always allowed."
    )
    readable: tuple[Path, ...] = Field(
        default=(),
        description="Files and folders, besides the workload's own folder, that isolated trials may read: a JSON list.",
    )
    study_disk_bytes: int | None = Field(
        default=None,
        ge=0,
        description="Maximum bytes of the files of one isolated study; by default half of the free space.",
    )
    study_memory_bytes: int | None = Field(
        default=None,
        ge=1 << 28,
        description="Maximum memory of all processes of one isolated study, and of all studies of one user on a "
        "machine, in bytes; by default four fifths of the memory of the machine or its container.",
    )
