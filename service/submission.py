"""Creation of a study from a request, with all checks that run no code."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from steptune._version import __version__
from steptune.tuner.errors import WorkloadRejectedError
from steptune.tuner.records import Study, StudySettings
from steptune.tuner.workloads.reference import format_reference, parse_reference, source_digest
from steptune.tuner.workloads.zoo import known_reference


def checked_reference(text: str) -> str:
    """Check a reference to code that every worker has: a zoo entry, or a class in an installed module.

    Raises:
        WorkloadNotFoundError: The zoo has no such entry.
        WorkloadRejectedError: The reference names a file, which only its user has, no class, or an argument that the
            entry lacks.
    """
    target = text.partition("?")[0]
    source = target.rpartition(":")[0]
    if "/" in source or source.endswith(".py"):  # before any file is looked at
        raise WorkloadRejectedError(
            f"{text!r} is a file that workers do not have: upload it with POST /api/v1/workloads"
        )
    return format_reference(known_reference(text))


def new_study(
    study_id: str, workload: str, settings: StudySettings, data_directory: Path, *, uploaded_digest: str | None = None
) -> Study:
    """Create a study that has not run yet.

    Args:
        workload: Reference from `checked_reference`, or one within the upload.
        uploaded_digest: Digest of the upload.
    """
    digest = source_digest(parse_reference(workload)) if uploaded_digest is None else uploaded_digest[:16]
    return Study(
        study_id=study_id,
        workload=workload,
        settings=settings,
        created_at=datetime.now(UTC).isoformat(),
        directory=str((data_directory / "studies" / study_id).absolute()),
        source_digest=digest,
        steptune_version=__version__,
    )
