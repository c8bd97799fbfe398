"""First step of a trial that starts from a frozen copy of a script, and of one that starts the command again.

    python benchmarks/first_step.py

The script imports torch and transformers and makes a small model; forks and starts take turns. Of interest: the ratio
of the medians, from the request to the end of the first step.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

from stamp import RESULTS, ROOT, stamp

from steptune.tuner.scripts.launch import Ended, ran_script
from steptune.tuner.scripts.look import Look, look_at, same_for_all

SCRIPTS = ROOT / "benchmarks" / "scripts"
WANTED = 0.15
MEASURE = {"warm_up_s": 0.0, "window_s": 0.001, "min_rounds": 1, "max_rounds": 1, "half_width": 1.0, "cap_s": 0.0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--script", default="gpt2_loop", help="of benchmarks/scripts; it is run in its small form")
    parser.add_argument("--pairs", type=int, default=5, help="of a fork and a start")
    parser.add_argument("--out", type=Path, default=RESULTS / "first_step.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="steptune-first-step-") as folder:
        found = measured(arguments.script, arguments.pairs, Path(folder))
    found = {**stamp(" ".join(["python", "benchmarks/first_step.py", *sys.argv[1:]])), **found}
    arguments.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))
    print(f"wanted: at most {WANTED}: {'reached' if found['ratio'] <= WANTED else 'NOT reached'}")


def measured(script: str, pairs: int, folder: Path) -> dict:
    """Seconds to the end of the first step, by fork and by start."""
    work = folder / "work"
    work.mkdir()
    shutil.copyfile(SCRIPTS / f"{script}.py", work / f"{script}.py")
    log = folder / "log"
    look, ended = look_at((sys.executable, f"{script}.py", "--tiny"), work, log, frozen_seed=0)
    if look is None or look.copy is None:
        why = look.why_no_copy if look is not None else log.read_text()
        raise SystemExit(f"no frozen copy of {script}, status {ended.status}: {why}")
    seconds: dict[str, list[float]] = {"fork": [], "start": []}
    try:
        for _ in range(pairs):
            seconds["fork"].append(first_step_s(look, log, forked=True))
            seconds["start"].append(first_step_s(look, log, forked=False))
    finally:
        look.close()
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "script": script,
        "load_1min": round(os.getloadavg()[0], 1),
        "seconds": {name: [round(value, 3) for value in values] for name, values in seconds.items()},
        "ratio": round(medians["fork"] / medians["start"], 4),
    }


def first_step_s(look: Look, log: Path, *, forked: bool) -> float:
    """One trial of today's settings without a guard."""
    trial = {
        "pattern": look.record.step.optimizers,
        "loader": look.script.loader_number,
        "loader_place": look.script.places.get("loader", ""),
        "models": look.script.models,
        "changes": {},
        "seed": 0,
        "guard": None,
        "only_guard": False,
        "num_losses": 0,
        "measure": {**MEASURE, "profile": False, "queue": 0},
    }
    began_ns = time.perf_counter_ns()
    if forked:
        assert look.copy is not None, "it was looked for before"
        with look.copy.ran(trial, log, None, None) as ended:
            return (_first_step_ns(ended) - began_ns) / 1e9
    with ran_script(look.command, trial=trial, variables=same_for_all(), folder=look.folder, log=log) as ended:
        return (_first_step_ns(ended) - began_ns) / 1e9


def _first_step_ns(ended: Ended) -> int:
    return int(json.loads((ended.folder / "trial-0.json").read_text())["first_step_ns"])


if __name__ == "__main__":
    main()
