"""Do the confirmation's intervals hold, under noise of many kinds?

    python benchmarks/statistics                # writes results/statistics.json and .md; some minutes on two cores
    python benchmarks/statistics --half fit     # prints the half on which constants may be fitted

Simulated studies are confirmed by the product's code (`simulated_study.py`) under noise whose truth is known
(`noise.py`): alternately after a long search and a short one, one start after another and in turns, with one finalist
and with two. A study counts as covered where the intervals of all finalists hold the true gains, and as a false
"faster" where a finalist without a gain is called faster. Widths are in those of an oracle that knows the standard
deviation of a start, for the same number of blocks.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from noise import FIT, REPORT, SCATTER, SCATTERED, SD, UNBOUNDED
from scipy.special import ndtri
from simulated_study import Case, confirmed
from stamp import RESULTS, hardware, stamp

from steptune.tuner.hardware import describe_environment
from steptune.tuner.search.confirmation import LEVEL

BLOCKS = (2, 3, 5, 12)
GAINS = (1.0, 1.05, 1.3)
HALVES = {"fit": (FIT, 1_000_000), "report": (REPORT, 2_000_000)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--half", choices=HALVES, default="report")
    parser.add_argument("--studies", type=int, default=2000, help="of each row")
    parser.add_argument("--only", nargs="*", choices=FIT, help="noise processes; a part of a half is not written")
    parser.add_argument("--processes", type=int, default=2, help="side by side")
    parser.add_argument("--rows", type=Path, help="JSON lines that grow as rows come; those that are there are kept")
    parser.add_argument("--label", default="product", help="of these rows, beside those that are kept")
    parser.add_argument("--out", type=Path, default=RESULTS / "statistics.json")
    arguments = parser.parse_args()
    cells = list(itertools.product(arguments.only or FIT, BLOCKS, GAINS))
    rows = made_rows(arguments.half, cells, arguments.studies, arguments.processes, arguments.rows)
    table = markdown(rows)
    print(table)
    if arguments.half == "report" and not arguments.only:
        command = f"python benchmarks/statistics --studies {arguments.studies}"
        made = {
            **stamp(command),
            "hardware": hardware(describe_environment("cpu", Path(tempfile.gettempdir()), 1)),
            "rows": rows,
        }
        kept = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
        kept[arguments.label] = made
        arguments.out.write_text(json.dumps(kept, indent=1) + "\n")
        arguments.out.with_suffix(".md").write_text(page(kept))


def made_rows(half: str, cells: list[tuple], studies: int, num_processes: int, kept: Path | None) -> list[dict]:
    """Rows of all cells in their order, those of most blocks first made."""
    lines = kept.read_text().splitlines() if kept is not None and kept.exists() else []
    known = {_cell(kept_row): kept_row for kept_row in map(json.loads, lines) if kept_row["studies"] == studies}
    missing = sorted((cell for cell in cells if cell not in known), key=lambda cell: -cell[1])
    with ProcessPoolExecutor(num_processes) as pool:
        for made in as_completed([pool.submit(row, half, *cell, studies) for cell in missing]):
            known[_cell(made.result())] = made.result()
            if kept is not None:
                with kept.open("a") as file:
                    file.write(json.dumps(made.result()) + "\n")
    return [known[cell] for cell in cells]


def _cell(row: dict) -> tuple:
    return row["process"], row["blocks"], row["gain"]


def row(half: str, process: str, blocks: int, gain: float, studies: int) -> dict:
    """Shares over many studies under one process, with time for so many blocks; for all where starts are scattered."""
    processes, first_seed = HALVES[half]
    sd = SCATTER * SD if process == SCATTERED else SD
    covered, faster, false, used, widths = [], [], [], [], []
    for number in range(studies):
        seed = first_seed + number
        case = Case(
            gain=gain,
            blocks=blocks,
            time_for=BLOCKS[-1] if process == SCATTERED else blocks,
            finalists=1 + number // 2 % 2,
            long_search=bool(number % 2),
            in_turns=bool(number // 4 % 2),
        )
        judged, truth = confirmed(case, processes[process](seed), seed)
        judged = [finalist for finalist in judged if finalist.gain is not None]
        log_gains = [truth[finalist.candidate.key] for finalist in judged]
        bounds = [(math.log(f.gain.interval.low), math.log(f.gain.interval.high)) for f in judged if f.gain]
        covered.append(all(low <= true <= high for (low, high), true in zip(bounds, log_gains, strict=True)))
        false.append(any(f.is_faster for f, true in zip(judged, log_gains, strict=True) if true <= 0))
        faster.append(any(f.is_faster for f in judged))
        used.append(len(judged[0].log_ratios))
        oracle = -float(ndtri((1 - LEVEL) / 2 / len(judged))) * sd * math.sqrt(2 / used[-1])
        widths += [(high - low) / 2 / oracle for low, high in bounds]
    return {
        "process": process,
        "blocks": blocks,
        "gain": gain,
        "studies": studies,
        "coverage": statistics.fmean(covered),
        "false_faster": statistics.fmean(false),
        "faster": statistics.fmean(faster),
        "mean_blocks": statistics.fmean(used),
        "median_width": statistics.median(widths),
    }


def summary(rows: Sequence[dict]) -> dict:
    """Return the worst row of each quantity that has a floor."""
    bounded = [row for row in rows if row["process"] != UNBOUNDED]
    iid = [row for row in rows if row["process"] == "iid"]
    if not bounded or not iid:
        return {}
    return {
        "least coverage": min(row["coverage"] for row in bounded),
        "most false faster": max(row["false_faster"] for row in bounded),
        "iid coverage": max(row["coverage"] for row in iid),
        "iid width": max(row["median_width"] for row in iid),
        "1.3x in two blocks": min(row["faster"] for row in iid if row["blocks"] == 2 and row["gain"] == 1.3),
    }


def markdown(rows: Sequence[dict]) -> str:
    """One line a process and a number of blocks: worst over the gains."""
    lines = [
        "| noise | blocks asked for | coverage, worst gain | false faster | faster at 1.05x, 1.3x "
        "| blocks used without a gain, at 1.3x | median width / oracle's, worst gain |",
        "|---|---|---|---|---|---|---|",
    ]
    for (process, blocks), found in itertools.groupby(rows, lambda row: (row["process"], row["blocks"])):
        of = {row["gain"]: row for row in found}
        worst = min(row["coverage"] for row in of.values())
        power = ", ".join(f"{of[gain]['faster']:.0%}" for gain in GAINS[1:])
        lines.append(
            f"| {process} | {blocks} | {worst:.1%} | {max(r['false_faster'] for r in of.values()):.2%} | {power} "
            f"| {of[1.0]['mean_blocks']:.1f}, {of[1.3]['mean_blocks']:.1f} "
            f"| {max(row['median_width'] for row in of.values()):.2f} |"
        )
    told = "; ".join(f"{name} {value:.3f}" for name, value in summary(rows).items())
    return "\n".join([*lines, *(["", f"Over all rows but the last process: {told}."] if told else [])])


def page(kept: dict) -> str:
    """All rows that are kept, as one page."""
    parts = ["# The confirmation's intervals under simulated noise", ""]
    parts += [
        "Simulated starts, no measurement of a device. The worst of each row over gains of 1.0, 1.05 and 1.3.",
        "",
    ]
    for label, of in kept.items():
        parts += [f"## {label}", "", f"Made by `{of['command']}`, code {of['code']}, {of['date']}.", ""]
        parts += [markdown(of["rows"]), ""]
    return "\n".join(parts)


if __name__ == "__main__":
    main()
