"""`steptune predict` on a study in the database: what it prints, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from page_builders import put
from predictions import profile_of, result_of, study_of, topology_of
from report_builders import make_trials

from steptune.service.database import open_store
from steptune.tuner.records import BASELINE, Candidate

BF16 = Candidate(choices={"gradient_compression": {"method": "bf16"}})
CLUSTER = ("--hosts", "4", "--devices", "8", "--network", "25gbps", "--inside", "400GBps")


@pytest.fixture
def studies(inside, tmp_path: Path) -> tuple[str, str]:
    """Ids of a study of one rank, and of one of two ranks of the same workload, in the folder's database."""
    store = open_store(f"sqlite:///{tmp_path / 'steptune.db'}")
    alone = [result_of("a", BASELINE, 70_000_000, breakdown=profile_of())]
    ranks = [
        result_of("a", BASELINE, 79_000_000, num_ranks=2, breakdown=profile_of(9_000_000)),
        result_of("b", BF16, 80_000_000, num_ranks=2),
    ]
    try:
        one, _ = put(store, (study_of(), make_trials(alone), (), None), queued=False)
        two, _ = put(store, (study_of(2, topology=topology_of((0, 0))), make_trials(ranks), (), None), queued=False)
    finally:
        store.close()
    return one, two


def test_it_names_the_best_way_and_all_others(studies, inside):
    out = " ".join(inside("predict", studies[0], *CLUSTER).out.split())
    assert "4 hosts with 8 devices each (32 ranks)" in out
    assert "best: " in out
    assert "best lossy: " in out
    for part in (
        "two levels",
        "ZeRO-1",
        "Not possible there",
        "Assumed",
        "so the error of these predictions is unknown",
    ):
        assert part in out


def test_the_error_is_stated_where_there_is_something_to_compare_with(studies, inside):
    own = inside("predict", studies[1], "--network", "25gbps", "--hosts", "2").out
    assert "Compared with measurements" in own
    assert "median error" in own
    against = inside("predict", studies[0], *CLUSTER, "--against", studies[1], "--json").json
    assert [check["num_ranks"] for check in against["checks"]] == [2, 2]
    assert against["median_error"] > 0


def test_json_has_the_whole_answer(studies, inside):
    found = inside("predict", studies[0], *CLUSTER, "--latency", "50us", "--contention", "0.2", "--json").json
    assert found["study_id"] == studies[0]
    assert found["between"]["latency_ns"] == 50_000
    assert found["basis"]["contention"] == 0.2
    assert found["best"]["num_ranks"] == 32
    assert {curve["num_hosts"] for curve in found["curves"]} == {1, 2, 4}
    assert "emulated links" in found["validated"]


def test_what_is_not_known_is_asked_for(studies, inside):
    assert "--inside 400GBps" in inside("predict", studies[0], "--devices", "8", status=2).error
    assert "--network 25gbps" in inside("predict", studies[0], "--hosts", "2", status=2).error
    assert "write bits as 25gbps" in inside("predict", studies[0], "--network", "fast", status=2).error
    assert "has no trial '9'" in inside("predict", studies[0], "--from", "9", status=2).error
