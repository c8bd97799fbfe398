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
    windows = known_answers.Windows(num_warm=1, least_steps=2, length_s=0.01, least_blocks=3, most_s=0.0)
    row = known_answers.measured(pair, device=torch.device("cpu"), small=True, windows=windows, traces=tmp_path)
    assert row["with_ms"] > 2.0  # the sleep alone
    assert min(row["true_of_blocks"]) <= row["true"] <= max(row["true_of_blocks"])
    assert row["half_width"] > 0
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
    assert sleep["not_replayed"] == "the replayed steps show no such cost"


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
        "half_width": 0.005,
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
        row("launch-bound: norm", 0.30, [0.348, 0.348], 1, 0.35),
        row("balanced: norm", 0.30, [0.0, 0.32], 2, 0.29),  # the range reaches 30 points below the truth
        row("compute-bound: norm", 0.018, [0.0, 0.0], None, 0.02),  # 1.3 to 2.3 points
        {"pair": "balanced: loop", "error": "no memory"},
        {"pair": "balanced: sleep", "true": 0.3},  # of before truths had intervals
    ]
    lines = known_answers.summary(rows).splitlines()
    assert len(lines) == len(known_answers.PAIRS) + 11
    assert lines[-11:] == [
        "3 of 24 pairs; findings miss the saved share by 4.8 points at the median, 25.0 at the 90th percentile",
        "a true share is known within 0.5 points at the median, 0.5 at the 90th percentile",
        "2 replays miss it by 3.3 points at the median, 4.5 at the 90th percentile",
        "within 5% of the step: 2 of 3 (wanted 85%): NOT reached",
        "the same wherever in its interval the truth lies: 1 of 3",
        "named first, of those that cost more than 2%: 1 of 2 (wanted 85%): NOT reached",
        "the same among findings that state a saving: 2 of 2",
        "named at all: 2 of 2",
        "may cost more than 2%, or less: compute-bound: norm",
        "bound reaches the upper end of the truth: 1 of 3",
        "bound below the lower end of it: balanced: norm",
    ]
    assert any(line.startswith("balanced: loop") and line.endswith("no memory") for line in lines)
    assert any(line.startswith("balanced: sleep") and line.endswith("missing") for line in lines)


def test_summary_of_nothing(known_answers) -> None:
    assert known_answers.summary([]).splitlines()[-1] == "no pair was measured"


class Drifting:
    """Seconds per step of a host that grows slower by a share in every window; sides differ by a fifth."""

    def __init__(self, slower: float, jitter: float = 0.0) -> None:
        self.now, self.slower, self.jitter, self.called = 1.0, slower, jitter, []

    def __call__(self, side, count: int, num_warm: int) -> float:
        self.called.append((side, count, num_warm))
        self.now += self.slower
        return (1.0 if side == "with" else 0.8) * (self.now + self.jitter * (-1) ** (len(self.called) // 5))


def test_a_drift_of_the_host_is_no_saving(known_answers) -> None:
    host = Drifting(slower=0.01)
    windows = known_answers.Windows(length_s=0.0, most_s=1e9)
    truth = known_answers.in_turns(["with", "without"], host, windows)
    assert truth.row()["true"] == pytest.approx(0.2, abs=1e-3)
    assert len(truth.shares) == windows.least_blocks  # certain by then
    sides = [side for side, _, _ in host.called[2:10]]
    assert sides == ["with", "without", "without", "with", "without", "with", "with", "without"]
    assert {warm for _, _, warm in host.called} == {windows.num_warm}


def test_an_uncertain_truth_takes_the_time_of_its_pair(known_answers) -> None:
    windows = known_answers.Windows(length_s=0.0, most_s=0.0)
    truth = known_answers.in_turns(["with", "without"], Drifting(slower=0.0, jitter=0.4), windows)
    assert len(truth.shares) == windows.least_blocks
    assert truth.half_width > 0.01
    low, high = truth.interval
    assert low < 0.2 < high


def test_the_time_of_unprofiled_steps_is_that_just_before_the_capture(known_answers) -> None:
    truth_of = importlib.import_module("known_truth").Truth
    truth = truth_of(with_s=(9.0, 9.0, 1.0, 2.0, 1.0, 2.0), without_s=(1.0,) * 6)
    assert truth.unprofiled_ns == 1_500_000_000
