"""Creation and execution of studies for commands and workers: these functions connect the engine with the database and
the files.
"""

from __future__ import annotations

import contextlib
import gzip
import logging
import os
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO, cast

from steptune._version import __version__
from steptune.dashboards.report import render_report
from steptune.dashboards.trial_page import TrialPageSource
from steptune.service.artifacts import ArtifactStore, open_artifacts
from steptune.service.artifacts.retention import KEPT_VERDICTS, trace_kind
from steptune.service.connections import FULL_ERRNOS
from steptune.service.directories import remove_tree
from steptune.service.isolation import Level
from steptune.service.places import this_place
from steptune.service.running import chosen_level, isolated_runner
from steptune.service.settings import Settings
from steptune.service.store import SqlStudyStore
from steptune.tuner.errors import RunnerError, StorageFullError, StoreError, StudyNotFoundError
from steptune.tuner.export import own_for
from steptune.tuner.objectives import check_device, parse_objective
from steptune.tuner.protocols import ProgressListener, StudyStore, TrialRunner
from steptune.tuner.records import Recommendation, Study, StudySettings, StudyState, new_id
from steptune.tuner.scripts.facts import command_digest
from steptune.tuner.scripts.guard_files import ReferenceRuns
from steptune.tuner.search.driver import StudyDriver
from steptune.tuner.search.ledger import Ledger
from steptune.tuner.search.searches import check_search
from steptune.tuner.search.space import check_names
from steptune.tuner.search.view import StudyView
from steptune.tuner.trials.analysis_files import read_analysis, read_lanes, read_timelines
from steptune.tuner.trials.host_group import HostGroup
from steptune.tuner.trials.runner import LocalRunner
from steptune.tuner.trials.study_files import StudyFiles
from steptune.tuner.trials.untrusted import open_below
from steptune.tuner.workloads.reference import format_reference, is_command, parse_reference, source_digest
from steptune.tuner.workloads.zoo import known_reference

REPORT_FILE = "report.html"
MIN_TASK_DEADLINE_S = 120.0
logger = logging.getLogger("steptune.studies")
COMPRESSION = 3
"""Compression level of stored files: ten times as fast as the default level, for files a tenth larger."""
LOG_BYTES = 4 << 20
"""Maximum bytes of a trial's log that are stored, from its end."""
MAX_KEPT_BYTES = 4 << 30
"""Maximum size of a trace in bytes, uncompressed: a sparse file of zeros takes no space on disk, but hours to
compress.
"""


class FileReplacedError(StoreError):
    """A path no longer holds a file that can be read."""


@dataclass(frozen=True, kw_only=True)
class Results:
    """Files that a finished study has written for the user."""

    report: Path
    exports: tuple[Path, ...]


def new_study(workload: str, settings: StudySettings, service_settings: Settings) -> Study:
    """Create a study without recording it, after all checks that need no other process.

    Raises:
        WorkloadError: The workload's file or class does not exist.
        ChoiceError: A strategy does not exist.
    """
    reference = known_reference(workload)
    check_names(settings.only, settings.skip)
    check_search(settings.search)
    check_device(parse_objective(settings.objective), settings.device)
    study_id = new_id()
    directory = (service_settings.data_directory / "studies" / study_id).resolve()
    return Study(
        study_id=study_id,
        workload=format_reference(reference),
        settings=settings,
        created_at=datetime.now(UTC).isoformat(),
        directory=str(directory),
        source_digest=source_digest(reference),
        steptune_version=__version__,
    )


@contextlib.contextmanager
def discarded_unless_recorded(study: Study, store: StudyStore) -> Iterator[None]:
    """Remove the directory of a study if the study is not recorded in the end."""
    try:
        yield
    finally:
        try:
            store.get_study(study.study_id)
        except StudyNotFoundError:
            shutil.rmtree(study.directory, ignore_errors=True)


def check_writable(folder: Path) -> None:
    """Refuse a results folder to which this user may not write. The check precedes the study, because results are
    written at its end.

    Raises:
        StoreError: The path is not a folder, or the folder or its parent may not be written.
    """
    present = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not present.is_dir():
        raise StoreError(
            f"{folder} cannot hold the results: {present} is not a folder; name another folder with --output"
        )
    if not os.access(present, os.W_OK | os.X_OK):
        raise StoreError(
            f"{folder} cannot hold the results: this user may not write to {present}; name another folder with --output"
        )


def check_unchanged(study: Study) -> None:
    """Refuse to continue a study whose workload was edited since it began.

    Raises:
        StoreError: The file has changed, or the script was submitted and its sources are at the service.
    """
    if is_command(study.workload):
        script = study.facts.script if study.facts is not None else None
        if script is None or not Path(script.folder).is_dir():
            where = "at a service" if script is None else f"in {script.folder}, which no longer exists"
            raise StoreError(f"the script of study {study.study_id} is {where}: begin a new study")
        digest = command_digest(script.command, Path(script.folder))
    else:
        digest = source_digest(parse_reference(study.workload))
    if study.source_digest and digest != study.source_digest:
        raise StoreError(
            f"the file of {study.workload} has changed since study {study.study_id} began: the study "
            "would mix two workloads. Begin a new study with `steptune tune`"
        )


