"""Recommendation from a finished search and its confirmation."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Protocol

from steptune.tuner.costs.bounds import Situation
from steptune.tuner.costs.categories import bottleneck
from steptune.tuner.estimates import student_quantile
from steptune.tuner.objectives import THROUGHPUT, Objective
from steptune.tuner.records import (
    Alternative,
    Candidate,
    Cost,
    Gain,
    GuardVerdict,
    Interval,
    Part,
    Recommendation,
    Study,
    TrialResult,
    Verdict,
)
from steptune.tuner.search.confirmation import Finalist
from steptune.tuner.search.designer import BUDGET_SPENT, Designer
from steptune.tuner.search.effects import Difference
from steptune.tuner.search.knowledge import WORTHWHILE
from steptune.tuner.search.prospect import prospect
from steptune.tuner.speeds import is_wide
from steptune.tuner.strategies.combine import environment_variables
from steptune.tuner.strategies.in_scripts import script_changes


class LogRates(Protocol):
    """Function that returns the logarithms of the rates of a candidate's runs."""

    def __call__(self, candidate: Candidate, *, counted: bool) -> Sequence[float]: ...


NUM_ALTERNATIVES = 3
LEAST_INCREASE = 1.25
"""Minimum factor by which a recommended budget exceeds one that did not suffice."""


class Searched(Protocol):
    """Function that returns the search's posterior of a candidate's log ratio, the logarithm of its rate over the
    reference's.
    """

    def __call__(self, candidate: Candidate) -> Difference: ...


def choose(finalists: Sequence[Finalist], searched: Searched | None = None) -> Finalist | None:
    """Choose the finalist that is best by all evidence and proven faster; a finalist with fewer changes is preferred if
    it is slower by at most `WORTHWHILE`.

    Args:
        searched: Evidence of the search, weighted by its variance; None leaves the choice to the confirmation.
    """
    proven = {f.candidate.key: (f, _evidence(f, searched)) for f in finalists if f.is_faster}
    best = max((evidence for _, evidence in proven.values()), default=0.0)
    good = [pair for pair in proven.values() if pair[1] >= best - math.log1p(WORTHWHILE)]
    good.sort(key=lambda pair: (len(pair[0].candidate.choices), -pair[1]))
    return good[0][0] if good else None


def chosen_of(designer: Designer, finalists: Sequence[Finalist]) -> Finalist | None:
    """Return the finalist that is recommended; None where none is proven faster."""
    return choose(finalists, lambda candidate: designer.difference(candidate, designer.reference))


def _evidence(finalist: Finalist, searched: Searched | None) -> float:
    """Return the mean of two log ratios, the confirmation's and the search's, weighted by inverse variances."""
    confirmed = statistics.fmean(finalist.log_ratios)
    if searched is None or not finalist.standard_error:
        return confirmed
    before = searched(finalist.candidate)
    weight = before.sd**2 / (before.sd**2 + finalist.standard_error**2)
    return weight * confirmed + (1 - weight) * before.mean


