"""The first screen of a finished study's page, below its claim: cause, changes, how to use them, cost, and what more
time could gain.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from steptune.dashboards import units
from steptune.dashboards.epochs import EpochInfo
from steptune.dashboards.gains import GainRow
from steptune.dashboards.headline import Fact, HeadlineInfo
from steptune.tuner.errors import ChoiceError, RecommendationError
from steptune.tuner.export.carried import carried
from steptune.tuner.records import Choice, Finding, GuardVerdict, Recommendation, Study, choice_label
from steptune.tuner.scripts.diff import script_diff
from steptune.tuner.strategies import STRATEGIES, strategy_named
from steptune.tuner.strategies.knobs import with_knobs
from steptune.tuner.wording import counted
from steptune.tuner.workloads.reference import is_command


class ChangeRow(NamedTuple):
    """A strategy that the recommendation changes. Its contribution is NaN where none is proven; its interval is given
    wherever the contribution was measured.
    """

    strategy: str
    summary: str
    today: str
    now: str
    gain: float
    low: float
    high: float
    method: str


class Use(NamedTuple):
    """Text for users to copy, with its title and a note on how to use it."""

    title: str
    text: str
    note: str = ""


def change_rows(study: Study, recommendation: Recommendation, gains: Sequence[GainRow]) -> list[ChangeRow]:
    """Return one row for each strategy of the recommendation, with the parameters that the recommendation changes."""
    contributions = {row.strategy: (row.gain, row.low, row.high, row.method) for row in gains}
    rows = []
    for name, choice in recommendation.candidate.choices.items():
        summary, current = _strategy_today(study, name)
        was = {parameter: current[parameter] for parameter in choice if parameter in current}
        unknown = (math.nan, math.nan, math.nan, "")
        rows.append(
            ChangeRow(
                name,
                summary,
                choice_label(was) if was else units.UNKNOWN,
                choice_label(choice),
                *contributions.get(name, unknown),
            )
        )
    return rows


def _strategy_today(study: Study, name: str) -> tuple[str, Choice]:
    """Return the summary and today's choice of a strategy; both are empty for a strategy that this version of Steptune
    does not know.
    """
    try:
        strategy = strategy_named(name, with_knobs(STRATEGIES, study.facts) if study.facts else STRATEGIES)
    except ChoiceError:
        return "", {}
    current = study.facts.current.get(name, {}) if study.facts else {}
    return strategy.summary, strategy.completed(current)


def get_uses(recommendation: Recommendation) -> list[Use]:
    """Return the ways to use a recommendation, each as a text to copy; empty where the recommendation changes
    nothing.
    """
    if recommendation.candidate.is_baseline:
        return []
    if is_command(recommendation.workload):
        uses = _in_script(recommendation)
    else:
        uses = [
            Use("In your script", _APPLY, _and("use it with the workload that was tuned", carried(recommendation, ())))
        ]
    if recommendation.environment_variables:
        lines = [f"export {name}={value}" for name, value in recommendation.environment_variables.items()]
        uses.append(Use("Environment", "\n".join(lines), "must be set before torch is imported"))
    return uses


_ENABLE = 'import steptune; steptune.enable("steptune.json")'
_APPLY = """\
job = steptune.apply("steptune.json", workload)
for batch in job.loader:
    loss = job.step(batch)"""


def _in_script(recommendation: Recommendation) -> list[Use]:
    """Return the texts that apply a recommendation to its training script: the `enable` line, which makes all changes,
    and, if the script is on this machine and unedited, the command's arguments and a diff. Each text states its share
    of the gain; the arguments and the diff state one share together.
    """
    everything = _and("makes all changes", carried(recommendation, ()))
    try:
        found = script_diff(recommendation)
    except RecommendationError as error:
        return [Use("One line in the script", _ENABLE, f"{everything}. No diff is available: {error}")]
    part = carried(recommendation, tuple(found.left_out), way="the line below")
    uses = []
    if found.options:
        together = f"together with the diff, {part}" if found.diff and part else part
        uses.append(Use("Arguments", " ".join(found.options), _and("add to the command", together)))
    if found.diff:
        together = f"together with the arguments, {part}" if found.options and part else part
        uses.append(Use("Diff", found.diff, _and("run git apply in the script's folder", together)))
    return [*uses, Use("One line in the script", _ENABLE, everything)]


def _and(said: str, part: str) -> str:
    return f"{said}; {part}" if part else said


def screen_facts(
    headline: HeadlineInfo, recommendation: Recommendation, epoch: EpochInfo, cause: Finding | None
) -> list[Fact]:
    """Return the facts below an answer: cause, evidence, cost, and what more time could gain."""
    facts = {fact.name: fact for fact in headline.facts}
    cost = facts["Cost of tuning"]
    device_hours = units.significant(recommendation.cost.tuning_s * epoch.num_devices / 3600, 2)
    note = ", ".join(filter(None, (f"{device_hours} device hours", cost.note)))
    return [
        _cause_fact(facts["Bottleneck"], cause),
        _training_fact(facts.get("Same training?", facts["Verdict"]), recommendation.guard),
        Fact("What it cost", cost.value, note),
        facts.get("With more time", facts["Remaining potential"]),
    ]


def _training_fact(fact: Fact, guard: GuardVerdict | None) -> Fact:
    """Return the guard's verdict with the number of its comparisons, which the evidence lists; the fact as it is if
    nothing was compared.
    """
    if guard is None or not guard.checks:
        return fact
    num_compared = len(guard.compared) or len(guard.checks)
    left_out = f"; {len(guard.notes)} not possible here" if guard.notes else ""
    return Fact(fact.name, fact.value, f"{guard.reason}; {counted(num_compared, 'comparison')}{left_out}: see Evidence")


def _cause_fact(bottleneck: Fact, cause: Finding | None) -> Fact:
    before = bottleneck.note.removeprefix("before: ")
    changed = bottleneck.note.startswith("before: ") and before != bottleneck.value
    value = f"{before} → {bottleneck.value}" if changed else bottleneck.value
    return Fact("Cause: the bottleneck", value, cause.message if cause else bottleneck.note)
