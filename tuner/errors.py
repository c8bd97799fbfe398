"""Every error that Steptune raises for a person to read.

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


class SteptuneError(ValueError):
    """Base of all errors that are shown to a person without a traceback."""


class WorkloadError(SteptuneError):
    """The workload cannot be loaded, lacks a piece, or cannot be trained."""


class WorkloadNotFoundError(WorkloadError):
    """The file, module, class or zoo entry that was named does not exist."""


class WorkloadRejectedError(WorkloadError):
    """The workload loads, but a required piece is missing or wrong."""


class ArchiveRefusedError(WorkloadError):
    """An archive that cannot be unpacked safely, or within the limits."""

    def __init__(self, message: str, *, rule: str, value: object, limit: object = None) -> None:
        super().__init__(message)
        self.rule = rule
        self.value = value
        self.limit = limit


class ChoiceError(SteptuneError):
    """An unknown strategy, or a choice that the strategy does not have."""


class CaptureError(SteptuneError):
    """A training step cannot be recorded as a CUDA graph: names the operator and the line, and why."""


class BudgetError(SteptuneError):
    """A budget that cannot be read, or that is too short for one trial."""


class PlatformError(SteptuneError):
    """This platform, interpreter or library version is not supported."""


class IsolationUnavailableError(PlatformError):
    """Trials cannot be isolated here in the way that was asked for."""


class MissingDependencyError(SteptuneError):
    """An optional package is needed for what was asked."""


class StoreError(SteptuneError):
    """The database, or a study in it, cannot be used."""


class StudyNotFoundError(StoreError):
    """No study has the given id."""


class SchemaOutdatedError(StoreError):
    """The database is older than this version of Steptune."""


class SchemaTooNewError(StoreError):
    """The database was written by a newer version of Steptune."""


class StorageFullError(StoreError):
    """The disk or the database is full."""


class StoreUnavailableError(StoreError):
    """The database is busy, restarts, or cannot be reached: what was asked may succeed later."""


class StateConflictError(StoreError):
    """The study is in a state that does not allow what was asked."""


class VersionConflictError(StateConflictError):
    """The study was changed by somebody else since it was at the version that the caller has read."""


class LeaseLostError(StoreError):
    """This worker no longer holds the study: another may run it by now, so nothing is written."""


class QuotaExceededError(SteptuneError):
    """A user has reached the limit of what they may use.

    Attributes:
        quota: Its name, as in the settings.
        value: What it would be.
        limit: What it may be.
    """

    def __init__(self, message: str, *, quota: str, value: float, limit: float) -> None:
        super().__init__(message)
        self.quota = quota
        self.value = value
        self.limit = limit


class BaselineError(SteptuneError):
    """The workload, exactly as the user runs it today, could not be measured."""

    def __init__(self, message: str, *, out_of_memory: bool = False) -> None:
        super().__init__(message)
        self.out_of_memory = out_of_memory


class RecommendationError(SteptuneError):
    """A recommendation that cannot be read, or cannot be applied here."""


class UnsupportedError(SteptuneError):
    """A choice turned out to be impossible for this workload, in the running job."""


class RunnerError(SteptuneError):
    """Steptune's own machinery failed; the user's code is not to blame."""


class HostsUnavailableError(RunnerError):
    """A cluster has not got the hosts of a study, or cannot be asked: the study can wait for them."""


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
    """Look up a member of a module by the name that it had, with a warning; such names end with the next release.

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
