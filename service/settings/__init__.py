"""Settings from flags, the environment (`STEPTUNE_...`) or a `.env` file; all defaults are usable."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self, get_args

from pydantic import Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict
from sqlalchemy.engine import make_url

from steptune.service.settings.access import AccessSettings, none_if_empty
from steptune.service.settings.isolation import IsolationSettings
from steptune.service.settings.queue import QueueSettings
from steptune.tuner.errors import ChoiceError


class Settings(AccessSettings, QueueSettings, IsolationSettings, BaseSettings):
    """Settings of the service and the commands. Secrets have no flag: process lists would show them."""

    model_config = SettingsConfigDict(
        env_prefix="STEPTUNE_", env_file=".env", extra="ignore", hide_input_in_errors=True
    )

    database_url: str = Field(
        default="sqlite:///steptune.db",
        description="SQLAlchemy URL of the database: sqlite:///… or postgresql+psycopg://…",
    )
    database_password_file: Path | None = Field(
        default=None, description="File with the password of the database, if the database's URL omits it."
    )
    data_directory: Path = Field(
        default=Path(".steptune"), description="Directory of the studies' working files and traces."
    )

    artifacts_url: str | None = Field(
        default=None,
        description="Location of traces and uploads: a folder, or a URL such as s3://bucket/steptune; default: "
        "`artifacts` in the data directory.",
    )
    artifact_grace_s: float = Field(
        default=24 * 3600.0, gt=0, description="Age in seconds after which a file that nothing refers to is removed."
    )
    max_artifact_bytes: int | None = Field(
        default=None,
        ge=0,
        description="Maximum bytes of the files of all studies together; null for no limit. The oldest traces of ended "
        "studies are removed first.",
    )
    max_user_artifact_bytes: int | None = Field(
        default=None,
        ge=0,
        description="Maximum bytes of the studies and uploads of one user who has no quota of their own.",
    )
    max_study_artifact_bytes: int | None = Field(
        default=10 << 30, ge=0, description="Maximum bytes of the files of one study."
    )

    audit_days: float = Field(default=365.0, gt=0, description="Days for which the audit log is kept.")

    host_patience_s: float = Field(
        default=60.0, gt=0, description="Seconds that a study waits for a lost host to return."
    )

    ray_timeout_s: float = Field(
        default=600.0,
        gt=0,
        description="Seconds that a Ray cluster has to reserve the hosts of `steptune tune`, or to replace a lost one.",
    )

    # --- the server
    host: str = Field(default="127.0.0.1", description="Address on which `serve` listens.")
    port: int = Field(default=8700, ge=0, le=65535, description="Port on which `serve` listens; 0 for any free port.")
    base_path: str = Field(default="", description="Path below which a proxy serves Steptune, such as /steptune.")
    embedded_worker: bool = Field(
        default=True, description="Run a worker beside the server, as a supervised child process."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Lowest level of the log lines that `serve` writes to standard error, as JSON."
    )
    shutdown_timeout_s: float = Field(
        default=20.0, gt=0, description="Seconds that running requests have to finish when the server is told to stop."
    )
    max_body_bytes: int = Field(
        default=1 << 20, gt=0, description="Maximum bytes of the body of a request, except for uploads."
    )
    max_upload_bytes: int = Field(
        default=256 << 20, gt=0, description="Maximum bytes of an uploaded workload (file or archive)."
    )
    event_poll_s: float = Field(
        default=0.25, gt=0, description="Seconds between queries of the database for new events."
    )
    max_event_streams: int = Field(
        default=1000, gt=0, description="Maximum number of event streams of one server process."
    )
    max_user_event_streams: int = Field(default=32, gt=0, description="Maximum number of event streams of one user.")
    max_study_event_streams: int = Field(default=128, gt=0, description="Maximum number of event streams of one study.")
    metrics_token: SecretStr | None = Field(
        default=None,
        description="Bearer token for /metrics. If it is not set, /metrics is closed, unless `insecure_no_auth` "
        "is set.",
    )

    @field_validator("metrics_token", mode="before")
    @classmethod
    def _no_empty_token(cls, value: object) -> object:
        return none_if_empty(value)

    @field_validator("base_path")
    @classmethod
    def _plain_path(cls, value: str) -> str:
        value = value.rstrip("/")
        if value and not value.startswith("/"):
            raise ValueError(f"the path must begin with a slash, like /steptune, got {value!r}")
        return value

    @model_validator(mode="after")
    def _with_password(self) -> Self:
        if self.database_password_file is not None and self.database_url.startswith("postgresql"):
            try:
                password = self.database_password_file.read_text(encoding="utf-8").strip()
            except OSError as error:
                raise ValueError(f"database_password_file cannot be read: {error}") from error
            url = make_url(self.database_url).set(password=password)
            self.database_url = url.render_as_string(hide_password=False)
        return self


def is_secret(name: str) -> bool:
    """Say whether a setting is a secret, which is never shown."""
    field = Settings.model_fields.get(name)
    return field is not None and SecretStr in (field.annotation, *get_args(field.annotation))


def load_settings(**given: Any) -> Settings:
    """Load the settings. Values given here, such as a command's flags, take precedence over the environment and the
    `.env` file.

    Raises:
        ChoiceError: A setting is invalid; the message names it.
    """
    try:
        return Settings(**given)
    except ValidationError as error:
        mistake = error.errors()[0]
        name = str(mistake["loc"][0]) if mistake["loc"] else "settings"
        found = f" (found {mistake['input']!r})" if mistake["loc"] and not is_secret(name) else ""
        raise ChoiceError(f"{name}: {mistake['msg']}{found}") from None
