"""Gain of a study on workloads that wait for their input.

    python benchmarks/input_bound.py                       # both workloads, 4 minutes of tuning each
    python benchmarks/input_bound.py --small               # a dry run

`jpeg`: real JPEG files, decoded and augmented in the main process, a small ResNet. Of interest: the gain over the
user's settings (no workers, pageable memory), and the share of the step that waits for data afterwards, restarts of
epochs included.

`epochs`: a small dataset whose epochs take a moment, so that starting the loader's workers anew dominates. Of
interest: the gain over whole epochs, timed outside of the engine in processes of their own, in turns.

One JSON line a workload is appended to the results file.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from bound_rows import measure_rows, parser_of
from stamp import ROOT
from tuned import Tuned

from steptune.tuner.costs.categories import Category
from steptune.tuner.estimates import plain_mean
from steptune.tuner.records import BASELINE, Choice

WORKLOADS = ROOT / "benchmarks" / "workloads" / "jpeg_resnet.py"
FULL = {"jpeg": f"{WORKLOADS}:JpegResNet", "epochs": f"{WORKLOADS}:ShortEpochs"}
SMALL = {
    "jpeg": f"{WORKLOADS}:JpegResNet?files=64&side=64&size=32&width=8&batch=8",
    "epochs": f"{WORKLOADS}:ShortEpochs?samples=64&features=64&width=32&batch=16",
}
WANTED_RATIO, WANTED_WAIT = 2.66, 0.02
NUM_TURNS = 4
WAITS = {"data_wait_after": Category.DATA_WAIT, "epoch_restart_after": Category.EPOCH_RESTART}


def look(name: str, study: Tuned, found: dict, num_epochs: int) -> dict:
    timed = {}
    if name == "epochs":
        ours = study.recommendation.candidate
        timed["whole_epochs"] = whole_epochs(
            study.study.workload, study.space.complete(BASELINE), study.space.complete(ours), num_epochs
        )
    after = found["shares_after"]  # empty without a profile that can be trusted
    waits = {name: after.get(category.value, 0.0) if after else None for name, category in WAITS.items()}
    return {**timed, **waits}


def whole_epochs(workload: str, today: dict[str, Choice], ours: dict[str, Choice], num_epochs: int) -> dict:
    """Ratio of the times of whole epochs, in turns of fresh processes."""
    logs, seconds = [], {"today": [], "recommended": []}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(NUM_TURNS):
            times = {}
            for name, choices in (("today", today), ("recommended", ours)):
                times[name] = statistics.median(epochs(workload, Path(folder) / "data", choices, num_epochs))
                seconds[name].append(round(times[name], 5))
            logs.append(math.log(times["today"] / times["recommended"]))
    estimate = plain_mean(logs)
    half = estimate.half_width()
    interval = [round(math.exp(estimate.mean - half), 3), round(math.exp(estimate.mean + half), 3)]
    return {"ratio": round(math.exp(estimate.mean), 3), "interval": interval, "seconds_per_epoch": seconds}


def epochs(workload: str, folder: Path, choices: dict[str, Choice], count: int) -> list[float]:
    """Seconds of each epoch of one process."""
    script = ROOT / "benchmarks" / "whole_epochs.py"
    command = [sys.executable, str(script), workload, str(folder), json.dumps(choices), "--epochs", str(count)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]),
        "TORCHINDUCTOR_CACHE_DIR": str(folder.parent / "compiled"),  # one turn compiles, the others find it
    }
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


def verdict(row: dict) -> str:
    if row["row"] == "epochs":
        ratio = row["whole_epochs"]["ratio"]
        reached = "reached" if ratio >= WANTED_RATIO else "NOT reached"
        return f"{ratio:.2f} times over whole epochs, wanted {WANTED_RATIO}: {reached}"
    if any(row[name] is None for name in WAITS):
        return f"{row['gain']} times, wanted {WANTED_RATIO}; no profile of the answer can be trusted: NOT reached"
    waits = sum(row[name] for name in WAITS)
    good = (row["gain"] or 0) >= WANTED_RATIO and waits < WANTED_WAIT
    return (
        f"{row['gain']} times, wanted {WANTED_RATIO}; data wait and epoch restart {waits:.1%} after, wanted below "
        f"{WANTED_WAIT:.0%}: {'reached' if good else 'NOT reached'}"
    )


def main() -> None:
    parser = parser_of(__doc__, FULL, "input_bound.jsonl")
    parser.add_argument("--epochs", type=int, default=20, help="whole epochs of each timed process")
    arguments = parser.parse_args()
    rows = SMALL if arguments.small else FULL
    measure_rows("input_bound.py", arguments, rows, partial(look, num_epochs=arguments.epochs), verdict)


if __name__ == "__main__":
    main()
