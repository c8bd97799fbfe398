"""Do recommendations train as well as today's settings?

    python benchmarks/trained.py                                   # fourteen studies, six trainings of each
    python benchmarks/trained.py --only MarkovGPT --budget 120     # both starts of one training
    python benchmarks/trained.py --only Teacher --steps 50 --budget 40 --seeds 0 1 --out small.jsonl      # a dry run
    python benchmarks/trained.py --phase studies --records FOLDER --at-once 5 --budget 75 --foreign-load 1
    python benchmarks/trained.py --phase trainings --records FOLDER --at-once 10    # of the recommendations kept there

Seven small trainings (`workloads/learning.py`), each from FP32 eager and from bf16 compiled with a fused optimizer, are
tuned. Then today's settings and the recommended ones train 2,000 steps each, from the same three seeds, in fresh
processes. The metric is the mean loss of the last steps; no step sees a sample twice. It should lie inside the spread
that seeds alone make: the mean of the recommended settings between the best and the worst seed of today's.

Trainings may run side by side on one device: they are not timed. Studies side by side find what suits such a device,
which is all that is asked of them here; the gains that they state are none of an idle one.

One JSON line a row is appended to the results file. A study that finds nothing faster has no row to judge: its line
says so.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import msgspec
from stamp import RESULTS, ROOT, hardware, stamp
from tuned import add_foreign_load, settings_of, tuned

from steptune.tuner.errors import SteptuneError
from steptune.tuner.export import exporter_named
from steptune.tuner.records import BASELINE, Environment, Recommendation

LEARNING = ROOT / "benchmarks" / "workloads" / "learning.py"
NAMES = (
    "MarkovGPT",
    "MarkovLSTM",
    "ShapesConvolutional",
    "ShapesTransformer",
    "Teacher",
    "ShapesDenoiser",
    "Towers",
)
STARTS = {"FP32": "", "bf16 compiled fused": "professional=True"}
SCRIPT = ROOT / "benchmarks" / "fidelity" / "trained.py"
SIDES = ("today", "recommended")
NUM_LAST = 10
"""One in so many steps is among the last ones, whose loss is the metric."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=NAMES, default=NAMES)
    parser.add_argument("--start", nargs="*", choices=STARTS, default=tuple(STARTS))
    parser.add_argument("--phase", choices=("studies", "trainings", "both"), default="both")
    parser.add_argument("--records", type=Path, help="folder that keeps recommendations between the phases")
    parser.add_argument("--at-once", type=int, default=1, help="studies, or trainings, side by side")
    parser.add_argument("--budget", type=float, default=120.0, help="seconds of each study")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, nargs="+", default=(0, 1, 2))
    parser.add_argument("--out", type=Path, default=RESULTS / "trained.jsonl")
    add_foreign_load(parser)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        arguments.records = arguments.records or Path(folder)
        rows = [(name, start) for name in arguments.only for start in arguments.start]
        if arguments.phase != "trainings":
            study_all(rows, arguments)
        if arguments.phase != "studies":
            train_all(rows, arguments)


# --- studies ----------------------------------------------------------------------------------


def study_all(rows: Sequence[tuple[str, str]], arguments: argparse.Namespace) -> None:
    with ProcessPoolExecutor(arguments.at_once) as pool:  # a study has a process of its own
        for done in [pool.submit(study, *row, arguments) for row in rows]:
            done.result()


