"""Does the diagnosis of a real step name its cause, and state what leaving it out saves?

    python benchmarks/known_answers.py --minutes 8
    python benchmarks/known_answers.py --summary
    python benchmarks/known_answers.py --restate --traces FOLDER      # analyses kept traces again, without a GPU
    python benchmarks/known_answers.py --small --device cpu --out small.jsonl      # a dry run

Eight causes in three kinds of step (`known_steps.py`), each pair in a fresh process, as a trial is. Both sides are
timed in turn without the profiler (`known_truth.py`): the share that is saved without the cause is the truth, and it
has an interval. Then the side with the cause is captured as a trial's profile is, and analysed with its mean step time
just before. Without a finding of the cause, the statement is that nothing is saved; a finding without a replay states a
range, of which the farther end is compared.

Rules of the table, set before any pair was measured by them:

- A pair costs more than two points where its whole interval lies above them; one whose interval holds them is undecided
  and counted in neither group.
- A statement is within five points where its distance from the middle of the interval is; how many are so wherever in
  the interval the truth lies is said beside it.
- A bound reaches the truth where it is at least the upper end of the interval, and misses it where it is below the
  lower end; between them the pair does not decide.

One JSON line a pair is appended to the results file. Pairs that are there already, with an interval, without an error
and of the same device, are not run again, so that a run can be continued; those that fail have their error in the line.
The last line of a pair counts.
"""

from __future__ import annotations

import argparse
import gzip
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import torch
from known_answers_table import summary
from known_steps import CAUSES, PAIRS, Cause, Pair, Step
from known_truth import SMALL, Windows, in_turns, uncollected
from result_lines import append, kept_lines
from stamp import RESULTS, stamp

from steptune.tuner.hardware import default_device, describe_hardware
from steptune.tuner.profiling.analysis import analyse_rank
from steptune.tuner.profiling.diagnosis import RULES
from steptune.tuner.profiling.evidence import busiest
from steptune.tuner.profiling.replay.answers import not_replayed, saved_range, saved_share
from steptune.tuner.profiling.stall_findings import STALL_THRESHOLDS
from steptune.tuner.records import Replay
from steptune.tuner.trace_records import RankAnalysis
from steptune.tuner.trials.capture import num_profiled_steps, record_profile

LIMIT_S = 90.0
"""For a pair; a dry run on a busy CPU takes longer than a GPU."""
LEAST_SHARE = {"host_stall": STALL_THRESHOLDS[0], **{rule.name: rule.thresholds[0] for rule in RULES}}
"""From which share of the step on a finding speaks: its silence says that there is less."""


def measured(pair: Pair, *, device: torch.device, small: bool, windows: Windows, traces: Path | None = None) -> dict:
    """The truth of a pair, and what the diagnosis of the captured steps states.

    Args:
        traces: Folder in which the captured trace is kept.
    """
    step = Step(pair.family, pair.kind, device, small=small)
    cause = CAUSES[pair.cause]
    sides = cause.sides(step)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        with uncollected():
            truth = in_turns(sides, step.seconds, windows)
            record_profile(sides[0], num_profiled_steps(truth.unprofiled_ns), device, path)
        analysis = analyse_rank(path, truth.unprofiled_ns)
        if traces is not None:
            _keep(path, _trace_of(pair.name, traces))
    return {
        "batch": step.batch,
        "host_ms": round(step.host_s * 1e3, 4),
        "device_ms": round(step.device_s * 1e3, 4),
        "step_ms": round(step.step_s * 1e3, 4),
        **truth.row(),
        **stated(analysis, cause),
    }


def stated(analysis: RankAnalysis, cause: Cause) -> dict:
    """Statement of the findings about a cause, and the replay behind it."""
    findings = analysis.findings
    breakdown = busiest(analysis.breakdowns)
    replay = breakdown.replay
    place, own = next(((n, f) for n, f in enumerate(findings, 1) if f.rule == cause.rule), (None, None))
    replayed = saved_share(replay, cause.edit)
    if own is None:
        low = high = 0.0
    else:
        low, high = saved_range(replay, cause.edit) or (0.0, own.bound)
    return {
        "rule": cause.rule,
        "place": place,
        "stated": [round(low, 4), round(high, 4)],
        "bound": round(own.bound if own is not None else LEAST_SHARE[cause.rule], 4),
        "replayed": None if replayed is None else round(replayed, 4),
        "not_replayed": not_replayed(replay, cause.edit) if replay is not None else "no device worked",
        "replay": _replay_row(replay),
        "num_steps": breakdown.num_steps,
        "findings": [
            {
                "rule": finding.rule,
                "bound": round(finding.bound, 4),
                "saves": finding.evidence.get("saves"),
                "cause": finding.evidence.get("cause"),
                "message": finding.message,
            }
            for finding in findings
        ],
    }


