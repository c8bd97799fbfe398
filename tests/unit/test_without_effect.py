"""A choice that was not carried out is not recommended, however fast its trials were."""

from __future__ import annotations

from msgspec.structs import replace
from search_builders import SMALL, Machine, StudyRun, candidate

from steptune.tuner.records import Effect, TrialResult

GIVEN_UP = "9 graphs: compiled too often (L['self'].number == 3), so it runs as it is"


class WithoutEffect(Machine):
    """The best choices of the loader are never carried out."""

    def run(self, *arguments, **options) -> list[TrialResult]:
        return [self._seen(result) for result in super().run(*arguments, **options)]

    def _seen(self, result: TrialResult) -> TrialResult:
        if result.candidate.choices.get("loader") != {"level": 2}:
            return result
        return replace(result, effects=(Effect(strategy="loader", took=False, detail=GIVEN_UP),))


def test_is_neither_accepted_nor_confirmed_and_the_reason_is_told() -> None:
    study = StudyRun(WithoutEffect(SMALL))
    recommendation = study.run()
    assert recommendation.candidate.choices.get("loader") != {"level": 2}
    tried = [d for d in study.decisions if d.candidate and d.candidate.choices.get("loader") == {"level": 2}]
    assert tried
    assert {decision.verdict for decision in tried} == {"no_effect"}
    assert all(f"loader had no effect: {GIVEN_UP}" in decision.reason for decision in tried)


def test_it_is_the_best_where_it_is_carried_out() -> None:
    assert StudyRun(Machine(SMALL)).run().candidate == candidate(loader=2, products=2)
