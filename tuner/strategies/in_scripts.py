"""Application of a candidate to a training script with its own loop; each strategy defines how to apply its choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from steptune.tuner.records import Candidate, Choice, ScriptChanges, ScriptFacts
from steptune.tuner.strategies import STRATEGIES
from steptune.tuner.strategies.api import Outside, Strategy


def outside_of(
    candidate: Candidate,
    choices: Mapping[str, Choice],
    script: ScriptFacts,
    strategies: Sequence[Strategy] = STRATEGIES,
) -> dict[str, Outside]:
    """Return, by strategy, how each choice of a candidate is applied in the script.

    Args:
        choices: The complete choice of every strategy.
    """
    known = {strategy.name: strategy for strategy in strategies}
    found = {}
    for name in candidate.choices:
        outside = known[name].outside(choices[name], script)
        assert isinstance(outside, Outside), f"the space must not contain choices of {name} that need a Workload"
        found[name] = outside
    return found


def script_changes(
    candidate: Candidate,
    choices: Mapping[str, Choice],
    script: ScriptFacts | None,
    strategies: Sequence[Strategy] = STRATEGIES,
) -> ScriptChanges | None:
    """Return a candidate's changes to a training script, in the form in which `steptune.enable` makes them; None if the
    workload is not a script.
    """
    if script is None:
        return None
    found = outside_of(candidate, choices, script, strategies).values()
    return ScriptChanges(
        script=script,
        changes={name: value for outside in found for name, value in outside.changes.items()},
        words=tuple(outside.words for outside in found),
    )
