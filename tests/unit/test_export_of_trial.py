"""Any configuration that a study measured can be exported in the place of the recommended one."""

import json

import pytest
from msgspec.structs import replace
from page_builders import OUT_OF_MEMORY, large_story

from steptune.tuner.errors import ChoiceError, RecommendationError
from steptune.tuner.export import exporter_named, exporters_for
from steptune.tuner.export.of_trial import recommendation_of_trial
from steptune.tuner.records import Trial, Verdict

STUDY, TRIALS, _, RECOMMENDATION = large_story()
assert RECOMMENDATION is not None


def _verdict(trial: Trial) -> str:
    found = [t.result for t in TRIALS if t.candidate == trial.candidate and t.result is not None]
    if any(r.guard is not None and not r.guard.passed for r in found):
        return "rejected"
    return "usable" if any(r.ok for r in found) else "failed"


@pytest.mark.parametrize("by", ["number", "id"])
def test_every_usable_configuration_is_written_by_every_format_that_can_hold_it(by: str) -> None:
    usable = [t for t in TRIALS if _verdict(t) == "usable" and t.candidate != RECOMMENDATION.candidate]
    assert len({trial.candidate.key for trial in usable}) > 10
    for trial in usable[::20]:
        named = {"number": str(trial.sequence), "id": trial.trial_id}[by]
        made = recommendation_of_trial(STUDY, RECOMMENDATION, TRIALS, named)
        assert (made.candidate, made.verdict, made.gain) == (trial.candidate, Verdict.UNCONFIRMED, None)
        assert made.peak_memory_bytes == max(
            t.result.peak_memory_bytes for t in TRIALS if t.candidate == trial.candidate and t.result and t.result.ok
        )
        assert [part.strategy for part in made.parts] == list(trial.candidate.choices)
        read = json.loads(exporter_named("json").export(made))
        assert read["candidate"]["choices"] == trial.candidate.choices
        for exporter in exporters_for(made):
            assert exporter.export(made)
        assert f"trial {trial.sequence}, chosen by hand" in exporter_named("python").export(made)


def test_a_trial_of_the_recommended_configuration_is_the_recommendation() -> None:
    own = next(t for t in TRIALS if _verdict(t) == "usable")
    recommended = replace(RECOMMENDATION, candidate=own.candidate)
    assert recommendation_of_trial(STUDY, recommended, TRIALS, own.trial_id) is recommended


def test_another_training_is_refused_with_the_reason() -> None:
    trial = next(t for t in TRIALS if _verdict(t) == "rejected")
    with pytest.raises(RecommendationError, match=f"trial {trial.sequence} changes the training"):
        recommendation_of_trial(STUDY, RECOMMENDATION, TRIALS, str(trial.sequence))


def test_a_configuration_that_never_ran_is_refused_with_the_reason() -> None:
    trial = next(t for t in TRIALS if _verdict(t) == "usable")
    trials = [
        replace(t, result=replace(t.result, failure=OUT_OF_MEMORY)) if t.candidate == trial.candidate else t
        for t in TRIALS
    ]
    with pytest.raises(RecommendationError, match=f"trial {trial.sequence} failed: 24.1 GiB were asked for"):
        recommendation_of_trial(STUDY, RECOMMENDATION, trials, str(trial.sequence))


@pytest.mark.parametrize("wanted", ["201", "0", "", "x"])
def test_what_names_no_trial_is_refused(wanted: str) -> None:
    with pytest.raises(ChoiceError, match="no trial"):
        recommendation_of_trial(STUDY, RECOMMENDATION, TRIALS, wanted)
