"""Do recommendations train as well as today's settings?

    python benchmarks/trained.py                                   # ten studies, six trainings of each
    python benchmarks/trained.py --only MarkovGPT --budget 120     # both starts of one training
    python benchmarks/trained.py --only Teacher --steps 50 --budget 40 --seeds 0 1 --out small.jsonl      # a dry run

Five small trainings (`workloads/learning.py`), each from FP32 eager and from bf16 compiled with a fused optimizer, are
tuned. Then today's settings and the recommended ones train 2,000 steps each, from the same three seeds, in fresh
processes. The metric is the mean loss of the last steps; no step sees a sample twice. It should lie inside the spread
that seeds alone make: the mean of the recommended settings between the best and the worst seed of today's.

One JSON line a row is appended to the results file. A study that finds nothing faster has no row to judge: its line
says so.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
from stamp import RESULTS, ROOT, hardware, stamp
from tuned import add_foreign_load, settings_of, tuned

from steptune.tuner.export import exporter_named
from steptune.tuner.records import BASELINE, Environment, Recommendation

LEARNING = ROOT / "benchmarks" / "workloads" / "learning.py"
NAMES = ("MarkovGPT", "MarkovLSTM", "ShapesConvolutional", "ShapesTransformer", "Teacher")
STARTS = {"FP32": "", "bf16 compiled fused": "professional=True"}
SCRIPT = ROOT / "benchmarks" / "fidelity" / "trained.py"
NUM_LAST = 10
"""One in so many steps is among the last ones, whose loss is the metric."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=NAMES, default=NAMES)
    parser.add_argument("--start", nargs="*", choices=STARTS, default=tuple(STARTS))
    parser.add_argument("--budget", type=float, default=120.0, help="seconds of each study")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, nargs="+", default=(0, 1, 2))
    parser.add_argument("--out", type=Path, default=RESULTS / "trained.jsonl")
    add_foreign_load(parser)
    arguments = parser.parse_args()
    for name in arguments.only:
        for start in arguments.start:
            line = measured(name, start, arguments)
            with arguments.out.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(f"{name}, {start}: {told(line)}", flush=True)


def measured(name: str, start: str, arguments: argparse.Namespace) -> dict:
    """One row: what was recommended, and the final losses of both sides by seed."""
    reference = f"{LEARNING}:{name}?num_steps={arguments.steps}&{STARTS[start]}".rstrip("&")
    with tuned(reference, settings_of(arguments.budget / 60, arguments.foreign_load), say=f"{name}  ") as study:
        recommendation = study.recommendation
    line = {
        "row": f"{name}, {start}",
        **stamp(" ".join(["python", "benchmarks/trained.py", *sys.argv[1:]])),
        "hardware": hardware(Environment(hardware=recommendation.hardware)),
        "verdict": recommendation.verdict.value,
        "choices": dict(recommendation.candidate.choices),
        "ratio": recommendation.gain and round(recommendation.gain.ratio, 4),
    }
    if not recommendation.candidate.choices:
        return line
    losses = {
        side: [trained(record, reference, seed, arguments.steps) for seed in arguments.seeds]
        for side, record in (("today", today_of(recommendation)), ("recommended", recommendation))
    }
    return {**line, "steps": arguments.steps, "seeds": list(arguments.seeds), **judged(losses)}


def today_of(recommendation: Recommendation) -> Recommendation:
    """The same record with what the workload runs today: a strategy that a record does not name stays as it is."""
    return msgspec.structs.replace(recommendation, candidate=BASELINE, choices={}, environment_variables={})


def trained(recommendation: Recommendation, reference: str, seed: int, steps: int) -> dict[str, float]:
    """Losses of a training in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "steptune.json"
        record.write_text(exporter_named("json").export(recommendation))
        last = max(1, steps // NUM_LAST)
        done = subprocess.run(
            [sys.executable, str(SCRIPT), str(record), reference, str(seed), str(steps), str(last)],
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
    if done.returncode != 0:
        raise RuntimeError(f"a training of {reference} failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def judged(losses: dict[str, list[dict[str, float]]]) -> dict:
    """Final losses by side, and whether the recommended ones are within the spread of today's seeds."""
    last = {side: [of["last_loss"] for of in seeds] for side, seeds in losses.items()}
    low, high = min(last["today"]), max(last["today"])
    return {
        "first_loss": losses["today"][0]["first_loss"],
        "last_losses": last,
        "learned": high < 0.9 * losses["today"][0]["first_loss"],
        "inside": low <= statistics.fmean(last["recommended"]) <= high,
        "further_apart": max(
            abs(ours - theirs) for ours, theirs in zip(last["recommended"], last["today"], strict=True)
        )
        > high - low,
    }


def told(line: dict) -> str:
    """Say the row in words."""
    if "last_losses" not in line:
        return f"{line['verdict']}: nothing to train"
    theirs, ours = ([f"{loss:.4f}" for loss in line["last_losses"][side]] for side in ("today", "recommended"))
    return f"{line['ratio']}x; today {', '.join(theirs)}; recommended {', '.join(ours)}; inside: {line['inside']}"


if __name__ == "__main__":
    main()
