"""Every legal choice of every strategy once, against the baseline in turns: does it run, is it the same
training, did it take effect, and what does it gain?

    python benchmarks/strategy_survey.py --out survey.jsonl examples/digits_vit.py:DigitsViT zoo:gpt2?batch=2

Writes one JSON line a choice as it goes, with hardware and versions, and prints a table.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path

import msgspec
from engine import engine
from stamp import stamp

from steptune.tuner.estimates import log_ratio
from steptune.tuner.records import BASELINE, Candidate, MeasureSettings, Numerics, Purpose, StudySettings

STAMP = stamp(" ".join(["python", "benchmarks/strategy_survey.py", *sys.argv[1:]]))


def survey(workload: str, settings: StudySettings, cap: float, deadline: float, sink) -> None:
    with engine(workload, settings) as ready:
        space = ready.space
        environment = _plain(space.environment)
        facts = {**_plain(space.workload), "reference": workload}  # without the folder of this machine
        sink({"workload": workload, **STAMP, "environment": environment, "facts": facts})
        ready.make_reference()
        measure = MeasureSettings(cap_s=cap, max_rounds=20)
        for move in space.moves:
            if time.monotonic() > deadline:
                sink({"workload": workload, "choice": move.label, "skipped": "out of time"})
                continue
            candidate = space.combine(BASELINE, [move])
            if candidate is None:
                sink({"workload": workload, "choice": move.label, "unsupported": "not without another choice"})
                continue
            began = time.monotonic()
            base, result = ready.run([BASELINE, candidate], [Purpose.COMPANION, Purpose.EXPLORE], measure)
            sink(_row(workload, move.label, base, result, candidate, time.monotonic() - began))
        for exclusion in space.excluded:
            sink({"workload": workload, "choice": exclusion.move.label, "unsupported": exclusion.reason})


def _row(workload: str, label: str, base, result, candidate: Candidate, seconds: float) -> dict:
    ratio = log_ratio(result, base) if result.ok and base.ok else None
    return {
        "workload": workload,
        "choice": label,
        "ratio": round(math.exp(ratio.mean), 4) if ratio else None,
        "half_width": round(ratio.half_width(), 4) if ratio and math.isfinite(ratio.half_width()) else None,
        "guard": result.guard.reason if result.guard else None,
        "failure": f"{result.failure.kind.value} in {result.failure.phase.value}: {result.failure.message[:300]}"
        if result.failure
        else None,
        "effects": [
            f"{e.strategy}: {e.detail}" for e in result.effects if not e.took or e.strategy in candidate.choices
        ],
        "took": all(e.took for e in result.effects),
        "compile_s": round(result.startup.compile_ns / 1e9, 1) if result.startup else None,
        "peak_mib": result.peak_memory_bytes >> 20,
        "step_ms": {k: round(v / 1e6, 3) for k, v in result.breakdowns[0].per_step_ns.items() if v > 0}
        if result.breakdowns
        else None,
        "problems": result.breakdowns[0].quality.problems if result.breakdowns else None,
        "seconds": round(seconds, 1),
    }


def _plain(record) -> dict:
    return msgspec.to_builtins(record)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workloads", nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cap", type=float, default=1.0, help="seconds of windows for a choice")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--device", default=None)
    parser.add_argument("--allow", nargs="*", default=[])
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--skip", nargs="*", default=[])
    arguments = parser.parse_args()
    settings = StudySettings(
        device=arguments.device,
        allow=tuple(Numerics(name) for name in arguments.allow),
        only=tuple(arguments.only),
        skip=tuple(arguments.skip),
        phase_timeout_s=150,
    )
    deadline = time.monotonic() + 60 * arguments.minutes
    with arguments.out.open("a") as file:

        def sink(row: dict) -> None:
            file.write(json.dumps(row) + "\n")
            file.flush()
            if "choice" in row:
                outcome = (
                    row.get("unsupported")
                    or row.get("skipped")
                    or row.get("failure")
                    or f"{row['ratio']} +-{row['half_width']}"
                )
                where = f"{row['workload'][-30:]:30} {row['choice'][:60]:60}"
                print(f"{where} {outcome[:90]} | {row.get('guard')} {row.get('took')}", flush=True)

        for workload in arguments.workloads:
            try:
                survey(workload, settings, arguments.cap, deadline, sink)
            except Exception as error:
                sink({"workload": workload, "choice": "", "failure": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main()
