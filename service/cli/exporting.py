"""`export`: write the files of a study's recommendation, from the local database or from a service."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath

from steptune.dashboards.trial_page import TrialPageSource
from steptune.service.cli.console import output, print_json, say
from steptune.service.client import Client
from steptune.service.connections import storage_errors
from steptune.service.messages import ExportFormat
from steptune.tuner.errors import ChoiceError, RecommendationError, StoreError
from steptune.tuner.export import exported, exporter_named, exporters_for
from steptune.tuner.export.base import headline, one_line
from steptune.tuner.export.carried import NOT_MEASURED, carried, contribution_told
from steptune.tuner.export.of_trial import recommendation_of_trial
from steptune.tuner.export.study_formats import STUDY_FORMATS, study_format
from steptune.tuner.records import Recommendation, Study
from steptune.tuner.wording import no_such
from steptune.tuner.workloads.reference import COMMAND

DIFF, DIFF_FILE = "diff", "steptune.diff"
"""Name of the export format that is a diff of the script's own lines, and the name of its file. This command makes the
diff, because a service must not access users' files.
"""


@dataclass(frozen=True, kw_only=True)
class Exported:
    """One exported file.

    Attributes:
        format: Name of the format.
        file_name: Name of the file, without folders.
        content: Content of the file.
        usage: How to use the file, in one line.
        not_expressible: Parts of the recommendation that the file leaves out, one sentence each.
        carries: The part of the gain that it carries; empty where none is claimed.
    """

    format: str
    file_name: str
    content: bytes
    usage: str
    not_expressible: tuple[str, ...] = ()
    carries: str = ""


def export_local(
    store: TrialPageSource, study: Study, format_: str | None, folder: Path, *, trial: str | None, as_json: bool
) -> None:
    """Export one format, or, without a format, the report and all formats that can express the recommendation; `-` is
    standard output.

    Args:
        trial: Trial whose configuration is exported; None exports the recommended one.

    Raises:
        ChoiceError: There is no such format, or no such trial.
        StoreError: There is no recommendation yet, or the folder cannot be written.
        RecommendationError: The format that was asked for cannot hold it.
    """
    from steptune.service.studies import REPORT_FILE, write_files, write_report

    known = None if format_ in (None, DIFF) else study_format(format_)
    if known is not None:
        content = known.content(study, store.trials(study.study_id))
        files = [Exported(format=known.name, file_name=known.file_name, content=content, usage=known.usage)]
    else:
        files = _files(_recommendation(store, study, trial), format_)
    if str(folder) == "-":
        _print(files)
        return
    files, folder = _placed(files, folder)
    paths = write_files(study.study_id, {file.file_name: file.content for file in files}, folder)
    with_report = format_ is None and trial is None
    report = write_report(study.study_id, store, folder / REPORT_FILE) if with_report else None
    _tell(files, paths, report, as_json=as_json)


def export_remote(
    client: Client, study_id: str, format_: str | None, folder: Path, *, trial: str | None, as_json: bool
) -> None:
    """Export one format, or, without a format, all formats that can express the recommendation; `-` is standard output.

    Args:
        trial: Trial whose configuration is exported; None exports the recommended one.

    Raises:
        NotFoundError: There is no such study or trial, or it has no recommendation yet.
        ChoiceError: The service has no such format.
        StoreError: The folder cannot be written.
    """
    known = next((known for known in STUDY_FORMATS if known.name == format_), None)
    if known is not None:
        content = client.study_file(study_id, known.name)
        files = [Exported(format=known.name, file_name=known.file_name, content=content, usage=known.usage)]
    else:
        chosen = _chosen(client.export_formats(study_id, trial), format_)
        files = [_of_service(client, study_id, found, trial) for found in chosen]
    if str(folder) == "-":
        _print(files)
        return
    files, folder = _placed(files, folder)
    with storage_errors(str(folder)):
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / file.file_name for file in files]
        for file, path in zip(files, paths, strict=True):
            path.write_bytes(file.content)
    _tell(files, paths, None, as_json=as_json)


def _recommendation(store: TrialPageSource, study: Study, trial: str | None) -> Recommendation:
    recommendation = store.recommendation(study.study_id)
    if recommendation is None:
        raise StoreError(
            f"study {study.study_id} ({study.state.value}) has no recommendation: "
            f"continue it with `steptune resume {study.study_id}`"
        )
    if trial is None:
        return recommendation
    return recommendation_of_trial(study, recommendation, store.trials(study.study_id), trial)


def _files(recommendation: Recommendation, name: str | None) -> list[Exported]:
    """Return the export in one format, or, without a name, in all formats that can express the recommendation."""
    if name == DIFF:
        return [_diff(recommendation)]
    files = _formats(recommendation, name)
    if name is None and recommendation.in_script is not None:
        with contextlib.suppress(RecommendationError):
            files.append(_diff(recommendation))
    return files


def _formats(recommendation: Recommendation, name: str | None) -> list[Exported]:
    chosen = (exporter_named(name),) if name else exporters_for(recommendation)
    return [
        Exported(
            format=exporter.name,
            file_name=exporter.file_name(recommendation),
            content=exported(exporter, recommendation).encode(),
            usage=exporter.how_to_use(recommendation),
            not_expressible=exporter.not_expressible(recommendation),
            carries=exporter.carries(recommendation),
        )
        for exporter in chosen
    ]


def _diff(recommendation: Recommendation) -> Exported:
    """Return the diff of a script's own lines, with comments above it that `git apply` and `patch` ignore."""
    from steptune.tuner.scripts.diff import script_diff

    found = script_diff(recommendation)
    left_out = tuple(
        f"{name} ({reason}; {_contribution(recommendation, name)}); steptune.enable makes all changes"
        for name, reason in found.left_out.items()
    )
    left_out += tuple(f"the script's option {option} (add it to the command)" for option in found.options)
    said = [f"Steptune for {recommendation.workload.removeprefix(COMMAND)}: {headline(recommendation)}."]
    said += [f"In this change: {name} ({_contribution(recommendation, name)})" for name in found.expressed]
    carries = carried(recommendation, tuple(found.left_out), way="steptune.enable")
    said += [f"This {carries}."] if carries else []
    said += [f"Not expressed here: {sentence}" for sentence in left_out]
    comments = "".join(f"# {one_line(line)}\n" for line in said)
    return Exported(
        format=DIFF,
        file_name=DIFF_FILE,
        content=(comments + found.diff).encode(),
        usage=f"In the script's folder: git apply {DIFF_FILE}, or patch -p1 < {DIFF_FILE}"
        if found.diff
        else f"Add to the command: {' '.join(found.options)}",
        not_expressible=left_out,
        carries=carries,
    )


