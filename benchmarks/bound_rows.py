"""Rows of a table with one study each: what `launch_bound.py` and `input_bound.py` do in the same way."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from stamp import RESULTS, stamp
from tuned import Tuned, add_foreign_load, answer, json_lines, settings_of, told, tuned

Look = Callable[[str, Tuned, dict], dict]
"""Function that returns what is of interest in a study, from the name of its row and its answer."""


def parser_of(doc: str | None, rows: Mapping[str, str], out: str) -> argparse.ArgumentParser:
    """
    Args:
        out: Name of the results file.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=list(rows), default=list(rows))
    parser.add_argument("--minutes", type=float, default=4.0, help="of tuning, for each")
    parser.add_argument("--small", action="store_true")
    add_foreign_load(parser)
    parser.add_argument("--out", type=Path, default=RESULTS / out)
    parser.add_argument("--trials", type=Path, help="folder for a file of all trials of a study")
    return parser


def measure_rows(
    program: str, arguments: argparse.Namespace, rows: Mapping[str, str], look: Look, verdict: Callable[[dict], str]
) -> None:
    """Appends a JSON line to the results file for each row that is wanted.

    Args:
        program: That is run, for the stamp.
        rows: Workloads by name.
        verdict: Whether a row reached what is wanted.
    """
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    command = " ".join(["python", f"benchmarks/{program}", *sys.argv[1:]])
    settings = settings_of(arguments.minutes, arguments.foreign_load)
    for name in arguments.only:
        with tuned(rows[name], settings, say=f"{name}  ") as study:
            found = answer(study)
            if arguments.trials is not None:
                (arguments.trials / f"{name}_trials.jsonl").write_text(json_lines(told(study)))
            found |= look(name, study, found)
        head = {"row": name, "small": arguments.small, **stamp(command), "workload": Path(rows[name]).name}
        row = {**head, **found}
        with arguments.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(name, json.dumps(row["recommended"]))
        print(name, verdict(row), flush=True)
