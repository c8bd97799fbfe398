"""Do answers hold when they are measured again, in another process tree, with cold caches, at another time?

    python benchmarks/remeasured.py --first --minutes 5     # studies that are not in the file yet
    python benchmarks/remeasured.py --again --minutes 9     # an hour later: answers that were measured once
    python benchmarks/remeasured.py --summary
    python benchmarks/remeasured.py --first --small --rows rows.jsonl --only lstm       # a dry run on a CPU

`--first` runs short studies, as `steptune tune` does, and keeps each answer: what is recommended, its gain with the
interval, the verdict, and what the guard saw of every candidate. A study states a gain of every finalist, with
intervals that hold at once: the runner-up's is kept, too, and counted apart. `--again` starts the stored configurations
and the baseline of the same workload anew, in blocks of fresh processes as the confirmation does, in a folder of its
own where nothing is compiled, and says whether each new gain lies in its stored interval. It measures nothing within
`LEAST_APART_S` of the first time.

The stated interval of 95 % is of the gain that the study measured; where a further confirmation falls is the wider
prediction interval, which is counted beside it. Rows are appended as they come, and what a file has is not run again:
sittings add up. Rows that are committed already are read from the results file, new ones go to `--rows`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from engine import Engine, engine
from msgspec import convert, to_builtins
from msgspec.structs import replace
from stamp import RESULTS, ROOT, hardware, stamp
from tuned import Tuned, add_foreign_load, answer, settings_of, tuned

from steptune.tuner.errors import SteptuneError
from steptune.tuner.records import BASELINE, Candidate, Gain, MeasureSettings, Purpose, StudySettings
from steptune.tuner.search.confirmation import LEAST_BLOCKS, judge, plan_blocks

OUTPUT = RESULTS / "remeasured.jsonl"
WORKLOADS, EXAMPLES = ROOT / "benchmarks" / "workloads", ROOT / "examples"
DIGITS = f"{EXAMPLES / 'digits_vit.py'}:DigitsViT"
PROFESSIONAL = f"{WORKLOADS / 'mixed_precision.py'}:professional?entry="
LEAST_APART_S = 3600.0
BLOCKS = 5
CAP_S = 4.0
"""Seconds of windows of one start in a block."""
SPARE_S = 10.0
"""Beside its budget, what a study is taken to need; the same for the first block of what is measured again."""
SMALL_S = 100.0
_GPT = "sequence=32&n_layer=2&n_embd=32&n_head=2&vocab_size=256&n_positions=32"
_BERT = "sequence=32&hidden_size=32&num_hidden_layers=2&num_attention_heads=2&intermediate_size=64&vocab_size=256"
_VIT = "model_type=vit&hidden_size=32&num_hidden_layers=2&num_attention_heads=2&intermediate_size=64&image_size=32"


@dataclass(frozen=True, kw_only=True)
class Job:
    """A workload whose answer is measured twice.

    Attributes:
        budget_s: Of its study.
        small: The workload of a dry run.
    """

    name: str
    workload: str
    budget_s: float
    small: str = ""


JOBS = (
    Job(
        name="gpt2_small",
        workload="zoo:gpt2?batch=4&sequence=1024",
        budget_s=75.0,
        small=f"zoo:gpt2?batch=2&{_GPT}",
    ),
    Job(
        name="launch_bound",
        workload=f"{WORKLOADS / 'launch_bound.py'}:LaunchBound",
        budget_s=75.0,
        small="zoo:synthetic",
    ),
    Job(
        name="gpt2_small, bf16 compiled fused",
        workload=f"{PROFESSIONAL}gpt2&batch=4&sequence=1024",
        budget_s=130.0,
        small=f"{PROFESSIONAL}gpt2&batch=2&{_GPT}",
    ),
    Job(name="char_gpt", workload=f"{EXAMPLES / 'char_gpt.py'}:CharGPT", budget_s=75.0),
    Job(name="resnet50_64", workload="zoo:resnet50?batch=64", budget_s=75.0),
    Job(name="lstm", workload="zoo:lstm", budget_s=75.0),
    Job(
        name="bert, bf16 compiled fused",
        workload=f"{PROFESSIONAL}bert&batch=32&sequence=512",
        budget_s=130.0,
        small=f"{PROFESSIONAL}bert&batch=2&{_BERT}",
    ),
    Job(name="swin_tiny_16", workload="zoo:swin_tiny?batch=16", budget_s=75.0),
    Job(name="digits_vit", workload=DIGITS, budget_s=75.0, small=DIGITS),
    Job(
        name="vit_base",
        workload="zoo:transformers?model_type=vit&batch=64",
        budget_s=75.0,
        small=f"zoo:transformers?{_VIT}&batch=4",
    ),
    Job(name="detector", workload="zoo:detector", budget_s=75.0),
    Job(
        name="resnet50_64, bf16 compiled fused",
        workload=f"{PROFESSIONAL}resnet50&batch=64",
        budget_s=130.0,
    ),
    Job(name="mixture_of_experts", workload="zoo:mixture_of_experts", budget_s=75.0),
    Job(name="photo_resnet", workload=f"{EXAMPLES / 'photo_resnet.py'}:PhotoResNet", budget_s=75.0),
    Job(name="bert", workload="zoo:bert?batch=32&sequence=512", budget_s=75.0),
    Job(name="vgg16", workload="zoo:vgg16", budget_s=80.0),
)


# --- the first time ---------------------------------------------------------------------------


def first(job: Job, arguments: argparse.Namespace) -> dict:
    """Run a study; return its answer, the statement that is tried later, and what the guard saw."""
    budget_s = SMALL_S if arguments.small else job.budget_s
    settings = settings_of(budget_s / 60, arguments.foreign_load)
    settings = replace(settings, search=arguments.search)
    workload = job.small if arguments.small else job.workload
    with tuned(workload, settings, say=f"{job.name} ") as study:
        return {
            "step": "first",
            "job": job.name,
            "small": arguments.small,
            "workload": workload.replace(f"{ROOT}/", ""),
            "budget_s": budget_s,
            "search": arguments.search,
            "at": now(),
            "statements": stated(study),
            **answer(study),
            "guarded": guarded(study),
            **stamp(command()),
        }


def stated(study: Tuned) -> list[dict]:
    """Configurations whose gain the study confirmed, the recommended one first."""
    found = study.recommendation
    pairs = [(found.candidate, found.gain), *((other.candidate, other.confirmed) for other in found.alternatives)]
    gains = {candidate.key: (candidate, gain) for candidate, gain in reversed(pairs) if gain is not None}
    return [
        {
            "candidate": to_builtins(candidate),
            "gain": to_builtins(gain),
            "is_answer": candidate.key == found.candidate.key,
        }
        for candidate, gain in reversed(gains.values())
        if not candidate.is_baseline
    ]


def guarded(study: Tuned) -> list[dict]:
    """The guard's verdict on each candidate that it judged, with what every check saw and allows."""
    rows = []
    for trial in study.store.trials(study.study.study_id):
        verdict = trial.result.guard if trial.result is not None else None
        if verdict is not None:
            checks = {check.name: [float(f"{value:.3g}") for value in (check.observed, check.tolerance)]
                      for check in verdict.checks}  # fmt: skip
            label = trial.candidate.label
            rows.append({"candidate": label, "passed": verdict.passed, "reason": verdict.reason, "checks": checks})
    return rows


