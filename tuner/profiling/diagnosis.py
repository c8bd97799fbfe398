"""Diagnosis of a breakdown by rules, each of which finds one cause that makes the step longer (`rules`, one file per
subject).

A rule checks exclusive shares of the (rescaled) step. It fires at its lowest threshold; the higher
ones raise its severity. A finding names its evidence, the advice, the strategies that would act on
it, and the most that they could save. If the capture is bad, that is the only finding.

Gains of synchronisations, stalls, batches, allocations and late ranks are replayed (`replay`): the steps' graph is
simulated without them. Without a replay, the gain is a range from 0 to the share of the categories, marked as such.

Advice is a list of remedies. Each is left out if the step's facts (`facts`) show that it is enabled already; a rule
with no remedy left finds nothing. Host time inside stalls (`stalls`) is not dispatch: launching less would
not shorten it, so it has a separate finding.

The thresholds are those of torch-tb-profiler, TensorFlow's and XProf's rules and our own proposals:
see docs/diagnosis.md for each one's source.
"""

from __future__ import annotations

from collections.abc import Mapping

from steptune.tuner.costs.categories import Category
from steptune.tuner.profiling.claims import Subject, claimed
from steptune.tuner.profiling.evidence import SEVERITIES, Evidence
from steptune.tuner.profiling.finding_places import places_of
from steptune.tuner.profiling.gains import ASIDE, BESIDE, LATE_RULE, Gain, bound_of, by_worth
from steptune.tuner.profiling.quality import PROBLEMS
from steptune.tuner.profiling.replay.answers import LATE_RANKS, STALLS
from steptune.tuner.profiling.rules.communication import COMMUNICATION_RULES
from steptune.tuner.profiling.rules.compute import COMPUTE_RULES
from steptune.tuner.profiling.rules.host import HOST_RULES
from steptune.tuner.profiling.rules.input import INPUT_RULES
from steptune.tuner.profiling.rules.memory import MEMORY_RULES
from steptune.tuner.profiling.rules.rule import Rule
from steptune.tuner.profiling.rules.uneven_steps import UNEVEN_STEP_RULES
from steptune.tuner.profiling.stall_findings import STALL_RULE, diagnose_stalls
from steptune.tuner.records import Finding
from steptune.tuner.strategies.registry import strategies_for

BAD_CAPTURE = "bad_capture"
"""Name of the rule whose findings state why a capture cannot be trusted."""
NOTABLE = 0.01
"""Minimum difference between a finding's gain with the other causes present and its gain without them, as a share of
the step. If the difference is smaller, only the latter is reported.
"""
RULES: tuple[Rule, ...] = (
    *INPUT_RULES,
    *HOST_RULES,
    *COMMUNICATION_RULES,
    *COMPUTE_RULES,
    *UNEVEN_STEP_RULES,
    *MEMORY_RULES,
)
SUBJECTS: Mapping[str, Subject] = {
    **{rule.name: Subject(categories=rule.categories, cause=rule.replayed) for rule in RULES},
    STALL_RULE: Subject(categories=(Category.HOST,), cause=STALLS),
    LATE_RULE: Subject(categories=(Category.COMMUNICATION,), cause=LATE_RANKS),
}
"""Categories of every rule, and the cause that a replay removes for it."""
UNKNOWN_PROBLEM = "profile again with more warm-up and less detail"
"""Advice for a bad capture whose problem is unknown, as in older records."""


def diagnose(evidence: Evidence) -> tuple[Finding, ...]:
    """Return the findings of a breakdown, the largest gain first; for a bad capture, only its problems."""
    quality = evidence.breakdown.quality
    if quality.problems:
        names = quality.problem_names or ("",) * len(quality.problems)
        own = evidence.facts.own_capture
        return tuple(_bad_capture(problem, name, own) for problem, name in zip(quality.problems, names, strict=True))
    applied = [*(_apply(rule, evidence) for rule in RULES), diagnose_stalls(evidence)]
    found = by_worth(finding for finding in applied if finding is not None)
    return claimed(found, [evidence], SUBJECTS)


