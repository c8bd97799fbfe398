"""How much of a short budget is left for candidates, of jobs that run bf16 and compiled already?

    python benchmarks/preparation_share.py
    python benchmarks/preparation_share.py --only diffusion_unet
    python benchmarks/preparation_share.py --small      # small models and budgets, on a CPU
    python benchmarks/preparation_share.py --fresh      # on a machine that has never run the job

Runs a study of each workload with its budget, as `steptune tune` does, and appends one JSON line: seconds of the
inspection, the guard's reference, the baseline, the candidates and the confirmation, seconds that were not used, how
many candidates were measured, and the phases of every trial. On a GPU of 80 GB inspection, reference and baseline
should take at most `MOST_PREPARATION` of the budget, and at least one candidate should be measured.

A job that is tuned has run before: one process takes a step of it and compiles a small function first, so that the
files of PyTorch, cuDNN and Triton are in memory. On a machine that was just started, reading them takes longer than
many a step of the preparation; `--fresh` leaves that in. Nothing that was compiled is shared with the study.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stamp import ROOT, stamp
from tuned import Tuned, add_foreign_load, answer, settings_of, tuned

from steptune.tuner.errors import SteptuneError
from steptune.tuner.records import Purpose, Trial

MOST_PREPARATION = 0.6
"""Share of the budget that preparation may take."""
FOLDER = ROOT / "benchmarks" / "workloads"
ONE_STEP = """
import sys
import torch
from steptune.tuner.workloads.loading import load_workload
workload, device = load_workload(sys.argv[1]), "cuda" if torch.cuda.is_available() else "cpu"
model, dataset = workload.model().to(device), workload.dataset()
collate = workload.collate or torch.utils.data.default_collate
collated = collate([dataset[index] for index in range(workload.global_batch)])
batch = workload.batch_transform(torch.utils._pytree.tree_map(lambda leaf: leaf.to(device), collated))
with torch.autocast(device, torch.bfloat16):
    workload.loss(model, batch).backward()
values = torch.randn(4096, device=device, requires_grad=True)
torch.compile(lambda x: torch.nn.functional.gelu(x).sum())(values).backward()
"""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A workload and its budget; `small` are the arguments of a dry run."""

    name: str
    workload: str
    small: str
    budget_s: float
    small_budget_s: float


JOBS = (
    Job(
        name="diffusion_unet",
        workload="diffusion_unet.py:DiffusionUNet",
        small="batch=4&image_size=16&channels=32&multipliers=1,2&attended=1&depth=1&head=16&images=64",
        budget_s=130.0,
        small_budget_s=130.0,
    ),
    Job(
        name="llama_1b",
        workload="llama_1b.py:Llama1B",
        small="batch=4&sequence=64&vocabulary=512&width=64&hidden=128&depth=2&heads=4&kv_heads=2&samples=64",
        budget_s=300.0,
        small_budget_s=180.0,
    ),
)
PARTS = {
    "inspecting the machine": "inspection",
    "inspecting the workload": "inspection",
    "measuring the links between ranks": "inspection",
    "running the reference": "reference",
    "baseline": "baseline",
    "confirming": "confirmation",
}
"""Part that a stage belongs to; all other stages measure candidates."""
PREPARATION = ("inspection", "reference", "baseline")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=[job.name for job in JOBS], default=None)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--fresh", action="store_true", help="run nothing before")
    parser.add_argument("--budget", type=float, default=None, help="seconds, instead of the job's own")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "preparation_share.jsonl")
    add_foreign_load(parser)
    arguments = parser.parse_args()
    passed = True
    for job in JOBS:
        if arguments.only in (None, job.name):
            try:
                row = measured(job, arguments)
            except SteptuneError as error:  # the next job has a budget of its own
                row = {"job": job.name, "passed": False, "error": str(error), **stamp(command())}
            print(json.dumps({name: value for name, value in row.items() if name != "trials"}, indent=2))
            with arguments.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
            passed &= arguments.small or row["passed"]
    return 0 if passed else 1


