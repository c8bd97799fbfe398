"""Settings, from the environment (`STEPTUNE_...`) or a `.env` file; all defaults are usable."""

from __future__ import annotations

from pathlib import Path

from pydantic_settings import BaseSettings, SettingsConfigDict

from service.access.settings import AccessSettings


class Settings(AccessSettings, BaseSettings):
    """Where Steptune keeps things.

    Attributes:
        database_url: SQLAlchemy URL of the database.
        data_directory: Studies' working files and kept traces.
    """

    model_config = SettingsConfigDict(env_prefix="STEPTUNE_", env_file=".env", extra="ignore")

    database_url: str = "sqlite:///steptune.db"
    data_directory: Path = Path(".steptune")
