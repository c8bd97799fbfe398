"""One command tunes a workload, and the other commands read, export and check what it found."""

import csv
import io
import json
import re
import subprocess
import sys
from contextlib import closing
from html import unescape

import msgspec
import pytest
import yaml
from command import CONTROL, TUNED

from steptune.service.database import open_store
from steptune.tuner.export import EXPORTERS, OWN
from steptune.tuner.records import Recommendation
from steptune.tuner.wording import ratio, ratio_range

pytestmark = pytest.mark.xdist_group("tuned_study")

UNITLESS = re.compile("(time|duration|memory|latency|rate)(?!.*(_ns|_s|_ms|_bytes)$)")
"""Names of quantities that have a unit, without one."""


@pytest.fixture
def recommendation(tuned_inside):
    return tuned_inside("show", "--json").json["recommendation"]


@pytest.fixture
def study_id(tuned_inside):
    return tuned_inside("list", "--json").json[0]["study"]["study_id"]


def test_the_answer_is_one_screen(tuning, recommendation):
    out = tuning.out
    assert len(out.splitlines()) < 24
    assert all(len(line) <= 80 for line in out.splitlines())
    assert re.search(r"\d+\.\d+× as fast as today's settings", out)
    for part in recommendation["parts"]:
        assert f"{part['strategy']}: " in out.partition("Changes")[2].partition("How to use it")[0]
    assert "python results/train_recommended.py" in out.partition("How to use it")[2].partition("Next")[0]


def test_all_of_it_has_the_claim_the_reasons_and_the_rejections(tuned_inside, recommendation):
    out = tuned_inside("show", "--all").out
    assert re.search(r"\d+\.\d+× as fast as today's settings", out)
    assert re.search(r"[\d.,]+ samples/s with today's settings, [\d.,]+ samples/s as recommended", out)
    assert re.search(r"95 % interval\s+[\d.,]+× to [\d.,]+×", out)
    assert re.search(r"Bottleneck\s+\w+\s+before: input", out)
    trusted = [name for name in ("before", "after") if recommendation[f"shares_{name}"]]
    columns = {"before": "today", "after": "recommended"}
    assert re.search(" +".join(["step breakdown", *(columns[name] for name in trusted)]), out)
    accepted = out.partition("Recommended changes")[2].partition("What was tried")[0]
    for part in recommendation["parts"]:
        assert f"{part['strategy']}:" in accepted
    if len(recommendation["parts"]) == 1:
        assert f"{recommendation['gain']['ratio']:.2f}×" in accepted, "an only part contributes what the answer gains"
    assert "left out by --only" in out.partition("Untried choices")[2]


def test_the_claim_is_supported_by_its_interval(recommendation):
    assert recommendation["verdict"] == "faster"
    low, high = recommendation["gain"]["interval"]["low"], recommendation["gain"]["interval"]["high"]
    assert 1 < low < recommendation["gain"]["ratio"] < high
    assert recommendation["baseline_units_per_s"] < recommendation["units_per_s"]


def test_every_command_and_file_has_one_speed_and_one_interval(tuning, tuned, tuned_inside, study_id, recommendation):
    gain = recommendation["gain"]
    interval = gain["interval"]["low"], gain["interval"]["high"]
    sides = f"{study_id}:baseline", f"{study_id}:recommended"
    texts = {
        "tune": tuning.out,
        "show": tuned_inside("show").out,
        "show --all": tuned_inside("show", "--all").out,
        "list": tuned_inside("list").out,
        "compare": tuned_inside("compare", *sides).out,
        "report": unescape((tuned.folder / "results" / "report.html").read_text()),
    }
    for name, text in texts.items():
        flat = " ".join(text.split())
        assert ratio(gain["ratio"]) in flat, name
        assert ratio_range(*interval) in flat, name
    script = (tuned.folder / "results" / "train_recommended.py").read_text()
    assert f"{ratio(gain['ratio'], 'x')} the speed of today's settings" in script
    assert ratio_range(*interval, "x") in script
    said = {ratio(value) for value in (gain["ratio"], *interval)}
    assert set(re.findall(r"[\d.]+×", texts["tune"])) == said
    assert not re.findall(r"[\d.]+×|[+-][\d.]+ ?%", tuning.err), "progress states no gain"


def test_progress_off_a_terminal_is_one_line_for_each_thing_that_happened(tuning):
    assert not CONTROL.search(tuning.err)
    study, *lines = tuning.err.splitlines()
    assert re.fullmatch(r"study [0-9a-z]{26}", study)
    assert all(re.match(r"\[[^]]+ (s|min|h)\] \S", line) for line in lines), tuning.err
    assert any("accepted" in line for line in lines)
    assert len(lines) < 30


