"""Time and memory of what a study reads of past studies when its search begins.

    python benchmarks/history.py --out history.json [--database URL]

A database holds 9,700 studies of one owner, each with 90 decisions that tell what a bound was worth and an answer for
the same workload. A fresh process each reads the past once: without limits, as it was before, and as the store reads it
now. The database is a new SQLite file unless `--database` names an empty one.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests" / "support"))  # before this folder: both have a module `predictions`

from builders import sample_environment, sample_hardware  # noqa: E402
from msgspec.structs import replace  # noqa: E402
from page_builders import put, stories  # noqa: E402
from sqlalchemy import insert, select  # noqa: E402
from stamp import RESULTS, stamp  # noqa: E402

from steptune.service.connections import create_engine_for, reading, writing  # noqa: E402
from steptune.service.database import migrate  # noqa: E402
from steptune.service.models import DecisionRow, RecommendationRow, StudyRow  # noqa: E402
from steptune.service.store import SqlStudyStore  # noqa: E402
from steptune.tuner.records import Decision, Recommendation, new_id  # noqa: E402
from steptune.tuner.store_rules import decode  # noqa: E402

NUM_STUDIES, NUM_DECISIONS = 9_700, 90


def fill(url: str) -> None:
    """One study through the store, and copies of its rows."""
    migrate(url)
    engine = create_engine_for(url)
    study, trials, decisions, recommendation = stories()["complete"]
    study = replace(study, environment=sample_environment("cpu"))
    study_id, _ = put(SqlStudyStore(engine), (study, trials, decisions, recommendation))
    with engine.connect() as connection:
        study, answer = (
            dict(connection.execute(select(table.__table__).where(table.study_id == study_id)).one()._mapping)
            for table in (StudyRow, RecommendationRow)
        )
        known = DecisionRow.predicted_bound.is_not(None), DecisionRow.measured_gain.is_not(None)
        query = select(DecisionRow.__table__).where(DecisionRow.study_id == study_id, *known)
        decision = dict(connection.execute(query).mappings().first() or {})
    for begin in range(0, NUM_STUDIES, 200):
        ids = [new_id() for _ in range(begin, min(begin + 200, NUM_STUDIES))]
        decisions = [{**decision, "study_id": i, "sequence": n} for i in ids for n in range(NUM_DECISIONS)]
        with writing(engine) as session:
            session.execute(insert(StudyRow), [{**study, "study_id": i} for i in ids])
            session.execute(insert(RecommendationRow), [{**answer, "study_id": i} for i in ids])
            session.execute(insert(DecisionRow), decisions)
    engine.dispose()


def read(url: str, how: str) -> dict:
    """Read the past once; return the seconds and the memory that this process took for it."""
    engine = create_engine_for(url)
    store = SqlStudyStore(engine)
    with reading(engine) as session:
        newest = select(RecommendationRow).order_by(RecommendationRow.study_id.desc()).limit(1)
        asking = session.scalars(newest).one()
        study_id, device_kind = asking.study_id, asking.device_kind
    before_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    begin = time.perf_counter()
    if how == "without limits":
        with reading(engine) as session:
            answers = [decode(r, Recommendation) for r in session.scalars(select(RecommendationRow.record))]
            decisions = [decode(r, Decision) for r in session.scalars(select(DecisionRow.record))]
    else:
        answers = store.past_recommendations(study_id, device_kind)
        decisions = store.past_decisions(study_id, sample_hardware(device_kind))
    seconds = time.perf_counter() - begin
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    engine.dispose()
    return {
        "answers": len(answers),
        "decisions": len(decisions),
        "seconds": round(seconds, 3),
        "added_mib": round(peak_mib - before_mib, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--database")
    parser.add_argument("--read", choices=("without limits", "as stored"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.read:
        print(json.dumps(read(options.database, options.read)))
        return
    with tempfile.TemporaryDirectory() as folder:
        url = options.database or f"sqlite:///{folder}/steptune.db"
        fill(url)
        kinds = ("without limits", "as stored", "as stored")
        command = [sys.executable, __file__, "--database", url, "--read"]
        rows = {}
        for how in kinds:
            told = subprocess.run([*command, how], check=True, capture_output=True, text=True)
            rows.setdefault(how, []).append(json.loads(told.stdout))
    result = {
        **stamp("python benchmarks/history.py", ("service", "benchmarks")),
        "database": url.split(":")[0],
        "cores": os.cpu_count(),
        "load_at_end": round(os.getloadavg()[0], 1),
        "studies": NUM_STUDIES,
        "decisions_each": NUM_DECISIONS,
        "processes": rows,
    }
    text = json.dumps(result, indent=1)
    print(text)
    if options.out:
        (RESULTS / options.out).write_text(text + "\n")


if __name__ == "__main__":
    main()
