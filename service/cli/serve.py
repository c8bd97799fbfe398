"""`serve`: the service as one process, which also runs a worker as a child process."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import typer
from pydantic.fields import FieldInfo

from steptune.service.settings import Settings, is_secret, load_settings

SHORT = {"embedded_worker": "--worker/--no-worker"}
_SECRETS = "Secrets are read from the environment only."


def register(app: typer.Typer) -> None:
    """Add the command. Its options are generated from the settings, so that none can be missing."""
    app.command()(_command())


def serve(settings: Settings) -> None:
    """Serve until interrupted.

    Raises:
        StoreError: The database cannot be used; SchemaOutdatedError and SchemaTooNewError say how to continue.
        ChoiceError: Settings that contradict each other.
    """
    from steptune.service.serving import run

    run(settings)


def _command() -> Callable[..., None]:
    def command(**given: Any) -> None:
        serve(load_settings(**{name: value for name, value in given.items() if value is not None}))

    command.__name__ = "serve"
    command.__doc__ = (
        "Run the service: the REST interface and an embedded worker.\n\n"
        f"Each option can also be set in the environment or in a file `.env`, under STEPTUNE_ and its name. {_SECRETS}"
    )
    own_first = sorted(Settings.model_fields.items(), key=lambda item: item[0] not in Settings.__annotations__)
    parameters = [_parameter(name, field) for name, field in own_first if not is_secret(name)]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def _parameter(name: str, field: FieldInfo) -> inspect.Parameter:
    flag = f"--{name.replace('_', '-')}"
    kind = _flag_type(field.annotation)
    flags = (SHORT.get(name, f"{flag}/--no-{flag.removeprefix('--')}"),) if kind is bool else (flag,)
    shown = "" if field.default in (None, "", ()) else f" Default {_shown(field.default)}."
    option = typer.Option(*flags, help=f"{field.description}{shown}", show_default=False, rich_help_panel=_group(name))
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )


def _group(name: str) -> str:
    """Return the heading under which `--help` lists an option: the heading of the settings class that defines it."""
    owner = next(kind for kind in Settings.__mro__ if name in inspect.get_annotations(kind))
    return owner.__name__.removesuffix("Settings") or "Service"


def _flag_type(annotation: Any) -> Any:
    """Return a type that Typer can parse for a setting with this annotation; pydantic checks the rest."""
    if get_origin(annotation) in (Union, UnionType):
        annotation = next(part for part in get_args(annotation) if part is not type(None))
    return annotation if annotation in (bool, int, float) else str


def _shown(default: Any) -> str:
    return {True: "yes", False: "no"}[default] if isinstance(default, bool) else f"{default}"
