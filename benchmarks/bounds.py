"""Do bounds hold? Every legal single choice of some workloads, against what the baseline's profile said it can save.

    python benchmarks/bounds.py                   ten workloads of a CPU, hours on a quiet machine
    python benchmarks/bounds.py --quick           two workloads, every fourth choice

Baseline and candidate run in turns. The bound is that of the baseline's profile, as the search takes it. A choice that
seems to gain more than its bound allows is started four times more, because starts of one candidate differ by more than
windows of one start; the bound is *violated* where the mean of these four is above it by more than chance leaves in one
of 40 cases. The row of a violation names the categories that shrank by more than the bound let them: they explain it.
What was measured while others used the machine is not judged: a profile and windows that saw other loads say nothing of
bounds. Rows are written as they come, and a second run goes on where the first one stopped.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from engine import Engine, engine
from stamp import RESULTS, hardware, stamp

from steptune.tuner.costs.bounds import Situation
from steptune.tuner.estimates import log_ratio
from steptune.tuner.records import BASELINE, MeasureSettings, Move, Purpose, StudySettings, TrialResult
from steptune.tuner.search.knowledge import Knowledge
from steptune.tuner.strategies.situations import situation_of

WORKLOADS = (
    "examples/digits_vit.py:DigitsViT",
    "examples/photo_resnet.py:PhotoResNet",
    "examples/char_gpt.py:CharGPT",
    "zoo:synthetic",
    "zoo:gpt2?batch=2",
    "zoo:bert?batch=2",
    "zoo:swin_tiny?batch=2",
    "zoo:timm?name=resnet18&batch=8",
    "zoo:timm?name=mobilenetv3_small_100&batch=8",
    "zoo:timm?name=vit_tiny_patch16_224&batch=4",
)
QUICK, QUICK_EVERY = WORKLOADS[:2], 4
NUM_FURTHER = 4
"""Starts of a choice that seems to gain more than its bound: the first one was selected, and does not count then."""
ERRORS = 3.18
"""Standard errors of the mean of so few starts that it exceeds in one of 40 cases (Student's t)."""
WINDOW_ERROR = 0.01
"""Standard error of a log ratio that is known from one pair of windows."""
NOTABLE = 0.01
"""Share of the step, below which a category that shrank explains nothing."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--cap", type=float, default=2.0, help="seconds of windows for a pair of trials")
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--device", default=None)
    parser.add_argument("--out", type=Path, default=RESULTS / "bounds.jsonl")
    arguments = parser.parse_args()
    origin = stamp(" ".join(["python", "benchmarks/bounds.py", *sys.argv[1:]]))
    workloads = arguments.workloads or (QUICK if arguments.quick else WORKLOADS)
    deadline = time.monotonic() + 60 * arguments.minutes
    rows = _read(arguments.out)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with arguments.out.open("a", encoding="utf-8") as file:

        def sink(row: dict) -> None:
            file.write(json.dumps({**row, **origin}) + "\n")
            file.flush()
            rows.append(row)
            print(_line(row), flush=True)

        for workload in workloads:
            done = {row["choice"] for row in rows if row["workload"] == workload}
            every = QUICK_EVERY if arguments.quick else 1
            audit(workload, arguments.device, arguments.cap, every, done, deadline, sink)
    show(rows)


def audit(
    workload: str,
    device: str | None,
    cap_s: float,
    every: int,
    done: set[str],
    deadline: float,
    sink: Callable[[dict], None],
) -> None:
    """One row a choice; of what cannot be bounded because the baseline's profile cannot be trusted there is none."""
    settings = StudySettings(device=device, phase_timeout_s=150)
    with engine(workload, settings) as ready:
        measure = MeasureSettings(cap_s=cap_s, max_rounds=40)
        [baseline] = ready.run([BASELINE], [Purpose.BASELINE], measure)
        if not baseline.ok:
            raise SystemExit(f"{workload}: the baseline failed: {baseline.failure}")
        knowledge = Knowledge(ready.space, BASELINE)
        knowledge.take_in_beside(baseline)
        before = knowledge.own_situation(BASELINE)
        if before is None or _is_busy(baseline):
            raise SystemExit(
                f"{workload}: the baseline's profile cannot be trusted, or others use the machine: end them"
            )
        ready.make_reference()
        machine = hardware(ready.space.environment)
        for move in ready.space.moves[::every]:
            if move.label not in done and time.monotonic() < deadline:
                row = audited(ready, knowledge, before, move, measure)
                sink({"workload": workload, "choice": move.label, **row, "hardware": machine})


def audited(ready: Engine, knowledge: Knowledge, before: Situation, move: Move, measure: MeasureSettings) -> dict:
    """The bound and the gain of one choice."""
    candidate = ready.space.combine(BASELINE, [move])
    if candidate is None:
        return {"skipped": "not legal by itself"}
    bound = knowledge.bound(move, BASELINE)
    base, first = ready.run([BASELINE, candidate], [Purpose.COMPANION, Purpose.EXPLORE], measure)
    if not (base.ok and first.ok):
        return {"bound": round(bound, 4), "skipped": _why(base, first)}
    if _is_busy(base, first):
        return {"bound": round(bound, 4), "skipped": "others used the machine: profile and windows saw other loads"}
    gains, errors = _told(base, first)
    if _saved(gains[0]) > bound:
        gains, errors = [], []
        for number in range(1, 1 + NUM_FURTHER):
            again = ready.run([BASELINE, candidate], [Purpose.COMPANION, Purpose.REPLICATE], measure, number)
            more, error = _told(*again)
            gains, errors = gains + more, errors + error
        if not gains:
            return {"bound": round(bound, 4), "skipped": "no start after the first was good"}
    mean = statistics.fmean(gains)
    error = statistics.stdev(gains) / math.sqrt(len(gains)) if len(gains) > 1 else errors[0]
    violated = len(gains) == NUM_FURTHER and _saved(mean - ERRORS * error) > bound
    choices = ready.space.complete(candidate)
    after = situation_of(first, ready.space.workload, ready.space.environment, choices)
    return {
        "bound": round(bound, 4),
        "saved": round(_saved(mean), 4),
        "standard_error": round(error, 4),
        "starts": len(gains),
        "violated": violated,
        "explanation": explained(before, after, ready, move) if violated else "",
    }


def explained(before: Situation, after: Situation | None, ready: Engine, move: Move) -> str:
    """Categories that shrank by more than the choice was said to be able to save of them."""
    if after is None:
        return "the candidate has no profile"
    strategy = ready.space.strategy(move.strategy)
    allowed = strategy.savings(before, strategy.complete(move.choice, ready.space.workload))
    was, now = before.breakdown.per_step_ns, after.breakdown.per_step_ns
    shrank = {name: (value - now.get(name, 0.0)) / before.step_ns for name, value in was.items()}
    beyond = {name: share - dict(allowed).get(name, 0.0) for name, share in shrank.items()}
    found = sorted(((share, name) for name, share in beyond.items() if share > NOTABLE), reverse=True)
    told = ", ".join(f"{name} by {share:.1%} of the step" for share, name in found)
    return f"shrank beyond its bound: {told}" if told else "no category of the profiles shrank beyond its bound"


def _told(base: TrialResult, result: TrialResult) -> tuple[list[float], list[float]]:
    """Log ratio of one start and its error; none where it failed."""
    ratio = log_ratio(result, base) if base.ok and result.ok else None
    if ratio is None:
        return [], []
    return [ratio.mean], [ratio.standard_error if math.isfinite(ratio.standard_error) else WINDOW_ERROR]


def _is_busy(*results: TrialResult) -> bool:
    """Return True where others used more of the cores than windows may lose."""
    shares = [window.foreign_cpu_share for result in results for window in result.clean_windows]
    return statistics.median(shares) > MeasureSettings().foreign_cpu_share


def _saved(log_gain: float) -> float:
    """Share of the step that a logarithm of a ratio of speeds saves."""
    return 1 - math.exp(-log_gain)


def _why(*results: TrialResult) -> str:
    failed = next((r for r in results if r.failure is not None), None)
    if failed is None or failed.failure is None:
        return "no clean window, or not the same training"
    return f"{failed.failure.kind.value} in {failed.failure.phase.value}: {failed.failure.message[:200]}"


def _read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _line(row: dict) -> str:
    where = f"{row['workload'][-28:]:28} {row['choice'][:60]:60}"
    if "skipped" in row:
        return f"{where} skipped: {row['skipped'][:60]}"
    mark = f" VIOLATED: {row['explanation']}" if row["violated"] else ""
    return f"{where} bound {row['bound']:6.1%} saved {row['saved']:6.1%} ({row['starts']}){mark}"


def show(rows: Sequence[dict]) -> None:
    judged = [row for row in rows if "skipped" not in row]
    violated = [row for row in judged if row["violated"]]
    workloads = len({row["workload"] for row in judged})
    share = len(violated) / len(judged) if judged else 0.0
    print(f"{len(violated)} of {len(judged)} bounds violated ({share:.1%}), {workloads} workloads")
    for row in violated:
        print(f"  {row['workload']} {row['choice']}: {row['explanation']}")


if __name__ == "__main__":
    main()