# --- and again --------------------------------------------------------------------------------


def again(row: dict, arguments: argparse.Namespace, left_s: float) -> dict:
    """Measure stored configurations against their baseline, in blocks of fresh processes."""
    candidates = [convert(statement["candidate"], Candidate) for statement in row["statements"]]
    job = next(job for job in JOBS if job.name == row["job"])
    measure = MeasureSettings(cap_s=CAP_S, foreign_cpu_share=arguments.foreign_load)
    began, at = time.monotonic(), now()
    head = {"step": "again", "job": job.name, "small": row["small"], "at": at, **stamp(command())}
    try:
        settings = StudySettings(measure=measure)
        with engine(job.small if row["small"] else job.workload, settings) as ready:
            head["hardware"] = hardware(ready.space.environment)
            gains = confirmed(ready, candidates, measure, began + left_s)
    except SteptuneError as error:
        return {**head, "error": str(error)[:300]}
    results = [
        compared(statement, gains[candidate.key])
        for statement, candidate in zip(row["statements"], candidates, strict=True)
        if gains[candidate.key] is not None
    ]
    if not results:
        return {**head, "error": f"fewer than {LEAST_BLOCKS} blocks of both sides"}
    apart_s = (datetime.fromisoformat(at) - datetime.fromisoformat(row["at"])).total_seconds()
    return {**head, "apart_s": round(apart_s), "results": results, "s": round(time.monotonic() - began, 1)}


def compared(statement: dict, gain: Gain) -> dict:
    """Say whether a gain that was measured again lies where the statement says."""
    before = convert(statement["gain"], Gain)
    return {
        **statement,
        "again": to_builtins(gain),
        "inside": before.interval.low <= gain.ratio <= before.interval.high,
        "inside_prediction": before.prediction.low <= gain.ratio <= before.prediction.high,
    }


def confirmed(
    ready: Engine, candidates: list[Candidate], measure: MeasureSettings, deadline: float
) -> dict[str, Gain | None]:
    """Gains by candidate key, by as many blocks as the time allows; None for fewer than two."""
    blocks: list[dict] = []
    block_s = 0.0
    for block in plan_blocks(BASELINE, candidates, BLOCKS, seed=int(time.time())):
        if len(blocks) >= LEAST_BLOCKS and time.monotonic() + block_s > deadline:
            break
        began = time.monotonic()
        order = list(block.order)
        results = ready.run(order, [Purpose.CONFIRM] * len(order), measure, block.number)
        blocks.append({result.candidate.key: result for result in results if result.ok})
        block_s = time.monotonic() - began
    return {finalist.candidate.key: finalist.gain for finalist in judge(BASELINE, candidates, blocks)}


