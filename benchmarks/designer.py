"""Does the search find the best configuration of known surfaces, and how often does random search?

    python benchmarks/designer.py --seeds 0 20

Each surface of `steptune.tuner.trials.fake` is searched under multiplicative noise of every process start. A
seed counts when the step of the designer's answer is within 2 % of the shortest step of all candidates
that fit. On the surface of pure noise every candidate is as fast as the baseline, so there the whole
driver runs, confirmation included, and a seed counts when its answer is the baseline.

Random search has the same number of trials: the baseline, then candidates with every level drawn
uniformly; its answer is the one that measured fastest. Nothing here depends on the machine's speed.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from datetime import UTC, datetime
from pathlib import Path

from stamp import RESULTS, stamp

from steptune.tuner.estimates import units_per_s
from steptune.tuner.memory_store import MemoryStudyStore
from steptune.tuner.records import (
    BASELINE,
    Candidate,
    MeasureSettings,
    Purpose,
    Study,
    StudySettings,
    TrialSpec,
    new_id,
)
from steptune.tuner.search.designer import Designer
from steptune.tuner.search.driver import StudyDriver
from steptune.tuner.search.knowledge import Outcome
from steptune.tuner.search.model_search import ModelSearch
from steptune.tuner.search.space import Space
from steptune.tuner.trials.fake import NOISE, SURFACES, FakeRunner, Surface

WITHIN = 1.02
CODE = ("tuner/search", "tuner/trials/fake.py", "tuner/estimates.py", "benchmarks/designer.py")
NO_LIMIT_S = 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs=2, default=(0, 20), metavar=("A", "B"), help="from A to below B")
    parser.add_argument("--trials", type=int, default=25, help="trials of one search")
    parser.add_argument("--noise", type=float, default=0.03, help="standard deviation between process starts")
    parser.add_argument("--out", type=Path, default=RESULTS / "designer.json")
    arguments = parser.parse_args()
    seeds = range(*arguments.seeds)
    rows = []
    print(
        f"{'surface':12s} {'designer':>9s} {'median':>7s} {'worst':>7s}   {'random':>9s} {'median':>7s} {'worst':>7s}"
    )
    for surface in SURFACES:
        row = judge(surface, seeds, arguments.trials, arguments.noise)
        rows.append(row)
        print(f"{row['surface']:12s} {_columns(row['designer'])}   {_columns(row['random'])}", flush=True)
        if row["designer"]["missed"]:
            print(f"{'':12s} missed by seed: {row['designer']['missed']}", flush=True)
    report = {
        "question": f"answers within {WITHIN - 1:.0%} of the best; on pure noise: answers that are the baseline",
        **stamp(
            f"python benchmarks/designer.py --seeds {seeds.start} {seeds.stop} "
            f"--trials {arguments.trials} --noise {arguments.noise:g}",
            code=CODE,
        ),
        "seeds": [seeds.start, seeds.stop],
        "trials": arguments.trials,
        "noise": arguments.noise,
        "surfaces": rows,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=2) + "\n")


def judge(surface: Surface, seeds: range, trials: int, noise: float) -> dict:
    designed = {seed: design(surface, seed, trials, noise) for seed in seeds}
    drawn = {seed: draw(surface, seed, trials, noise) for seed in seeds}
    return {
        "surface": surface.name,
        "baseline_ms": round(surface.total_ms(BASELINE), 6),
        "best_ms": round(surface.best_ms(), 6),
        "designer": _summary(surface, designed),
        "random": _summary(surface, drawn),
    }


def design(surface: Surface, seed: int, trials: int, noise: float) -> Candidate:
    """The designer's answer; on pure noise the driver's, because only the confirmation tells noise from gain."""
    runner = FakeRunner(surface, noise_sd=noise, seed=seed)
    settings = StudySettings(budget_s=NO_LIMIT_S, max_trials=trials, seed=seed)
    if surface is NOISE:
        store, now = MemoryStudyStore(), datetime.now(UTC).isoformat()
        study = Study(study_id=new_id(), workload="fake:surface", settings=settings, created_at=now, directory="")
        store.create_study(study)
        return StudyDriver(study, store, runner, strategies=surface.strategies).run().candidate
    space = Space(runner.describe(), runner.inspect(), settings, surface.strategies)
    designer = Designer(space, search=ModelSearch(), budget_s=NO_LIMIT_S, max_trials=trials, seed=seed)
    while (suggestion := designer.suggest()) is not None:
        designer.update(Outcome(result=_run(runner, suggestion.candidate, suggestion.purpose)))
    assert runner.num_trials <= trials
    return designer.best()


def draw(surface: Surface, seed: int, trials: int, noise: float) -> Candidate:
    """The answer of random search."""
    runner, generator = FakeRunner(surface, noise_sd=noise, seed=seed), random.Random(seed)
    best, fastest = BASELINE, 0.0
    for number in range(trials):
        levels = {s.name: generator.randrange(s.levels + 1) if number else 0 for s in surface.strategies}
        candidate = Candidate(choices={name: {"level": level} for name, level in levels.items() if level})
        result = _run(runner, candidate, Purpose.EXPLORE)
        if result.ok and units_per_s(result) > fastest:
            best, fastest = candidate, units_per_s(result)
    return best


def _run(runner: FakeRunner, candidate: Candidate, purpose: Purpose):
    spec = TrialSpec(trial_id=new_id(), workload="fake:surface", candidate=candidate, choices={}, study_directory="")
    return runner.run([spec], [purpose], MeasureSettings(), "group", lambda progress: None)[0]


def _summary(surface: Surface, answers: dict[int, Candidate]) -> dict:
    ratios = {seed: surface.total_ms(candidate) / surface.best_ms() for seed, candidate in answers.items()}
    if surface is NOISE:
        missed = {seed: candidate.label for seed, candidate in answers.items() if not candidate.is_baseline}
    else:
        missed = {seed: round(ratio, 4) for seed, ratio in ratios.items() if ratio > WITHIN}
    return {
        "found": len(answers) - len(missed),
        "of": len(answers),
        "median_over_best": round(statistics.median(ratios.values()), 4),
        "worst_over_best": round(max(ratios.values()), 4),
        "missed": missed,
    }


def _columns(summary: dict) -> str:
    found = f"{summary['found']}/{summary['of']}"
    return f"{found:>9s} {summary['median_over_best']:7.3f} {summary['worst_over_best']:7.3f}"


if __name__ == "__main__":
    main()