def test_the_report_is_one_file_that_needs_no_network(tuned):
    html = (tuned.folder / "results" / "report.html").read_text()
    loaded = re.findall(r"""<(?:script|img|iframe|link)\b[^>]*\b(?:src|href)\s*=\s*["']?([^"'\s>]+)""", html)
    assert [address for address in loaded if not address.startswith("data:")] == []
    assert not re.search(r"@import|url\(\s*['\"]?(?:https?:)?//", html)
    assert "as fast as" in html


@pytest.mark.parametrize("part", [slice(12), slice(-8, None)], ids=["beginning", "end"])
def test_show_reads_a_study_back_by_a_part_of_its_id(tuned_inside, tuning, study_id, part):
    shown = tuned_inside("show", study_id[part]).out
    assert shown.partition("How to use it")[0] == tuning.out.partition("How to use it")[0]
    assert f"steptune export {study_id[-8:]}" in shown


@pytest.mark.parametrize("columns", [60, 120])
def test_a_narrow_terminal_breaks_neither_ids_nor_figures(tuned, study_id, columns):
    listed = tuned("list", variables={"COLUMNS": str(columns)}).out
    assert re.search(rf"^{study_id}  \d{{4}}-\d\d-\d\d \d\d:\d\d  \d", listed, re.MULTILINE)
    shown = tuned("show", "--all", variables={"COLUMNS": str(columns)}).out
    assert all(len(line) <= columns for line in (listed + shown).splitlines())
    recommended = shown.partition("Recommended changes")[2]
    assert re.search(r"^[\d.]+× +[\d.]+× to [\d.]+× +sampling +data_loading: ", recommended, re.MULTILINE)


def test_output_has_no_colours_off_a_terminal_or_when_they_are_refused(tuned, tuning):
    assert not CONTROL.search(tuning.out)
    assert not CONTROL.search(tuned("show", "--all", variables={"NO_COLOR": "1", "TERM": "xterm-256color"}).out)


def test_the_bar_is_readable_without_colours(tuned_inside):
    """Neighbours in a bar differ by their shade."""
    [bar] = [line for line in tuned_inside("show", "--all").out.splitlines() if line.startswith("today  ")]
    assert len(set(bar) & set("█▓▒░")) > 1


def test_exports_of_all_formats_say_the_same(tuned, tuned_inside, tmp_path, recommendation):
    written = tuned_inside("export", "--output", str(tmp_path), "--json").json
    paths = {entry["format"]: entry["path"] for entry in written["exports"]}
    assert set(paths) == {exporter.name for exporter in EXPORTERS} - {"accelerate_fsdp1"}  # nothing is sharded
    in_json = json.loads((tmp_path / "steptune.json").read_text())
    in_yaml = yaml.safe_load((tmp_path / "steptune.yaml").read_text())
    assert in_json == in_yaml
    text = json.dumps(in_json)
    for strategy, choice in recommendation["candidate"]["choices"].items():
        assert strategy in text
        for value in choice.values():
            assert json.dumps(value) in text
    assert (tmp_path / "report.html").stat().st_size > 10_000
    for name in (paths[exporter.name] for exporter in OWN):
        assert (tuned.folder / "results" / name.rpartition("/")[2]).read_text() == (tmp_path / name).read_text()


def test_one_format_goes_to_standard_output(tuned, tuned_inside):
    ended = tuned_inside("export", "--format", "yaml", "--output", "-")
    assert ended.out == (tuned.folder / "results" / "steptune.yaml").read_text()
    assert not ended.err


def test_another_trial_s_configuration_is_exported_in_place_of_the_recommended_one(tuned, tuned_inside):
    exported = tuned_inside("export", "--trial", "1", "--format", "json", "--output", "-").json
    assert exported["candidate"]["choices"] == {}
    refused = tuned("export", "--trial", "9999", "--format", "json", "--output", "-", status=2)
    assert "names no trial of this study" in " ".join(refused.err.split())


def test_the_trials_are_exported_as_a_table(tuned, tuned_inside):
    rows = list(csv.DictReader(io.StringIO(tuned_inside("export", "--format", "csv", "--output", "-").out)))
    assert {row["purpose"] for row in rows} >= {"baseline", "confirm"}
    assert all(float(row["units_per_s"]) > 0 for row in rows if row["state"] == "completed")


def test_the_study_is_exported_for_optuna(tuned, tuned_inside, tmp_path):
    written = tuned_inside("export", "--format", "optuna", "--output", str(tmp_path), "--json").json
    assert written["report"] is None
    assert [entry["path"] for entry in written["exports"]] == [str(tmp_path / "optuna_study.log")]
    assert (tmp_path / "optuna_study.log").read_text().startswith('{"op_code":0')