# --- the file ---------------------------------------------------------------------------------


def due(rows: Sequence[dict], *, small: bool) -> list[dict]:
    """First rows with a statement that were not measured again, and are old enough."""
    done = {row["job"] for row in rows if row["step"] == "again" and row["small"] == small and "results" in row}
    firsts = [row for row in rows if row["step"] == "first" and row["small"] == small and row["statements"]]
    return [row for row in firsts if row["job"] not in done and (small or _age_s(row) >= LEAST_APART_S)]


def _age_s(row: dict) -> float:
    return (datetime.now(UTC) - datetime.fromisoformat(row["at"])).total_seconds()


def summary(rows: Sequence[dict], *, small: bool) -> str:
    """Count second measurements inside the first intervals, and candidates that the guard rejected."""
    rows = [row for row in rows if row["small"] == small]
    text, results = [], []
    for row in (row for row in rows if row["step"] == "again"):
        if "error" in row:
            text.append(f"{row['job']:36} {row['error']}")
        for result in row.get("results", ()):
            results.append(result)
            low, high = (result["gain"]["interval"][side] for side in ("low", "high"))
            text.append(
                f"{row['job']:36} {'answer' if result['is_answer'] else 'runner-up':10}{result['gain']['ratio']:.3f} "
                f"[{low:.3f}, {high:.3f}], after {row['apart_s'] / 3600:.1f} h {result['again']['ratio']:.3f}: "
                f"{'inside' if result['inside'] else 'OUTSIDE'}"
            )
    for label, is_answer in (("answers", True), ("runners-up", False)):
        own = [result for result in results if result["is_answer"] is is_answer]
        inside, predicted = (sum(result[name] for result in own) for name in ("inside", "inside_prediction"))
        text.append(f"{label}: {inside} of {len(own)} inside their interval, {predicted} inside their prediction")
    judged = [verdict for row in rows if row["step"] == "first" for verdict in row["guarded"]]
    rejected = [f"{verdict['candidate']}: {verdict['reason']}" for verdict in judged if not verdict["passed"]]
    return "\n".join([*text, f"guard: {len(rejected)} of {len(judged)} candidates rejected", *rejected])


def lines_of(paths: Sequence[Path]) -> list[dict]:
    return [
        json.loads(line) for path in dict.fromkeys(paths) if path.exists() for line in path.read_text().splitlines()
    ]


def append(path: Path, row: dict) -> None:
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")
    shown = ("job", "verdict", "gain", "gain_interval", "num_blocks", "trials", "tuning_s", "s", "error")
    print({name: row[name] for name in shown if name in row}, flush=True)


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def command() -> str:
    return " ".join(["python", "benchmarks/remeasured.py", *sys.argv[1:]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--first", action="store_true")
    what.add_argument("--again", action="store_true")
    what.add_argument("--summary", action="store_true")
    parser.add_argument("--minutes", type=float, default=9.0, help="after which nothing begins")
    parser.add_argument("--only", nargs="*", choices=[job.name for job in JOBS])
    parser.add_argument("--search", default="model", help="as of `steptune tune`")
    parser.add_argument(
        "--small", action="store_true", help="small models, on a CPU; those that have none are left out"
    )
    parser.add_argument("--rows", type=Path, default=OUTPUT, help="where new rows go")
    add_foreign_load(parser)
    arguments = parser.parse_args()
    deadline = time.monotonic() + 60 * arguments.minutes
    known = lines_of([OUTPUT, arguments.rows])
    wanted = arguments.only or [job.name for job in JOBS]
    if arguments.first:
        run_first([job for job in JOBS if job.name in wanted], known, arguments, deadline)
    elif arguments.again:
        run_again([row for row in due(known, small=arguments.small) if row["job"] in wanted], arguments, deadline)
    print(summary(lines_of([OUTPUT, arguments.rows]), small=arguments.small))


def run_first(jobs: Sequence[Job], known: Sequence[dict], arguments: argparse.Namespace, deadline: float) -> None:
    done = {row["job"] for row in known if row["step"] == "first" and row["small"] == arguments.small}
    for job in jobs:
        needed_s = SPARE_S + (SMALL_S if arguments.small else job.budget_s)
        if job.name in done or (arguments.small and not job.small) or time.monotonic() + needed_s > deadline:
            continue
        try:
            append(arguments.rows, first(job, arguments))
        except SteptuneError as error:
            print(f"{job.name}: {error}", flush=True)


def run_again(rows: Sequence[dict], arguments: argparse.Namespace, deadline: float) -> None:
    """In the order of the file; each has an equal part of the time that is left."""
    for place, row in enumerate(rows):
        left_s = deadline - time.monotonic()
        if left_s > SPARE_S:
            append(arguments.rows, again(row, arguments, left_s / (len(rows) - place)))


if __name__ == "__main__":
    main()
