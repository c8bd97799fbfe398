"""How far is a stated gain from the true one, by replay and by the subtraction of categories?

    python benchmarks/replay.py

Pairs are programs on a simulated machine with and without a cause (tests/counterfactuals): the truth is the program
without it, unprofiled. Errors are points of the step's share that is saved. Replays of the unchanged steps of real
traces are compared with what was recorded. No figure is a measurement of this machine but the
seconds, and how many times the processor time of an analysis without replay one with it takes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from unittest.mock import patch

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT / "tests"), str(ROOT / "tests" / "support")]

from counterfactuals.machine import step_time, write_traces  # noqa: E402
from counterfactuals.programs import Pair, pairs  # noqa: E402
from stamp import RESULTS, stamp  # noqa: E402

from steptune.tuner.costs.categories import HOST_CATEGORIES, Category  # noqa: E402
from steptune.tuner.profiling import analysis  # noqa: E402
from steptune.tuner.profiling.analysis import analyse_rank, analyse_trace, analyse_traces  # noqa: E402
from steptune.tuner.profiling.capture import link  # noqa: E402
from steptune.tuner.profiling.gains import REPLAY_MARGIN  # noqa: E402
from steptune.tuner.profiling.rank_comparison import compare_ranks, late_part  # noqa: E402
from steptune.tuner.profiling.reader import read_trace  # noqa: E402
from steptune.tuner.profiling.replay.answers import replay, replay_ranks  # noqa: E402
from steptune.tuner.profiling.replay.graph import build_graph  # noqa: E402
from steptune.tuner.records import Breakdown, Replay  # noqa: E402

TRACES = Path(os.environ.get("STEPTUNE_TRACES") or ROOT.parent / "shared" / "traces")
CAPTURES = ROOT / "tests" / "captures"
CAUSES = {
    "synchronisation": "synchronisation",
    "host_stall": "stalls",
    "input_bound": "loader",
    "rank_skew": "late_ranks",
}
"""Causes that a program can be run without, by the rule that finds them; launches cost what is left without these."""
NOTABLE = 0.02
"""A share of the step that the best remedy has to save before it matters which finding is the first."""
NEARLY_BEST = 0.95
UNPROFILED, TURNS = 0.85, 3
"""Share of the recorded step for the unprofiled one that costs of an analysis are measured with: its calibration
simulates most.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="+", default=["development", "held out"])
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="that answer pairs at once")
    parser.add_argument("--out", type=Path, default=RESULTS / "replay.json")
    arguments = parser.parse_args()
    report = {
        "question": "error of stated gains against the truth of simulated pairs, and of replays of unchanged traces",
        **stamp(" ".join(["python", "benchmarks/replay.py", *sys.argv[1:]])),
        "sets": {},
    }
    for kind in arguments.sets:
        with multiprocessing.Pool(arguments.processes) as pool:
            rows = pool.starmap(answered_number, [(kind, number) for number in range(len(list(pairs(kind))))], 1)
        report["sets"][kind] = {"summary": summary(rows), "first_finding": first_findings(rows), "pairs": rows}
        print(kind, json.dumps(report["sets"][kind]["summary"], indent=1), flush=True)
        print("first finding", report["sets"][kind]["first_finding"], flush=True)
    with multiprocessing.Pool(arguments.processes) as pool:
        files = [path for folder in (TRACES, CAPTURES) for path in sorted(folder.glob("*.json.gz"))]
        report["self_replay"] = pool.map(self_replay, files, 1)
    errors = [row["error"] for row in report["self_replay"] if not row["refusal"]]
    report["self_replay_summary"] = {"replayed": len(errors), **quantiles(errors, 100)}
    print(json.dumps(report["self_replay_summary"]))
    report["costs"] = [cost(path) for path in sorted(TRACES.glob("*.json.gz"))]
    print("costs", json.dumps(quantiles([row["times"] for row in report["costs"]], 1)))
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")


def answered_number(kind: str, number: int) -> dict:
    """Run `answered` in a process of its own: programs cannot be sent to one."""
    return answered(list(pairs(kind))[number])


def answered(pair: Pair) -> dict:
    """The true saving of a pair, and those by replay and by subtraction."""
    options = {"num_ranks": pair.num_ranks, "seed": pair.seed}
    before = step_time(pair.program, pair.machine, **options)
    after = step_time(pair.program, pair.machine, without=frozenset({pair.cause}), **options)
    with tempfile.TemporaryDirectory() as folder:
        paths = write_traces(Path(folder), pair.program, pair.machine, num_steps=pair.num_steps, **options)
        captures = [link(read_trace(path)) for path in paths]
        unprofiled_ns = round(before * 1000)
        findings = analyse_traces(paths, unprofiled_ns).findings
    analysed = [analyse_trace(capture.trace, "", unprofiled_ns) for capture in captures]
    graphs = dict(enumerate(build_graph(capture) for capture in captures))
    if pair.cause == "late_ranks":
        said = {
            cost: replay_ranks(graphs, value) for cost, value in (("calibrated", unprofiled_ns), ("as_recorded", None))
        }
    else:
        workers = bool(pair.machine.workers)
        said = {
            cost: replay(graphs[0], value, workers=workers)
            for cost, value in (("calibrated", unprofiled_ns), ("as_recorded", None))
        }
    row = {
        "name": pair.name,
        "cause": pair.cause,
        "true": round(1 - after / before, 4),
        "replay": round(said["calibrated"].saved.get(pair.cause, 0.0), 4),
        "bound": round(bound_of(said["calibrated"], pair.cause), 4),
        "not_calibrated": round(said["as_recorded"].saved.get(pair.cause, 0.0), 4),
        "subtraction": round(subtracted(pair, analysed), 4),
        "refusal": said["calibrated"].refusal,
        "unprofiled_error": said["calibrated"].unprofiled_error,
        "first": next((finding.rule for finding in findings), ""),
        "worth": worth(pair, before, options),
    }
    print(row, flush=True)
    return row


