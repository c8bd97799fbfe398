"""A workload's own knob is found, applied and trained with, from the command line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from command import PATIENT, Steptune

pytestmark = pytest.mark.xdist_group("knobs")

WORKLOAD = Path(__file__).parents[1] / "workloads" / "knobbed.py"


@pytest.fixture(scope="module")
def steptune(tmp_path_factory):
    return Steptune(tmp_path_factory.mktemp("knobs"))


@pytest.fixture(scope="module")
def recommendation(steptune):
    # The trials end the search: a slow machine has time for them all.
    arguments = ("--only", "knobs", "--search", "model", "--trials", "4", "--budget", "3m", "--device", "cpu")
    return steptune("tune", f"{WORKLOAD}:Pieces", *arguments, *PATIENT, "--output", "results", "--json").json


def test_a_faster_value_is_recommended_under_the_guard(recommendation):
    """Which of the two depends on the few trials that there are; both are far faster than today's."""
    ((name, choice),) = recommendation["candidate"]["choices"].items()
    assert (name, choice["value"]) in [("knobs.num_pieces", 1), ("knobs.num_pieces", 4)]
    assert recommendation["verdict"] == "faster"
    assert recommendation["guard"]["passed"]
    assert recommendation["choices"]["knobs.offset"] == {"value": 0.0}


@pytest.mark.usefixtures("recommendation")
def test_what_is_not_the_same_training_and_what_needs_consent_is_said(steptune):
    rows = {row["moves"][0]["strategy"]: row for row in steptune("show", "--json").json["decisions"] if row["moves"]}
    assert rows["knobs.offset"]["verdict"] in ("guard_rejected", "not_tried")
    assert rows["knobs.smoothing"]["reason"] == "is recipe: allow it with --allow recipe"


@pytest.mark.usefixtures("recommendation")
def test_the_exported_script_trains_with_it(steptune):
    script = steptune.folder / "results" / "train_recommended.py"
    command = [sys.executable, "-W", "error", str(script), "--steps", "2", "--device", "cpu"]
    ended = subprocess.run(command, cwd=steptune.folder, capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "step 2: loss" in ended.stdout


@pytest.mark.usefixtures("recommendation")
def test_verify_trains_both_values(steptune):
    found = steptune("verify", "--steps", "8", "--json").json
    assert found["same"]
    assert found["recommended_units_per_s"] > found["baseline_units_per_s"]


@pytest.mark.usefixtures("recommendation")
def test_a_value_that_is_none_ends_the_command_in_words(steptune):
    bad = steptune.folder / "bad.py"
    bad.write_text(WORKLOAD.read_text() + "\n\nclass Bad(Pieces):\n    knobs = {'pieces': (1, 2)}\n")
    refused = steptune("tune", f"{bad}:Bad", "--budget", "10s", "--device", "cpu", status=None)
    assert refused.status != 0
    assert "Bad.knobs names 'pieces', but Bad.pieces does not exist" in refused.error


def test_strategies_list_them(steptune):
    rows = {row["name"]: row for row in steptune("strategies", "-w", f"{WORKLOAD}:Pieces", "--json").json}
    assert [choice["choice"] for choice in rows["knobs.num_pieces"]["choices"]] == [{"value": 1}, {"value": 4}]
    assert json.dumps(rows["knobs.smoothing"]["neutral"]) == '{"value": 0.0}'
