"""Exporters that say each strategy's choice in a target's own words, and list what has none.

An exporter has one rule for each strategy that its target knows. A rule takes the complete choice and gives what the
file says of it, by section, and why some parameters cannot be said. A strategy without a rule cannot be said at all,
those of later versions included: nothing is left out silently.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from steptune.tuner.errors import RecommendationError
from steptune.tuner.export.base import Exporter
from steptune.tuner.export.settings import Setting, choice_of, grouped, sentence, settings_of
from steptune.tuner.records import Choice, Recommendation
from steptune.tuner.strategies.knobs import PREFIX, is_knob

Sections = dict[str, dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Said:
    """Settings of a target for one strategy.

    Attributes:
        sections: Keys and values, by section of the file.
        missing: Parameters that are not said, and why.
        differs: Parameters that are said, but that the target makes otherwise than it was measured, and how.
    """

    sections: Sections = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)
    differs: Mapping[str, str] = field(default_factory=dict)


Rule = Callable[[Choice, Recommendation], Said]


class TranslatingExporter(Exporter):
    """An exporter made of rules.

    Attributes:
        rules: By strategy.
        lacks: Why a strategy without a rule cannot be said.
        beside: Reasons that name another file of the same target, which says it.
    """

    rules: ClassVar[Mapping[str, Rule]]
    lacks: ClassVar[str]
    beside: ClassVar[frozenset[str]] = frozenset()

    def sections(self, recommendation: Recommendation) -> Sections:
        """Settings of all rules together."""
        whole: Sections = {}
        for strategy, rule in self.rules.items():
            for name, values in rule(choice_of(recommendation, strategy), recommendation).sections.items():
                whole.setdefault(name, {}).update(values)
        return whole

    def not_expressible(self, recommendation: Recommendation) -> tuple[str, ...]:
        sentences = []
        for strategy, settings in grouped(settings_of(recommendation)).items():
            by_reason: dict[str, list[Setting]] = {}
            reasons = {**self._differs(strategy, recommendation), **self._missing(strategy, settings, recommendation)}
            for setting in settings:
                if setting.parameter in reasons:
                    by_reason.setdefault(reasons[setting.parameter], []).append(setting)
            sentences += [sentence(listed, reason) for reason, listed in by_reason.items()]
        return (*sentences, *self.notes(recommendation))

    def lost(self, recommendation: Recommendation) -> tuple[str, ...]:
        found = []
        for strategy, settings in grouped(settings_of(recommendation)).items():
            missing = self._missing(strategy, settings, recommendation)
            reasons = {missing[setting.parameter] for setting in settings if setting.parameter in missing}
            if reasons - self.beside:
                found.append(strategy)
        return tuple(found)

    def otherwise(self, recommendation: Recommendation) -> tuple[str, ...]:
        by_strategy = grouped(settings_of(recommendation))
        return tuple(strategy for strategy in by_strategy if self._differs(strategy, recommendation))

    def notes(self, recommendation: Recommendation) -> tuple[str, ...]:
        """Differences between the target and what was measured, whatever the choices."""
        return ()

    def checked(self, recommendation: Recommendation) -> Recommendation:
        """The recommendation, where the target can hold it.

        Raises:
            RecommendationError: It cannot.
        """
        reason = self.refusal(recommendation)
        if reason is not None:
            raise RecommendationError(f"{self.name}: {reason}")
        return recommendation

    def _differs(self, strategy: str, recommendation: Recommendation) -> Mapping[str, str]:
        rule = self.rules.get(strategy)
        return rule(choice_of(recommendation, strategy), recommendation).differs if rule else {}

    def _missing(self, strategy: str, settings: list[Setting], recommendation: Recommendation) -> Mapping[str, str]:
        if is_knob(strategy):
            return {"value": f"set the attribute {strategy.removeprefix(PREFIX)} of your workload yourself"}
        rule = self.rules.get(strategy)
        if rule is None:
            return {setting.parameter: self.lacks for setting in settings}
        return rule(choice_of(recommendation, strategy), recommendation).missing