def recommend(
    study: Study,
    designer: Designer,
    finalists: Sequence[Finalist],
    *,
    log_rates: LogRates,
    objective: Objective,
    tuning_s: float,
    num_trials: int,
    version: str,
    no_time_for: Sequence[str] = (),
    confirming: Sequence[TrialResult] = (),
    contributions: Mapping[str, Gain] | None = None,
    together: Mapping[str, tuple[str, ...]] | None = None,
) -> Recommendation:
    """Assemble the recommendation.

    Without finalists (an interrupted study) the best candidate of the search is named, unconfirmed.

    Args:
        log_rates: Log rates of a candidate, as the objective counts them or as they were measured.
        no_time_for: Parts that the confirmation left out for lack of time.
        confirming: Results of the confirmation for all candidates that it compared.
        contributions: Contributions of the recommended candidate's parts, by strategy, where they were measured.
        together: By strategy, the other parts that cannot run without it.
    """
    assert study.facts is not None
    assert study.environment is not None
    chosen = chosen_of(designer, finalists)
    confirmed = any(f.gain is not None for f in finalists)
    candidate = chosen.candidate if chosen else designer.reference if confirmed else designer.best()
    verdict = _verdict(designer, candidate, chosen, confirmed)
    unproven = None if chosen else next((f for f in finalists if f.gain is not None), None)
    if _is_inconclusive(verdict, designer, chosen or unproven, finalists, confirming):
        verdict = Verdict.INCONCLUSIVE
    results = designer.knowledge.results.get(candidate.key, [])
    baseline_results = designer.knowledge.results.get(designer.reference.key, [])
    counted_rate, baseline_rate = (_rate(log_rates(designer.reference, counted=counted)) for counted in (True, False))
    ratio = speed = _ratio(designer, candidate, chosen)
    if not objective.is_rate:
        rates = log_rates(candidate, counted=False)
        speed = _rate(rates) / baseline_rate if rates else 1.0
    figure = functools.partial(
        objective.figure,
        unit=study.facts.sample_unit,
        units_per_step=_units_per_step(baseline_results, study),
        num_devices=study.settings.num_ranks if study.environment.hardware.device_kind != "cpu" else 1,
    )
    is_plain = objective.kind == THROUGHPUT
    before, after = _situation(designer, designer.reference), _situation(designer, candidate)
    return Recommendation(
        study_id=study.study_id,
        created_at=datetime.now(UTC).isoformat(),
        workload=study.workload,
        workload_signature=study.facts.signature,
        global_batch=study.facts.global_batch,
        num_ranks=study.settings.num_ranks,
        sample_unit=study.facts.sample_unit,
        verdict=verdict,
        candidate=candidate,
        choices=designer.space.complete(candidate),
        environment_variables=environment_variables(designer.space.complete(candidate), designer.space.strategies),
        hardware=study.environment.hardware,
        baseline_units_per_s=baseline_rate,
        units_per_s=baseline_rate * speed,
        objective=study.settings.objective,
        objective_before="" if is_plain else figure(counted_rate),
        objective_after="" if is_plain else figure(counted_rate * ratio),
        gain=chosen.gain if chosen else None,
        unproven_gain=unproven.gain if unproven else None,
        unproven_candidate=unproven.candidate if unproven else None,
        search_interval=_searched(designer, candidate) if verdict is Verdict.UNCONFIRMED else None,
        no_time_for=(*designer.no_time_for(), *no_time_for),
        needed_budget_s=_needed_budget_s(study, designer, verdict),
        parts=_parts(designer, candidate, contributions or {}, together or {}),
        shares_before=_shares(before),
        shares_after=_shares(after),
        bottleneck_before=_bottleneck(before),
        bottleneck_after=_bottleneck(after),
        guard=_guard(results),
        certificate=designer.certificate(),
        prospect=prospect(designer),
        cost=_cost(results, baseline_rate, speed, tuning_s, num_trials, study.facts.units_per_batch),
        alternatives=_alternatives(designer, candidate, finalists),
        peak_memory_bytes=max((r.peak_memory_bytes for r in results), default=0),
        baseline_peak_memory_bytes=max((r.peak_memory_bytes for r in baseline_results), default=0),
        foreign_cpu_share=max(_foreign_share(baseline_results), _foreign_share(confirming)),
        in_script=script_changes(
            candidate, designer.space.complete(candidate), study.facts.script, designer.space.strategies
        ),
        steptune_version=version,
    )


def _units_per_step(results: Sequence[TrialResult], study: Study) -> float:
    windows = [window for result in results for window in result.clean_windows]
    steps = sum(window.num_steps for window in windows)
    assert study.facts is not None
    return sum(window.num_units for window in windows) / steps if steps else study.facts.units_per_batch


def _rate(log_rates: Sequence[float]) -> float:
    return math.exp(sum(log_rates) / len(log_rates))


def _foreign_share(results: Sequence[TrialResult]) -> float:
    shares = [window.foreign_cpu_share for result in results for window in result.windows if window.void is None]
    return statistics.median(shares) if shares else 0.0


def _verdict(designer: Designer, candidate: Candidate, chosen: Finalist | None, confirmed: bool) -> Verdict:
    if not designer.reference.is_baseline:
        return Verdict.ENABLES_TRAINING
    if chosen is not None:
        return Verdict.FASTER
    if not confirmed and candidate != designer.reference:
        return Verdict.UNCONFIRMED
    return Verdict.NO_SIGNIFICANT_GAIN if designer.has_searched else Verdict.NOT_SEARCHED


def _is_inconclusive(
    verdict: Verdict,
    designer: Designer,
    judged: Finalist | None,
    finalists: Sequence[Finalist],
    confirming: Sequence[TrialResult],
) -> bool:
    """Say whether the verdict is uncertain: the claimed gain has a wide interval, or a busy machine may hide a
    worthwhile gain.
    """
    if verdict not in (Verdict.FASTER, Verdict.NO_SIGNIFICANT_GAIN):
        return False
    if judged is not None and judged.gain is not None and is_wide(judged.gain.interval):
        return True
    return verdict is Verdict.NO_SIGNIFICANT_GAIN and _is_blurred(designer, finalists, confirming)


def _is_blurred(designer: Designer, finalists: Sequence[Finalist], confirming: Sequence[TrialResult]) -> bool:
    """Say whether the machine was busy in most windows of the baseline or of the confirmation, and a worthwhile gain is
    not excluded.
    """
    baseline = designer.knowledge.results.get(designer.reference.key, [])
    if not (_mostly_marked(baseline) or _mostly_marked(confirming)):
        return False
    highs = [f.gain.interval.high for f in finalists if f.gain is not None]
    return max(highs, default=1 + designer.certificate().noise) > 1 + WORTHWHILE


def _needed_budget_s(study: Study, designer: Designer, verdict: Verdict) -> float | None:
    """Return the budget that the study would have needed, for the preparation and for a short search with its
    confirmation; None if the study was not limited by its budget.
    """
    if verdict not in (Verdict.NOT_SEARCHED, Verdict.UNCONFIRMED) or designer.ended != BUDGET_SPENT:
        return None
    prepared_s = study.settings.budget_s - designer.budget_s
    return max(prepared_s + designer.needed_s(), LEAST_INCREASE * study.settings.budget_s)


