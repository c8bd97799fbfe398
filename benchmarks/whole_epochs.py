"""Times whole epochs of one configuration in a process of its own, as a training script runs them.

    python benchmarks/whole_epochs.py WORKLOAD FOLDER '{"data_loading": {...}, ...}' --epochs 20

The loader is iterated anew in every epoch, nothing is left out and nothing amortised. Prints seconds per epoch.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch

from steptune.tuner.strategies.combine import make_plan
from steptune.tuner.training.assemble import assemble
from steptune.tuner.workloads.loading import load_workload


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload")
    parser.add_argument("folder", type=Path, help="for what the workload prepares; kept")
    parser.add_argument("choices", help="the complete choice of every strategy, as JSON")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--untimed", type=int, default=3)
    arguments = parser.parse_args()
    workload = load_workload(arguments.workload)
    workload.directory = arguments.folder
    if not arguments.folder.exists():
        arguments.folder.mkdir(parents=True)
        workload.prepare(arguments.folder)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    job = assemble(workload, make_plan(json.loads(arguments.choices)), device=device)
    seconds = []
    for _ in range(arguments.untimed + arguments.epochs):
        began = time.perf_counter()
        for batch in job:
            loss = job.step(batch)
        float(loss)  # waits for the device
        seconds.append(time.perf_counter() - began)
    print(json.dumps(seconds[arguments.untimed :]))


if __name__ == "__main__":
    main()