def _bad_capture(problem: str, name: str, own: bool) -> Finding:
    known = next((known for known in PROBLEMS if known.name == name), None)
    advice = UNKNOWN_PROBLEM if known is None else known.own_advice if own else known.advice
    return Finding(
        rule=BAD_CAPTURE,
        severity="warning",
        message=f"the profile cannot be trusted: {problem}",
        advice=advice,
        strategies=(),
        bound=0.0,
        evidence={"problem": name} if name else {},
    )


def _apply(rule: Rule, evidence: Evidence) -> Finding | None:
    share = rule.measure(evidence) if rule.measure is not None else evidence.share(*rule.categories)
    if evidence.device_kind not in rule.devices or share is None:
        return None
    gain = evidence.gain(rule.replayed, share) if rule.replayed else None
    aside = rule.aside(evidence)
    message = _message(rule, gain, share, aside=aside)
    if gain is not None and gain.expected is not None:
        share = gain.expected
    if share < rule.thresholds[0] or not rule.applies(evidence):
        return None
    level = 0 if aside else sum(share >= threshold for threshold in rule.thresholds) - 1
    cause = rule.cause(evidence)
    facts = evidence.facts
    remedies = [remedy for remedy in (cause.remedies if cause else rule.remedies) if remedy.useful(facts)]
    if not remedies:
        return None
    beside = evidence.gain(rule.bounded_by, share) if rule.bounded_by else None
    return Finding(
        rule=rule.name,
        severity=SEVERITIES[level],
        message=f"{message}; {cause.message}" if cause else message,
        advice=", ".join(remedy.advice for remedy in remedies),
        strategies=strategies_for(*(cure for remedy in remedies for cure in remedy.cures)),
        bound=max(_most(rule, evidence, gain, share), _beside(beside)),
        evidence={
            **(gain.evidence if gain is not None else {}),
            **({BESIDE: f"{beside.high:.1%}"} if beside and gain and _beside(beside) > gain.bound + NOTABLE else {}),
            **({ASIDE: "others come first"} if aside else {}),
            **_times(rule, evidence),
            **({"cause": cause.name} if cause else {}),
            **places_of(rule, evidence),
        },
    )


def _message(rule: Rule, gain: Gain | None, share: float, *, aside: bool) -> str:
    """Return the message of a finding, with its simulated gain if there is one."""
    if gain is None or gain.expected is None:
        return (rule.aside_message if aside else rule.message).format(share=f"{'at most ' if aside else ''}{share:.0%}")
    return (rule.aside_message if aside else rule.replayed_message).format(share=gain.share)


def _most(rule: Rule, evidence: Evidence, gain: Gain | None, share: float) -> float:
    """Return the maximum share of the step that a rule's advice could save."""
    removable = evidence.removable_share(*rule.categories)
    return bound_of(gain, rule.reach * (min(removable, share) if rule.measure is not None else removable), share)


def _beside(gain: Gain | None) -> float:
    """Return the upper bound on a gain that was simulated with the other causes present; 0 if it was not simulated."""
    return gain.bound if gain is not None and gain.expected is not None else 0.0


def _times(rule: Rule, evidence: Evidence) -> dict[str, float | str]:
    """Return milliseconds per step of each category; for communication also the part that delayed compute."""
    breakdown, own = evidence.breakdown, evidence.own_part
    times = {c.value: own(c) * breakdown.per_step_ns.get(c, 0.0) for c in rule.categories}
    blocking = [c for c in rule.categories if c.value in breakdown.blocking]
    held = {f"{c.value}_blocking": own(c) * breakdown.removable_ns(c) for c in blocking}
    return {f"{name}_ms": round(value / 1e6, 4) for name, value in {**times, **held}.items() if value > 0}
