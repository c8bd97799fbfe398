"""Summaries of results files by the benchmarks of several GPUs, and their search for the largest batch."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
DDP = "DDP 25 MiB"


@pytest.fixture(scope="module")
def load() -> Iterator[Any]:
    """Imports a benchmark by its name, and leaves no trace of it."""
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(BENCHMARKS)):
            del sys.modules[name]


@pytest.fixture(scope="module")
def table(load: Any) -> Any:
    return load("multi_gpu_table")


@pytest.fixture(scope="module")
def rows(load: Any) -> Any:
    return load("multi_gpu_rows")


def line(row: str = "vit_large", network: str = "one", allow: str = "", **changes: Any) -> dict[str, Any]:
    return {
        "row": row,
        "network": network,
        "allow": allow,
        "ranks": 4,
        "unit": "sample",
        "tuning_s": 280.0,
        "trials": 12,
        "guard_verdicts": {"passed": 11, "rejected": 1},
        "beside": {"units_per_s": 1000.0, "peak_mib_by_rank": [1, 2]},
        "exposed_communication": 0.05,
        "by_hand": {
            DDP: {"ratio": 3.0, "interval": [2.9, 3.1]},
            "hierarchical": {"ratio": 1.2, "interval": None},
            "DDP 200 MiB": {"unsupported": "one bucket holds all"},
            "PowerSGD 4": {"ratio": None, "failure": "out of memory"},
        },
        **changes,
    }


class TestRows:
    def test_are_missing_until_they_are_measured(self, table: Any) -> None:
        planned = sum(map(len, table.PLANNED.values()))
        assert table.summary([]).count("missing") == planned
        assert table.summary([line()]).count("missing") == planned - 1

    def test_others_than_those_planned_are_shown_once_measured(self, table: Any) -> None:
        assert table.summary([line("vgg16", "two_25gbit")]).count("reached") == 1

    def test_the_last_of_a_row_counts(self, table: Any) -> None:
        text = table.summary([line(trials=77), line(trials=12)])
        assert "12 trials" in text
        assert "77 trials" not in text

    def test_ranks_that_shared_a_device_have_a_table_of_their_own(self, table: Any) -> None:
        planned = sum(map(len, table.PLANNED.values()))
        shared = line("vgg16", "two", "lossy", ranks_per_device=2, trials=77)
        text = table.summary([shared])
        assert text.count("missing") == planned
        assert "two, allowed: lossy, ranks share a device\n  vgg16" in text

    def test_one_that_cannot_be_run_here_says_why(self, table: Any) -> None:
        impossible = {
            "row": "vgg16",
            "network": "two_25gbit",
            "allow": "",
            "impossible": "there is no tc (iproute2) here",
        }
        assert "impossible: there is no tc" in table.summary([impossible])

    def test_columns_that_drop_information_need_consent(self, table: Any, rows: Any) -> None:
        for row in rows.ROWS:
            for network in table.NETWORKS:
                exact = rows.by_hand(row, network=network, lossy=False, on_cpu=False)
                assert not any("gradient_compression" in choices for choices in exact.values())
                lossy = rows.by_hand(row, network=network, lossy=True, on_cpu=False)
                assert exact.keys() < lossy.keys()
                assert next(iter(lossy)) == DDP

    @pytest.mark.parametrize("network", ["one", "two", "two_25gbit"])
    def test_what_is_not_compiled_stands_beside_the_same_compiled(self, rows: Any, network: str) -> None:
        """DDP and FSDP2, in the way that suits the model, and early enough to be timed."""
        for row in rows.ROWS:
            columns = rows.by_hand(row, network=network, lossy=False, on_cpu=False)
            for name in (DDP, "FSDP2 per block", "FSDP2 per block, grad_op"):
                compiled = f"{name.removesuffix(' 25 MiB')}, compiled"
                assert columns[compiled].pop("compile")["scope"] == ("regional" if row.blocks else "whole")
                assert columns[compiled] == columns[name]
                assert list(columns).index(compiled) < list(columns).index("FSDP2 per block")

    def test_what_needs_a_network_is_by_hand_between_hosts_only(self, rows: Any) -> None:
        row = rows.ROWS[0]
        one = rows.by_hand(row, network="one", lossy=True, on_cpu=False)
        assert not any(choices.keys() & {"hierarchical_allreduce", "nccl_settings"} for choices in one.values())
        two = rows.by_hand(row, network="two", lossy=True, on_cpu=False)
        assert {"hierarchical", "hybrid sharding, bf16 reduction", "DDP, 4 x 4 sockets"} <= two.keys()

    def test_every_column_is_a_choice_of_the_strategies(self, rows: Any) -> None:
        from steptune.tuner.strategies import strategy_named

        for choices in rows.by_hand(rows.ROWS[0], network="two", lossy=True, on_cpu=False).values():
            for name, choice in choices.items():
                strategy_named(name).check(choice)


class TestAims:
    @pytest.mark.parametrize(
        ("ratio", "interval", "reached"),
        [(1.2, None, True), (0.985, [0.96, 1.01], True), (0.985, [0.97, 0.99], False), (0.97, [0.9, 1.1], False)],
    )
    def test_the_slowest_comparison_decides(
        self, table: Any, ratio: float, interval: list[float] | None, reached: bool
    ) -> None:
        by_hand = {DDP: {"ratio": 3.0, "interval": None}, "hierarchical": {"ratio": ratio, "interval": interval}}
        assert table.verdicts(line(by_hand=by_hand))["at least the best by hand"] == reached

    @pytest.mark.parametrize(("allow", "wanted"), [("lossy", 2.5), ("", 1.5)])
    def test_between_hosts_a_vit_beats_ddps_default(self, table: Any, allow: str, wanted: float) -> None:
        for ratio, reached in ((wanted, True), (wanted - 0.01, False)):
            found = line(network="two", allow=allow, by_hand={DDP: {"ratio": ratio, "interval": None}})
            assert table.verdicts(found)[f"{wanted} times DDP's default"] == reached

    def test_communication_is_hidden_on_one_host(self, table: Any) -> None:
        assert not table.verdicts(line(exposed_communication=0.11))["exposed communication below 10 %"]
        assert "exposed communication below 10 %" not in table.verdicts(line(network="two"))

    def test_the_largest_batch_is_compared_with_ddps(self, table: Any) -> None:
        found = line("vit_huge_largest", by_hand={DDP: {"ratio": 2.1, "interval": None}})
        assert "NOT 2.2 times DDP's default" in table.summary([found])


class TestLargestBatch:
    @pytest.mark.parametrize("truth", [0, 1, 7, 30, 64, 100])
    @pytest.mark.parametrize("guess", [1, 8, 40, 200])
    def test_is_found_from_any_guess(self, truth: int, guess: int, load: Any) -> None:
        tried: list[int] = []

        def fits(size: int) -> bool:
            tried.append(size)
            return size <= truth

        assert load("rank_peaks").largest_batch(fits, guess, 64) == min(truth, 64)
        assert len(set(tried)) == len(tried) <= 14

    def test_a_good_guess_takes_two_tries(self, load: Any) -> None:
        tried: list[int] = []
        assert load("rank_peaks").largest_batch(lambda size: tried.append(size) or size <= 9, 9, 64) == 9
        assert tried == [9, 10]


class TestMemory:
    def peak(self, layout: str, error: float | None, **changes: Any) -> dict[str, Any]:
        peak = {"row": "gpt2_xl", "layout": layout, "per_rank": 1, "cap_bytes": 1, "predicted_bytes": 10**9}
        return {**peak, "peak_bytes": [10**9, 10**9], "out_of_memory": False, "failure": "", "error": error, **changes}

    def test_the_worst_prediction_decides(self, load: Any) -> None:
        good = [self.peak("DDP", 0.04), self.peak("no wrap", -0.09)]
        assert "2 peaks, worst error -9.0%, 0 not predicted: reached" in load("memory").summary(good)
        assert "NOT reached" in load("memory").summary([*good, self.peak("full shard", 0.11)])
        assert "NOT reached" in load("memory").summary([*good, self.peak("full shard", None)])

    def test_what_was_measured_without_the_cap_is_what_predictions_begin_with(self, load: Any) -> None:
        text = load("memory").summary([self.peak("DDP", None, cap_bytes=None), self.peak("DDP", 0.01)])
        assert "1 peaks, worst error +1.0%, 0 not predicted: reached" in text

    def test_a_study_under_the_cap_is_told(self, load: Any) -> None:
        found = {"verdict": "enables_training", "recommended": {"sharding": {"mode": "full"}}, "peak_mib": 20000}
        text = load("memory").summary([{"row": "gpt2_xl", "study": found, "cap_bytes": 24 * 10**9}])
        assert "tuned under 24 GB: enables_training, {'sharding': {'mode': 'full'}}, 20000 MiB" in text
        assert text.count("tuned under the cap: missing") == 1

    def test_layouts_without_a_largest_batch_are_missing(self, load: Any) -> None:
        largest = {"row": "gpt2_large", "layout": "full shard", "largest_per_rank": 5, "cap_bytes": 1}
        text = load("memory").summary([largest])
        assert "full shard               largest batch of a rank: 5" in text
        assert text.count("largest batch: missing") == 7
