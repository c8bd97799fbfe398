"""How good is the search's answer after so many starts and seconds, beside what others would use?

    python benchmarks/search_quality.py run --half report --per-family 4 --seeds 0 10 --processes 8
    python benchmarks/search_quality.py run --half report --per-family 4 --seeds 0 10 --processes 8 \
        --methods model --starts 30 --out benchmarks/results/search_stops.jsonl
    python benchmarks/search_quality.py table
    python benchmarks/search_quality.py run --half report --first 4 --per-family 4 --seeds 0 2 \
        --methods model "additive GP" --starts 30 --out benchmarks/results/search_unseen.jsonl
    python benchmarks/search_quality.py table --rows benchmarks/results/search_unseen.jsonl \
        --stops benchmarks/results/search_unseen.jsonl --out benchmarks/results/search_unseen

`run` replays searches on generated surfaces (`search_surfaces.py`) and appends one row for each replay to
`benchmarks/results/search_quality.jsonl`; replays that are there already are not run again. A row has the seconds after
each start and the true step of the answer then, over the best step of the surface. `table` makes the summary
(`search_quality.json`, `search_quality.md`) from the rows. The model's longer replays, in a file of their own, say how
often it would have ended its search, and whether it would have been right. The last two commands count that on surfaces
that nobody has looked at.

All methods see the same parameters, in an order shuffled by the seed; ordered ones in the order of their values. A
start is one process start: the baseline, repeats and failures count. A start costs what it would: the process, warm-up,
windows, guard and profile where it is the first of its configuration, and compilation, short where the model was
compiled before. Nothing here depends on the machine's speed; numerical libraries are held to one thread
(OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1), which is faster for matrices as small as these.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import multiprocessing
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from search_opponents import DeepSpeed, ExpertList, Greedy, Horovod, PlainGaussian
from search_surfaces import Surface, SurfaceRunner, SurfaceSpace, every_surface
from stamp import RESULTS, stamp

from steptune.tuner.estimates import log_rate
from steptune.tuner.records import BASELINE, Candidate, Purpose
from steptune.tuner.search.designer import Designer
from steptune.tuner.search.knowledge import Outcome
from steptune.tuner.search.model_search import UNLIKELY, ModelSearch
from steptune.tuner.search.plain_searches import OptunaSearch, RandomSearch

ROWS, STOPS = RESULTS / "search_quality.jsonl", RESULTS / "search_stops.jsonl"
CODE = (
    "tuner/search",
    "benchmarks/search_quality.py",
    "benchmarks/search_surfaces.py",
    "benchmarks/search_opponents.py",
)
NUM_STARTS = 20
TOUGH = 12
"""Starts of the additive Gaussian process from which a surface counts as one that is not easy."""
WITHIN = 0.02
FIRST_PROFILE = (Purpose.BASELINE, Purpose.EXPLORE, Purpose.AUDIT)
NUM_BOOTSTRAPS = 400


def with_search(make: Callable[[], Any]) -> Callable[..., Designer]:
    return lambda space, **limits: Designer(space, search=make(), **limits)


METHODS: dict[str, Callable[..., Any]] = {
    "model": with_search(lambda: ModelSearch(ends_below=0.0)),
    "random": with_search(RandomSearch),
    "TPE": with_search(lambda: OptunaSearch("tpe")),
    "Optuna GP": with_search(lambda: OptunaSearch("gp")),
    "additive GP": with_search(lambda: PlainGaussian(ends_below=0.0)),
    "greedy": with_search(Greedy),
    "expert": with_search(ExpertList),
    "DeepSpeed": with_search(DeepSpeed),
    "Horovod": with_search(Horovod),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run")
    run.add_argument("--half", choices=("fit", "report", "both"), default="report")
    run.add_argument("--per-family", type=int, default=2)
    run.add_argument("--first", type=int, default=0, help="number of the first surface of each family")
    run.add_argument("--seeds", type=int, nargs=2, default=(0, 10), metavar=("A", "B"), help="from A to below B")
    run.add_argument("--methods", nargs="*", default=list(METHODS))
    run.add_argument("--starts", type=int, default=NUM_STARTS)
    run.add_argument("--processes", type=int, default=1)
    run.add_argument("--fresh", action="store_true", help="first drop the rows of these methods that are there")
    run.add_argument("--out", type=Path, default=ROWS)
    table = commands.add_parser("table")
    table.add_argument("--rows", type=Path, default=ROWS)
    table.add_argument("--stops", type=Path, default=STOPS, help="rows of longer searches, for when they would end")
    table.add_argument("--half", choices=("fit", "report"), default="report")
    table.add_argument("--out", type=Path, default=RESULTS / "search_quality")
    arguments = parser.parse_args()
    if arguments.command == "run":
        run_all(arguments)
    else:
        rows, longer = (read(path, arguments.half) for path in (arguments.rows, arguments.stops))
        write_table(rows, longer, arguments.out, arguments.half)


def run_all(arguments: argparse.Namespace) -> None:
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    rows = read(arguments.out) if arguments.out.exists() else []
    if arguments.fresh:
        rows = [row for row in rows if row["method"] not in arguments.methods]
        arguments.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = {(row["surface"], row["method"], row["seed"]) for row in rows}
    chosen = arguments.half, arguments.per_family, arguments.first
    names = [surface.name for surface in _surfaces(*chosen)]
    jobs = [
        (chosen, number, method, seed, arguments.starts)
        for seed, (number, name), method in itertools.product(
            range(*arguments.seeds), enumerate(names), arguments.methods
        )
        if (name, method, seed) not in done
    ]
    with multiprocessing.get_context("spawn").Pool(arguments.processes) as pool, arguments.out.open("a") as file:
        for row in pool.imap(_replay_of, jobs):
            file.write(json.dumps(row) + "\n")
            file.flush()


@functools.cache
def _surfaces(half: str, per_family: int, first: int) -> list[Surface]:
    """Surfaces with their best configurations, which each process looks for once."""
    return every_surface(half, per_family, first)


def _replay_of(job: tuple[tuple[str, int, int], int, str, int, int]) -> dict[str, Any]:
    chosen, number, method, seed, num_starts = job
    return replay(_surfaces(*chosen)[number], method, seed, num_starts)


def replay(surface: Surface, method: str, seed: int, num_starts: int) -> dict[str, Any]:
    """One search: seconds and the answer's true step over the best, after every start."""
    order = np.random.default_rng(seed).permutation(len(surface.knobs))
    space, runner = SurfaceSpace(surface, order), SurfaceRunner(surface, seed)
    budget_s = num_starts * (surface.start_s + surface.compile_s + 8.0)
    designer = METHODS[method](space, budget_s=budget_s, max_trials=num_starts, seed=seed)
    seconds, ratios, left = [], [], []
    while (suggestion := designer.suggest()) is not None:
        profiled = suggestion.replicate == 0 and suggestion.purpose in FIRST_PROFILE
        result = runner.run(suggestion.candidate, suggestion.purpose, profiled=profiled)
        designer.update(Outcome(result=result))
        seconds.append(round(designer.knowledge.spent_s, 1))
        ratios.append(round(surface.step_ms(answer(designer, method)) / surface.best_ms, 4))
        left.append(round(getattr(designer.search, "probability_left", None) or 0.0, 3))
    return {
        "surface": surface.name,
        "family": surface.family.name,
        "half": surface.family.half,
        "professional": surface.family.professional,
        "method": method,
        "seed": seed,
        "today": round(surface.today_ms / surface.best_ms, 4),
        "num_starts": num_starts,
        "seconds": seconds,
        "over_best": ratios,
        **({"probability_left": left} if method == "model" else {}),
    }


