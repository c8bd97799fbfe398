"""`watch`: live progress of a study at a service, as `tune` shows it, and its answer at the end."""

from __future__ import annotations

import typer
from rich.console import Console
from rich.text import Text

from steptune.service.cli.console import errors, output, print_json, say
from steptune.service.cli.live import live_progress
from steptune.service.cli.options import AsJson
from steptune.service.cli.remote import RemoteStudy, Token, TokenFile, Url, connected, study_id_of
from steptune.service.client import Client
from steptune.service.messages import StudyDetail
from steptune.service.tables import plain_table
from steptune.tuner.errors import BaselineError
from steptune.tuner.records import Event, Recommendation, StudyState, choice_label
from steptune.tuner.speeds import answer_of, contribution_of, needed_by, proven_gain


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(watch)


def watch(
    study_id: RemoteStudy = "last",
    url: Url = None,
    token: Token = None,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Show the live progress of a study at a service until it has ended. Ctrl-C ends the display, not the study."""
    with connected(url, token, token_file) as client:
        follow_to_its_end(client, study_id_of(client, study_id), errors, as_json=as_json)


def follow_to_its_end(client: Client, study_id: str, console: Console, *, as_json: bool) -> None:
    """Show progress until the study has ended, then the answer.

    Raises:
        BaselineError: The study failed.
        typer.Exit: Status 1 where it was cancelled without an answer.
    """
    from steptune.service.progress import EVENT, Picture

    if not as_json:
        _say_what_it_waits_for(client.study(study_id))
    with live_progress(console, quiet=as_json) as show:
        picture = Picture()
        for event in client.events(study_id):
            if event.kind == "state" and not as_json and not console.is_terminal:
                say(_state_text(event))
            if event.kind == EVENT:
                show(picture.after(event.data))
    study, recommendation = client.study(study_id), client.recommendation(study_id)
    if as_json:
        print_json({"study": study, "recommendation": recommendation})
    elif recommendation is not None:
        print_answer(output, study_id, recommendation)
    if recommendation is None and study.state is StudyState.FAILED:
        raise BaselineError(f"study {study_id} failed: {study.message}")
    if recommendation is None:
        say(f"study {study_id} is {study.state.value}{f': {study.message}' if study.message else ''}")
        raise typer.Exit(1)


def print_answer(console: Console, study_id: str, recommendation: Recommendation) -> None:
    """Print a recommendation's verdict and gain, the changes with their contributions, and how to export them."""
    from steptune.dashboards import units

    headline = Text(units.words(recommendation.verdict.value), style="bold")
    speed = answer_of(recommendation)
    if proven_gain(recommendation) is not None:
        headline.append(f"  {units.ratio(speed.ratio)}")
    if recommendation.gain is not None:
        headline.append(f"  ({units.ratio_interval(recommendation.gain.interval)})", style="not bold dim")
    console.print(headline)
    if recommendation.parts:
        table = plain_table("contribution", "change")
        for part in recommendation.parts:
            known = contribution_of(recommendation, part)
            gain = "" if known is None else units.ratio(known.ratio)
            remark = "" if known is None or not known.together else f"  ({needed_by(known.together)})"
            table.add_row(gain, f"{part.strategy}: {choice_label(part.choice)}{remark}")
        console.print(table)
    console.print(f"study    {study_id}  (write it to files with `steptune export {study_id} --url …`)", soft_wrap=True)


def _say_what_it_waits_for(study: StudyDetail) -> None:
    if study.queue is not None and study.queue.waits_for:
        say(f"the study waits for {study.queue.waits_for}")


def _state_text(event: Event) -> str:
    message = event.data.get("message", "")
    return f"{event.data.get('state', event.kind)}{f': {message}' if message else ''}"
