"""The benchmark of known answers: which pairs it has, how a pair is measured, and how its table judges rows."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS, CAPTURES = ROOT / "benchmarks", ROOT / "tests" / "captures"


@pytest.fixture(scope="module")
def known_answers() -> Iterator[ModuleType]:
    loaded = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module("known_answers")
    for name in set(sys.modules) - loaded:
        if str(BENCHMARKS) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def test_eight_causes_in_three_kinds_of_step(known_answers) -> None:
    pairs = known_answers.PAIRS
    kinds = {"launch-bound", "balanced", "compute-bound"}
    causes = {"item early", "item late", "norm", "nonzero", "sleep", "loop", "collection", "cuda graph"}
    assert {(pair.kind, pair.cause) for pair in pairs} == {(kind, cause) for kind in kinds for cause in causes}
    assert len(pairs) == 24
    for kind in kinds:
        assert {pair.family for pair in pairs if pair.kind == kind} == {"transformer", "convolutional", "mlp"}


def test_one_pair_on_a_cpu(known_answers, tmp_path) -> None:
    import torch

    pair = next(pair for pair in known_answers.PAIRS if pair.name == "launch-bound: sleep")
    windows = known_answers.Windows(turns=3, length_s=0.01)
    row = known_answers.measured(pair, device=torch.device("cpu"), small=True, windows=windows, traces=tmp_path)
    assert row["with_ms"] > 2.0  # the sleep alone
    assert row["true"] == sorted(row["true_of_turns"])[1]
    assert row["replay"] is None  # no device worked
    (trace,) = tmp_path.iterdir()
    again = known_answers.stated(known_answers.analyse_rank(trace, row["unprofiled_ns"]), known_answers.CAUSES["sleep"])
    assert again == {key: row[key] for key in again}


def test_statements_of_a_recorded_step(known_answers) -> None:
    """A step of an H200 that waits for its loader and is replayed; launches cost something too, nothing sleeps."""
    known = json.loads((CAPTURES / "captures.json").read_text())["h200_input_bound"]["unprofiled_step_ms"]
    analysis = known_answers.analyse_rank(CAPTURES / "h200_input_bound.json.gz", round(known * 1e6))
    launches = known_answers.stated(analysis, known_answers.CAUSES["cuda graph"])
    assert launches["place"] == 2
    assert launches["stated"] == [launches["replayed"]] * 2
    assert 0 < launches["replayed"] < launches["bound"]
    sleep = known_answers.stated(analysis, known_answers.CAUSES["sleep"])
    assert (sleep["place"], sleep["stated"], sleep["bound"]) == (None, [0.0, 0.0], 0.02)
    assert sleep["not_replayed"] == "the replayed steps do not show it"


def test_a_graph_needs_a_device(known_answers) -> None:
    import torch

    pair = next(pair for pair in known_answers.PAIRS if pair.cause == "cuda graph")
    with pytest.raises(ValueError, match="requires a CUDA device, not cpu"):
        known_answers.measured(pair, device=torch.device("cpu"), small=True, windows=known_answers.SMALL)


def row(pair: str, true: float, stated: list[float], place: int | None, bound: float) -> dict:
    return {
        "pair": pair,
        "rule": "synchronisation",
        "true": true,
        "true_of_turns": [true - 0.02, true - 0.01, true, true + 0.01, true + 0.02],
        "stated": stated,
        "replayed": stated[0] if stated[0] == stated[1] else None,
        "not_replayed": "",
        "place": place,
        "bound": bound,
        "with_ms": 1.0,
        "findings": [{"rule": "unfused", "saves": None}, {"rule": "synchronisation", "saves": "10 % of the step"}],
    }


def test_summary_counts_what_is_wanted(known_answers) -> None:
    rows = [
        row("launch-bound: norm", 0.30, [0.33, 0.33], 1, 0.35),
        row("balanced: norm", 0.30, [0.0, 0.32], 2, 0.32),  # the range reaches 30 points below the truth
        row("compute-bound: norm", 0.01, [0.0, 0.0], None, 0.02),
        {"pair": "balanced: loop", "error": "no memory"},
    ]
    lines = known_answers.summary(rows).splitlines()
    assert len(lines) == len(known_answers.PAIRS) + 8
    assert (
        lines[-8]
        == "3 of 24 pairs; findings miss the saved share by 3.0 points at the median, 24.6 at the 90th percentile"
    )
    # The quantiles at 0.2 and 0.8 lie between turns: 1.2 points around the middle.
    assert lines[-7] == "three fifths of its turns lie within 1.2 points of a true share (median pair)"
    assert lines[-6] == "2 replays miss it by 2.0 points at the median, 2.8 at the 90th percentile"
    assert lines[-5:] == [
        "within 5% of the step: 2 of 3 (wanted 85%): NOT reached",
        "named first, of those that cost more than 2%: 1 of 2 (wanted 85%): NOT reached",
        "the same among findings that state a saving: 2 of 2",
        "named at all: 2 of 2",
        "bound reaches the truth: 3 of 3",
    ]
    assert any(line.startswith("balanced: loop") and line.endswith("no memory") for line in lines)


def test_summary_of_nothing(known_answers) -> None:
    assert known_answers.summary([]).splitlines()[-1] == "no pair was measured"
