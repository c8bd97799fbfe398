"""Whatever is killed or restarted, every study ends and every result is recorded once."""

import os
from pathlib import Path

import pytest
from chaos import ENDED, chaos
from postgres import skip_without_server

from tuner.records import StudyState


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("database", ["postgresql", pytest.param("sqlite", marks=pytest.mark.soak)])
def test_twenty_seconds_of_kills(database: str, tmp_path: Path) -> None:
    """Three workers of which two share a core, four studies, and a restart of all that is below."""
    if database == "postgresql":
        skip_without_server()
    with chaos(database, tmp_path, seed=1, pause_s=1.0) as run:
        tally = run.run(num_studies=4, kills=1000, seconds=20, refill=False)
    assert tally.faults == {}, run.service.log()
    assert set(tally.studies) <= {state.value for state in ENDED}
    assert tally.num_kills > 0
    assert tally.studies[StudyState.COMPLETED.value] > 0


@pytest.mark.soak
@pytest.mark.timeout(5400)
def test_a_thousand_kills(tmp_path: Path) -> None:
    """Or half an hour of them; the tally goes to where STEPTUNE_CHAOS_TALLY says."""
    import json

    skip_without_server()
    with chaos("postgresql", tmp_path, seed=2, pause_s=1.7) as run:
        tally = run.run(num_studies=10, kills=1000, seconds=1800, refill=True)
    path = os.environ.get("STEPTUNE_CHAOS_TALLY")
    if path:
        Path(path).write_text(json.dumps(tally.as_json(), indent=1) + "\n")
    print(json.dumps(tally.as_json(), indent=1))  # noqa: T201
    assert tally.faults == {}, run.service.log()
