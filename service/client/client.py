"""Typed requests to the service: answers are records of `service.messages` and `tuner.records`."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec

from steptune.service.client.errors import NotFoundError
from steptune.service.client.events import follow
from steptune.service.client.packing import SCRIPT_LIMITS, Packed, check_source, is_source, pack
from steptune.service.client.transport import Transport
from steptune.service.connections import storage_errors
from steptune.service.messages import (
    ArtifactInfo,
    Caller,
    ExportFormat,
    ExportList,
    HardwareSummary,
    Page,
    ReservationSummary,
    StudyDetail,
    StudySummary,
    TrialBreakdown,
    TrialDetail,
    TrialFinding,
    TrialGuard,
    TrialSummary,
    WorkerSummary,
    WorkloadInfo,
)
from steptune.service.script_source import MANIFEST, ScriptManifest
from steptune.tuner.errors import StoreError
from steptune.tuner.records import (
    CollectiveStats,
    Decision,
    Event,
    GapSite,
    KernelStats,
    Recommendation,
    StudyState,
    Window,
)
from steptune.tuner.store_rules import decode
from steptune.tuner.workloads.reference import workload_of

ENDED = (StudyState.COMPLETED, StudyState.CANCELLED, StudyState.FAILED)
PAGE = 200
Item = TypeVar("Item")


class Client:
    """Client of a service for one user. Close it after use; threads may share it.

    Every method raises `ServiceError` (of `service.client.errors`) where the service refuses, and
    `ServiceUnreachableError` where it does not answer. Requests that are safe to repeat are repeated, with pauses;
    a POST carries an idempotency key, so that it is carried out once.

    Args:
        url: Address of the service: https://host, with a base path if it has one.
        token: Bearer token; None where the service needs no login.
        timeout_s: Maximum seconds without progress of a read or write.
        retries: Maximum number of times that a request is sent again.
        transport: Transport of httpx, to reach a service in another way.
    """

    def __init__(
        self, url: str, token: str | None = None, *, timeout_s: float = 30.0, retries: int = 4, transport: Any = None
    ) -> None:
        self._transport = Transport(url, token, timeout_s=timeout_s, retries=retries, transport=transport)

    def close(self) -> None:
        """Close the connections."""
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def url(self) -> str:
        return self._transport.url

    def me(self) -> Caller:
        """Return the owner of this token, and their permissions."""
        return self._transport.get("/me", Caller)

    # --- workloads -------------------------------------------------------------------------------

    def upload(self, path: Path | str, *, entry: str = "", name: str = "") -> WorkloadInfo:
        """Upload a Python file, an archive, or a folder, which is packed without hidden and cached files.

        Args:
            entry: The workload in it, as train.py:MyWorkload; may be left out where there is only one.
            name: Name to show.

        Raises:
            WorkloadError: The path does not exist, or its content is too large.
        """
        path = Path(path)
        if path.is_dir():
            with tempfile.TemporaryDirectory(prefix="steptune-") as folder:
                packed = Path(folder) / f"{path.resolve().name or 'workload'}.tar.gz"
                pack(path, packed)
                return self._send_file(packed, entry, name)
        return self._send_file(path, entry, name)

    def upload_script(self, folder: Path, manifest: ScriptManifest) -> tuple[WorkloadInfo, Packed]:
        """Upload a script's own sources, without data, and the manifest that says how to run it.

        Returns:
            The workload, and the files that were sent or left out.

        Raises:
            WorkloadError: The folder does not exist, or its sources are too large.
        """
        with tempfile.TemporaryDirectory(prefix="steptune-") as temporary:
            packed = Path(temporary) / f"{folder.resolve().name or 'script'}.tar.gz"
            data = {folder / name for name in manifest.data}
            sent = pack(
                folder,
                packed,
                SCRIPT_LIMITS,
                wanted=lambda path: is_source(path) and not data & {path, *path.parents},
                beside={MANIFEST: msgspec.json.encode(manifest)},
            )
            for name in sent.files:
                check_source(folder / name)
            return self._send_file(packed, workload_of(manifest.command), ""), sent

    def name_workload(self, entry: str, *, name: str = "") -> WorkloadInfo:
        """Register a workload that workers already have: `zoo:NAME`, or `package.module:Class`."""
        return self._transport.post("/workloads", WorkloadInfo, {"entry": entry, "name": name})

    def workloads(self) -> Iterator[WorkloadInfo]:
        """Yield your workloads, the newest first."""
        return self._all("/workloads", Page[WorkloadInfo])

    def delete_workload(self, workload_id: str) -> None:
        """Delete a workload to which no study refers."""
        self._transport.delete(f"/workloads/{workload_id}")

    # --- studies ---------------------------------------------------------------------------------

    def submit(self, workload: str | None = None, *, workload_id: str | None = None, **request: Any) -> StudyDetail:
        """Submit a study.

        Args:
            workload: Reference of a workload that workers have: `zoo:NAME`, or `package.module:Class`; or
            workload_id: Id of an uploaded workload.
            request: The other fields of `POST /studies`: budget_s, max_trials, allow, only, skip, seed, num_ranks,
                num_hosts, device, constraints, hardware, priority, title.
        """
        body = {"workload": workload, "workload_id": workload_id, **request}
        given = {name: value for name, value in body.items() if value is not None}
        return self._transport.post("/studies", StudyDetail, given)

    def study(self, study_id: str) -> StudyDetail:
        return self._transport.get(f"/studies/{study_id}", StudyDetail)

    def studies(self, **filters: str | None) -> Iterator[StudySummary]:
        """Yield your studies, the newest first. Filters: state, owner, workload, workload_id, hardware."""
        return self._all("/studies", Page[StudySummary], **filters)

    def change(self, study_id: str, **changes: Any) -> StudyDetail:
        """Change the `title` or `priority` of a study."""
        return self._transport.patch(f"/studies/{study_id}", StudyDetail, changes)

    def cancel(self, study_id: str) -> StudyDetail:
        """Cancel a study permanently; a running study recommends its best configuration so far."""
        return self._transport.post(f"/studies/{study_id}/cancel", StudyDetail)

    def pause(self, study_id: str) -> StudyDetail:
        """Stop a study until it is resumed."""
        return self._transport.post(f"/studies/{study_id}/pause", StudyDetail)

    def resume(self, study_id: str) -> StudyDetail:
        """Requeue a paused, interrupted or failed study."""
        return self._transport.post(f"/studies/{study_id}/resume", StudyDetail)

    def delete(self, study_id: str) -> None:
        """Delete a study with all its measurements."""
        self._transport.delete(f"/studies/{study_id}")

    def wait(self, study_id: str, timeout_s: float | None = None) -> StudyDetail:
        """Wait until a study has ended, and return it.

        Raises:
            TimeoutError: The study has not ended within the time.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for _ in follow(self._transport, f"/studies/{study_id}/events", 0):
            if deadline is not None and time.monotonic() > deadline:
                state = self.study(study_id).state
                raise TimeoutError(f"study {study_id} has not ended within {timeout_s:g} s: it is {state.value}")
        return self.study(study_id)

    def events(self, study_id: str, after: int = 0) -> Iterator[Event]:
        """Yield the events of a study as they happen, until the study ends: all events, or those with numbers above
        `after`.

        A connection that breaks is made again, and nothing is missed or repeated.
        """
        followed = follow(self._transport, f"/studies/{study_id}/events", after)
        return (event for event in followed if event is not None)

    # --- what a study found ----------------------------------------------------------------------

    def decisions(self, study_id: str) -> Iterator[Decision]:
        """Yield the decisions of the search, in order."""
        return self._all(f"/studies/{study_id}/decisions", Page[Decision])

    def findings(self, study_id: str) -> Iterator[TrialFinding]:
        """Yield findings of the trials' breakdowns, the newest trial first."""
        return self._all(f"/studies/{study_id}/findings", Page[TrialFinding])

    def recommendation(self, study_id: str) -> Recommendation | None:
        """Return the recommendation of a study; None while there is none."""
        try:
            text = self._transport.get_text(f"/studies/{study_id}/recommendation", format=None)
        except NotFoundError as error:
            if error.problem.code == "recommendation-not-found":
                return None
            raise
        return decode(text, Recommendation)

    def export_formats(self, study_id: str, trial: str | None = None) -> tuple[ExportFormat, ...]:
        """Return the export formats for the recommendation, or for a trial's configuration. Each states the settings
        that it cannot express.
        """
        return self._transport.get(f"/studies/{study_id}/exports", ExportList, trial=trial).items

    def export(self, study_id: str, format: str, trial: str | None = None) -> str:
        """Return the recommendation, or a trial's configuration, in the format of another tool."""
        return self._transport.get_text(f"/studies/{study_id}/exports/{format}", trial=trial)

    def study_file(self, study_id: str, format: str) -> bytes:
        """Return the trials as a table ("csv", "parquet"), or the study as an Optuna journal ("optuna")."""
        if format == "optuna":
            return self._transport.get_bytes(f"/studies/{study_id}/optuna")
        return self._transport.get_bytes(f"/studies/{study_id}/trials", format=format)

    # --- trials ----------------------------------------------------------------------------------

    def trials(self, study_id: str, state: str | None = None) -> Iterator[TrialSummary]:
        """Yield the trials in the order in which they began."""
        return self._all(f"/studies/{study_id}/trials", Page[TrialSummary], state=state)

    def trial(self, trial_id: str) -> TrialDetail:
        return self._transport.get(f"/trials/{trial_id}", TrialDetail)

    def windows(self, trial_id: str) -> Iterator[Window]:
        return self._all(f"/trials/{trial_id}/windows", Page[Window])

    def breakdown(self, trial_id: str) -> TrialBreakdown:
        """Return the breakdown of a trial's profiled steps; the times of its categories sum to the duration of these
        steps.
        """
        return self._transport.get(f"/trials/{trial_id}/breakdown", TrialBreakdown)

    def kernels(self, trial_id: str) -> Iterator[KernelStats]:
        return self._all(f"/trials/{trial_id}/kernels", Page[KernelStats])

    def gaps(self, trial_id: str) -> Iterator[GapSite]:
        return self._all(f"/trials/{trial_id}/gaps", Page[GapSite])

    def collectives(self, trial_id: str) -> Iterator[CollectiveStats]:
        return self._all(f"/trials/{trial_id}/collectives", Page[CollectiveStats])

    def guard(self, trial_id: str) -> TrialGuard:
        """Return the guard's verdict on a trial: whether it is still the same training as the reference."""
        return self._transport.get(f"/trials/{trial_id}/guard", TrialGuard)

    def log(self, trial_id: str, tail_bytes: int = 1 << 16) -> str:
        """Return the end of a trial's log, with the output of its processes."""
        return self._transport.get_text(f"/trials/{trial_id}/logs", tail_bytes=tail_bytes)

    # --- files, workers --------------------------------------------------------------------------

    def artifacts(self, study_id: str) -> Iterator[ArtifactInfo]:
        """Yield the files of a study and its trials."""
        return self._all(f"/studies/{study_id}/artifacts", Page[ArtifactInfo])

    def download(self, artifact_id: int, target: Path | str) -> Path:
        """Download a file as it is stored; traces and timelines are gzip files.

        Raises:
            StoreError: The file cannot be written.
        """
        return self._download(f"/artifacts/{artifact_id}", Path(target))

    def download_trace(self, trial_id: str, target: Path | str) -> Path:
        """Download the trace of a trial (gzipped JSON); raises the errors of `download`."""
        return self._download(f"/trials/{trial_id}/trace", Path(target))

    def workers(self) -> Iterator[WorkerSummary]:
        """Yield the workers, the newest first."""
        return self._all("/workers", Page[WorkerSummary])

    def reservations(self) -> Iterator[ReservationSummary]:
        """Yield the studies that occupy hosts and devices or wait for them, the oldest first."""
        return self._all("/reservations", Page[ReservationSummary])

    def hardware_profiles(self) -> Iterator[HardwareSummary]:
        """Yield the hardware of workers and of past studies."""
        return self._all("/hardware-profiles", Page[HardwareSummary])

    # --- how -------------------------------------------------------------------------------------

    def _all(self, path: str, page: type[Page[Item]], **filters: str | None) -> Iterator[Item]:
        """Yield the items of all pages; each page is requested when it is needed."""
        cursor: str | None = None
        while True:
            found = self._transport.get(path, page, limit=PAGE, cursor=cursor, **filters)
            yield from found.items
            cursor = found.next_cursor
            if cursor is None:
                return

    def _send_file(self, path: Path, entry: str, name: str) -> WorkloadInfo:
        with storage_errors(str(path)), path.open("rb") as file:

            def form() -> dict[str, Any]:
                file.seek(0)
                return {"files": {"file": (path.name, file)}, "data": {"entry": entry, "name": name}}

            return self._transport.post_form("/workloads", WorkloadInfo, form)

    def _download(self, path: str, target: Path) -> Path:
        """Download to a file, which is written or replaced only once the download is complete."""
        partial = target.with_name(f".{target.name}.part")
        try:
            with self._transport.streaming(path, headers={"Accept": "*/*"}) as response:
                expected = response.headers.get("Content-Length")
                with storage_errors(str(target)), partial.open("wb") as file:
                    for chunk in response.iter_raw():
                        file.write(chunk)
                    size = file.tell()
            if expected is not None and size != int(expected):
                raise StoreError(f"the download of {target} is incomplete ({size:,} of {expected} bytes): repeat it")
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
        return target
