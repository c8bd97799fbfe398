"""Selection and comparison of two trials, for the `compare` command and the comparison page."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import structs

from steptune.dashboards.starts import leading_candidate
from steptune.tuner.errors import StoreError
from steptune.tuner.objectives import parse_objective
from steptune.tuner.profiling.comparison import STEP
from steptune.tuner.profiling.module_comparison import compare_modules
from steptune.tuner.profiling.trial_comparison import ONE_START, compare_trials, different_hardware
from steptune.tuner.protocols import StudyStore
from steptune.tuner.records import Candidate, Interval, Recommendation, Study, Trial
from steptune.tuner.speeds import Method, speed_of
from steptune.tuner.trace_records import Comparison, Difference, TraceAnalysis

PROFILED_RUNS = (
    "the categories come from one profiled run of each configuration, whose step time may differ from the study's "
    "figure"
)


def trial_in(store: StudyStore, study: Study, which: str) -> Trial:
    """Return a study's trial by its number or by a name such as "best"; the trial must be complete.

    Args:
        which: Number of the trial, "baseline", "recommended", or "best" (the recommended or, so far, leading
            configuration).

    Raises:
        StoreError: There is no such trial, or it has no result.
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
        + (
            f"of its {len(trials)} trials, these were profiled: {profiled}"
            if profiled
            else "none of its trials was profiled"
        )
    )


def with_result(trial: Trial) -> Trial:
    """Return the trial; refuse one without a result.

    Raises:
        StoreError: The trial has no result (yet).
    """
    if trial.result is None:
        raise StoreError(f"trial {trial.sequence} of study {trial.study_id} has no result ({trial.state.value})")
    return trial


def compared(
    before: tuple[Study, Trial],
    after: tuple[Study, Trial],
    recommendation: Recommendation | None,
    *,
    analysis_of: Callable[[str], TraceAnalysis | None],
    top: int,
    labels: tuple[str, str] | None = None,
) -> Comparison:
    """Compare two trials, and name the reasons why figures of different studies are hard to compare.

    Args:
        analysis_of: Returns the stored analysis of a trial; modules are compared where both trials have one.
        recommendation: Recommendation of the first trial's study. If it states the speeds of both configurations, the
            step's change is taken from there: two runs are less certain.

    Raises:
        ComparisonError: One of the trials was not profiled.
    """
    (study, trial), (other_study, other) = before, after
    results = [t.result for t in (trial, other) if t.result is not None]
    labels = labels or (label(study, trial), label(other_study, other))
    comparison = compare_trials(*results, labels=labels, top=top)
    kept = [_kept_of(t, analysis_of(t.trial_id)) for t in (trial, other)] if comparison.trusted else [None]
    if None not in kept:
        first, second = (analysis for analysis in kept if analysis is not None)
        comparison = structs.replace(comparison, modules=compare_modules(first, second, top))
    notes = different_hardware(study.environment, other_study.environment)
    if study.workload != other_study.workload:
        notes.append(f"different workloads: {study.workload} and {other_study.workload}")
    if recommendation is not None and study.study_id == other_study.study_id:
        comparison = _stated(comparison, study, recommendation, trial.candidate, other.candidate)
    return structs.replace(comparison, notes=(*notes, *comparison.notes))


def _kept_of(trial: Trial, kept: TraceAnalysis | None) -> TraceAnalysis | None:
    """Return the first rank's analysis from a stored file. Its breakdowns are replaced with those of the trial's
    result, because user code may have changed the file.
    """
    if kept is None or trial.result is None:
        return None
    return structs.replace(kept, ranks=(structs.replace(kept.ranks[0], breakdowns=trial.result.breakdowns),))


def _stated(
    comparison: Comparison, study: Study, recommendation: Recommendation, before: Candidate, after: Candidate
) -> Comparison:
    """Add the study's own figures to a comparison of two configurations: their step times, and the interval of the
    difference. One configuration must be the study's reference; otherwise the comparison is unchanged.
    """
    speeds = [speed_of(recommendation, candidate) for candidate in (before, after)]
    is_stated = recommendation.baseline_units_per_s > 0 and parse_objective(recommendation.objective).is_rate
    if study.facts is None or None in speeds or not is_stated:
        return comparison
    one, other = (speed for speed in speeds if speed is not None)
    if [one.method, other.method].count(Method.REFERENCE) != 1:
        return comparison
    speed, inverted = (other, False) if one.method is Method.REFERENCE else (one, True)
    reference_ns = 1e9 * study.facts.units_per_batch / recommendation.baseline_units_per_s
    steps = [reference_ns, reference_ns / speed.ratio]
    ends = [] if speed.interval is None else [speed.interval.low, speed.interval.high]
    changes = sorted((-1 if inverted else 1) * (reference_ns / end - reference_ns) for end in ends)
    ratios = sorted(1 / end if inverted else end for end in ends)
    before_ns, after_ns = reversed(steps) if inverted else steps
    return structs.replace(
        comparison,
        measured=Difference(
            name=STEP,
            before_ns=before_ns,
            after_ns=after_ns,
            low_ns=changes[0] if changes else None,
            high_ns=changes[1] if changes else None,
        ),
        stated=Interval(low=ratios[0], high=ratios[1]) if ratios else None,
        stated_how=speed.told,
        notes=tuple(PROFILED_RUNS if note == ONE_START else note for note in comparison.notes),
    )


def label(study: Study, trial: Trial) -> str:
    return f"trial {trial.sequence} of study {study.study_id[-6:]}: {trial.candidate.label}"