def _mostly_marked(results: Sequence[TrialResult]) -> bool:
    windows = [window for result in results for window in result.clean_windows]
    return 2 * sum(window.marked is not None for window in windows) > len(windows)


def _ratio(designer: Designer, candidate: Candidate, chosen: Finalist | None) -> float:
    if chosen is not None and chosen.gain is not None:
        return chosen.gain.ratio
    if candidate == designer.reference:
        return 1.0
    return designer.difference(candidate, designer.reference).ratio


def _situation(designer: Designer, candidate: Candidate) -> Situation | None:
    return designer.knowledge.own_situation(candidate)


def _shares(situation: Situation | None) -> dict[str, float]:
    """Return each category's share of the step; empty without a profile that can be trusted."""
    if situation is None or situation.breakdown.quality.problems:
        return {}
    return situation.shares


def _bottleneck(situation: Situation | None) -> str:
    if situation is None or situation.breakdown.quality.problems:
        return "unknown"
    return bottleneck(situation.breakdown.per_step_ns)


def _parts(
    designer: Designer,
    candidate: Candidate,
    contributions: Mapping[str, Gain],
    together: Mapping[str, tuple[str, ...]],
) -> tuple[Part, ...]:
    """Return every change with its contribution, if that was measured; the largest contribution comes first."""
    parts = []
    accepted = [decision for decision in designer.decisions if decision.verdict == "accepted"]
    for name, choice in candidate.choices.items():
        if designer.reference.choices.get(name) == choice:
            continue
        # The one that left the neutral choice: a later one only went on from another choice of the strategy.
        decision = next((d for d in accepted if any(m.strategy == name and m.choice for m in d.moves)), None)
        strategy, gain = designer.space.strategy(name), contributions.get(name)
        parts.append(
            Part(
                strategy=name,
                choice=choice,
                gain=None if gain is None else gain.ratio,
                interval=None if gain is None else gain.interval,
                num_blocks=0 if gain is None else gain.num_blocks,
                together=together.get(name, ()),
                bound=decision.predicted_bound if decision else None,
                reason=decision.reason if decision else "part of the best combination",
                numerics=strategy.numerics(strategy.complete(choice, designer.space.workload)),
            )
        )
    return tuple(sorted(parts, key=lambda part: -(part.gain or 0.0)))


def _interval(difference: Difference, quantile: float) -> Interval:
    low, high = (math.exp(difference.mean + sign * quantile * difference.sd) for sign in (-1, 1))
    return Interval(low=low, high=high)


def _searched(designer: Designer, candidate: Candidate) -> Interval:
    """Return the interval of a candidate's rate over the reference's, from the trials of the search."""
    return _interval(designer.difference(candidate, designer.reference), _quantile(designer))


def _quantile(designer: Designer) -> float:
    """Return the quantile of Student's t distribution for a 95 % interval. The noise is estimated only from candidates
    that were run more than once.
    """
    repeats = sum(len(results) - 1 for results in designer.knowledge.results.values())
    return student_quantile(0.975, max(1, repeats))


def _guard(results: Sequence[TrialResult]) -> GuardVerdict | None:
    return next((result.guard for result in results if result.guard is not None), None)


def _cost(
    results: Sequence[TrialResult], baseline_rate: float, ratio: float, tuning_s: float, num_trials: int, units: float
) -> Cost:
    """Return the cost of tuning and compilation, and the number of steps after which they are paid back."""
    compile_s = max((r.startup.compile_ns / 1e9 for r in results if r.startup and r.startup.compile_cold), default=0.0)
    saved_s = units / baseline_rate * (1 - 1 / ratio) if ratio > 1 else 0.0
    return Cost(
        tuning_s=tuning_s,
        num_trials=num_trials,
        compile_s=compile_s,
        payback_steps=compile_s / saved_s if saved_s and compile_s else None,
        payback_tuning_steps=tuning_s / saved_s if saved_s else None,
    )


def _alternatives(designer: Designer, recommended: Candidate, finalists: Sequence[Finalist]) -> tuple[Alternative, ...]:
    """Return the other finalists, then the next best candidates, each with its memory and numerics."""
    knowledge = designer.knowledge
    confirmed = {finalist.candidate.key: finalist.gain for finalist in finalists}
    others = [c for c in knowledge.measured() if c != recommended]
    others.sort(key=lambda c: (c.key not in confirmed, -designer.difference(c, designer.reference).mean))
    return tuple(
        Alternative(
            candidate=candidate,
            gain=designer.difference(candidate, designer.reference).ratio,
            peak_memory_bytes=max(r.peak_memory_bytes for r in knowledge.results[candidate.key]),
            numerics=designer.space.numerics(candidate),
            guard=guard.reason if (guard := _guard(knowledge.results[candidate.key])) else "not checked",
            interval=_searched(designer, candidate),
            confirmed=confirmed.get(candidate.key),
        )
        for candidate in others[:NUM_ALTERNATIVES]
    )
