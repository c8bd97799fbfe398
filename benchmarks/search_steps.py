"""How near the best do whole studies with the real strategies come, on modelled steps of a GPU?

    python benchmarks/search_steps.py --seeds 0 2 --budgets 330 660

Each step (`tests/support/gpu_steps.py`) is searched with its real space, bounds and expectations, and on a clock that
charges preparation, starts, compilation and confirmation. A row is one study: the step of its answer over the best
step, which is found by changing one or two choices at a time, from several configurations, on the true times. Nothing
here is a measurement of a GPU, or depends on the machine's speed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from search_opponents import DeepSpeed, ExpertList, Greedy, Horovod, PlainGaussian
from stamp import RESULTS, stamp

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from gpu_model import GpuModel, Step, studied
from gpu_steps import STEPS

from steptune.tuner.records import BASELINE, Candidate, StudySettings
from steptune.tuner.search import preparation
from steptune.tuner.search.searches import make_search
from steptune.tuner.search.space import Space

CODE = ("tuner/search", "tests/support/gpu_model.py", "tests/support/gpu_steps.py", "benchmarks/search_steps.py")
OPPONENTS: dict[str, Callable[[], Any]] = {
    "additive GP": PlainGaussian,
    "greedy": Greedy,
    "expert": ExpertList,
    "DeepSpeed": DeepSpeed,
    "Horovod": Horovod,
}
METHODS = ("model", "random", "tpe", *OPPONENTS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs=2, default=(0, 4), metavar=("A", "B"), help="from A to below B")
    parser.add_argument("--budgets", type=float, nargs="*", default=(330.0, 660.0), help="seconds")
    parser.add_argument("--methods", nargs="*", default=METHODS)
    parser.add_argument("--out", type=Path, default=RESULTS / "search_steps.json")
    arguments = parser.parse_args()
    best: dict[str, float] = {}
    rows = []
    for name, method, seed, budget_s in itertools.product(
        STEPS, arguments.methods, range(*arguments.seeds), arguments.budgets
    ):
        row = study(STEPS[name], method, seed, budget_s, best)
        rows.append({"step": name, **row})
        print(json.dumps(rows[-1]), flush=True)
    report = {
        "question": "the step of a study's answer over the best step of its space, with the real strategies",
        **stamp(" ".join(["python", *sys.argv]), CODE),
        "summary": summary(rows),
        "rows": rows,
    }
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    for name, found in report["summary"].items():
        print(f"{name:24s} {found}")


def study(step: Step, method: str, seed: int, budget_s: float, best: dict[str, float]) -> dict[str, Any]:
    """One study to its answer."""
    runner = GpuModel(step, seed)
    settings = StudySettings(
        budget_s=budget_s, num_ranks=step.num_ranks, search="model" if method in OPPONENTS else method
    )
    with mock.patch.object(preparation, "make_search", lambda name: OPPONENTS.get(method, lambda: make_search(name))()):
        answer, driver = studied(runner, settings)
    assert driver.prepared is not None
    space = driver.prepared.space
    if step.name not in best:
        best[step.name] = shortest_ms(space, step)
    step_ms = step.step_ms(space.complete(answer.candidate))
    return {
        "method": method,
        "seed": seed,
        "budget_s": budget_s,
        "today_over_best": round(step.step_ms(space.complete(BASELINE)) / best[step.name], 4),
        "over_best": round(step_ms / best[step.name], 4),
        "seconds": round(runner.now_s, 1),
        "starts": len(runner.labels),
        "answer": answer.candidate.label,
        "verdict": str(answer.verdict),
    }


def shortest_ms(space: Space, step: Step) -> float:
    """The shortest true step that changes of one or two choices lead to, from several configurations."""
    return min(_descend(space, step, start) for start in _beginnings(space))


def _beginnings(space: Space) -> list[Candidate]:
    return [BASELINE, *(c for move in space.moves if (c := space.combine(BASELINE, [move])) is not None)][:12]


def _descend(space: Space, step: Step, candidate: Candidate) -> float:
    found = step.step_ms(space.complete(candidate))
    while True:
        single = [[move] for move in space.moves]
        for changes in (single, [list(pair) for pair in itertools.combinations(space.moves, 2)]):
            near = [c for moves in changes if (c := space.combine(candidate, moves)) is not None]
            times = [step.step_ms(space.complete(c)) for c in near]
            if times and min(times) < found - 1e-9:
                found, candidate = min(times), near[times.index(min(times))]
                break
        else:
            return found


def summary(rows: list[dict[str, Any]], by: str = "method") -> dict[str, dict[str, Any]]:
    """Mean step over the best by method, or another column, and budget, and the worst of the steps' means."""
    found = {}
    for method, budget_s in dict.fromkeys((row[by], row["budget_s"]) for row in rows):
        own = [row for row in rows if (row[by], row["budget_s"]) == (method, budget_s)]
        by_step = [statistics.mean(r["over_best"] for r in own if r["step"] == n) for n in {r["step"] for r in own}]
        found[f"{method}, {budget_s:g} s"] = {
            "mean": round(statistics.mean(row["over_best"] for row in own), 4),
            "worst_step": round(max(by_step), 4),
            "studies": len(own),
        }
    return found


if __name__ == "__main__":
    main()
