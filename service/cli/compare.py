"""`compare`: changes between two traces, or between two trials of studies."""

from __future__ import annotations

import glob
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from steptune.service.cli.console import errors, opened_store, output, print_json, settings_with
from steptune.service.cli.inspect_study import resolve
from steptune.service.cli.options import AsJson, Database
from steptune.tuner.errors import ChoiceError

if TYPE_CHECKING:
    from steptune.service.store import SqlStudyStore
    from steptune.tuner.records import Study, Trial
    from steptune.tuner.trace_records import Comparison

SIDE = (
    "A trace of torch.profiler (file, folder or pattern), or a trial: its id, STUDY:NUMBER, STUDY:baseline or "
    "STUDY:recommended. STUDY is an id of a study, the start or end of the id, or `last`."
)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(compare)


def compare(
    before: Annotated[str, typer.Argument(help=SIDE, metavar="A")],
    after: Annotated[str, typer.Argument(help="The other trace or trial, named like A.", metavar="B")],
    top: Annotated[int, typer.Option("--top", min=1, help="Maximum rows of kernels and of gaps.")] = 10,
    database: Database = None,
    as_json: AsJson = False,
) -> None:
    """Compare A with B: the change of every category, with an interval, and the kernels and gaps that explain it."""
    from steptune.service.cli.trace_summary import print_comparison

    kinds = [_is_trace(side) for side in (before, after)]
    if kinds[0] != kinds[1]:
        trace, trial = (before, after) if kinds[0] else (after, before)
        raise ChoiceError(f"{trace} is a trace and {trial} is a trial: compare two traces or two trials")
    comparison = _of_traces(before, after, top) if kinds[0] else _of_trials(before, after, top, database)
    if as_json:
        print_json(comparison)
    else:
        print_comparison(output, comparison)


def _is_trace(side: str) -> bool:
    from steptune.tuner.profiling.trace_files import SUFFIXES

    return Path(side).exists() or glob.has_magic(side) or side.endswith(SUFFIXES)


def _of_traces(before: str, after: str, top: int) -> Comparison:
    from steptune.service.cli.analysed import compared_traces
    from steptune.tuner.profiling.trace_files import find_traces

    files = [find_traces([side]) for side in (before, after)]
    with errors.status("reading"):
        return compared_traces(files[0], files[1], None, top)[-1]


def _of_trials(before: str, after: str, top: int, database: str | None) -> Comparison:
    from steptune.service.artifacts import open_artifacts
    from steptune.service.comparing import compared
    from steptune.service.trial_source import KeptTrials

    settings = settings_with(database)
    with opened_store(settings) as store:
        source = KeptTrials(store, open_artifacts(settings))
        first = _trial(store, before)
        answer = store.recommendation(first[0].study_id)
        return compared(first, _trial(store, after), answer, analysis_of=source.trial_analysis, top=top)


def _trial(store: SqlStudyStore, reference: str) -> tuple[Study, Trial]:
    """Return the trial that the reference names; it must be complete.

    Raises:
        StoreError: There is no such trial, or it has no result.
    """
    from steptune.service.comparing import trial_in, with_result

    name, colon, which = reference.rpartition(":")
    if colon:
        study = resolve(store, name)
        return study, trial_in(store, study, which)
    trial = with_result(store.trial(reference))
    return store.get_study(trial.study_id), trial
