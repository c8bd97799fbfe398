"""`user`: users of the service, and their limits."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from steptune.service.access.users import LIMITS, User
from steptune.service.cli.access import DEFAULT_SCOPES, Scopes, UserName, opened_access, record, shown_time
from steptune.service.cli.console import output, print_json
from steptune.service.cli.options import AsJson, Database
from steptune.service.settings.scopes import parse_scopes
from steptune.service.tables import plain_table
from steptune.tuner.errors import ChoiceError

app = typer.Typer(help="Manage users of the service.", no_args_is_help=True)

DEFAULT = "default"
Priority = Annotated[
    int | None, typer.Option("--priority", help="Priority of the user's studies; higher ones run first.")
]
MaxRunning = Annotated[
    str | None, typer.Option("--max-running", help="Maximum number of running studies.", metavar="NUMBER|default")
]
MaxQueued = Annotated[
    str | None, typer.Option("--max-queued", help="Maximum number of waiting studies.", metavar="NUMBER|default")
]
MaxDeviceHours = Annotated[
    str | None, typer.Option("--max-device-hours", help="Maximum device hours in 30 days.", metavar="NUMBER|default")
]
MaxArtifactBytes = Annotated[
    str | None,
    typer.Option("--max-artifact-bytes", help="Maximum bytes of uploads, traces and logs.", metavar="NUMBER|default"),
]


@app.command()
def create(
    name: UserName,
    scopes: Scopes = DEFAULT_SCOPES,
    priority: Priority = None,
    max_running: MaxRunning = None,
    max_queued: MaxQueued = None,
    max_device_hours: MaxDeviceHours = None,
    max_artifact_bytes: MaxArtifactBytes = None,
    database: Database = None,
    as_json: AsJson = False,
) -> None:
    """Create a user, who logs in with a token, or through an identity provider under this name."""
    changes = _changes(priority, max_running, max_queued, max_device_hours, max_artifact_bytes)
    with opened_access(database) as access:
        user = access.users.create(name, parse_scopes(scopes), **changes)
        record(access, "create_user", user.user_id, name=user.name, scopes=" ".join(user.scopes))
    _show([user], as_json, one=True)


@app.command("list")
def list_users(
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of users, newest first.")] = 50,
    database: Database = None,
    as_json: AsJson = False,
) -> None:
    """List users, the newest first."""
    with opened_access(database) as access:
        users = access.users.page(limit=limit)
    _show(users, as_json)


@app.command()
def disable(
    name: UserName,
    undo: Annotated[bool, typer.Option("--undo", help="Enable the user again.")] = False,
    database: Database = None,
    as_json: AsJson = False,
) -> None:
    """Refuse a user's tokens and logins; the user's studies and files stay."""
    with opened_access(database) as access:
        user = access.users.change(access.users.named(name).user_id, disabled=not undo)
        record(access, "disable_user" if not undo else "enable_user", user.user_id, name=user.name)
    _show([user], as_json, one=True)


@app.command()
def quota(
    name: UserName,
    priority: Priority = None,
    max_running: MaxRunning = None,
    max_queued: MaxQueued = None,
    max_device_hours: MaxDeviceHours = None,
    max_artifact_bytes: MaxArtifactBytes = None,
    database: Database = None,
    as_json: AsJson = False,
) -> None:
    """Show or set a user's limits; `default` stands for those of the settings."""
    changes = _changes(priority, max_running, max_queued, max_device_hours, max_artifact_bytes)
    with opened_access(database) as access:
        user = access.users.named(name)
        if changes:
            user = access.users.change(user.user_id, **changes)
            record(access, "change_user", user.user_id, **changes)
    _show([user], as_json, one=True)


def _changes(priority: int | None, *limits: str | None) -> dict[str, Any]:
    """Return the changes that the options state, by column name.

    Raises:
        ChoiceError: A limit that is neither a number nor `default`.
    """
    changes: dict[str, Any] = {} if priority is None else {"priority": priority}
    for name, text in zip(LIMITS, limits, strict=True):
        if text is not None:
            changes[name] = None if text == DEFAULT else _number(name, text)
    return changes


def _number(name: str, text: str) -> float | int:
    try:
        return float(text) if name == "max_device_hours" else int(text)
    except ValueError as error:
        option = "--" + name.replace("_", "-")
        raise ChoiceError(f"{option} must be a number or `{DEFAULT}`, got {text!r}") from error


def _show(users: list[User], as_json: bool, *, one: bool = False) -> None:
    if as_json:
        print_json(users[0] if one else users)
        return
    table = plain_table("id", "name", "scopes", "priority", "running", "queued", "device h", "bytes", "state")
    for user in users:
        limits = [DEFAULT if getattr(user, limit) is None else f"{getattr(user, limit):g}" for limit in LIMITS]
        state = "active" if user.disabled_at is None else f"disabled {shown_time(user.disabled_at)}"
        table.add_row(user.user_id, user.name, " ".join(user.scopes), str(user.priority), *limits, state)
    output.print(table)
