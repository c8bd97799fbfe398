"""Does a study of three minutes answer as well as one of twice the time did, from today's FP32 and from what
professionals run?

    python benchmarks/search_rows.py --list
    python benchmarks/search_rows.py --row "diffusion_unet, bf16 compiled fused" --budget 130
    python benchmarks/search_rows.py --search stages --budget 330 --row "swin_tiny_16, FP32"     # to compare with
    python benchmarks/search_rows.py --small --budget 100 --row "gpt2_small, FP32"     # a dry run on a CPU

Six rows are drawn by a committed seed from the workloads of `single_gpu.py`, `llama_1b`, `diffusion_unet` and three
others, each in FP32 eager and in bf16, compiled, with a fused optimizer. Without `--row` those that the file does not
have are run, one after the other, as long as their budget fits into `--minutes`.

A row says the verdict with its interval, when every candidate was measured, and the share of the budget that
inspection and reference took. A job that is tuned has run before: one step of it is taken and a small function compiled
first, as `preparation_share.py` does it; `--fresh` leaves that out. One JSON line a row, appended as it comes.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from msgspec.structs import replace
from preparation_share import run_before, seconds_by_part
from single_gpu import ROWS as SINGLE_GPU
from stamp import RESULTS, ROOT, stamp
from tuned import Tuned, add_foreign_load, answer, settings_of, told, tuned

from steptune.tuner.errors import SteptuneError
from steptune.tuner.records import Purpose

SEED = 25
NUM_DRAWN = 6
BUDGET_S = 180.0
SPARE_S = 40.0
"""Seconds that a row is taken to need beside its budget: the step that is taken before, and blocks that end late."""
FOLDER = ROOT / "benchmarks" / "workloads"
FP32, PROFESSIONAL = "FP32", "bf16 compiled fused"
UNET, LLAMA = f"{FOLDER / 'diffusion_unet.py'}:DiffusionUNet", f"{FOLDER / 'llama_1b.py'}:Llama1B"
SMALL_UNET = "batch=4&image_size=16&channels=32&multipliers=1,2&attended=1&depth=1&head=16&images=64"
SMALL_LLAMA = "batch=4&sequence=64&vocabulary=512&width=64&hidden=128&depth=2&heads=4&kv_heads=2&samples=64"
REACHED_S = (130.0, 180.0, 300.0)
"""Seconds by which candidates are counted."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One workload from one start; `small` is that of a dry run."""

    name: str
    workload: str
    small: str = ""


def _of_zoo(name: str, reference: str, small: str = "") -> list[Row]:
    """Both starts of an entry of the zoo."""
    entry, _, arguments = reference.removeprefix("zoo:").partition("?")
    _, _, of_small = small.removeprefix("zoo:").partition("?")
    professional = f"{FOLDER / 'mixed_precision.py'}:professional?entry={entry}&"
    return [
        Row(name=f"{name}, {FP32}", workload=reference, small=small),
        Row(
            name=f"{name}, {PROFESSIONAL}",
            workload=professional + arguments,
            small=professional + of_small if small else "",
        ),
    ]


def _of_file(name: str, reference: str, small: str) -> list[Row]:
    """Both starts of a workload that is compiled and in bf16 unless it is asked to be plain."""
    return [
        Row(name=f"{name}, {FP32}", workload=f"{reference}?plain=True", small=f"{reference}?plain=True&{small}"),
        Row(name=f"{name}, {PROFESSIONAL}", workload=reference, small=f"{reference}?{small}"),
    ]


ROWS: tuple[Row, ...] = (
    *(row for single in SINGLE_GPU for row in _of_zoo(single.name, single.workload, single.small)),
    *_of_file("llama_1b", LLAMA, SMALL_LLAMA),
    *_of_file("diffusion_unet", UNET, SMALL_UNET),
    *_of_zoo("bert_large", "zoo:bert_large?batch=16&sequence=512"),
    *_of_zoo("mixture_of_experts", "zoo:mixture_of_experts?batch=16"),
    *_of_zoo("lstm", "zoo:lstm?batch=64"),
)