def measured(job: Job, arguments: argparse.Namespace) -> dict:
    """The row of one job."""
    workload = f"{FOLDER / job.workload}{'?' + job.small if arguments.small else ''}"
    budget_s = arguments.budget or (job.small_budget_s if arguments.small else job.budget_s)
    if not arguments.fresh:
        run_before(workload)
    with tuned(workload, settings_of(budget_s / 60, arguments.foreign_load), say=f"{job.name} ") as study:
        trials = study.store.trials(study.study.study_id)
        seconds = seconds_by_part(study.stages, study.seconds)
        share = sum(seconds[part] for part in PREPARATION) / budget_s
        candidates = candidates_measured(trials)
        return {
            "job": job.name,
            "small": arguments.small,
            "ran_before": not arguments.fresh,
            "budget_s": budget_s,
            "seconds": seconds,
            "total_s": round(study.seconds, 1),
            "unused_s": round(max(0.0, budget_s - study.seconds), 1),
            "preparation_share": round(share, 3),
            "candidates_measured": candidates,
            "passed": share <= MOST_PREPARATION and candidates >= 1,
            "no_time_for": list(study.recommendation.no_time_for),
            "needed_budget_s": study.recommendation.needed_budget_s,
            **found(study),
            "trials": [told(trial) for trial in trials],
            **stamp(command()),
        }


def run_before(workload: str) -> None:
    """Takes one step of a job and compiles a small function, with caches that are thrown away."""
    with tempfile.TemporaryDirectory() as caches:
        environment = {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor",
            "TRITON_CACHE_DIR": f"{caches}/triton",
        }
        subprocess.run([sys.executable, "-c", ONE_STEP, workload], check=True, env=environment)


def command() -> str:
    return " ".join(["python", "benchmarks/preparation_share.py", *sys.argv[1:]])


def found(study: Tuned) -> dict:
    """The study's answer, and the machine."""
    kept = ("hardware", "verdict", "recommended", "gain", "gain_interval", "num_blocks", "ended")
    return {name: value for name, value in answer(study).items() if name in kept}


def seconds_by_part(stages: Sequence[tuple[float, str]], total_s: float) -> dict[str, float]:
    """Seconds from the begin of each stage to that of the next, by the part that it belongs to."""
    seconds = Counter(dict.fromkeys([*PREPARATION, "candidates", "confirmation"], 0.0))
    ends = [*(began_s for began_s, _ in stages[1:]), total_s]
    for (began_s, stage), end_s in zip(stages, ends, strict=True):
        if stage not in ("starting", "done"):
            seconds[PARTS.get(stage, "candidates")] += end_s - began_s
    return {part: round(value, 1) for part, value in seconds.items()}


def candidates_measured(trials: Sequence[Trial]) -> int:
    """Different candidates beside the baseline that the search measured."""
    searched = (t for t in trials if t.purpose not in (Purpose.BASELINE, Purpose.COMPANION, Purpose.CONFIRM))
    good = (t for t in searched if t.result is not None and t.result.ok and not t.candidate.is_baseline)
    return len({trial.candidate.key for trial in good})


def told(trial: Trial) -> dict:
    """One trial: what it was for, and where its seconds went."""
    result = trial.result
    row: dict = {"candidate": trial.candidate.label, "purpose": trial.purpose.value, "state": trial.state.value}
    if result is None:
        return row
    return row | {
        "phases_s": {name: round(value / 1e9, 2) for name, value in result.phases_ns.items()},
        "compile_s": result.startup and round(result.startup.compile_ns / 1e9, 2),
        "user_code_s": result.startup and round(result.startup.user_code_ns / 1e9, 2),
        "num_windows": len(result.windows),
        "peak_mib": result.peak_memory_bytes >> 20,
        "cache": result.compilation and [result.compilation.cache_hits, result.compilation.cache_misses],
        "graphs": result.compilation and result.compilation.num_graphs,
        "failure": result.failure and f"{result.failure.kind.value} in {result.failure.phase.value}",
    }


if __name__ == "__main__":
    sys.exit(main())
