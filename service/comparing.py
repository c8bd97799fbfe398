"""Which trials are meant where two are compared, and their comparison: for the command and for the page."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import structs

from steptune.dashboards.starts import leading_candidate
from steptune.tuner.errors import StoreError
from steptune.tuner.profiling.trial_comparison import compare_trials, different_hardware
from steptune.tuner.protocols import StudyStore
from steptune.tuner.records import Study, Trial
from steptune.tuner.trace_records import Comparison


def trial_in(store: StudyStore, study: Study, which: str) -> Trial:
    """The trial of a study that is meant, complete.

    Args:
        which: Its number, "baseline", "recommended", or "best" (what is recommended or leads so far).

    Raises:
        StoreError: There is none, or it has no result.
    """
    trials = store.trials(study.study_id)
    recommendation = store.recommendation(study.study_id)
    leading = leading_candidate(store, study.study_id)
    chosen: dict[str, Callable[[Trial], bool]] = {
        "baseline": lambda trial: trial.candidate.is_baseline,
        "recommended": lambda trial: recommendation is not None and trial.candidate == recommendation.candidate,
        "best": lambda trial: leading is not None and trial.candidate == leading[1],
    }
    if which in chosen:
        found = [t for t in trials if chosen[which](t) and t.result is not None and t.result.breakdowns]
    else:
        found = [t for t in trials if which.isdecimal() and t.sequence == int(which)]
    if found:
        return with_result(found[0])
    profiled = ", ".join(str(t.sequence) for t in trials if t.result is not None and t.result.breakdowns)
    raise StoreError(
        f"study {study.study_id} has no trial {which!r} that can be compared: "
        + (f"of its {len(trials)} trials, these were profiled: {profiled}" if profiled else "none of its was profiled")
    )


def with_result(trial: Trial) -> Trial:
    """
    Raises:
        StoreError: It has none (yet).
    """
    if trial.result is None:
        raise StoreError(f"trial {trial.sequence} of study {trial.study_id} has no result ({trial.state.value})")
    return trial


def compared(
    before: tuple[Study, Trial], after: tuple[Study, Trial], *, top: int, labels: tuple[str, str] | None = None
) -> Comparison:
    """What changed between two trials, with what makes figures of different studies hard to compare.

    Raises:
        ComparisonError: One was not profiled.
    """
    (study, trial), (other_study, other) = before, after
    results = [t.result for t in (trial, other) if t.result is not None]
    labels = labels or (label(study, trial), label(other_study, other))
    comparison = compare_trials(*results, labels=labels, top=top)
    notes = different_hardware(study.environment, other_study.environment)
    if study.workload != other_study.workload:
        notes.append(f"different workloads: {study.workload} and {other_study.workload}")
    return structs.replace(comparison, notes=(*notes, *comparison.notes))


def label(study: Study, trial: Trial) -> str:
    return f"trial {trial.sequence} of study {study.study_id[-6:]}: {trial.candidate.label}"
