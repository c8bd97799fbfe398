"""Cost of Steptune itself: time per trial, and memory of the parent process.

    python benchmarks/overhead.py

Cost of a trial: from the request to its first step, less the time inside the user's own code (importing
the workload, building its model and data set). Compilation happens in the first steps, so it is not in
it. Measured on a toy, over every choice that can be made here, and on GPT-2 large from a transformers
config (774 million parameters), whose initial state is mapped into every trial instead of made again.

The parent's peak memory is that of this process, which has imported what the command line imports.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

from engine import engine
from stamp import RESULTS, hardware, peak_memory_bytes, stamp

import steptune.service.cli.tune  # noqa: F401  what the parent of `steptune tune` has loaded
from steptune.tuner.records import BASELINE, MeasureSettings, Purpose, StudySettings

TOY = "zoo:synthetic"
LARGE = "zoo:gpt2_large?batch=1&sequence=16"
BRIEF = MeasureSettings(cap_s=0.0, min_rounds=1, max_rounds=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="trials of the large model, minutes each on a CPU")
    parser.add_argument("--only", choices=("toy", "large"))
    parser.add_argument("--out", type=Path, default=RESULTS / "overhead.json")
    arguments = parser.parse_args()
    rows, machine = [], {}
    if arguments.only != "large":
        row, machine = measure(TOY, repeats=1, every_choice=True)
        rows.append(row)
    if arguments.only != "toy":
        row, machine = measure(LARGE, repeats=arguments.repeats, every_choice=False)
        rows.append(row)
    report = {
        "question": "seconds of Steptune's own per trial, until the first step",
        **stamp(" ".join(["python", "benchmarks/overhead.py", *sys.argv[1:]])),
        "hardware": machine,
        "workloads": rows,
        "parent": {"peak_mib": peak_memory_bytes() >> 20, "torch_is_loaded": "torch" in sys.modules},
    }
    print(f"parent: peak {report['parent']['peak_mib']} MiB, torch loaded: {report['parent']['torch_is_loaded']}")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=2) + "\n")


def measure(workload: str, *, repeats: int, every_choice: bool) -> tuple[dict, dict]:
    """The cost of trials one after another; the first includes starting the trial server."""
    settings = StudySettings()
    with engine(workload, settings) as ready:
        space = ready.space
        candidates = [BASELINE]
        if every_choice:
            candidates += [c for move in space.moves if (c := space.combine(BASELINE, [move])) is not None]
        own, user, failed = [], [], []
        for candidate in candidates * repeats:
            (result,) = ready.run([candidate], [Purpose.CONFIRM], BRIEF)
            if result.startup is None:
                failed.append(f"{candidate.label}: {result.failure and result.failure.message}")
                continue
            own.append((result.startup.first_step_ns - result.startup.user_code_ns) / 1e9)
            user.append(result.startup.user_code_ns / 1e9)
            print(f"{workload:36} {candidate.label[:60]:60} {own[-1]:.3f} s own, {user[-1]:.3f} s user's", flush=True)
        row = {
            "workload": workload,
            "num_trials": len(own),
            "own_s": _spread(own),
            "user_code_s": _spread(user),
            "failed": failed,
        }
        print(f"{workload}: own cost per trial {row['own_s']}", flush=True)
        return row, hardware(space.environment)


def _spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "median": round(statistics.median(ordered), 3),
        "p90": round(ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))], 3),
        "max": round(ordered[-1], 3),
    }


if __name__ == "__main__":
    main()
