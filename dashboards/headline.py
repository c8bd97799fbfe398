"""Headline of a study: the speed-up in one number, and the facts behind it."""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from steptune.dashboards import units
from steptune.dashboards.sources import TrialSource
from steptune.dashboards.starts import leading_candidate, reference_results, results
from steptune.tuner.estimates import units_per_s
from steptune.tuner.objectives import PLAIN, parse_objective
from steptune.tuner.records import (
    Gain,
    MeasureSettings,
    Recommendation,
    SampleUnit,
    Study,
    StudyState,
    Trial,
    TrialState,
    Verdict,
)
from steptune.tuner.speeds import WIDEST, answer_of, is_wide
from steptune.tuner.workloads.reference import is_command

TRIALS_SPENT = "trials spent"
RESUME = "steptune resume"
MORE_TIME, LEAST_MORE_S = 0.5, 60.0
"""Additional time suggested for a study that needs more time: this share of the study's budget, but at least this
number of seconds.
"""


class Fact(NamedTuple):
    """A fact about the study, with the evidence for it."""

    name: str
    value: str
    note: str = ""


class HeadlineInfo(NamedTuple):
    """Headline of a study. `tone` is "good", "neutral" or "warning"; `figure` is the number, or empty. `interval` is
    the interval of the confirmed gain in words, whether or not the gain is proven.
    """

    tone: str
    figure: str
    title: str
    sentence: str
    facts: tuple[Fact, ...]
    interval: str = ""


def get_headline_info(source: TrialSource, study_id: str, *, at_service: bool = False) -> HeadlineInfo:
    """Return the headline of a study in any state. It claims only confirmed gains.

    Args:
        at_service: Whether the reader uses a service with logins, and so can run no command where the study is stored.
    """
    recommendation = source.recommendation(study_id)
    info = (
        _of_recommendation(source.get_study(study_id), recommendation, at_service)
        if recommendation is not None
        else _of_unfinished(source, study_id)
    )
    info = info._replace(facts=(*_objective_fact(source.get_study(study_id), recommendation), *info.facts))
    trials = source.trials(study_id)
    return info._replace(facts=(*info.facts, *_repeats_fact(trials), *_isolation_fact(trials)))


def _objective_fact(study: Study, recommendation: Recommendation | None) -> tuple[Fact, ...]:
    """Return a fact that states the objective and the memory limit; empty if the objective is throughput alone, without
    a memory limit.
    """
    objective, limit = parse_objective(study.settings.objective), study.settings.memory_limit_bytes
    if objective == PLAIN and limit is None:
        return ()
    within = "" if limit is None else f" within {units.memory(limit)} per rank"
    note = ""
    if recommendation is not None and recommendation.objective_before:
        note = (
            f"{recommendation.objective_before} with today's settings, {recommendation.objective_after} as recommended"
        )
    return (Fact("Optimised", f"{objective.words}{within}", note),)


def _repeats_fact(trials: Sequence[Trial]) -> tuple[Fact, ...]:
    """State how many runs were repeated, and for which reasons. The failures that led to a repetition say nothing about
    the candidate.
    """
    reasons = Counter(a.failure.message for trial in trials if trial.result for a in trial.result.repeated)
    if not reasons:
        return ()
    (reason, count), *others = reasons.most_common()
    more = f"; and {units.counted(len(others), 'other reason')}" if others else ""
    return (Fact("Repeated", units.counted(reasons.total(), "run"), f"{count} × {reason}{more}"),)


def _isolation_fact(trials: Sequence[Trial]) -> tuple[Fact, ...]:
    """State how the trials were isolated from the machine; a resumed study may have used several levels."""
    counts = Counter(trial.result.isolation for trial in trials if trial.result is not None)
    if not counts:
        return ()
    if len(counts) == 1:
        return (Fact("Isolation", next(iter(counts))),)
    return (Fact("Isolation", ", ".join(f"{level} ({units.counted(n, 'trial')})" for level, n in counts.items())),)


