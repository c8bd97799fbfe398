"""The native formats, the snippet's text, and what `apply` refuses."""

from __future__ import annotations

import ast
import json
import math
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import yaml
from export_builders import candidates
from hypothesis import given, settings
from hypothesis import strategies as st
from report_builders import complete, environment_variables, make_recommendation, without_gain

import steptune
from steptune.tuner.errors import RecommendationError
from steptune.tuner.export import EXPORTERS, exporter_named
from steptune.tuner.export.base import Exporter, headline
from steptune.tuner.export.native import load_recommendation
from steptune.tuner.records import SCHEMA_VERSION, Candidate, Recommendation, Verdict

NATIVE = [exporter_named("json"), exporter_named("yaml")]


class TestNativeFormats:
    @pytest.mark.parametrize("exporter", NATIVE, ids=lambda e: e.name)
    @settings(max_examples=50, deadline=None)
    @given(candidate=candidates(), rate=st.floats(1e-3, 1e9), text=st.text(max_size=40))
    def test_what_is_exported_is_read_back_exactly(
        self, exporter: Exporter, candidate: Candidate, rate: float, text: str
    ) -> None:
        text = text.encode("utf-8", "ignore").decode()
        recommendation = make_recommendation(candidate, units_per_s=rate, workload=f"a {text}", bottleneck_after=text)
        assert load_recommendation(exporter.export(recommendation)) == recommendation

    @pytest.mark.parametrize("exporter", NATIVE, ids=lambda e: e.name)
    def test_a_file_is_read_by_its_path(self, exporter: Exporter, tmp_path: Path) -> None:
        recommendation = make_recommendation()
        path = tmp_path / exporter.file_name(recommendation)
        path.write_text(exporter.export(recommendation), encoding="utf-8")
        assert load_recommendation(path) == recommendation
        assert load_recommendation(str(path)) == recommendation

    @pytest.mark.parametrize("exporter", NATIVE, ids=lambda e: e.name)
    def test_infinite_figures_survive(self, exporter: Exporter) -> None:
        recommendation = make_recommendation(units_per_s=math.inf)
        assert load_recommendation(exporter.export(recommendation)).units_per_s == math.inf

    def test_yaml_keeps_each_choice_on_one_line(self) -> None:
        lines = exporter_named("yaml").export(make_recommendation()).splitlines()
        assert "  optimizer_implementation: {implementation: fused, contiguous: false}" in lines


def exported_fields(**changes) -> dict:
    return {**msgspec.to_builtins(make_recommendation()), **changes}


class TestRefusals:
    def test_a_missing_file_is_named(self) -> None:
        with pytest.raises(RecommendationError, match=r"nowhere/steptune.json does not exist: give the path"):
            load_recommendation("nowhere/steptune.json")

    def test_a_folder_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(RecommendationError, match="cannot be read"):
            load_recommendation(tmp_path)

    def test_a_binary_file_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "model.pt"
        path.write_bytes(b"\x80\x02\xff\xfe")
        with pytest.raises(RecommendationError, match=r"model.pt cannot be read"):
            load_recommendation(path)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ('{"schema_version": 1,', "is not valid JSON"),
            ("schema_version: 1\nchoices: [", "is not valid YAML"),
            ("key: !!python/object:os.system {}\n", "is not valid YAML"),
            ("just\nprose\n", "holds no recommendation"),
            ("\n", "holds no recommendation"),
            ('{"choices": {}}', "holds no recommendation"),
        ],
    )
    def test_text_that_is_no_recommendation_is_refused(self, text: str, message: str) -> None:
        with pytest.raises(RecommendationError, match=message):
            load_recommendation(text)

    def test_a_newer_schema_names_both_versions_and_the_way_out(self) -> None:
        text = json.dumps(exported_fields(schema_version=SCHEMA_VERSION + 1, steptune_version="9.9"))
        with pytest.raises(RecommendationError, match=rf"schema_version {SCHEMA_VERSION + 1}.*9\.9.*upgrade steptune"):
            load_recommendation(text)

    @pytest.mark.parametrize("version", [0, "one", None, True])
    def test_another_schema_asks_for_a_new_export(self, version: object) -> None:
        with pytest.raises(RecommendationError, match="export it again"):
            load_recommendation(json.dumps(exported_fields(schema_version=version)))

    def test_an_unknown_field_is_named(self) -> None:
        with pytest.raises(RecommendationError, match="`speed`"):
            load_recommendation(json.dumps(exported_fields(speed="ludicrous")))

    def test_a_wrong_value_is_named_with_its_place(self) -> None:
        with pytest.raises(RecommendationError, match=r"\$\.global_batch"):
            load_recommendation(json.dumps(exported_fields(global_batch="many")))


