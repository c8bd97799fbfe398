"""Settings, from the environment (`STEPTUNE_...`) or a `.env` file; all defaults are usable."""

from __future__ import annotations

from pathlib import Path

from pydantic_settings import BaseSettings, SettingsConfigDict


class Settings(BaseSettings):
    """Where Steptune keeps things.

    Attributes:
        database_url: SQLAlchemy URL of the database.
        data_directory: Studies' working files and kept traces.
        isolation: How trials are kept from this machine: none, limits, bubblewrap, or strongest (the first of these,
            from the right, that works here). Not set, it is none for commands that a user types, and strongest for a
            worker.
        isolation_network: Whether isolated trials may use the network; loopback they always may.
        readable: Files and folders that isolated trials may read beside the workload's own folder: a JSON list.
        study_disk_bytes: What the files of one isolated study may take; not set, half of what is free.
    """

    model_config = SettingsConfigDict(env_prefix="STEPTUNE_", env_file=".env", extra="ignore")

    database_url: str = "sqlite:///steptune.db"
    data_directory: Path = Path(".steptune")
    isolation: str | None = None
    isolation_network: bool = False
    readable: tuple[Path, ...] = ()
    study_disk_bytes: int | None = None