def test_one_export_may_be_named_itself(tuned, tuned_inside, tmp_path):
    path = tmp_path / "new" / "mine.log"
    written = tuned_inside("export", "--format", "optuna", "--output", str(path), "--json").json
    assert [entry["path"] for entry in written["exports"]] == [str(path)]
    assert path.read_text().startswith('{"op_code":0')


@pytest.mark.parametrize("command", ["show", "list"])
def test_json_names_carry_units(tuned_inside, command):
    assert not list(_unitless(tuned_inside(command, "--json").json))


def _unitless(value, name=""):
    if isinstance(value, dict):
        for key, inner in value.items():
            if not key.startswith("shares_"):  # by category of the step
                yield from _unitless(inner, key)
    elif isinstance(value, list):
        for inner in value:
            yield from _unitless(inner, name)
    elif isinstance(value, int | float) and not isinstance(value, bool) and UNITLESS.search(name):
        yield name


def test_json_is_the_record(tuned, recommendation):
    """The output of `--json` can be read back by the type that it came from."""
    read = msgspec.convert(recommendation, Recommendation)
    assert json.loads(msgspec.json.encode(read)) == recommendation


def test_a_complete_study_is_not_resumed(tuned_inside, study_id):
    message = tuned_inside("resume", study_id, status=2).error
    assert "is complete" in message
    assert f"steptune show {study_id}" in message
    assert f"steptune resume {study_id} --budget" in message


def test_apply_in_a_plain_script_gives_the_measured_configuration(tuned, tmp_path, recommendation):
    script = tmp_path / "train.py"
    script.write_text(
        "import json, sys, steptune\n"
        "from steptune.tuner.workloads.zoo.synthetic import Synthetic\n"
        "job = steptune.apply(sys.argv[1], Synthetic(load_ms=20, compute_ms=2, batch=4))\n"
        "batch = next(iter(job.loader))\n"
        "loss = job.step(batch)\n"
        "print(json.dumps({'num_workers': job.loader.num_workers, 'loss': float(loss)}))\n"
    )
    found = json.loads(_python(tuned, script, "results/steptune.json"))
    loading = recommendation["choices"]["data_loading"]
    assert found["num_workers"] == loading["num_workers"]
    assert found["loss"] > 0


def test_the_exported_script_trains(tuned):
    assert "loss" in _python(tuned, "results/train_recommended.py", "--steps", "3")


def _python(tuned, *arguments):
    process = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=tuned.folder,
        env=tuned.environment(),
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


def test_verify_trains_both_and_compares(tuned, recommendation):
    verified = tuned("verify", "--steps", "6", "--json")
    found = verified.json
    changed = bool(recommendation["candidate"]["choices"])
    assert ("The recommendation is today's configuration" in verified.err) is not changed
    assert found["same"] is True
    assert [len(curve["losses"]) for curve in found["baseline"]] == [6, 6, 6]
    assert found["recommended"]["losses"] == pytest.approx(found["baseline"][0]["losses"], rel=1e-4)
    # The start of workers and a compilation are no part of a speed.
    assert found["recommended"]["num_untimed_steps"] == 3
    assert found["recommended"]["num_units"] == 3 * 4
    assert found["recommended_units_per_s"] == pytest.approx(12 / found["recommended"]["duration_s"])


def test_a_reference_with_arguments_is_kept(tuned_inside):
    assert tuned_inside("show", "--json").json["study"]["workload"] == TUNED


def test_two_trials_of_a_study_are_compared(tuned_inside, recommendation):
    out = tuned_inside("compare", "last:baseline", "last:recommended").out
    assert "speed in the study: confirmed in " in out
    said = out.partition("to   ")[2].partition("\n")[0]
    assert ("data_loading: " if recommendation["candidate"]["choices"] else "baseline") in said
    compared = tuned_inside("compare", "last:baseline", "last:recommended", "--json").json
    assert compared["measured"]["low_ns"] <= compared["measured"]["high_ns"]
    assert all(module["cause"] and module["before_ns"] != module["after_ns"] for module in compared["modules"])
    assert compared["modules"] or not compared["trusted"]  # on a busy machine no difference is told
    changes = [d["after_ns"] - d["before_ns"] for d in compared["categories"]]
    assert sum(changes) == pytest.approx(compared["step"]["after_ns"] - compared["step"]["before_ns"], abs=10)
    with closing(open_store("sqlite:///steptune.db")) as store:
        trials = [trial for trial in store.trials(recommendation["study_id"]) if trial.result is not None]
    profiled, other = (next(t for t in trials if bool(t.result.breakdowns) is known) for known in (True, False))
    assert tuned_inside("compare", profiled.trial_id, f"last:{profiled.sequence}", "--json").json["step"]["low_ns"] < 0
    assert "but not profiled" in tuned_inside("compare", other.trial_id, other.trial_id, status=2).error
    assert "has no trial '999'" in tuned_inside("compare", "last:1", "last:999", status=2).error