def _of_recommendation(study: Study, r: Recommendation, at_service: bool) -> HeadlineInfo:
    before, after = units.rate(r.baseline_units_per_s, r.sample_unit), units.rate(r.units_per_s, r.sample_unit)
    change = f"{before} with today's settings, {after} as recommended."
    objective = parse_objective(r.objective)
    if r.objective_before:
        change = f"{r.objective_before} with today's settings, {r.objective_after} as recommended ({before}, {after})."
    speed = answer_of(r)
    ratio = speed.ratio
    seen = f"ran at {units.ratio(ratio)}" if parse_objective(r.objective).is_rate else "compare as follows"
    tone, figure, title, sentence = {
        Verdict.FASTER: ("good", units.ratio(ratio), objective.compared, change),
        Verdict.NO_SIGNIFICANT_GAIN: (
            "neutral",
            "1×",
            "No significant gain",
            f"{_nothing_faster(r)}. Keep today's settings: they train at {before}.",
        ),
        Verdict.ENABLES_TRAINING: (
            "good",
            "",
            "Enables training",
            f"Today's settings do not fit into memory; the recommended settings train at {after}.",
        ),
        Verdict.UNCONFIRMED: (
            "warning",
            "",
            "Not confirmed",
            f"The best settings of the search {seen}: {change} They were not measured "
            "again in new runs, and the best of many noisy measurements looks better than it is."
            f"{_way_on(study, r, at_service)}",
        ),
        Verdict.INCONCLUSIVE: ("warning", "", *_why_inconclusive(study, r, before, at_service)),
        Verdict.NOT_SEARCHED: (
            "warning",
            "",
            "Not searched",
            f"{_why_not_searched(r)}, so nothing is known about {objective.better} settings. Today's "
            f"settings train at {before}.{_way_on(study, r, at_service)}",
        ),
    }[r.verdict]
    return HeadlineInfo(tone, figure, title, sentence, _facts(study, r), _interval(r))


def _interval(r: Recommendation) -> str:
    """Return the interval of the gain, as `95 % interval 2.37× to 2.47×, in 5 blocks`; where today's settings are
    recommended, the interval of the best finalist.
    """
    gain = r.gain or r.unproven_gain
    if gain is None or r.verdict in (Verdict.NOT_SEARCHED, Verdict.ENABLES_TRAINING):
        return ""
    whose = " of the best finalist" if r.gain is None else ""
    interval = f"{units.percent(gain.interval.level)} interval{whose} {units.ratio_interval(gain.interval)}"
    return f"{interval}, in {units.counted(gain.num_blocks, 'block')}"


def _why_not_searched(r: Recommendation) -> str:
    if r.certificate.ended == "interrupted":
        return "The study was interrupted before a candidate was tried"
    if r.certificate.ended == TRIALS_SPENT:
        return "All allowed trials ran today's settings, and no candidate was tried"
    return "The budget was spent before a candidate was tried"


def _why_inconclusive(study: Study, r: Recommendation, before: str, at_service: bool) -> tuple[str, str]:
    """Return the title and sentences that say why a study is inconclusive, and what helps."""
    command = more_time_command(study, r)
    more = f"more time on a quiet machine: `{command}`" if command else "a longer --budget, or a quiet machine"
    if at_service:
        more = f"more time on a quiet machine: submit it again with {_budget_with_more(study, r)}"
    gain = r.gain or r.unproven_gain
    if gain is not None and is_wide(gain.interval):
        whose = "the best finalist" if r.candidate.is_baseline else "these settings"
        return (
            "Inconclusive: the interval is wide",
            f"The speed of {whose} over today's settings ({before}) is only known to lie between "
            f"{units.ratio_interval(gain.interval).replace(' to ', ' and ')}, because runs of the same settings differ "
            f"too much. Use {more}.",
        )
    return (
        "Inconclusive: the machine is busy",
        f"Other programs used {units.percent(r.foreign_cpu_share)} of the cores, so even a worthwhile gain could not "
        f"be distinguished from noise; today's settings ran at {before}. Use {more}.",
    )


def _way_on(study: Study, r: Recommendation, at_service: bool) -> str:
    """Return a sentence that says how to get an answer from the study; empty if the study was cancelled permanently."""
    if at_service:
        return _way_on_at_service(study, r)
    if r.certificate.ended == "interrupted":
        return "" if study.state is StudyState.CANCELLED else f" Continue with `{resume_command(study)}`."
    if r.certificate.ended == TRIALS_SPENT:
        return " Allow more trials with --trials."
    if r.needed_budget_s is None:
        return ""
    command = more_time_command(study, r)
    return f" Continue with `{command}`." if command else f" Use --budget {_as_option(r.needed_budget_s)}."


def _way_on_at_service(study: Study, r: Recommendation) -> str:
    if r.certificate.ended == "interrupted":
        can_go_on = study.state in (StudyState.INTERRUPTED, StudyState.PAUSED)
        return " Users who may submit studies can resume this study on this page." if can_go_on else ""
    if r.certificate.ended == TRIALS_SPENT:
        return " Submit it again with more trials."
    return "" if r.needed_budget_s is None else f" Submit it again with {_budget_with_more(study, r)}."


def _budget_with_more(study: Study, r: Recommendation) -> str:
    """State the budget with which to submit a study again: longer than its previous budget, which was too short."""
    return f"a budget of {_as_option(max(r.needed_budget_s or 0.0, (1 + MORE_TIME) * study.settings.budget_s))}"


