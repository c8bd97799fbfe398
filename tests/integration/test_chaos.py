"""Whatever is killed or restarted, every study ends and every result is recorded once."""

from pathlib import Path

import pytest
from chaos import ENDED, chaos
from postgres import skip_without_server

from steptune.tuner.records import StudyState


@pytest.mark.timeout(1200)
@pytest.mark.xdist_group("killed")
@pytest.mark.parametrize("database", ["postgresql", pytest.param("sqlite", marks=pytest.mark.soak)])
def test_twenty_seconds_of_kills(database: str, tmp_path: Path) -> None:
    """Three workers of which two share a core, three studies, and a restart of all that is below."""
    if database == "postgresql":
        skip_without_server()
    with chaos(database, tmp_path, seed=1, pause_s=1.0) as run:
        tally = run.run(num_studies=3, kills=1000, seconds=20, refill=False)
    assert tally.faults == {}, run.service.log()
    assert set(tally.studies) <= {state.value for state in ENDED}
    assert tally.num_kills > 0
    assert tally.studies[StudyState.COMPLETED.value] > 0