def study(name: str, start: str, arguments: argparse.Namespace) -> None:
    """Keeps a recommendation and today's settings as records, and what is said of them."""
    settings = settings_of(arguments.budget / 60, arguments.foreign_load)
    folder = folder_of(name, start, arguments)
    folder.mkdir(parents=True, exist_ok=True)
    head = {"row": f"{name}, {start}", **stamp(" ".join(["python", "benchmarks/trained.py", *sys.argv[1:]]))}
    try:
        with tuned(reference_of(name, start, arguments.steps), settings, say=f"{name}, {start}  ") as found:
            recommendation = found.recommendation
    except SteptuneError as error:  # the others go on
        (folder / "line.json").write_text(json.dumps({**head, "error": str(error), "choices": {}}))
        return
    for side, record in (("today", today_of(recommendation)), ("recommended", recommendation)):
        (folder / f"{side}.json").write_text(exporter_named("json").export(record))
    line = {
        **head,
        "hardware": hardware(Environment(hardware=recommendation.hardware)),
        "verdict": recommendation.verdict.value,
        "choices": dict(recommendation.candidate.choices),
        "ratio": recommendation.gain and round(recommendation.gain.ratio, 4),
    }
    (folder / "line.json").write_text(json.dumps(line))


def reference_of(name: str, start: str, steps: int) -> str:
    return f"{LEARNING}:{name}?num_steps={steps}&{STARTS[start]}".rstrip("&")


def folder_of(name: str, start: str, arguments: argparse.Namespace) -> Path:
    return Path(arguments.records) / f"{name}-{start.replace(' ', '-')}"


def today_of(recommendation: Recommendation) -> Recommendation:
    """Return the record with what the workload runs today: a strategy that a record does not name stays as it is."""
    return msgspec.structs.replace(recommendation, candidate=BASELINE, choices={}, environment_variables={})


# --- trainings --------------------------------------------------------------------------------


def train_all(rows: Sequence[tuple[str, str]], arguments: argparse.Namespace) -> None:
    """Trains seed by seed: a later one finds compiled what the first one compiled. A row follows its last training."""
    lines = {row: json.loads((folder_of(*row, arguments) / "line.json").read_text()) for row in rows}
    to_train = [row for row in rows if lines[row]["choices"]]
    num_threads = max(1, (os.cpu_count() or 1) // arguments.at_once)
    with ThreadPoolExecutor(arguments.at_once) as pool:
        losses = {
            (row, seed, side): pool.submit(trained, *row, side, seed, num_threads, arguments)
            for seed, row, side in itertools.product(arguments.seeds, to_train, SIDES)
        }
        for row in rows:
            line = lines[row]
            if row in to_train:
                of_sides = {side: [losses[row, seed, side].result() for seed in arguments.seeds] for side in SIDES}
                line |= {"steps": arguments.steps, "seeds": list(arguments.seeds), **judged(of_sides)}
            with arguments.out.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(f"{line['row']}: {told(line)}", flush=True)


def trained(
    name: str, start: str, side: str, seed: int, num_threads: int, arguments: argparse.Namespace
) -> dict[str, float]:
    """Train in a process of its own; its losses are kept beside its record, so that a run that is cut off goes on."""
    kept = folder_of(name, start, arguments) / f"{side}-{seed}-{arguments.steps}.json"
    if kept.exists():
        return json.loads(kept.read_text())
    reference, last = reference_of(name, start, arguments.steps), max(1, arguments.steps // NUM_LAST)
    with tempfile.TemporaryDirectory() as folder:  # also for what the workload prepares
        record = Path(folder) / "steptune.json"
        shutil.copy(folder_of(name, start, arguments) / f"{side}.json", record)
        done = subprocess.run(
            [sys.executable, str(SCRIPT), str(record), reference, str(seed), str(arguments.steps), str(last)],
            env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": str(num_threads)},
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
    if done.returncode != 0:
        raise RuntimeError(f"a training of {reference} failed:\n{done.stderr[-4000:]}")
    kept.write_text(done.stdout.splitlines()[-1])
    return json.loads(kept.read_text())


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
    if "error" in line:
        return f"no answer: {line['error']}"
    if "last_losses" not in line:
        return f"{line['verdict']}: nothing to train"
    theirs, ours = ([f"{loss:.4f}" for loss in line["last_losses"][side]] for side in ("today", "recommended"))
    return f"{line['ratio']}x; today {', '.join(theirs)}; recommended {', '.join(ours)}; inside: {line['inside']}"


if __name__ == "__main__":
    main()