def more_time_command(study: Study, r: Recommendation) -> str:
    """Return the command that resumes an ended study with the additional time that it probably needs. Empty if more
    time has no use, or if the study continues at a service within its own budget.
    """
    command, seconds = resume_command(study), _lacked_s(study, r)
    if study.state is not StudyState.COMPLETED or seconds is None or not command.startswith(RESUME):
        return ""
    return f"{command} --budget {_as_option(seconds)}"


def _lacked_s(study: Study, r: Recommendation) -> float | None:
    """Return the additional seconds that a study needs, including new measurements of today's settings and a new
    reference. None where more time has no use, or the need is not known.
    """
    some_s = max(LEAST_MORE_S, MORE_TIME * study.settings.budget_s)
    if r.verdict is Verdict.NOT_SEARCHED:
        return r.needed_budget_s
    if r.verdict is Verdict.UNCONFIRMED:
        return None if r.needed_budget_s is None else max(some_s, r.needed_budget_s - r.cost.tuning_s)
    return some_s if r.verdict is Verdict.INCONCLUSIVE or _may_find_more(r) else None


def _may_find_more(r: Recommendation) -> bool:
    return r.verdict is Verdict.NO_SIGNIFICANT_GAIN and bool(r.prospect)


def resume_command(study: Study) -> str:
    """Return the command that resumes a study: at its service if its script was submitted and is not on this
    machine.
    """
    script = study.facts.script if study.facts else None
    if is_command(study.workload) and (script is None or not Path(script.folder).is_dir()):
        return f"steptune continue {study.study_id} --url …"
    return f"{RESUME} {study.study_id}"


def _as_option(seconds: float) -> str:
    """Format a time as an option's value, `90s` or `4m`, rounded up."""
    return f"{math.ceil(seconds / 10) * 10}s" if seconds <= 120 else f"{math.ceil(seconds / 60)}m"


def _nothing_faster(r: Recommendation) -> str:
    better = parse_objective(r.objective).better
    if r.unproven_gain is None:
        return f"The search found nothing {better} than today's settings, so there was nothing to confirm"
    return f"No tried configuration is {better} than today's settings by more than this machine's noise"


def _facts(study: Study, r: Recommendation) -> tuple[Fact, ...]:
    verdict = parse_objective(r.objective).better if r.verdict is Verdict.FASTER else units.words(r.verdict.value)
    facts = [Fact("Verdict", verdict, _verdict_note(r))]
    gain = r.gain or r.unproven_gain
    if gain is not None:
        facts += _gain_facts(gain, of_today=r.verdict is not Verdict.ENABLES_TRAINING)
    if r.no_time_for:
        facts.append(Fact("No time for", r.no_time_for[0], "; ".join(r.no_time_for[1:])))
    if r.foreign_cpu_share > MeasureSettings().foreign_cpu_share:
        facts.append(
            Fact(
                "Busy machine",
                f"other programs used {units.percent(r.foreign_cpu_share)} of the cores",
                _why_ratios_hold(study),
            )
        )
    if r.guard is not None:
        compared = "; ".join(r.guard.compared) or ", ".join(check.name for check in r.guard.checks) or "losses"
        if r.guard.notes:
            compared += f"; not judged: {'; '.join(r.guard.notes)}"
        said = "yes" if r.guard.passed else "no"
        if not r.guard.checks:
            said, compared = "not guarded", f"nothing; {compared}"
        facts.append(Fact("Same training?", said, f"{r.guard.reason}; compared: {compared}"))
    facts.append(
        Fact(
            "Remaining potential",
            f"at most {units.percent(r.certificate.remaining_bound)} of the step",
            f"{r.certificate.status}; the search ended because: {r.certificate.ended}",
        )
    )
    if r.prospect:
        facts.append(Fact("With more time", *re.split("[:,] ", r.prospect, maxsplit=1)))
    facts.append(_bottleneck_fact(r))
    facts.append(_memory_fact(r))
    facts.append(_cost_fact(r))
    return tuple(facts)


def _why_ratios_hold(study: Study) -> str:
    quiet = "on a quiet machine, intervals would be narrower and rates may differ"
    if is_command(study.workload):
        return f"trials of a script do not take turns, so only the runs of the confirmation can be compared; {quiet}"
    return f"trials took turns, so ratios remain valid; {quiet}"


def _verdict_note(r: Recommendation) -> str:
    if r.verdict is Verdict.ENABLES_TRAINING:
        return "today's settings ran out of memory when they were run alone"
    if r.verdict is Verdict.INCONCLUSIVE:
        gain = r.gain or r.unproven_gain
        wide = gain is not None and is_wide(gain.interval)
        return f"the interval is wider than a factor of {WIDEST:g}" if wide else "the machine was busy in most windows"
    if r.verdict is Verdict.NOT_SEARCHED:
        return "no candidate was tried"
    if r.gain is not None:
        return "the whole interval lies above 1×"
    return "the interval does not exclude 1×" if r.unproven_gain else "not measured again in new runs"


