"""What holds for every entry of `EXPORTERS`."""

from __future__ import annotations

import pytest
from report_builders import make_recommendation, without_gain

from tuner.errors import ChoiceError
from tuner.export import EXPORTERS, Exporter, exporter_named
from tuner.export.base import one_line
from tuner.records import Candidate, Recommendation

BOUND_THREADS = Candidate(choices={"cpu_threads": {"bind": "close"}})
RECOMMENDATIONS = {
    "faster": make_recommendation(),
    "no_gain": without_gain(),
    "needs_environment": make_recommendation(BOUND_THREADS),
}


@pytest.mark.parametrize("recommendation", RECOMMENDATIONS.values(), ids=RECOMMENDATIONS)
@pytest.mark.parametrize("exporter", EXPORTERS, ids=lambda e: e.name)
class TestExporter:
    def test_the_text_is_whole_lines(self, exporter: Exporter, recommendation: Recommendation) -> None:
        text = exporter.export(recommendation)
        assert text.strip()
        assert text.endswith("\n")
        assert not text.endswith("\n\n")
        assert text.encode("utf-8")

    def test_the_same_recommendation_gives_the_same_text(
        self, exporter: Exporter, recommendation: Recommendation
    ) -> None:
        assert exporter.export(recommendation) == exporter.export(recommendation)

    def test_another_recommendation_gives_another_text(
        self, exporter: Exporter, recommendation: Recommendation
    ) -> None:
        other = make_recommendation(Candidate(choices={"cpu_threads": {"num_threads": 3}}))
        assert exporter.export(recommendation) != exporter.export(other)

    def test_it_says_what_it_is_for_and_how_it_is_used_in_one_line(
        self, exporter: Exporter, recommendation: Recommendation
    ) -> None:
        for text in (exporter.name, exporter.summary, exporter.version, exporter.usage):
            assert text
            assert text == one_line(text)

    def test_the_version_is_in_the_text(self, exporter: Exporter, recommendation: Recommendation) -> None:
        """Where the format has comments; elsewhere `version` is shown beside the text."""
        text = exporter.export(recommendation)
        assert exporter.comment is None or exporter.version in text

    def test_the_file_name_is_a_plain_name(self, exporter: Exporter, recommendation: Recommendation) -> None:
        name = exporter.file_name(recommendation)
        assert "." in name
        assert "/" not in name
        assert name == one_line(name)

    def test_what_cannot_be_expressed_is_listed_and_said(
        self, exporter: Exporter, recommendation: Recommendation
    ) -> None:
        missing = exporter.not_expressible(recommendation)
        assert isinstance(missing, tuple)
        if exporter.comment is not None:
            text = exporter.export(recommendation)
            assert all(one_line(sentence) in text for sentence in missing)

    def test_it_is_found_by_its_name(self, exporter: Exporter, recommendation: Recommendation) -> None:
        assert exporter_named(exporter.name) is exporter


def test_names_are_unique() -> None:
    assert len({exporter.name for exporter in EXPORTERS}) == len(EXPORTERS)


def test_an_unknown_format_is_refused_with_those_that_exist() -> None:
    with pytest.raises(ChoiceError, match=r"no export format 'toml': the formats are json, yaml, python"):
        exporter_named("toml")
