"""Spread of the answers of repeated `steptune tune` runs.

    python benchmarks/answers.py --repeats 5 --budget 4m examples/digits_vit.py:DigitsViT
    python benchmarks/answers.py --repeats 1 --budget 5m examples/photo_resnet.py:PhotoResNet

Runs the command as a user does, each time with an empty database, and collects verdict, gain with its
interval, bottleneck before and after, and what was recommended. One JSON line an answer, appended as it
comes, with hardware and versions.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from stamp import RESULTS, stamp


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--budget", default="4m")
    parser.add_argument("--keep", type=Path, help="folder for database and results of the last answer")
    parser.add_argument("--out", type=Path, default=RESULTS / "answers.jsonl")
    arguments = parser.parse_args()
    command = " ".join(["python", "benchmarks/answers.py", *sys.argv[1:]])
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    for seed in range(arguments.repeats):
        row = {**stamp(command), "seed": seed, **answer(arguments.workload, arguments.budget, seed, arguments.keep)}
        with arguments.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        shown = ("verdict", "ratio", "interval", "bottleneck_before", "bottleneck_after", "seconds")
        print({key: row[key] for key in shown}, row["recommended"], flush=True)


def answer(workload: str, budget: str, seed: int, keep: Path | None) -> dict:
    """One run of the command."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        folder = keep or temporary
        place = ["--database", f"sqlite:///{folder}/answers.db", "--output", f"{folder}/results"]
        options = ["--budget", budget, "--seed", str(seed), *place]
        command = [sys.executable, "-m", "steptune", "tune", workload, *options]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        recommendation = json.loads((Path(folder) / "results" / "steptune.json").read_text())
    gain, hardware = recommendation["gain"], recommendation["hardware"]
    return {
        "workload": workload,
        "budget": budget,
        "seconds": round(time.monotonic() - began),
        "hardware": {
            "cpu": hardware["cpu_name"],
            "cores": hardware["num_cores"],
            "devices": [device["name"] for device in hardware["devices"]],
        },
        "others_used": round(recommendation["foreign_cpu_share"], 2),
        "verdict": recommendation["verdict"],
        "baseline_units_per_s": round(recommendation["baseline_units_per_s"], 1),
        "ratio": gain and round(gain["ratio"], 4),
        "interval": gain and [round(gain["interval"][side], 4) for side in ("low", "high")],
        "bottleneck_before": recommendation["bottleneck_before"],
        "bottleneck_after": recommendation["bottleneck_after"],
        "recommended": recommendation["candidate"]["choices"],
        "tried": recommendation["cost"]["num_trials"],
        "families_not_tried": sorted(
            {move["strategy"] for row in recommendation["certificate"]["not_tried"] for move in row["moves"]}
        ),
    }


if __name__ == "__main__":
    main()
