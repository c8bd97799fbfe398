"""`delete`: delete a study."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from steptune.service.cli.console import opened_store, print_json, say, settings_with, short_name
from steptune.service.cli.inspect_study import resolve
from steptune.service.cli.options import AsJson, Database, StudyId
from steptune.service.cli.remote import Token, TokenFile, Url, connected, study_id_of
from steptune.service.connections import without_password
from steptune.tuner.errors import ChoiceError

Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(delete)


def delete(
    study_id: StudyId,
    yes: Yes = False,
    database: Database = None,
    url: Url = None,
    token: Token = None,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Delete a study and all its measurements, here or (with --url) at a service; reports and exports stay."""
    if url and database is None:
        with connected(url, token, token_file) as client:
            found = client.study(study_id_of(client, study_id))
            _confirm(f"{found.study_id} ({short_name(found.workload)}, {found.state.value}) at {client.url}", yes=yes)
            client.delete(found.study_id)
            _tell(found.study_id, as_json=as_json)
        return
    from steptune.service.deleting import delete_study

    settings = settings_with(database)
    with opened_store(settings) as store:
        study = resolve(store, study_id)
        place = without_password(settings.database_url)
        _confirm(f"{study.study_id} ({short_name(study.workload)}, {study.state.value}) in {place}", yes=yes)
        delete_study(study, store, settings)
    _tell(study.study_id, as_json=as_json)


def _confirm(what: str, *, yes: bool) -> None:
    if yes:
        return
    if not sys.stdin.isatty():
        raise ChoiceError(f"cannot ask for confirmation without a terminal: add --yes to delete study {what}")
    typer.confirm(f"Delete study {what}? This cannot be undone.", abort=True, err=True)


def _tell(study_id: str, *, as_json: bool) -> None:
    if as_json:
        print_json({"deleted": study_id})
    else:
        say(f"study {study_id} is deleted")
