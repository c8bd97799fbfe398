"""Promises of every exporter, for every entry of `EXPORTERS`."""

from __future__ import annotations

import ast
import re

import pytest
from export_builders import ENVIRONMENTS, FACTS, candidates
from export_builders import RECOMMENDATIONS as OF_EVERY_PART
from hypothesis import given, settings
from hypothesis import strategies as st
from report_builders import complete, environment_variables, make_recommendation, without_gain

from steptune.tuner.errors import ChoiceError, RecommendationError
from steptune.tuner.export import EXPORTERS, OWN, Exporter, exporter_named
from steptune.tuner.export.base import one_line
from steptune.tuner.export.settings import settings_of
from steptune.tuner.export.translation import TranslatingExporter
from steptune.tuner.records import Candidate, Choice, Environment, Recommendation
from steptune.tuner.strategies import STRATEGIES, Strategy, Supported
from steptune.tuner.strategies.combine import conflict, normalise

BOUND_THREADS = Candidate(choices={"cpu_threads": {"bind": "close"}})
RECOMMENDATIONS = {
    "faster": make_recommendation(),
    "no_gain": without_gain(),
    "needs_environment": make_recommendation(BOUND_THREADS),
    **OF_EVERY_PART,
}
HELD = [
    pytest.param(exporter, recommendation, id=f"{exporter.name}-{name}")
    for exporter in EXPORTERS
    for name, recommendation in RECOMMENDATIONS.items()
    if exporter.refusal(recommendation) is None
]
REFUSED = [
    pytest.param(exporter, recommendation, id=f"{exporter.name}-{name}")
    for exporter in EXPORTERS
    for name, recommendation in RECOMMENDATIONS.items()
    if exporter.refusal(recommendation) is not None
]
TRANSLATING = [exporter for exporter in EXPORTERS if isinstance(exporter, TranslatingExporter)]


@pytest.mark.parametrize("exporter", EXPORTERS, ids=lambda exporter: exporter.name)
def test_it_is_found_by_its_name_and_says_in_one_line_what_it_is_for(exporter: Exporter) -> None:
    assert exporter_named(exporter.name) is exporter
    for text in (exporter.name, exporter.summary, exporter.version, exporter.usage):
        assert text
        assert text == one_line(text)


@pytest.mark.parametrize("exporter", [*OWN, *TRANSLATING], ids=lambda exporter: exporter.name)
def test_epochs_ahead_are_carried_or_listed_as_missing(exporter: Exporter) -> None:
    """No other tool has such a loader; where a Python file is exported, it calls Steptune's."""
    loading: Choice = {"num_workers": 2, "persistent_workers": True, "epochs_ahead": True}
    recommendation = make_recommendation(Candidate(choices={"data_loading": loading}))
    listed = any("epochs_ahead" in sentence for sentence in exporter.not_expressible(recommendation))
    in_python = exporter.name in ("accelerate_python", "transformers", "lightning")
    assert listed == (exporter not in OWN and not in_python)
    if not listed:
        wanted = r"steptune\.epochs_ahead\(loader\)" if in_python else "epochs_ahead.*true"
        assert re.search(wanted, exporter.export(recommendation), re.IGNORECASE)


@pytest.mark.parametrize(("exporter", "recommendation"), HELD)
def test_the_text_is_whole_lines_and_says_its_version_and_what_is_missing(
    exporter: Exporter, recommendation: Recommendation
) -> None:
    """The last two where the format has comments; elsewhere they are shown beside the text."""
    text = exporter.export(recommendation)
    assert text == exporter.export(recommendation)
    assert text.strip()
    assert text.endswith("\n")
    assert not text.endswith("\n\n")
    assert text.encode("utf-8")
    name = exporter.file_name(recommendation)
    assert "." in name
    assert "/" not in name
    assert name == one_line(name)
    if name.endswith(".py"):
        ast.parse(text)
    if exporter.comment is not None:
        assert exporter.version in text
        assert all(one_line(sentence) in text for sentence in exporter.not_expressible(recommendation))


@pytest.mark.parametrize(("exporter", "recommendation"), HELD)
def test_another_recommendation_gives_another_text(exporter: Exporter, recommendation: Recommendation) -> None:
    """Or at least another list of what is not said, which is shown beside the text."""
    other = changed(recommendation, recommendation.candidate.with_choice("cpu_threads", {"num_threads": 3}))
    assert said(exporter, recommendation) != said(exporter, other)


def changed(recommendation: Recommendation, candidate: Candidate) -> Recommendation:
    """With the choices of another candidate; what this version does not know stays."""
    choices = complete(candidate)
    kept = {name: choice for name, choice in recommendation.choices.items() if name not in choices}
    return make_recommendation(
        candidate,
        choices={**choices, **kept},
        environment_variables=environment_variables(choices),
        hardware=recommendation.hardware,
        num_ranks=recommendation.num_ranks,
    )


def said(exporter: Exporter, recommendation: Recommendation) -> tuple[str, tuple[str, ...]]:
    return exporter.export(recommendation), exporter.not_expressible(recommendation)