class TestSnippet:
    def test_variables_are_set_before_torch_is_imported(self) -> None:
        text = exporter_named("python").export(
            make_recommendation(Candidate(choices={"cpu_threads": {"bind": "close"}}))
        )
        assert text.index("os.environ.update({'OMP_PLACES': 'cores', 'OMP_PROC_BIND': 'close'})") < text.index(
            "import torch\n"
        )

    def test_without_variables_the_environment_is_left_alone(self) -> None:
        assert "environ.update" not in exporter_named("python").export(make_recommendation())

    @settings(max_examples=50, deadline=None)
    @given(text=st.text(max_size=60) | st.sampled_from(['"""\nimport evil', "\\", '\\"""', '"', "$workload"]))
    def test_no_name_can_break_out_of_its_string(self, text: str) -> None:
        """The workload and the record in the script are the ones that were exported."""
        text = text.encode("utf-8", "ignore").decode()
        tree = ast.parse(exporter_named("python").export(make_recommendation(workload=text, bottleneck_after=text)))
        assigned = {
            node.targets[0].id: ast.literal_eval(node.value)  # type: ignore[attr-defined]
            for node in tree.body
            if isinstance(node, ast.Assign)
        }
        assert set(assigned) == {"WORKLOAD", "RECOMMENDATION"}
        assert assigned["WORKLOAD"] == text
        assert load_recommendation(assigned["RECOMMENDATION"]).bottleneck_after == text

    def test_the_story_of_the_search_is_left_out_and_what_runs_is_not(self) -> None:
        recommendation = make_recommendation()
        (text,) = (
            ast.literal_eval(node.value)
            for node in ast.parse(exporter_named("python").export(recommendation)).body
            if isinstance(node, ast.Assign) and node.targets[0].id == "RECOMMENDATION"  # type: ignore[attr-defined]
        )
        embedded = load_recommendation(text)
        assert embedded.certificate.not_tried == ()
        assert embedded.choices == recommendation.choices
        assert embedded.parts == recommendation.parts


class Partial(Exporter):
    """A target that lacks something."""

    name = "partial"
    summary = "a target that lacks something"
    version = "nothing 1.0"
    usage = "None."
    comment = "//"

    def file_name(self, recommendation: Recommendation) -> str:
        return "partial.txt"

    def export(self, recommendation: Recommendation) -> str:
        return self.header(recommendation)

    def not_expressible(self, recommendation: Recommendation) -> tuple[str, ...]:
        return ("dataset_cache: the target has no caches,\nof any kind",)


class TestHeader:
    def test_what_cannot_be_expressed_is_said_on_a_line_of_its_own(self) -> None:
        lines = Partial().export(make_recommendation()).splitlines()
        assert lines[-1] == "// Not expressed here: dataset_cache: the target has no caches, of any kind"
        assert all(line.startswith("// ") for line in lines)

    def test_a_name_with_line_breaks_stays_in_its_comment(self) -> None:
        text = Partial().export(make_recommendation(workload="a\nb\x85c\u2028d\x00e"))
        assert "// Steptune for a b c d e: 2.42x" in text

    def test_a_command_is_named_as_it_is_typed(self) -> None:
        text = Partial().export(make_recommendation(workload="-- python train.py --lr 1"))
        assert "// Steptune for python train.py --lr 1: 2.42x" in text

    @pytest.mark.parametrize(
        ("recommendation", "claim"),
        [
            (make_recommendation(), "2.42x the speed of today's settings (95% interval 2.37x to 2.47x)"),
            (make_recommendation(gain=None), "faster than today's settings"),
            (without_gain(), "no significant gain was found"),
            (make_recommendation(verdict=Verdict.UNCONFIRMED), "whose gain is not confirmed"),
        ],
    )
    def test_the_headline_claims_no_more_than_the_verdict(self, recommendation: Recommendation, claim: str) -> None:
        assert headline(recommendation).startswith(claim) or claim in headline(recommendation)


class TestLaunchEnvironment:
    def test_it_is_what_the_choices_need_before_torch(self) -> None:
        recommendation = make_recommendation(Candidate(choices={"cpu_threads": {"bind": "close"}}))
        assert steptune.launch_environment(recommendation) == {"OMP_PROC_BIND": "close", "OMP_PLACES": "cores"}

    def test_it_reads_an_export(self) -> None:
        text = exporter_named("yaml").export(make_recommendation())
        assert steptune.launch_environment(text) == {}


def test_the_builders_agree_with_the_strategies() -> None:
    recommendation = make_recommendation()
    assert recommendation.environment_variables == environment_variables(complete(recommendation.candidate))


def test_importing_steptune_and_exporting_needs_no_torch() -> None:
    """Workload files and launchers import steptune before they decide what torch may see."""
    program = (
        "import sys, steptune, steptune.tuner.export\n"
        "steptune.apply, steptune.launch_environment, steptune.load_recommendation\n"
        "assert 'torch' not in sys.modules and 'plotly' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_steptune_has_no_other_attributes() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'aply'"):
        _ = steptune.aply


def test_all_native_texts_are_plain_data() -> None:
    """Other tools can read them without Steptune."""
    recommendation = make_recommendation()
    as_json = json.loads(EXPORTERS[0].export(recommendation))
    as_yaml = yaml.safe_load(EXPORTERS[1].export(recommendation))
    assert as_json == as_yaml
