"""How good are the bounds that steer the search? Predicted against measured, for every change that was tried.

    python benchmarks/predictions.py --budget 3m zoo:synthetic examples/digits_vit.py:DigitsViT

Runs `steptune tune` on each workload with an empty database (or reads `--database`s of studies that ran
elsewhere) and reads the decisions: for each change the bound (the largest share of the step that it could
save, from the breakdown before it) and the share that it did save. A bound is broken where a change saved
more than the bound by more than twice its standard error. One JSON line a change, and a table.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from stamp import RESULTS, hardware, stamp

from steptune.service.database import open_store
from steptune.tuner.records import Decision, Study

JUDGED = ("accepted", "no_gain", "inconclusive")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*")
    parser.add_argument("--budget", default="3m")
    parser.add_argument("--database", type=Path, action="append", default=[])
    parser.add_argument("--out", type=Path, default=RESULTS / "predictions.jsonl")
    arguments = parser.parse_args()
    origin = stamp(" ".join(["python", "benchmarks/predictions.py", *sys.argv[1:]]))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    rows: list[dict] = []
    with arguments.out.open("a", encoding="utf-8") as file:
        for found in studied(arguments.database, arguments.workloads, arguments.budget):
            file.writelines(json.dumps({**row, **origin}) + "\n" for row in found)
            file.flush()
            rows += found
    show(rows)


def studied(databases: list[Path], workloads: list[str], budget: str) -> Iterator[list[dict]]:
    """The rows of one database or study after the other."""
    for database in databases:
        yield rows_of(database)
    for workload in workloads:
        with tempfile.TemporaryDirectory() as folder:
            yield tuned(workload, budget, Path(folder))


def tuned(workload: str, budget: str, folder: Path) -> list[dict]:
    """One study of a workload, and what its decisions say."""
    database = folder / "study.db"
    place = ["--database", f"sqlite:///{database}", "--output", str(folder / "results")]
    command = [sys.executable, "-m", "steptune", "tune", workload, "--budget", budget, *place]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return rows_of(database)


def rows_of(database: Path) -> list[dict]:
    store = open_store(f"sqlite:///{database}")
    try:
        return [row for study in store.list_studies() for row in judged(study, store.decisions(study.study_id))]
    finally:
        store.close()


def judged(study: Study, decisions: list[Decision]) -> Iterator[dict]:
    """Changes with a bound and a measured gain; both as shares of the step time before the change."""
    assert study.environment is not None
    assert study.facts is not None
    for decision in decisions:
        if decision.verdict not in JUDGED or decision.predicted_bound is None or decision.measured_gain is None:
            continue
        error = decision.measured_se or 0.0
        saved = decision.measured_gain / (1 + decision.measured_gain)
        yield {
            "workload": study.facts.name,
            "hardware": hardware(study.environment),
            "change": ", ".join(move.label for move in decision.moves),
            "verdict": decision.verdict,
            "bound": round(decision.predicted_bound, 4),
            "saved": round(saved, 4),
            "standard_error": round(error, 4),
            "broken": saved > decision.predicted_bound + 2 * error,
        }


def show(rows: list[dict]) -> None:
    for row in rows:
        mark = "BROKEN" if row["broken"] else ""
        print(f"{row['workload']:12} {row['change'][:60]:60} {row['bound']:7.1%} {row['saved']:7.1%} {mark}")
    accepted = [row for row in rows if row["verdict"] == "accepted" and row["bound"] > 0]
    if accepted:
        realised = statistics.median(row["saved"] / row["bound"] for row in accepted)
        print(f"{len(accepted)} accepted, of whose bounds {realised:.0%} (median) came true")
    print(f"{sum(row['broken'] for row in rows)} of {len(rows)} bounds broken")


if __name__ == "__main__":
    main()