def drawn() -> list[Row]:
    """The six rows: half of each start, no workload twice."""
    generator = random.Random(SEED)
    names = list(dict.fromkeys(row.name.partition(",")[0] for row in ROWS))
    chosen = generator.sample(names, NUM_DRAWN)
    starts = [FP32, PROFESSIONAL] * (NUM_DRAWN // 2)
    return [named(f"{name}, {start}") for name, start in zip(chosen, starts, strict=True)]


def named(name: str) -> Row:
    return next(row for row in ROWS if row.name == name)


def measured(row: Row, arguments: argparse.Namespace) -> dict:
    """Run a study and say what it found when."""
    workload = row.small if arguments.small else row.workload
    if not arguments.fresh:
        run_before(workload)
    settings = replace(settings_of(arguments.budget / 60, arguments.foreign_load), search=arguments.search)
    with tuned(workload, settings, say=f"{row.name}  ") as study:
        seconds = seconds_by_part(study.stages, study.seconds)
        at_s = candidates_at(study)
        return {
            "row": row.name,
            "drawn": row in drawn(),
            "small": arguments.small,
            "ran_before": not arguments.fresh,
            "search": arguments.search,
            "budget_s": arguments.budget,
            **answer(study),
            "seconds": seconds,
            "stages": [[round(began_s, 1), stage] for began_s, stage in study.stages],
            "inspection_and_reference": round((seconds["inspection"] + seconds["reference"]) / arguments.budget, 3),
            "candidates_at_s": at_s,
            "candidates_within": {str(round(limit)): sum(at <= limit for at in at_s) for limit in REACHED_S},
            "runners_up": [
                {"choices": other.candidate.choices, "confirmed": other.confirmed and round(other.confirmed.ratio, 4)}
                for other in study.recommendation.alternatives[:3]
            ],
            "trials_told": told(study),
            **stamp(" ".join(["python", "benchmarks/search_rows.py", *sys.argv[1:]])),
        }


def candidates_at(study: Tuned) -> list[float]:
    """Seconds after which each candidate of the search, beside the baseline, was measured for the first time."""
    began = datetime.fromisoformat(study.study.created_at)
    first: dict[str, float] = {}
    for trial in study.store.trials(study.study.study_id):
        searched = trial.purpose not in (Purpose.BASELINE, Purpose.COMPANION, Purpose.CONFIRM)
        good = trial.result is not None and trial.result.ok and not trial.candidate.is_baseline
        if searched and good and trial.result is not None:
            began_s = (datetime.fromisoformat(trial.started_at) - began).total_seconds()
            at_s = began_s + sum(trial.result.phases_ns.values()) / 1e9
            first[trial.candidate.key] = min(at_s, first.get(trial.candidate.key, at_s))
    return sorted(round(at_s, 1) for at_s in first.values())


def lines_of(*paths: Path) -> list[dict]:
    return [
        json.loads(line) for path in dict.fromkeys(paths) if path.exists() for line in path.read_text().splitlines()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", nargs="*", choices=[row.name for row in ROWS])
    parser.add_argument("--list", action="store_true", help="the rows that are drawn")
    parser.add_argument("--search", default="model", help="as of `steptune tune`")
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds of each study")
    parser.add_argument("--minutes", type=float, default=9.5, help="after which no study begins that would end later")
    parser.add_argument("--fresh", action="store_true", help="run nothing before")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS / "search_rows.jsonl")
    add_foreign_load(parser)
    arguments = parser.parse_args()
    if arguments.list:
        print(*(row.name for row in drawn()), sep="\n")
        return
    deadline = time.monotonic() + 60 * arguments.minutes
    known = lines_of(RESULTS / "search_rows.jsonl", arguments.out)
    done = {(r["row"], r["search"], r["budget_s"]) for r in known if r["small"] == arguments.small and "error" not in r}
    rows = [named(name) for name in arguments.row] if arguments.row else drawn()
    for row in rows:
        if (row.name, arguments.search, arguments.budget) in done:
            continue
        if time.monotonic() + arguments.budget + SPARE_S > deadline:
            print(f"{row.name}: no time", flush=True)
            continue
        try:
            line = measured(row, arguments)
        except SteptuneError as error:
            head = {"row": row.name, "small": arguments.small, "search": arguments.search, "budget_s": arguments.budget}
            line = {**head, "error": str(error)}
        with arguments.out.open("a") as file:
            file.write(json.dumps(line, default=str) + "\n")
        left_out = ("trials_told", "stages", "versions", "hardware", "shares_before", "shares_after")
        print(json.dumps({name: value for name, value in line.items() if name not in left_out}, indent=1), flush=True)


if __name__ == "__main__":
    main()