def bound_of(said: Replay, cause: str) -> float:
    """The bound that a finding of the cause has, also where it is too small for one."""
    return min(1.0, said.saved.get(cause, 0.0) + REPLAY_MARGIN + said.uncertain.get(cause, 0.0))


def worth(pair: Pair, before: float, options: dict) -> dict[str, float]:
    """Share of the step that each single remedy truly saves, by the rule that asks for it."""

    def without(*causes: str) -> float:
        return step_time(pair.program, pair.machine, without=frozenset(causes), **options) / before

    saved = {rule: 1 - without(cause) for rule, cause in CAUSES.items()}
    saved["launch_bound"] = without(*CAUSES.values()) - without(*CAUSES.values(), "launches")
    return {rule: round(share, 4) for rule, share in saved.items()}


def subtracted(pair: Pair, analysed: list) -> float:
    """Share of the step that the categories of a cause take."""
    breakdowns: list[Breakdown] = [analysis.breakdowns[0] for analysis, *_ in analysed]
    (first, *_) = breakdowns
    if pair.cause == "late_ranks":
        compared = compare_ranks({rank: calls for rank, (_, calls, _) in enumerate(analysed)})
        shares = []
        for wait, breakdown in zip(compared.waits, breakdowns, strict=True):
            shares.append(late_part(wait, breakdown) * breakdown.removable_share(Category.COMMUNICATION))
        return max(shares, default=0.0)
    if pair.cause == "stalls":
        return first.stalled_share * first.removable_share(Category.HOST)
    if pair.cause == "loader":
        return first.removable_share(Category.DATA_WAIT, Category.EPOCH_RESTART)
    if pair.cause == "launches":
        stalled = first.stalled_share * first.removable_share(Category.HOST)
        return first.removable_share(*HOST_CATEGORIES) - stalled
    return first.removable_share(Category.SYNCHRONISATION)


def summary(rows: list[dict]) -> dict:
    found = {}
    for cause in ("all", *dict.fromkeys(row["cause"] for row in rows)):
        own = [row for row in rows if cause in ("all", row["cause"])]
        reached = sum(row["bound"] >= row["true"] for row in own)
        found[cause] = {"pairs": len(own), "bound_reaches_truth": reached}
        for how in ("replay", "not_calibrated", "subtraction"):
            errors = [abs(row[how] - row["true"]) for row in own]
            gains = [(1 - row["true"]) / (1 - min(0.999, row[how])) for row in own]
            found[cause][how] = {
                **quantiles(errors, 100),
                "gain_within_5_percent": sum(0.95 <= ratio <= 1.05 for ratio in gains),
                "within_3_points": sum(error <= 0.03 for error in errors),
                "within_5_points": sum(error <= 0.05 for error in errors),
            }
    return found


def first_findings(rows: list[dict]) -> dict:
    """How often the first finding saves at least 95 % of what the best single remedy saves."""
    costly = [row for row in rows if max(row["worth"].values()) >= NOTABLE]
    best = [row["worth"].get(row["first"], 0.0) >= NEARLY_BEST * max(row["worth"].values()) for row in costly]
    return {"pairs": len(costly), "nearly_best": sum(best)}


def cost(path: Path) -> dict:
    """How many times the processor time of an analysis without replay one with it takes, in turns."""
    breakdown = analyse_rank(path).breakdowns[0]
    unprofiled_ns = round(UNPROFILED * sum(breakdown.per_step_ns.values()))
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(TURNS):
        for with_replay, times in seconds.items():
            without = contextlib.nullcontext() if with_replay else patch.object(analysis, "build_graph", lambda _: None)
            with without:
                began = time.process_time()
                analyse_rank(path, unprofiled_ns)
                times.append(time.process_time() - began)
    without_s, with_s = (statistics.median(seconds[with_replay]) for with_replay in (False, True))
    return {"trace": path.name.removesuffix(".json.gz"), "seconds": with_s, "times": round(with_s / without_s, 2)}


def quantiles(errors: Iterable[float], scale: float) -> dict:
    values = np.array(list(errors)) * scale
    return {name: round(float(np.quantile(values, q)), 2) for name, q in (("median", 0.5), ("p90", 0.9), ("max", 1.0))}


def self_replay(path: Path) -> dict:
    capture = link(read_trace(path))
    began = time.process_time()
    graph = build_graph(capture)
    said = replay(graph) if graph is not None else None
    return {
        "trace": path.name.removesuffix(".json.gz"),
        "steps": len(capture.steps),
        "error": said.error if said is not None else None,
        "refusal": said.refusal if said is not None else "no steps are marked, or no work is launched in them",
        "seconds": round(time.process_time() - began, 3),
    }


if __name__ == "__main__":
    main()
