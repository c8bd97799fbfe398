"""The benchmark of a fleet in its short form: some tens of studies at the same time, none lost."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STUDIES = 24


@pytest.mark.timeout(600)
def test_studies_that_run_at_the_same_time_all_end_and_no_event_is_lost(
    tmp_path: Path, empty_postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queue, leases, store and events are the service's; rows and bytes are those of the model in `docs/scale.md`."""
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    import fleet_simulation

    found = fleet_simulation.simulate(
        empty_postgres_url,
        tmp_path,
        studies=STUDIES,
        workers=STUDIES // 2,
        processes=2,
        trial_s=1.0,
        max_trials=3,
        ramp_s=2.0,
        deadline_s=300.0,
    )
    assert found["states"] == {"completed": STUDIES}
    assert found["lost"] == {"studies": 0, "trials": 0, "claims": 0, "events": 0}
    assert found["claims_in_threads"]["number"] == STUDIES
    assert found["claims"]["number"] > 0
    assert found["event_lag"]["delivered"] > 0
    for name in ("rows", "bytes"):
        assert found["per_trial"][name] == pytest.approx(found["model"][name], rel=0.1)
