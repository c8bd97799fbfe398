"""`studies`, `cancel`, `pause`, `continue`: list and control studies of a service."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Annotated

import typer
from rich.text import Text

from steptune.service.cli.console import output, print_json, say, short_name, studies_table
from steptune.service.cli.options import AsJson
from steptune.service.cli.remote import RemoteStudy, Token, TokenFile, Url, connected, study_id_of
from steptune.service.client import Client
from steptune.service.messages import StudyDetail, StudySummary
from steptune.tuner.records import StudyState, Verdict


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (studies, cancel, pause):
        app.command()(command)
    app.command("continue")(continue_)


def studies(
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of studies, newest first.")] = 20,
    state: Annotated[StudyState | None, typer.Option(help="Only studies in this state.", show_default=False)] = None,
    url: Url = None,
    token: Token = None,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """List your studies at a service, the newest first."""
    with connected(url, token, token_file) as client:
        found = list(islice(client.studies(state=state.value if state else None), limit))
    if as_json:
        print_json(found)
        return
    if not found:
        output.print("no study yet: start one with `steptune submit WORKLOAD`")
        return
    output.print(studies_table("state", ((study.study_id, study.created_at, _about(study)) for study in found)))


def cancel(
    study_id: RemoteStudy, url: Url = None, token: Token = None, token_file: TokenFile = None, as_json: AsJson = False
) -> None:
    """Cancel a study of a service permanently; a running study recommends its best configuration so far."""
    with connected(url, token, token_file) as client:
        _tell(client, client.cancel, study_id, as_json)


def pause(
    study_id: RemoteStudy, url: Url = None, token: Token = None, token_file: TokenFile = None, as_json: AsJson = False
) -> None:
    """Pause a study of a service until it is continued; complete trials are kept."""
    with connected(url, token, token_file) as client:
        _tell(client, client.pause, study_id, as_json)


def continue_(
    study_id: RemoteStudy, url: Url = None, token: Token = None, token_file: TokenFile = None, as_json: AsJson = False
) -> None:
    """Requeue a paused, interrupted or failed study of a service."""
    with connected(url, token, token_file) as client:
        _tell(client, client.resume, study_id, as_json)


def _tell(client: Client, action: Callable[[str], StudyDetail], study_id: str, as_json: bool) -> None:
    study = action(study_id_of(client, study_id))
    if as_json:
        print_json(study)
        return
    requested = study.queue.requested if study.queue else ""
    say(f"study {study.study_id} is {study.state.value}{f', {requested} requested' if requested else ''}")


def _about(study: StudySummary) -> Text:
    from steptune.dashboards import units

    text = Text(study.state.value)
    if study.verdict is Verdict.FASTER and study.gain is not None:
        text.append(f", {units.ratio(study.gain)}")
    elif study.verdict is not None:
        text.append(f", {units.words(study.verdict.value)}")
    return text.append(f"\n{study.title or short_name(study.workload)}", style="dim")
