"""Whatever is killed, stopped, restarted or full, every study ends with its answer, every result is recorded once, and
nobody misses an event.
"""

from pathlib import Path

import pytest
from chaos import ENDED, chaos
from postgres import skip_without_server

from steptune.tuner.records import StudyState


@pytest.mark.timeout(1200)
@pytest.mark.xdist_group("killed")
@pytest.mark.parametrize("database", ["postgresql", pytest.param("sqlite", marks=pytest.mark.soak)])
def test_kills_and_all_else_that_breaks(database: str, tmp_path: Path) -> None:
    """Three workers of which two share a core, two studies; a restart of the service, a crash of PostgreSQL, a worker
    that stops for longer than its lease, a full disk. Nothing fails for it.
    """
    if database == "postgresql":
        skip_without_server()
    with chaos(database, tmp_path, seed=1, pause_s=1.0) as run:
        tally = run.run(num_studies=2, kills=4, seconds=240, refill=False)
    assert tally.faults == {}, run.service.log()
    assert set(tally.studies) <= {state.value for state in ENDED} - {StudyState.FAILED.value}
    assert tally.kills["rank"] > 0
    assert tally.stops.total() > 0
    assert tally.database_crashes == (database == "postgresql")
    assert tally.events > 0
    assert tally.streams >= 2
    assert tally.studies[StudyState.COMPLETED.value] > 0