def with_more_time(study: Study, store: SqlStudyStore, seconds: float) -> Study:
    """Extend a study's budget to the time that its trials took plus `seconds`, and return the study."""
    spent_s = Ledger(store, study.study_id).spent_s
    return store.set_budget(study.study_id, spent_s + seconds)


def run_study(
    study: Study,
    store: StudyStore,
    service_settings: Settings,
    runner: TrialRunner,
    *,
    on_change: Callable[[StudyView], None] = lambda view: None,
    hosts: HostGroup | None = None,
    measured_anew: bool = False,
) -> Recommendation:
    """Run the rest of a study, store the profiles worth keeping, and clean up.

    Args:
        runner: Runner from `local_runner`, or a script's.
        hosts: All hosts, if the study runs on several.
        measured_anew: Treat earlier measurements as those of another place: the baseline and the best so far are
            measured again before the search continues.
    """
    since = f" since {datetime.now(UTC).isoformat(timespec='seconds')}" if measured_anew else ""
    try:
        driver = StudyDriver(
            study,
            store,
            runner,
            on_change=on_change,
            place=lambda: " and ".join([this_place() + since, *(hosts.places if hosts is not None else ())]),
        )
        recommendation = driver.run()
    except RunnerError as error:
        store.set_state(study.study_id, StudyState.FAILED, str(error))
        raise
    keep_profiles(study, store, recommendation, open_artifacts(service_settings))
    remove_working_files(study)
    return recommendation


@contextlib.contextmanager
def local_runner(
    study: Study,
    service_settings: Settings,
    *,
    level: Level | None = None,
    python: str | None = None,
    variables: Mapping[str, str] | None = None,
    listener: ProgressListener = lambda progress: None,
    hosts: HostGroup | None = None,
    check: Callable[[], None] = lambda: None,
) -> Iterator[LocalRunner]:
    """Open a runner for a study on this machine, and on all hosts if there are several; close it at the end.

    Args:
        check: Called some times a second while a trial runs; an exception ends the trial.
        level: Isolation level of its trials; by default that of the settings, or none.
    """
    settings = study.settings
    with isolated_runner(
        workload=study.workload,
        directory=Path(study.directory),
        settings=service_settings,
        level=level or chosen_level(service_settings, python=python),
        device=settings.device or "",
        num_ranks=settings.num_ranks,
        seed=settings.seed,
        memory_limit_bytes=settings.memory_limit_bytes,
        python=python,
        variables=variables or {},
        listener=listener,
        hosts=hosts,
        check=check,
        task_deadline_s=settings.phase_timeout_s or max(MIN_TASK_DEADLINE_S, settings.budget_s),
    ) as runner:
        yield runner


def keep_profiles(
    study: Study,
    store: StudyStore,
    recommendation: Recommendation | None,
    artifacts: ArtifactStore,
    *,
    logs: bool = False,
) -> None:
    """Store the timelines and analyses of all profiled trials, and the traces of all ranks for the baseline, accepted
    candidates and finalists. Files already stored, and paths that are not files, are skipped, so that this can be
    repeated as a study goes on.

    Args:
        logs: Also store the last `LOG_BYTES` of what complete trials printed.
    """
    files = StudyFiles(Path(study.directory))
    wanted = {recommendation.candidate.key} if recommendation else set()
    for decision in store.decisions(study.study_id):
        if decision.candidate is not None and decision.verdict in KEPT_VERDICTS:
            wanted.add(decision.candidate.key)
    kept = {(artifact.trial_id, artifact.kind) for artifact in store.artifacts(study.study_id)}
    for trial in store.trials(study.study_id):
        found = {
            "timeline": files.timelines(trial.trial_id),
            "analysis": files.analysis(trial.trial_id),
            "lanes": files.lanes(trial.trial_id),
        }
        if trial.candidate.key in wanted:
            ranks = range(study.settings.num_ranks)
            found |= {trace_kind(rank): files.trace(trial.trial_id, rank) for rank in ranks}
        if logs and trial.result is not None:
            found["log"] = files.logs / f"{trial.trial_id}.log"
        for kind, path in found.items():
            if (trial.trial_id, kind) in kept:
                continue
            last_bytes = LOG_BYTES if kind == "log" else None
            try:
                with compressed(files.directory, path, last_bytes=last_bytes) as packed:
                    check_kept(kind, packed)
                    with artifacts.putting(packed) as file:
                        store.add_artifact(study.study_id, trial.trial_id, kind, file.digest, file.size_bytes)
            except FileNotFoundError:
                continue
            except FileReplacedError as error:
                logger.debug("study %s: %s", study.study_id, error)