def _replay_row(replay: Replay | None) -> dict | None:
    if replay is None:
        return None
    return {
        "recorded_ns": replay.recorded_ns,
        "step_time_ns": replay.step_time_ns,
        "error": replay.error,
        "unprofiled_error": replay.unprofiled_error,
        "event_cost_ns": replay.event_cost_ns,
        "saved": {cause: round(share, 4) for cause, share in replay.saved.items()},
        "refusal": replay.refusal,
    }


def _trace_of(pair: str, traces: Path) -> Path:
    return traces / f"{pair.replace(': ', '_').replace(' ', '_')}.json.gz"


def _keep(path: Path, kept: Path) -> None:
    kept.parent.mkdir(parents=True, exist_ok=True)
    with path.open("rb") as source, gzip.open(kept, "wb") as sink:
        shutil.copyfileobj(source, sink)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=[pair.name for pair in PAIRS], metavar="PAIR")
    parser.add_argument("--minutes", type=float, default=10.0, help="no further pair is begun after them")
    parser.add_argument("--device", choices=["cpu", "cuda"], default=default_device())
    parser.add_argument("--small", action="store_true", help="models and windows of a dry run")
    parser.add_argument("--summary", action="store_true", help="only say what the results file holds")
    parser.add_argument("--traces", type=Path, help="folder in which the captured traces are kept")
    parser.add_argument("--restate", action="store_true", help="only analyse the kept traces of measured pairs again")
    parser.add_argument("--out", type=Path, default=RESULTS / "known_answers.jsonl")
    arguments = parser.parse_args()
    if arguments.restate and arguments.traces is None:
        parser.error("--restate requires --traces, the folder of the kept traces")
    if not (arguments.restate or arguments.summary or arguments.small or arguments.device == "cuda"):
        parser.error("kinds of step are made by the batch on a GPU; on a CPU only a dry run is possible: add --small")
    head = stamp(" ".join(["python", "benchmarks/known_answers.py", *sys.argv[1:]]))
    if arguments.restate:
        restate(arguments, head)
    elif not arguments.summary:
        measure(arguments, head)
    print(summary(kept_lines(arguments.out, small=arguments.small)))


def restate(arguments: argparse.Namespace, head: dict) -> None:
    """Appends a line for every measured pair whose trace is kept, with what is stated of it now."""
    last = {row["pair"]: row for row in kept_lines(arguments.out, small=arguments.small) if "half_width" in row}
    for name, row in last.items():
        trace = _trace_of(name, arguments.traces)
        if trace.exists():
            now = {key: head[key] for key in ("command", "date", "code")}
            found = stated(analyse_rank(trace, row["unprofiled_ns"]), CAUSES[row["cause"]])
            append(arguments.out, {**row, **now, **found})


def measure(arguments: argparse.Namespace, head: dict) -> None:
    """Appends a line for every pair that is not there yet, as long as there is time."""
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 60 * arguments.minutes
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "steptune.tuner.profiling.analysis"])
    with context.Pool(1) as pool:
        machine = pool.apply(_machine, (arguments.device,))
    done = {
        row["pair"]
        for row in kept_lines(arguments.out, small=arguments.small)
        if "half_width" in row and row["hardware"]["devices"] == machine["devices"]
    }
    for pair in PAIRS:
        if pair.name in done or (arguments.only and pair.name not in arguments.only) or time.monotonic() > deadline:
            continue
        began = time.monotonic()
        with context.Pool(1) as pool:
            answer = pool.apply_async(_answer, (pair, arguments.device, arguments.small, arguments.traces))
            try:
                found = answer.get(LIMIT_S)
            except multiprocessing.TimeoutError:
                found = {"error": f"not done within {LIMIT_S:.0f} s, or its process died"}
        row = {
            "pair": pair.name,
            "kind": pair.kind,
            "cause": pair.cause,
            "family": pair.family,
            "small": arguments.small,
            **head,
            "hardware": {**machine, "load_1min": round(os.getloadavg()[0], 1)},
            "seconds": round(time.monotonic() - began, 1),
            **found,
        }
        append(arguments.out, row)
        print(f"{pair.name}: {row['seconds']} s {found.get('error', '')}", flush=True)


def _machine(kind: str) -> dict:
    hardware = describe_hardware(kind)
    return {
        "cpu": hardware.cpu_name,
        "cores": hardware.num_cores,
        "devices": [device.name for device in hardware.devices],
        "versions": hardware.versions,
    }


def _answer(pair: Pair, kind: str, small: bool, traces: Path | None) -> dict:
    """The row of a pair, in a process of its own: its error where it has one."""
    try:
        windows = SMALL if small else Windows()
        return measured(pair, device=torch.device(kind), small=small, windows=windows, traces=traces)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    main()