def answer(designer: Any, method: str) -> Candidate:
    """Return the configuration that a model expects to be fastest; else the fastest by the mean of its own starts."""
    if method == "model":
        return designer.incumbent
    if method == "additive GP":
        return PlainGaussian.blind(designer.history).answer()
    means = {}
    for results in designer.knowledge.results.values():
        good = [log_rate(result).mean for result in results if result.ok]
        if good:
            means[results[0].candidate.key] = (float(np.mean(good)), results[0].candidate)
    return max(means.values(), key=lambda pair: pair[0])[1] if means else BASELINE


# --- the table --------------------------------------------------------------------------------


def read(path: Path, half: str | None = None) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in path.read_text().splitlines() if line]
    return [row for row in rows if half in (None, row["half"])]


def at(row: dict[str, Any], start: int) -> float:
    """The answer's regret after so many starts; a method that ended keeps its answer."""
    ratios = row["over_best"]
    return ratios[min(start, len(ratios)) - 1] - 1 if ratios else row["today"] - 1


def starts_to(row: dict[str, Any]) -> float:
    """Starts after which the answer stays within 2 % of the best; one more than there were where it does not."""
    outside = [n for n, ratio in enumerate(row["over_best"], 1) if ratio > 1 + WITHIN]
    last = outside[-1] if outside else 0
    return last + 1 if last < len(row["over_best"]) else row["num_starts"] + 1


