"""Gain of a new study by answers of earlier ones, and their cost where they do not fit.

    python benchmarks/search_transfer.py --seeds 0 3 --budgets 200 330

Each modelled step of a GPU (`tests/support/gpu_steps.py`) is searched three times in the same seconds: with an empty
store, with one that holds the study of a variant of it (all its times and its compilation drawn anew within a factor of
1.5), and with one that holds the studies of all other steps. A row is one study: the step of its answer over the best
step of its space. Nothing here is a measurement of a GPU, or depends on the machine's speed; numerical libraries are
held to one thread (OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1).
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from search_steps import shortest_ms, summary
from stamp import RESULTS, stamp

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from gpu_model import GpuModel, Step, studied
from gpu_steps import STEPS

from steptune.tuner.memory_store import MemoryStudyStore
from steptune.tuner.records import StudySettings

CODE = ("tuner/search", "tests/support/gpu_model.py", "tests/support/gpu_steps.py", "benchmarks/search_transfer.py")
WITHIN = 1.5
PAST_S = 660.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs=2, default=(0, 3), metavar=("A", "B"), help="from A to below B")
    parser.add_argument("--budgets", type=float, nargs="*", default=(200.0, 330.0), help="seconds")
    parser.add_argument("--out", type=Path, default=RESULTS / "search_transfer.json")
    arguments = parser.parse_args()
    best: dict[str, float] = {}
    rows = []
    for seed in range(*arguments.seeds):
        for name, step in STEPS.items():
            for past in ("none", "a variant", "all others"):
                for budget_s in arguments.budgets:
                    rows.append(
                        {"step": name, "past": past, **study(step, store_of(past, name, seed), seed, budget_s, best)}
                    )
                    print(json.dumps(rows[-1]), flush=True)
    report = {
        "question": "the step of a study's answer over the best step of its space, by what its store knew",
        **stamp(" ".join(["python", *sys.argv]), CODE),
        "summary": summary(rows, by="past"),
        "rows": rows,
    }
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    for name, found in report["summary"].items():
        print(f"{name:24s} {found}")


def store_of(past: str, name: str, seed: int) -> MemoryStudyStore:
    """A store with finished studies."""
    store = MemoryStudyStore()
    known = {"none": [], "a variant": [variant(STEPS[name], seed)]}
    others = [step for other, step in STEPS.items() if other != name]
    for step in known.get(past, others):
        studied(GpuModel(step, 1000 + seed), settings(step, PAST_S), store)
    return store


def variant(step: Step, seed: int) -> Step:
    """The step of another size of a model, on another batch."""
    chance = random.Random(f"{step.name} {seed}")

    def drawn(value: float) -> float:
        return value * WITHIN ** chance.uniform(-1, 1)

    return replace(
        step,
        name=f"a variant of {step.name}",
        gpu_ms={category: drawn(ms) for category, ms in step.gpu_ms.items()},
        host_ms=drawn(step.host_ms),
        optimizer_host_ms=drawn(step.optimizer_host_ms),
        whole_s=drawn(step.whole_s),
        regional_s=drawn(step.regional_s),
    )


def settings(step: Step, budget_s: float) -> StudySettings:
    return StudySettings(budget_s=budget_s, num_ranks=step.num_ranks)


def study(step: Step, store: MemoryStudyStore, seed: int, budget_s: float, best: dict[str, float]) -> dict[str, Any]:
    """One study to its answer."""
    runner = GpuModel(step, seed)
    answer, driver = studied(runner, settings(step, budget_s), store)
    assert driver.prepared is not None
    space = driver.prepared.space
    if step.name not in best:
        best[step.name] = shortest_ms(space, step)
    return {
        "seed": seed,
        "budget_s": budget_s,
        "winners": len(driver.prepared.priors.past_winners),
        "over_best": round(step.step_ms(space.complete(answer.candidate)) / best[step.name], 4),
        "answer": answer.candidate.label,
        "verdict": str(answer.verdict),
    }


if __name__ == "__main__":
    main()
