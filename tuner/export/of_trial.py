"""Recommendation made from the configuration of any trial, so that every exporter can write it.

A study recommends one configuration. A user may prefer another one that the study measured: the fastest that leaves
some memory free, or a plainer one that is nearly as fast.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import msgspec

from steptune.tuner.errors import ChoiceError, RecommendationError
from steptune.tuner.estimates import log_rate
from steptune.tuner.records import Candidate, Part, Recommendation, Study, Trial, TrialResult, Verdict, WorkloadFacts
from steptune.tuner.speeds import Method, speed_of
from steptune.tuner.strategies import STRATEGIES
from steptune.tuner.strategies.combine import complete_choices, environment_variables, numerics_of
from steptune.tuner.strategies.in_scripts import script_changes
from steptune.tuner.strategies.knobs import with_knobs


def recommendation_of_trial(
    study: Study, recommendation: Recommendation, trials: Sequence[Trial], wanted: str
) -> Recommendation:
    """Return the recommendation with its configuration replaced by that of a trial.

    The result claims a gain only where the confirmation proved one for this configuration.

    Args:
        trials: Trials of the study, in their order.
        wanted: Number of the trial (its `sequence`), or its id.

    Raises:
        ChoiceError: There is no such trial.
        RecommendationError: The trial's configuration failed, was not measured, or is another training.
    """
    trial = trial_named(trials, wanted)
    candidate, number = trial.candidate, trial.sequence
    if candidate == recommendation.candidate:
        return recommendation
    assert study.facts is not None, "a study with a recommendation has examined its workload"
    good = _usable([t.result for t in trials if t.candidate == candidate and t.result is not None], number)
    choices = complete_choices(candidate, study.facts)
    named = [other for other in recommendation.alternatives if other.candidate == candidate]
    proven = next((a.confirmed for a in named if a.confirmed is not None and a.confirmed.interval.low > 1.0), None)
    speed = speed_of(recommendation, candidate)
    ratio = None if speed is None else speed.ratio
    rate = math.exp(statistics.fmean(log_rate(result).mean for result in good))
    return msgspec.structs.replace(
        recommendation,
        of_trial=number,
        verdict=Verdict.FASTER if proven else Verdict.UNCONFIRMED,
        candidate=candidate,
        choices=choices,
        environment_variables=environment_variables(choices, with_knobs(STRATEGIES, study.facts)),
        units_per_s=rate if ratio is None else recommendation.baseline_units_per_s * ratio,
        objective_after="",
        gain=proven,
        unproven_gain=None,
        unproven_candidate=None,
        search_interval=speed.interval if speed is not None and speed.method is Method.SEARCHED else None,
        parts=_parts(candidate, study.facts),
        in_script=script_changes(candidate, choices, study.facts.script),
        shares_after={},
        bottleneck_after="unknown",
        guard=next((result.guard for result in good if result.guard is not None), None),
        peak_memory_bytes=max(result.peak_memory_bytes for result in good),
    )


def trial_named(trials: Sequence[Trial], wanted: str) -> Trial:
    """Return the trial with this number or id.

    Raises:
        ChoiceError: There is no such trial.
    """
    found = next((trial for trial in trials if wanted in (str(trial.sequence), trial.trial_id)), None)
    if found is None:
        raise ChoiceError(f"{wanted!r} names no trial of this study: give the number of a trial, or its id")
    return found


def _usable(results: Sequence[TrialResult], number: int) -> list[TrialResult]:
    """Return the successful results of a trial's configuration; refuse a configuration that the guard rejected, or that
    has no successful result.
    """
    rejected = next((r.guard for r in results if r.guard is not None and not r.guard.passed), None)
    if rejected is not None:
        raise RecommendationError(f"the configuration of trial {number} changes the training: {rejected.reason}")
    good = [result for result in results if result.ok]
    if not good:
        failure = next((result.failure for result in results if result.failure is not None), None)
        why = f"failed: {failure.message}" if failure is not None else "was not measured"
        raise RecommendationError(f"the configuration of trial {number} {why}")
    return good


def _parts(candidate: Candidate, facts: WorkloadFacts) -> tuple[Part, ...]:
    return tuple(
        Part(
            strategy=name,
            choice=choice,
            bound=None,
            reason="part of the configuration that was chosen by hand",
            numerics=numerics_of(Candidate(choices={name: choice}), facts, with_knobs(STRATEGIES, facts)),
        )
        for name, choice in candidate.choices.items()
    )