@pytest.mark.parametrize(("exporter", "recommendation"), REFUSED)
def test_what_cannot_be_held_is_refused_with_the_way_out(exporter: Exporter, recommendation: Recommendation) -> None:
    reason = exporter.refusal(recommendation)
    assert reason
    with pytest.raises(RecommendationError, match=re.escape(reason)):
        exporter.export(recommendation)
    assert any(f"export {other.name}" in reason for other in EXPORTERS)


def body(exporter: Exporter, recommendation: Recommendation) -> list[str]:
    """Without comments, which list what is not said."""
    lines = exporter.export(recommendation).splitlines()
    return [line for line in lines if exporter.comment is None or not line.lstrip().startswith(exporter.comment)]


def possible(strategy: Strategy, choice: Choice, environment: Environment) -> bool:
    try:
        complete_choice = strategy.completed(choice)
    except ChoiceError:
        return False
    return complete_choice == choice and isinstance(strategy.supports(choice, environment, FACTS), Supported)


@st.composite
def neighbours(draw: st.DrawFn) -> tuple[Recommendation, Recommendation, str, str]:
    """Two candidates that can be run and differ in one parameter of one strategy."""
    environment = ENVIRONMENTS[draw(st.sampled_from(sorted(ENVIRONMENTS)))]
    candidate = draw(candidates(environment, runnable=True))
    strategy = draw(st.sampled_from(STRATEGIES))
    choice = strategy.complete(candidate.choices.get(strategy.name, {}), FACTS)
    parameter = draw(st.sampled_from(sorted(choice)))
    values = [
        v for allowed in strategy.values[parameter] for v in (allowed[1:5] if type(allowed) is range else [allowed])
    ]
    value = draw(st.sampled_from(values))
    other = {**choice, parameter: value}
    same = parameter == "prefetch_factor" and value is None  # which is PyTorch's 2
    changed_one = candidate.with_choice(strategy.name, other)
    if same or not possible(strategy, other, environment) or conflict(changed_one, environment, FACTS):
        changed_one = candidate
    made = [candidate, normalise(changed_one, FACTS)]
    first, second = (
        make_recommendation(c, hardware=environment.hardware, num_ranks=environment.num_ranks) for c in made
    )
    return first, second, strategy.name, parameter


def meaning(recommendation: Recommendation) -> dict[str, Choice]:
    """Its choices, with TF32 said in one way: as the level, or as the flag beside FP32, it is the same."""
    choices = dict(recommendation.choices)
    if choices["precision"]["level"] == "fp32" and choices["backend_flags"]["tf32"]:
        choices["precision"] = {**choices["precision"], "level": "tf32"}
    if choices["precision"]["level"] == "tf32":
        choices["backend_flags"] = {**choices["backend_flags"], "tf32": True}
    return choices


@pytest.mark.parametrize("exporter", TRANSLATING, ids=lambda e: e.name)
@settings(max_examples=200)
@given(pair=neighbours())
def test_nothing_is_left_out_silently(
    exporter: TranslatingExporter, pair: tuple[Recommendation, Recommendation, str, str]
) -> None:
    """Candidates that differ in a parameter have other texts, or another list of what is not said."""
    first, second, strategy, parameter = pair
    counted = {(s.strategy, s.parameter) for one in (first, second) for s in settings_of(one)}
    if (strategy, parameter) not in counted or any(exporter.refusal(one) for one in (first, second)):
        return
    if meaning(first) != meaning(second) and body(exporter, first) == body(exporter, second):
        missed = f"{strategy}.{parameter}: {first.candidate.label} and {second.candidate.label}"
        assert exporter.not_expressible(first) != exporter.not_expressible(second), missed


@pytest.mark.parametrize("exporter", TRANSLATING, ids=lambda e: e.name)
def test_a_strategy_of_a_later_version_is_listed(exporter: TranslatingExporter) -> None:
    choices = {**complete(Candidate()), "warp_drive": {"factor": 9}}
    recommendation = make_recommendation(choices=choices)
    if exporter.refusal(recommendation) is None:
        missing = exporter.not_expressible(recommendation)
        assert any(re.search(r"^warp_drive: .*\bfactor=", sentence) for sentence in missing)


@pytest.mark.parametrize("exporter", TRANSLATING, ids=lambda e: e.name)
def test_rules_are_for_strategies_that_exist(exporter: TranslatingExporter) -> None:
    assert set(exporter.rules) <= {strategy.name for strategy in STRATEGIES} | {"sharding"}


def test_steptunes_own_formats_hold_everything() -> None:
    for exporter in OWN:
        for recommendation in RECOMMENDATIONS.values():
            assert exporter.refusal(recommendation) is None
            assert exporter.not_expressible(recommendation) == ()


def test_names_are_unique() -> None:
    assert len({exporter.name for exporter in EXPORTERS}) == len(EXPORTERS)


def test_an_unknown_format_is_refused_with_those_that_exist() -> None:
    with pytest.raises(ChoiceError, match=r"no export format 'toml': choose one of json, yaml, python"):
        exporter_named("toml")