def _gain_facts(gain: Gain, *, of_today: bool) -> list[Fact]:
    finalists = units.counted(gain.num_finalists, "finalist")
    reference = "today's settings" if of_today else "the nearest settings that fit"
    beside = [] if of_today else [Fact("Speed", units.ratio(gain.ratio), f"over {reference}")]
    return [
        *beside,
        Fact(
            f"{units.percent(gain.interval.level)} interval",
            units.ratio_interval(gain.interval),
            f"covers {finalists} jointly; a repeat of this comparison would land in "
            f"{units.ratio_interval(gain.prediction)}",
        ),
        Fact(
            "Measured in",
            units.counted(gain.num_blocks, "block"),
            f"new runs in random order, compared with {reference}; not used by the search",
        ),
    ]


def _bottleneck_fact(r: Recommendation) -> Fact:
    if r.bottleneck_before == r.bottleneck_after == "unknown":
        return Fact("Bottleneck", "unknown", "no profile can be trusted")
    return Fact("Bottleneck", r.bottleneck_after, f"before: {r.bottleneck_before}")


def _memory_fact(r: Recommendation) -> Fact:
    if not r.peak_memory_bytes:
        return Fact("Peak memory", units.UNKNOWN)
    before = f"{units.memory(r.baseline_peak_memory_bytes)} today" if r.baseline_peak_memory_bytes else ""
    return Fact("Peak memory", units.memory(r.peak_memory_bytes), before)


def _cost_fact(r: Recommendation) -> Fact:
    cost = r.cost
    paid = []
    if cost.payback_tuning_steps and r.verdict is Verdict.FASTER:
        paid.append(f"paid back after {units.significant(cost.payback_tuning_steps)} steps")
    if cost.payback_steps and r.verdict is Verdict.FASTER:
        paid.append(f"compilation paid back after {units.significant(cost.payback_steps)} steps")
    return Fact(
        "Cost of tuning", f"{units.duration(cost.tuning_s)}, {units.counted(cost.num_trials, 'trial')}", ", ".join(paid)
    )


# --- without a recommendation -----------------------------------------------------------------


def _of_unfinished(source: TrialSource, study_id: str) -> HeadlineInfo:
    study, trials = source.get_study(study_id), source.trials(study_id)
    facts = (
        Fact("State", study.state.value),
        *_trial_facts(trials),
        *_rate_facts(source, study, trials),
    )
    tone, title, sentence = {
        StudyState.QUEUED: ("neutral", "Waiting", "No worker has started the study yet"),
        StudyState.PAUSED: ("neutral", "Paused", "The search was paused before it had an answer"),
        StudyState.CANCELLED: ("warning", "Cancelled", "The search was cancelled before it had an answer"),
        StudyState.RUNNING: ("neutral", "Still searching", "There is no recommendation yet"),
        StudyState.INTERRUPTED: ("warning", "Interrupted", "The search was interrupted before it had an answer"),
        StudyState.COMPLETED: ("warning", "No recommendation", "The search ended without an answer"),
        StudyState.FAILED: ("warning", "Failed", "The search failed"),
    }[study.state]
    return HeadlineInfo(tone, "", title, f"{sentence}: {study.message}" if study.message else f"{sentence}.", facts)


def _trial_facts(trials: Sequence[Trial]) -> tuple[Fact, ...]:
    if not trials:
        return (Fact("Trials", "none yet"),)
    failed = sum(1 for result in results(trials) if not result.ok)
    running = sum(1 for trial in trials if trial.state is TrialState.RUNNING)
    parts = [f"{count} {word}" for count, word in ((failed, "failed"), (running, "running")) if count]
    return (Fact("Trials", str(len(trials)), ", ".join(parts)),)


def _rate_facts(source: TrialSource, study: Study, trials: Sequence[Trial]) -> tuple[Fact, ...]:
    """State the rates so far; the best one is marked as not confirmed."""
    unit = study.facts.sample_unit if study.facts else SampleUnit.SAMPLE
    facts = []
    starts = [units_per_s(result) for result in reference_results(trials)]
    if starts:
        facts.append(
            Fact("Today's settings", units.rate(statistics.fmean(starts), unit), units.counted(len(starts), "start"))
        )
    leading = leading_candidate(source, study.study_id)
    if leading is not None:
        rates = [units_per_s(r) for r in results(trials) if r.ok and r.candidate == leading[1]]
        if rates:
            facts.append(Fact("Best so far", units.rate(statistics.fmean(rates), unit), "not confirmed"))
    return tuple(facts)
