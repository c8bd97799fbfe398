"""Exporters that translate each strategy's choice into a target's terms, and list what the target lacks.

An exporter has one rule for each strategy that its target knows. A rule takes the complete choice and returns the
file's settings for it, by section, and the reasons why some parameters cannot be expressed. A strategy without a rule,
such as one of a later version, cannot be expressed at all: nothing is left out silently.
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
    """Settings in a target's terms for one strategy, and what the target lacks.

    Attributes:
        sections: Keys and values, by section of the file.
        missing: Parameters that the target cannot express, with the reasons.
        differs: Parameters that the target applies differently from the measured run, with the differences.
    """

    sections: Sections = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)
    differs: Mapping[str, str] = field(default_factory=dict)


Rule = Callable[[Choice, Recommendation], Said]


class TranslatingExporter(Exporter):
    """Exporter that consists of one rule for each strategy.

    Attributes:
        rules: Rules by strategy.
        lacks: Reason why strategies without a rule cannot be expressed.
        beside: Reasons that refer to another file of the same target, which has the setting.
    """

    rules: ClassVar[Mapping[str, Rule]]
    lacks: ClassVar[str]
    beside: ClassVar[frozenset[str]] = frozenset()

    def sections(self, recommendation: Recommendation) -> Sections:
        """Return the settings of all rules together."""
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
        """Return the differences between the target and the measured run that do not depend on the choices."""
        return ()

    def checked(self, recommendation: Recommendation) -> Recommendation:
        """Return the recommendation unchanged, or refuse it if the target cannot express it.

        Raises:
            RecommendationError: The target cannot express it.
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
