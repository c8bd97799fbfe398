"""Writes what a released revision holds, for the tests of migrations.

Run with the code of that revision, its `tests` folder on PYTHONPATH, when the revision is released:

    python tests/released/dump.py > tests/released/NUMBER.json
"""

import json
import sys
import tempfile
from datetime import datetime

from builders import (
    STUDY_ID,
    TRIAL_ID,
    failed_result,
    sample_decision,
    sample_recommendation,
    sample_result,
    sample_study,
    sample_topology,
    sample_trial,
)
from sqlalchemy import select

from steptune.service.connections import create_engine_for, reading
from steptune.service.database import open_store
from steptune.service.models import Base


def fill(url: str) -> None:
    """Two studies with all that belongs to a study, written by that revision's own store."""
    store = open_store(url)
    store.create_study(sample_study())
    store.create_study(sample_study(study_id="second", workload="zoo:synthetic"))
    store.begin_trials([sample_trial(), sample_trial(trial_id="failed", sequence=4)])
    store.complete_trials([sample_result(), failed_result(trial_id="failed")])
    store.begin_trials([sample_trial(trial_id="running", study_id="second", sequence=0)])
    store.replace_decisions(STUDY_ID, [sample_decision(1), sample_decision(2, verdict="not_tried")])
    store.save_recommendation(sample_recommendation())
    store.add_event(STUDY_ID, "state", {"state": "running", "text": "é"})
    store.add_event("second", "state", {})
    store.add_artifact(STUDY_ID, TRIAL_ID, "trace", "ab" * 32, 1234)
    store.add_artifact(STUDY_ID, None, "export", "cd" * 32, 5)
    store.save_topology(sample_topology())
    store.close()


def rows(url: str) -> dict[str, list[dict[str, object]]]:
    engine = create_engine_for(url)
    with reading(engine) as session:
        found = {
            table.name: [dict(row._mapping) for row in session.execute(select(table).order_by(*table.primary_key))]
            for table in Base.metadata.sorted_tables
        }
    engine.dispose()
    return {name: table for name, table in found.items() if table}


def text(value: object) -> str:
    assert isinstance(value, datetime)
    return value.isoformat()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{folder}/steptune.db"
        fill(url)
        json.dump(rows(url), sys.stdout, indent=1, default=text)
        sys.stdout.write("\n")