def seconds_to(row: dict[str, Any]) -> float:
    """Seconds until 95 % of the gain stay had, in logarithms; infinite where that does not come."""
    goal = 0.05 * math.log(row["today"])
    outside = [n for n, ratio in enumerate(row["over_best"]) if math.log(ratio) > goal]
    last = outside[-1] + 1 if outside else 0
    return row["seconds"][last] if last < len(row["seconds"]) else math.inf


def share(row: dict[str, Any], start: int) -> float:
    return 1 - math.log(1 + at(row, start)) / math.log(row["today"])


MEASURES: dict[str, Callable[[list[dict[str, Any]]], float]] = {
    "median starts to 2 %": lambda rows: float(np.median([starts_to(r) for r in rows])),
    "within 2 % at 12": lambda rows: float(np.mean([at(r, 12) <= WITHIN for r in rows])),
    "within 2 % at 20": lambda rows: float(np.mean([at(r, 20) <= WITHIN for r in rows])),
    "mean regret at 12": lambda rows: float(np.mean([at(r, 12) for r in rows])),
    "mean regret at 20": lambda rows: float(np.mean([at(r, 20) for r in rows])),
    "median s to 95 % of the gain": lambda rows: float(np.median([seconds_to(r) for r in rows])),
    "share of the gain at 12": lambda rows: float(np.mean([share(r, 12) for r in rows])),
    "share of the gain at 20": lambda rows: float(np.mean([share(r, 20) for r in rows])),
}


def interval(rows: list[dict[str, Any]], measure: Callable[[list[dict[str, Any]]], float]) -> list[float]:
    """95 % bootstrap interval over surfaces, and over seeds within each."""
    by_surface: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        by_surface[row["surface"]].append(row)
    names, generator, found = sorted(by_surface), np.random.default_rng(0), []
    for _ in range(NUM_BOOTSTRAPS):
        drawn: list[dict[str, Any]] = []
        for name in generator.choice(names, len(names)):
            same = by_surface[name]
            drawn += [same[n] for n in generator.integers(len(same), size=len(same))]
        found.append(measure(drawn))
    return [float(np.quantile(found, q, method="nearest")) for q in (0.025, 0.975)]


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {"replays": len(rows), "surfaces": len({row["surface"] for row in rows})}
    for name, measure in MEASURES.items():
        found[name] = {"value": known(measure(rows)), "interval": [known(end) for end in interval(rows, measure)]}
    return found


def known(value: float) -> float | None:
    """None of what was not reached."""
    return value if math.isfinite(value) else None


