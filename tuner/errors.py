"""Errors that Steptune raises for a person to read.

    SteptuneError(ValueError)
     ├─ WorkloadError                  the workload cannot be loaded, lacks a piece, or cannot be trained
     │   ├─ WorkloadNotFoundError      the file, module, class or zoo entry does not exist
     │   ├─ WorkloadRejectedError      it loads, but a required piece is missing or wrong
     │   └─ ArchiveRefusedError        an archive holds what cannot be unpacked safely
     ├─ ChoiceError                    an unknown strategy, or a choice that the strategy does not have
     ├─ CaptureError                   a training step cannot be recorded as a CUDA graph
     ├─ BudgetError                    a budget that cannot be read, or is too short for one trial
     ├─ PlatformError                  this platform, interpreter or library version is not supported
     │   └─ IsolationUnavailableError  trials cannot be isolated here as was asked
     ├─ MissingDependencyError         an optional package is needed for what was asked
     ├─ StoreError                     the database or a study in it cannot be used
     │   ├─ StudyNotFoundError         no study has this id
     │   ├─ SchemaOutdatedError        the database is older than this version: migrate it
     │   ├─ SchemaTooNewError          the database was written by a newer version
     │   ├─ StorageFullError           the disk or the database is full
     │   ├─ StoreUnavailableError      the database is busy, or cannot be reached at this moment
     │   ├─ StateConflictError         a study is in a state that does not allow what was asked
     │   └─ LeaseLostError             a worker no longer holds the study that it writes to
     ├─ QuotaExceededError             a user may not use more than they do
     ├─ BaselineError                  the user's own configuration could not be measured
     ├─ RecommendationError            a recommendation file that cannot be read or applied
     └─ RunnerError                    Steptune's own machinery failed (not the user's code)
         └─ HostsUnavailableError      a cluster has not got the hosts of a study yet

A message names what was violated, the value that was found, and the way out. `SteptuneError` is a
`ValueError`, so that a script may treat it as one. Our own invariants are `assert`s, never these.
Failures of a *trial* are results, not exceptions: see `steptune.tuner.records.Failure`.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

COMPILER_MODULES = ("torch._dynamo", "torch._inductor", "torch._functorch")
"""Modules of the exceptions that torch's compiler raises."""


class SteptuneError(ValueError):
    """Base of all errors that are shown to a person without a traceback."""


class WorkloadError(SteptuneError):
    """Error for a workload that cannot be loaded, lacks a required part, or cannot be trained."""


class WorkloadNotFoundError(WorkloadError):
    """Error for a file, module, class or zoo entry that does not exist."""


class WorkloadRejectedError(WorkloadError):
    """Error for a workload that loads, but in which a required part is missing or wrong."""


class ArchiveRefusedError(WorkloadError):
    """Error for an archive that cannot be unpacked safely, or within the limits."""

    def __init__(self, message: str, *, rule: str, value: object, limit: object = None) -> None:
        super().__init__(message)
        self.rule = rule
        self.value = value
        self.limit = limit


class ChoiceError(SteptuneError):
    """Error for an unknown strategy, or a choice that the strategy does not have."""


class CaptureError(SteptuneError):
    """Error for a training step that cannot be recorded as a CUDA graph; the message names the operator, the line and
    the reason.
    """


class BudgetError(SteptuneError):
    """Error for a budget that cannot be read, or that is too short for one trial."""


class PlatformError(SteptuneError):
    """Error for a platform, interpreter or library version that is not supported."""


class IsolationUnavailableError(PlatformError):
    """Error for an isolation level that cannot be used on this machine."""


class MissingDependencyError(SteptuneError):
    """Error for an optional package that is required but not installed."""


class StoreError(SteptuneError):
    """Error for a database, or a study in it, that cannot be used."""


class StudyNotFoundError(StoreError):
    """Error for an id that no study has."""


class SchemaOutdatedError(StoreError):
    """Error for a database that is older than this version of Steptune."""


class SchemaTooNewError(StoreError):
    """Error for a database that a newer version of Steptune has written."""


class StorageFullError(StoreError):
    """Error for a disk or a database that is full."""


class StoreUnavailableError(StoreError):
    """Error for a database that is busy, restarting or out of reach: a later attempt may succeed."""


class StateConflictError(StoreError):
    """Error for a study whose state does not allow the operation."""


class VersionConflictError(StateConflictError):
    """Error for a study that has changed since the caller read it."""


class LeaseLostError(StoreError):
    """Error for a worker that no longer holds its study: another worker may run it by now, so nothing is written."""


class QuotaExceededError(SteptuneError):
    """Error for a user who has reached a quota.

    Attributes:
        quota: Name of the quota, as in the settings.
        value: Usage if the request were granted.
        limit: Maximum usage.
    """

    def __init__(self, message: str, *, quota: str, value: float, limit: float) -> None:
        super().__init__(message)
        self.quota = quota
        self.value = value
        self.limit = limit


class BaselineError(SteptuneError):
    """Error for a workload that cannot be measured as the user runs it today."""

    def __init__(self, message: str, *, out_of_memory: bool = False) -> None:
        super().__init__(message)
        self.out_of_memory = out_of_memory


class RecommendationError(SteptuneError):
    """Error for a recommendation that cannot be read, or cannot be applied here."""


class UnsupportedError(SteptuneError):
    """Error for a choice that the running job showed to be impossible for this workload."""


class RunnerError(SteptuneError):
    """Error for a failure of Steptune's own machinery, not of the user's code."""


class HostsUnavailableError(RunnerError):
    """Error for a cluster that cannot be reached, or lacks hosts that a study needs; the study can wait for them."""


EARLIER_NAMES = {
    "ArchiveRefused": "ArchiveRefusedError",
    "BaselineFailed": "BaselineError",
    "CannotCapture": "CaptureError",
    "IsolationUnavailable": "IsolationUnavailableError",
    "LeaseLost": "LeaseLostError",
    "MissingDependency": "MissingDependencyError",
    "QuotaExceeded": "QuotaExceededError",
    "SchemaOutdated": "SchemaOutdatedError",
    "SchemaTooNew": "SchemaTooNewError",
    "StateConflict": "StateConflictError",
    "StorageFull": "StorageFullError",
    "StoreUnavailable": "StoreUnavailableError",
    "StudyNotFound": "StudyNotFoundError",
    "UnsupportedHere": "UnsupportedError",
    "VersionConflict": "VersionConflictError",
    "WorkloadNotFound": "WorkloadNotFoundError",
    "WorkloadRejected": "WorkloadRejectedError",
}


def by_earlier_name(name: str, module: Mapping[str, Any], earlier_names: Mapping[str, str]) -> Any:
    """Look up a module member by its former name, with a warning; former names are removed in the next release.

    Raises:
        AttributeError: The module never had this name.
    """
    if name not in earlier_names:
        raise AttributeError(f"module {module['__name__']!r} has no attribute {name!r}")
    warnings.warn(f"{name} is now {earlier_names[name]}", FutureWarning, stacklevel=3)
    return module[earlier_names[name]]


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        return by_earlier_name(name, globals(), EARLIER_NAMES)
