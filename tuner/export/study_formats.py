"""Exports of a whole study: its trials as a table, or all of it as an Optuna study. They need no recommendation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from steptune.tuner.errors import ChoiceError
from steptune.tuner.export import EXPORTERS, optuna_study, trial_table
from steptune.tuner.records import Study, Trial
from steptune.tuner.wording import no_such


@dataclass(frozen=True, kw_only=True)
class StudyFormat:
    """File format for a whole study.

    Attributes:
        name: Name by which a user selects it.
        summary: One-line description.
        usage: One line on how to use the file.
        file_name: Usual name of the file.
        media_type: Media type of the content.
        content: Function that returns the content; the same for the same trials.
    """

    name: str
    summary: str
    usage: str
    file_name: str
    media_type: str
    content: Callable[[Study, Sequence[Trial]], bytes]


STUDY_FORMATS = (
    StudyFormat(
        name="csv",
        summary="the trials as a table",
        usage='pandas.read_csv("trials.csv")',
        file_name="trials.csv",
        media_type="text/csv",
        content=lambda study, trials: trial_table.as_csv(trials),
    ),
    StudyFormat(
        name="parquet",
        summary="the trials as a table with types (needs pyarrow)",
        usage='pandas.read_parquet("trials.parquet")',
        file_name="trials.parquet",
        media_type="application/vnd.apache.parquet",
        content=lambda study, trials: trial_table.as_parquet(trials),
    ),
    StudyFormat(
        name="optuna",
        summary="the study as an Optuna study (optuna 5.0.0), in a journal file",
        usage="optuna-dashboard optuna_study.log",
        file_name="optuna_study.log",
        media_type="application/x-ndjson",
        content=optuna_study.optuna_journal,
    ),
)
_BY_NAME = {known.name: known for known in STUDY_FORMATS}


def study_format(name: str) -> StudyFormat | None:
    """Return the study format with this name; None where the name is a recommendation's format.

    Raises:
        ChoiceError: No format of either kind has this name; lists the names that exist.
    """
    names = [exporter.name for exporter in EXPORTERS]
    if name not in _BY_NAME and name not in names:
        raise ChoiceError(no_such("export format", name, (*names, *_BY_NAME)))
    return _BY_NAME.get(name)
