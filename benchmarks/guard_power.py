"""Planted faults of the update that the guard rejects, with its replay and without, and what it rejects wrongly.

Small trainings (`tests/guarded_updates.py`) run the guard's protocol in FP32, under bfloat16 and float16 autocast and
with FP32 masters, each in the tolerances of its own precision: with one thing wrong with the update, and unchanged, in
every form in which the optimizer runs.

    python benchmarks/guard_power.py            # writes results/guard_power.json; about three minutes on two cores

Faults of gradients, data, buffers and masks are not planted here.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from stamp import RESULTS, hardware, stamp

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from guarded import BF16, FP32, PROTOCOL, Study, make_study
from guarded_updates import FAULTS, PRECISIONS, TRAININGS

from steptune.tuner.errors import SteptuneError
from steptune.tuner.guard.update_replay import LIMIT
from steptune.tuner.hardware import describe_environment

OUTPUT = RESULTS / "guard_power.json"
REPLAYED = "replayed update"
SHORT = replace(PROTOCOL, num_curve=0, num_horizon=0, randomness="none")
FORMS = [
    {"implementation": implementation, "contiguous": contiguous}
    for implementation, contiguous in itertools.product(("for_loop", "foreach", "fused"), (False, True))
]


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of the guard.

    Attributes:
        fault: Name of it; empty for a correct change.
        without: Rejected by the other checks.
        score: Of the replayed update.
    """

    training: str
    precision: str
    fault: str
    without: bool
    score: float

    @property
    def rejected(self) -> bool:
        return self.without or self.score > LIMIT


def runs_of(study: Study) -> Iterator[Run]:
    for (precision, choices), fault in itertools.product(PRECISIONS.items(), FAULTS):
        planted = FAULTS[fault](study.make_workload)  # type: ignore[arg-type]
        if planted is not None:
            yield _run(study, precision, fault, planted(), choices)
    for (precision, choices), form in itertools.product(PRECISIONS.items(), FORMS):
        try:
            yield _run(study, precision, "", None, {**choices, "optimizer_implementation": form})
        except (SteptuneError, RuntimeError, TypeError):  # the optimizer has no such form
            continue


def _run(study: Study, precision: str, fault: str, workload: Any, choices: dict[str, Any]) -> Run:
    roundoff = FP32 if precision == "fp32" else BF16
    checks = study.checks(study.job(workload, **choices), unit_roundoff=roundoff)
    replayed = checks.pop(REPLAYED)
    others = any(not check.passed for check in checks.values())
    name = study.make_workload.__name__
    return Run(training=name, precision=precision, fault=fault, without=others, score=replayed.observed)


def table(runs: list[Run]) -> list[dict[str, Any]]:
    rows = []
    for precision in PRECISIONS:
        faulty = [run for run in runs if run.precision == precision and run.fault]
        correct = [run for run in runs if run.precision == precision and not run.fault]
        rows.append(
            {
                "precision": precision,
                "faults": len(faulty),
                "caught_without_replay": sum(run.without for run in faulty),
                "caught": sum(run.rejected for run in faulty),
                "smallest_score_of_a_fault": min(run.score for run in faulty),
                "correct": len(correct),
                "correct_rejected_by_replay": sum(run.score > LIMIT for run in correct),
                "correct_rejected": sum(run.rejected for run in correct),
                "largest_score_of_a_correct_run": max(run.score for run in correct),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    output: Path = parser.parse_args().output
    torch.set_num_threads(1)
    runs: list[Run] = []
    with tempfile.TemporaryDirectory() as folder:
        for training in TRAININGS:
            runs += runs_of(make_study(Path(folder) / training.__name__, training, protocol=SHORT))
    missed = Counter((run.fault, run.precision) for run in runs if run.fault and not run.rejected)
    result = {
        **stamp("python benchmarks/guard_power.py", ("tuner", "tests", "benchmarks")),
        "hardware": hardware(describe_environment("cpu", Path(tempfile.gettempdir()), 1)),
        "limit": LIMIT,
        "rows": table(runs),
        "missed": [f"{fault} ({precision}): {count}" for (fault, precision), count in missed.items()],
    }
    output.write_text(json.dumps(result, indent=1) + "\n")
    for row in result["rows"]:
        print(row)


if __name__ == "__main__":
    main()
