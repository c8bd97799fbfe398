"""`report`: a study as one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from steptune.service.cli.console import opened_store, output, print_json, settings_with
from steptune.service.cli.inspect_study import resolve
from steptune.service.cli.options import AsJson, Database, StudyId


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(report)


def report(
    study_id: StudyId = "last",
    path: Annotated[Path, typer.Option("--output", "-o", help="File to write.")] = Path("report.html"),
    database: Database = None,
    as_json: AsJson = False,
) -> None:
    """Write a study's page, with the pages of its most relevant trials, as one self-contained HTML file."""
    from steptune.service.artifacts import open_artifacts
    from steptune.service.studies import write_report
    from steptune.service.trial_source import KeptTrials

    settings = settings_with(database)
    with opened_store(settings) as store:
        study = resolve(store, study_id)
        written = write_report(study.study_id, KeptTrials(store, open_artifacts(settings)), path)
    if as_json:
        print_json({"study_id": study.study_id, "report": str(written)})
    else:
        output.print(f"{written}  (open in a browser)", soft_wrap=True, markup=False)
