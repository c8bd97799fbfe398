"""Table of a study's trials, for spreadsheets and notebooks: one row per trial, units in the column names.

Columns `STRATEGY.PARAMETER` hold what a trial changed; they are empty where it ran what the user runs today. Columns
`CATEGORY_ns` hold the breakdown of the first rank, per step.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from steptune.tuner.costs.categories import Category
from steptune.tuner.errors import MissingDependencyError
from steptune.tuner.estimates import step_time_ns, units_per_s
from steptune.tuner.records import Trial, TrialResult

if TYPE_CHECKING:
    import pandas


def trial_table(trials: Sequence[Trial]) -> pandas.DataFrame:
    """Return a table of the trials in the order in which they began; equal trials give equal columns."""
    import pandas

    rows = [{**_identity(trial), **_choices(trial), **_outcome(trial.result)} for trial in trials]
    columns = dict.fromkeys(name for part in (_identity, _choices) for trial in trials for name in part(trial))
    columns |= dict.fromkeys([*_outcome(None), *(name for row in rows for name in row)])
    return pandas.DataFrame(rows, columns=pandas.Index(columns)).convert_dtypes()


def as_csv(trials: Sequence[Trial]) -> bytes:
    """Return a table of the trials as CSV: UTF-8, with a header row."""
    text: str = trial_table(trials).to_csv(index=False)
    return text.encode()


def as_parquet(trials: Sequence[Trial]) -> bytes:
    """Return a table of the trials as a Parquet file, which keeps the types of the columns.

    Raises:
        MissingDependencyError: pyarrow is not installed.
    """
    if not has_parquet():
        raise MissingDependencyError("Parquet needs pyarrow: install steptune[parquet], or export csv")
    buffer = io.BytesIO()
    trial_table(trials).to_parquet(buffer, index=False)
    return buffer.getvalue()


def has_parquet() -> bool:
    """Say whether this installation can write Parquet files."""
    return find_spec("pyarrow") is not None


def _identity(trial: Trial) -> dict[str, Any]:
    return {
        "trial_id": trial.trial_id,
        "sequence": trial.sequence,
        "purpose": trial.purpose.value,
        "group": trial.group,
        "replicate": trial.replicate,
        "state": trial.state.value,
        "started_at": trial.started_at,
        "attempts": trial.attempts,
        "candidate_key": trial.candidate.key,
        "candidate": trial.candidate.label,
    }


def _choices(trial: Trial) -> dict[str, Any]:
    """Return the choices as text, because a parameter may be a number in one strategy and a word in another."""
    return {
        f"{strategy}.{parameter}": str(value)
        for strategy, choice in sorted(trial.candidate.choices.items())
        for parameter, value in choice.items()
    }


def _outcome(result: TrialResult | None) -> dict[str, Any]:
    windows = result.clean_windows if result else ()
    failure, guard = (result.failure, result.guard) if result else (None, None)
    breakdown = result.breakdowns[0] if result and result.breakdowns else None
    return {
        "units_per_s": units_per_s(result) if result and windows else None,
        "step_time_ns": step_time_ns(result) if result and windows else None,
        "num_windows": len(windows),
        "num_void_windows": len(result.windows) - len(windows) if result else 0,
        "peak_memory_bytes": (result.peak_memory_bytes or None) if result else None,
        "guard_passed": guard.passed if guard else None,
        "failure_kind": failure.kind.value if failure else None,
        "failure_phase": failure.phase.value if failure else None,
        "failure_message": failure.message if failure else None,
        "contended": result.contended if result else None,
        "compile_ns": result.startup.compile_ns if result and result.startup else None,
        "epoch_restart_cost_ns": result.epoch_restart_ns if result else None,
        "duration_ns": result.duration_ns if result else None,
        **({f"{name}_ns": breakdown.per_step_ns.get(name) for name in map(str, Category)} if breakdown else {}),
    }