def check_kept(kind: str, packed: Path) -> None:
    """Refuse a file that pages and clients could not read, before it is stored. Only one line is in memory at a time,
    whatever the file contains.

    Raises:
        FileReplacedError: The file is not in the form in which a trial writes it.
    """
    reader = {"timeline": read_timelines, "analysis": read_analysis, "lanes": read_lanes}.get(kind)
    if reader is None:
        return
    with gzip.open(packed) as file:
        try:
            deque[object](reader(cast(BinaryIO, file)), maxlen=0)
        except ValueError as error:
            raise FileReplacedError(
                f"the {kind} is invalid and is not stored: {error}; user code has overwritten it"
            ) from None


@contextlib.contextmanager
def compressed(directory: Path, path: Path, *, last_bytes: int | None = None) -> Iterator[Path]:
    """Make a temporary gzip copy of a file in a study's directory, with a fixed time stamp, so that equal traces are
    stored once.

    User code may write in that directory: no link in it is followed, and the copy is made beside it.

    Args:
        last_bytes: Maximum bytes to copy, from its end.

    Raises:
        FileNotFoundError: The file is not there.
        FileReplacedError: Something else has taken its place, or it is larger than `MAX_KEPT_BYTES`.
    """
    try:
        source = open_below(directory, path)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise FileReplacedError(f"{path} cannot be stored: {error.strerror}; user code has replaced it") from None
    with source, tempfile.NamedTemporaryFile(dir=directory.parent, prefix="trace-", suffix=".gz") as sink:
        size = os.fstat(source.fileno()).st_size
        if last_bytes is None and size > MAX_KEPT_BYTES:
            raise FileReplacedError(f"{path} has {size:,} bytes, but at most {MAX_KEPT_BYTES:,} are stored")
        if last_bytes is not None:
            source.seek(max(0, source.seek(0, os.SEEK_END) - last_bytes))
        with gzip.GzipFile("", "wb", COMPRESSION, sink, mtime=0) as file:
            _copy(source, file, last_bytes or MAX_KEPT_BYTES)
        sink.flush()
        yield Path(sink.name)


def _copy(source: BinaryIO, target: gzip.GzipFile, num_bytes: int) -> None:
    """Copy at most `num_bytes` bytes: the process that wrote the file may still be writing."""
    while num_bytes > 0 and (chunk := source.read(min(num_bytes, 1 << 20))):
        target.write(chunk)
        num_bytes -= len(chunk)


def remove_working_files(study: Study) -> None:
    """Remove files that can be made again; logs stay."""
    files = StudyFiles(Path(study.directory))
    for path in (files.initial_state, files.order_file, files.guard_batches_file, files.reference_update):
        path.unlink(missing_ok=True)
    made = (files.data, files.compile_cache, files.compiler_headers, files.directory / "trials")
    earlier = files.directory / "reference"  # of scripts' studies that an earlier version began
    for folder in (*made, ReferenceRuns(files.directory).folder, earlier):
        remove_tree(folder)


def write_results(study_id: str, source: TrialPageSource, recommendation: Recommendation, folder: Path) -> Results:
    """Write the report, and the exports for which no other tool is needed, into a folder.

    Raises:
        StoreError: The folder cannot be written; StorageFullError where the disk is full. The study itself is
            safe in the database.
    """
    report = write_report(study_id, source, folder / REPORT_FILE)
    own = own_for(recommendation)
    files = {exporter.file_name(recommendation): exporter.export(recommendation).encode() for exporter in own}
    return Results(report=report, exports=write_files(study_id, files, folder))


def write_report(study_id: str, source: TrialPageSource, report: Path) -> Path:
    """Write the report to this file.

    Raises:
        StoreError: As `write_results`.
    """
    with _written(report.parent, study_id):
        report.parent.mkdir(parents=True, exist_ok=True)
        report.write_text(render_report(source, study_id, source), encoding="utf-8")
    return report


def write_files(study_id: str, files: Mapping[str, bytes], folder: Path) -> tuple[Path, ...]:
    """Write a study's result files into a folder, by their names.

    Raises:
        StoreError: As `write_results`.
    """
    with _written(folder, study_id):
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (folder / name).write_bytes(content)
    return tuple(folder / name for name in files)


@contextlib.contextmanager
def _written(folder: Path, study_id: str) -> Iterator[None]:
    """Convert an error in writing results: the new error says that the study is safe, and how to export it."""
    try:
        yield
    except OSError as error:
        full = error.errno in FULL_ERRNOS
        way_out = "free space" if full else "choose another folder"
        raise (StorageFullError if full else StoreError)(
            f"{folder} cannot be written: {error.strerror or error}. The study is in the database: {way_out}, then "
            f"run `steptune export {study_id} --output FOLDER`"
        ) from None
