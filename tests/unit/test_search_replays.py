"""Surfaces and replays of the benchmark of searches."""

import argparse
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from search_quality import at, command_of, read, replay, run_all, seconds_to, share, starts_to, stops
from search_surfaces import FAMILIES, LEAST_GAIN, PROFESSIONAL_GAIN, draw_surface

ROW = {
    "today": 1.5,
    "over_best": [1.5, 1.01, 1.1, 1.015, 1.01],
    "seconds": [10.0, 20.0, 30.0, 40.0, 50.0],
    "num_starts": 20,
}


@pytest.mark.parametrize("half", ["fit", "report"])
def test_half_of_the_families_begin_where_a_professional_does(half):
    families = [family for family in FAMILIES if family.half == half]
    assert 2 * sum(family.professional for family in families) >= len(families)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_surface_is_always_the_same_and_has_something_to_gain(family):
    one, again = draw_surface(family, 3), draw_surface(family, 3)
    assert one.best_ms == again.best_ms
    assert [knob.effects.tolist() for knob in one.knobs] == [knob.effects.tolist() for knob in again.knobs]
    gain = one.today_ms / one.best_ms
    assert gain >= LEAST_GAIN
    assert not family.professional or gain <= PROFESSIONAL_GAIN


@pytest.mark.parametrize("method", ["random", "greedy", "expert", "model"])
def test_a_replay_is_reproducible_by_its_seed_and_keeps_its_starts(method):
    surface = draw_surface(FAMILIES[4], 0)
    row = replay(surface, method, seed=5, num_starts=6)
    assert row == replay(surface, method, seed=5, num_starts=6)
    assert 1 < len(row["over_best"]) <= 6
    assert row["over_best"][0] == row["today"]
    assert all(ratio >= 1 for ratio in row["over_best"])
    assert row["seconds"] == sorted(row["seconds"])


def test_several_processes_make_the_rows_of_one_and_fresh_ones_replace_those_of_their_method(tmp_path):
    out = tmp_path / "rows.jsonl"
    wanted = argparse.Namespace(
        half="fit", per_family=1, first=0, seeds=(0, 1), methods=["random"], starts=3, processes=2, fresh=False, out=out
    )
    run_all(wanted)
    rows = read(out)
    families = [family for family in FAMILIES if family.half == "fit"]
    assert rows == [replay(draw_surface(family, 0), "random", seed=0, num_starts=3) for family in families]
    run_all(wanted)
    assert read(out) == rows
    run_all(argparse.Namespace(**{**vars(wanted), "fresh": True, "starts": 2}))
    assert [row["num_starts"] for row in read(out)] == [2] * len(families)


def test_the_first_statement_of_a_replay_counts_and_is_false_where_more_than_two_per_cent_are_left():
    """The first replay says so where 1.03 is left to go to 1, the second where nothing is, the third never."""
    said = {**ROW, "over_best": [1.5, 1.03, 1.0], "probability_left": [0.9, 0.01, 0.01]}
    right = {**said, "over_best": [1.5, 1.0, 1.0]}
    never = {**said, "probability_left": [0.9, 0.5, 0.06]}
    assert stops([said, right, never]) == {"replays": 3, "starts": 20, "stop": 2, "false": 1}


class TestMeasures:
    def test_an_answer_counts_from_where_it_stays_within_two_per_cent(self):
        assert starts_to(ROW) == 4
        assert starts_to({**ROW, "over_best": [1.5, 1.3]}) == 21

    def test_a_method_that_has_ended_keeps_its_answer(self):
        assert at(ROW, 12) == pytest.approx(0.01)

    def test_ninety_five_per_cent_of_the_gain_is_of_logarithms(self):
        """5 % of log 1.5 is 0.0203: a step of 1.015 is beyond, one of 1.1 is not."""
        assert seconds_to(ROW) == 40.0
        assert share({**ROW, "over_best": [1.0]}, 12) == 1.0


def test_a_table_of_rows_beside_the_usual_ones_names_their_surfaces_starts_and_file():
    rows = [{**ROW, "surface": f"drift {n}", "family": "drift", "method": "model", "seed": 0} for n in (4, 5)]
    said = command_of(rows, "report", "search_unseen")
    assert '--half report --per-family 2 --seeds 0 1 --first 4 --methods "model" --starts 20 &&' in said
    assert said.count("benchmarks/results/search_unseen.jsonl") == 2
    assert "--first" not in command_of(rows, "report", "search_quality")