def _contribution(recommendation: Recommendation, name: str) -> str:
    """Return, in words, how much of the gain a change contributes."""
    part = next((part for part in recommendation.parts if part.strategy == name), None)
    if part is not None and len(recommendation.parts) == 1:
        return "accounts for the whole gain"
    told = NOT_MEASURED if part is None else contribution_told(recommendation, part)
    return f"its contribution: {told}"


def _chosen(formats: tuple[ExportFormat, ...], name: str | None) -> list[ExportFormat]:
    chosen = [known for known in formats if name in (None, known.name)]
    if not chosen:
        raise ChoiceError(no_such("export format", str(name), (known.name for known in formats)))
    return chosen


def _of_service(client: Client, study_id: str, known: ExportFormat, trial: str | None) -> Exported:
    return Exported(
        format=known.name,
        file_name=PurePath(known.file_name).name,  # a name, whatever the service says
        content=client.export(study_id, known.name, trial).encode(),
        usage=known.usage,
        not_expressible=known.not_expressible,
        carries=known.carries,
    )


def _placed(files: list[Exported], target: Path) -> tuple[list[Exported], Path]:
    """Return the files to write, and their folder. For a single file, the target may also be the path of the file
    itself, if it has the file's suffix.
    """
    if len(files) != 1 or target.is_dir() or target.suffix != PurePath(files[0].file_name).suffix:
        return files, target
    return [replace(files[0], file_name=target.name)], target.parent


def _print(files: Sequence[Exported]) -> None:
    for file in files:
        sys.stdout.buffer.write(file.content)
        for sentence in file.not_expressible:
            say(f"not expressed: {sentence}", style="yellow")
    sys.stdout.buffer.flush()


def _tell(files: Sequence[Exported], paths: Sequence[Path], report: Path | None, *, as_json: bool) -> None:
    """Print the exported files, how to use them, and what they leave out."""
    if as_json:
        exports = [
            {
                "format": file.format,
                "path": str(path),
                "usage": file.usage,
                "carries": file.carries,
                "not_expressible": file.not_expressible,
            }
            for file, path in zip(files, paths, strict=True)
        ]
        print_json({"report": str(report) if report else None, "exports": exports})
        return
    if report is not None:
        output.print(f"{report}  (open in a browser)", soft_wrap=True, markup=False)
    for file, path in zip(files, paths, strict=True):
        output.print(f"{path}  {file.usage}", soft_wrap=True, markup=False)
        if file.not_expressible and file.carries:
            say(f"  {file.carries}", style="yellow")
        for sentence in file.not_expressible:
            say(f"  not expressed: {sentence}", style="yellow")
