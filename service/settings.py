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
        artifacts_url: Where traces and uploads are kept: a folder, or a URL such as s3://bucket/steptune; default
            `artifacts` in the data directory.
        artifact_grace_s: A file to which nothing refers is removed when it is this old.
        max_artifact_bytes: Of all studies together, or none; the oldest traces of ended studies go first.
        max_user_artifact_bytes: Of the studies and uploads of one user, where the user has no quota of their own.
        max_study_artifact_bytes: Of one study.
        audit_days: How long the audit log is kept.
    """

    model_config = SettingsConfigDict(env_prefix="STEPTUNE_", env_file=".env", extra="ignore")

    database_url: str = "sqlite:///steptune.db"
    data_directory: Path = Path(".steptune")
    artifacts_url: str | None = None
    artifact_grace_s: float = 24 * 3600.0
    max_artifact_bytes: int | None = None
    max_user_artifact_bytes: int | None = None
    max_study_artifact_bytes: int | None = 10 << 30
    audit_days: float = 365.0
