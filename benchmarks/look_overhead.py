"""Cost of the hooks in a training script, while they only watch.

    python benchmarks/look_overhead.py

One loop (next, forward, backward, clipping, step) in one process, in blocks that take turns: with the hooks in place,
as they are between the first steps and the recording, and without. Processor time of the loop's thread, because others
use the machine too; torch has one thread. The cost is that of a step with five marks, and does not depend on the
model: it is given in microseconds and as a share of a step of 10 ms.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from stamp import RESULTS, stamp
from torch.utils.data import DataLoader, TensorDataset

from steptune.tuner.hardware import cpu_name, usable_cores
from steptune.tuner.scripts.agent import window
from steptune.tuner.scripts.agent.hooks import Hooks

STEP_NS = 10_000_000
LEAST_STEPS = 32
"""Steps before a block with hooks is timed: the period is found, and the wrapper of modules is gone."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--steps", type=int, default=400, help="steps of a block")
    parser.add_argument("--out", type=Path, default=RESULTS / "look_overhead.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    window.NUM_BLOCKS = sys.maxsize  # timing has no end, and no recording begins
    turns = random.Random(0)
    costs_ns, ratios = [], []
    for _ in range(arguments.pairs):
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "settings.json").write_text('{"full": true}')
            order = [Hooks(folder), None]
            turns.shuffle(order)
            times = {hooks is not None: block_ns(arguments.steps, hooks) for hooks in order}
        costs_ns.append(times[True] - times[False])
        ratios.append(times[True] / times[False])
    cost_ns = statistics.median(costs_ns)
    low, _, high = statistics.quantiles(costs_ns, n=4)
    report = {
        "question": "processor time that the hooks add to a step while they only watch",
        **stamp(" ".join(["python", "benchmarks/look_overhead.py", *sys.argv[1:]])),
        "hardware": {
            "cpu": cpu_name(),
            "cores": usable_cores(),
            "load_1min": round(os.getloadavg()[0], 1),
            "machine": "shared",
        },
        "num_pairs": arguments.pairs,
        "num_steps": arguments.steps,
        "cost_us": {"median": round(cost_ns / 1e3, 1), "quartiles": [round(low / 1e3, 1), round(high / 1e3, 1)]},
        "ratio_of_the_small_step": round(statistics.median(ratios), 3),
        "share_of_10_ms": round(cost_ns / STEP_NS, 5),
    }
    print(json.dumps(report, indent=2))
    arguments.out.write_text(json.dumps(report, indent=2) + "\n")


def block_ns(num_steps: int, hooks: Hooks | None) -> float:
    """Processor time of a step, in nanoseconds."""
    if hooks is not None:
        hooks.install()
    batches, step = make_loop(num_steps + LEAST_STEPS)
    for _ in range(LEAST_STEPS):
        step(next(batches))
    begin_ns = time.thread_time_ns()
    for _ in range(num_steps):
        step(next(batches))
    took_ns = time.thread_time_ns() - begin_ns
    if hooks is not None:
        assert hooks.session.window.num_steps > num_steps, "the hooks saw the steps"
        hooks.remove()
        hooks.session = None  # whose record would be written at the end
    return took_ns / num_steps


def make_loop(num_steps: int):
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(8 * num_steps, 16), torch.randint(0, 4, (8 * num_steps,)))
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch) -> None:
        loss = torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return iter(DataLoader(data, batch_size=8)), step


if __name__ == "__main__":
    main()
