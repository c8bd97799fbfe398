"""Rule that finds one kind of bottleneck in a step, with the remedies and the causes that it may name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from steptune.tuner.costs.categories import Category
from steptune.tuner.profiling.evidence import Evidence
from steptune.tuner.records import StepFacts
from steptune.tuner.strategies.cures import Cure
from steptune.tuner.strategies.registry import strategies_for


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """Remedy for a finding: advice, and the strategies that carry it out.

    Attributes:
        advice: Text shown to users, as an imperative.
        cures: Effects by which strategies carry out the remedy.
        useful: True if the remedy is not enabled yet and the device supports it.
        unless: Text shown to users: condition under which the remedy is left out; empty for never.
    """

    advice: str
    cures: tuple[Cure, ...] = ()
    useful: Callable[[StepFacts], bool] = lambda facts: True
    unless: str = ""


@dataclass(frozen=True, kw_only=True)
class Cause:
    """Cause that calls for other advice than the rule's own."""

    name: str
    message: str
    remedies: tuple[Remedy, ...]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Rule that finds one kind of bottleneck in a step.

    Attributes:
        categories: Categories whose joint share is compared with the thresholds.
        thresholds: Minimum shares for the severities note, warning and high.
        message: Text shown to users; `{share}` is filled in.
        remedies: Possible remedies; the rule finds nothing if none of them is useful.
        devices: Kinds of device to which the rule applies.
        applies: Further condition for the rule to fire.
        reach: The largest part of the share that the advice could save.
        measure: Quantity that is compared with the thresholds instead of the share; None if it is unknown. Such a
            rule bounds no gain, unless it has categories: then the measure is a part of their share, and the bound.
        cause: Function that distinguishes causes that need different advice.
        of_causes: Cures that only remedies of causes have.
        replayed: Name of the replay's edit that removes the rule's cause. If the steps can be replayed, the gain
            of that edit is compared with the thresholds, and bounds what the advice could save.
        replayed_message: Text shown to users instead of `message` for a replayed gain.
        bounded_by: Name of another edit whose gain is the bound if it is larger.
        aside: True if another cause is removed first: then this finding is a note, after all findings with a gain.
        aside_message: Text shown to users instead of `replayed_message` in that case.
    """

    name: str
    categories: tuple[Category, ...]
    thresholds: tuple[float, float, float]
    message: str
    remedies: tuple[Remedy, ...]
    devices: tuple[str, ...] = ("cpu", "cuda")
    applies: Callable[[Evidence], bool] = lambda evidence: True
    reach: float = 1.0
    measure: Callable[[Evidence], float | None] | None = None
    cause: Callable[[Evidence], Cause | None] = lambda evidence: None
    of_causes: tuple[Cure, ...] = ()
    replayed: str = ""
    replayed_message: str = ""
    bounded_by: str = ""
    aside: Callable[[Evidence], bool] = lambda evidence: False
    aside_message: str = ""

    @property
    def strategies(self) -> tuple[str, ...]:
        """Return the strategies named in any remedy of the rule or of its causes."""
        return strategies_for(*(cure for remedy in self.remedies for cure in remedy.cures), *self.of_causes)