def stops(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """First statements that a further gain of 2 % is less than 5 % likely: how many, and how many are false."""
    made = wrong = 0
    for row in rows:
        # What was likely left when the last start was asked for stands for the answer before it.
        for probability, ratio in zip(row["probability_left"], row["over_best"], strict=True):
            if probability < UNLIKELY and len(row["over_best"]) > 1:
                made += 1
                wrong += ratio > 1 / (1 - WITHIN)
                break
    return {"replays": len(rows), "starts": rows[0]["num_starts"], "stop": made, "false": wrong}


def write_table(rows: list[dict[str, Any]], longer: list[dict[str, Any]], out: Path, half: str) -> None:
    methods = [method for method in METHODS if any(row["method"] == method for row in rows)]
    groups = {
        "all surfaces": rows,
        "from professional baselines": [row for row in rows if row["professional"]],
        "not easy": tough(rows),
    }
    report = {
        "question": "the answer after so many starts and seconds, on surfaces that served no fitting",
        **stamp(command_of(rows, half, out.stem), code=CODE),
        "half": half,
        "groups": {
            name: {m: summary(own) for m in methods if (own := [r for r in some if r["method"] == m])}
            for name, some in groups.items()
            if some
        },
        "stops": stops([row for row in longer if row["method"] == "model"]),
    }
    out.with_suffix(".json").write_text(json.dumps(report, indent=2) + "\n")
    out.with_suffix(".md").write_text(as_markdown(report))


def command_of(rows: list[dict[str, Any]], half: str, name: str) -> str:
    """Return the command that makes these rows and their table.

    Args:
        name: The table's; rows beside the usual ones have a file of their own, in which all replays are equally long.
    """
    families, last = {row["family"] for row in rows}, max(row["seed"] for row in rows)
    per_family = math.ceil(len({row["surface"] for row in rows}) / len(families))
    first = min(int(row["surface"].rpartition(" ")[2]) for row in rows)
    number, table = "", ""
    if name != ROWS.stem:
        methods = " ".join(f'"{method}"' for method in dict.fromkeys(row["method"] for row in rows))
        number = f" --first {first} --methods {methods} --starts {rows[0]['num_starts']}"
        table = f" --rows benchmarks/results/{name}.jsonl --stops benchmarks/results/{name}.jsonl"
    wanted = f"--half {half} --per-family {per_family} --seeds 0 {last + 1}{number}"
    return f"python benchmarks/search_quality.py run {wanted} && python benchmarks/search_quality.py table{table}"


def tough(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows of surfaces on which the additive Gaussian process needs 12 starts or more at the median."""
    needed: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        if row["method"] == "additive GP":
            needed[row["surface"]].append(starts_to(row))
    hard = {name for name, values in needed.items() if np.median(values) >= TOUGH}
    return [row for row in rows if row["surface"] in hard]


def as_markdown(report: dict[str, Any]) -> str:
    lines = [
        "# The answer of a search after so many starts",
        "",
        f"Made by `{report['command']}`.",
        f"Families of surfaces of the half `{report['half']}`; constants are fitted on `fit`. Regret is the true step",
        "of the answer over the best of the space, less one; brackets are 95 % bootstrap intervals, over surfaces and",
        "over seeds within them.",
        "Replays on modelled surfaces, no measurement of a device.",
        "",
    ]
    for group, methods in report["groups"].items():
        first = next(iter(methods.values()))
        lines += [f"## {group.capitalize()}: {first['surfaces']} surfaces", ""]
        lines += ["| method | replays | " + " | ".join(MEASURES) + " |", "|---" * (2 + len(MEASURES)) + "|"]
        for method, found in methods.items():
            cells = [cell(name, found[name]) for name in MEASURES]
            lines.append(f"| {method} | {found['replays']} | " + " | ".join(cells) + " |")
        lines.append("")
    made = report["stops"]
    lines += [
        f"In {made['stop']} of {made['replays']} replays of {made['starts']} starts the model came to say that a",
        f"further gain of 2 % is less than 5 % likely; {made['false']} of these first statements were false.",
        "",
    ]
    return "\n".join(lines)


def cell(name: str, found: dict[str, Any]) -> str:
    value, low, high = (figure(name, number) for number in (found["value"], *found["interval"]))
    return f"{value} [{low}, {high}]"


def figure(name: str, value: float | None) -> str:
    if "median" not in name:
        return f"{value:.1%}"
    if value is None:
        return "not reached"
    return f"> {NUM_STARTS}" if "starts" in name and value > NUM_STARTS else f"{value:.0f}"


if __name__ == "__main__":
    main()
