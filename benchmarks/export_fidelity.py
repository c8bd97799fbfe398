"""Do exports run as fast as what was recommended, in the loops of the libraries that they are for?

    make export-environments && python benchmarks/export_fidelity.py digits photo

A study of each example recommends. Then the same model is trained by `steptune.apply` and in the loops of Accelerate
(under `accelerate launch`), of the Trainer of transformers and of Lightning: each once with the export of today's
settings and once with that of the recommended ones, in blocks of one process each, in random order. The gain that
arrives in a library is the ratio of its two; `share_of_gain` compares its logarithm with that of `steptune.apply`,
and `carries` is what the export itself says. The search leaves out what needs a step of Steptune's own.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import msgspec
from stamp import RESULTS, ROOT, hardware, stamp

from steptune.tuner.export import exporter_named
from steptune.tuner.export.native import load_recommendation
from steptune.tuner.records import BASELINE, Environment, Recommendation
from steptune.tuner.strategies import STRATEGIES

EXAMPLES = {
    "digits": "examples/digits_vit.py:DigitsViT",
    "photo": "examples/photo_resnet.py:PhotoResNet",
}
SCRIPTS = ROOT / "benchmarks" / "fidelity"
OWN_PYTHON = ROOT / ".venv-exports-accelerate" / "bin" / "python"
LIBRARY_PACKAGES = ("accelerate", "transformers", "lightning")
TARGETS = {
    "accelerate": ("accelerate", "accelerate_python"),
    "transformers": ("transformers",),
    "lightning": ("lightning",),
}
"""Formats that a script of each library uses."""
LIBRARIES = ("apply", *TARGETS)
SIDES = tuple(f"{library}{today}" for library in LIBRARIES for today in ("", "_today"))
NEEDS_STEP = ("micro_batch", "activation_checkpointing", "gradient_compression", "ddp_buckets")
"""Strategies without a meaning, or without the same one, in every one of the loops."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("examples", nargs="+", choices=EXAMPLES)
    parser.add_argument(
        "--only", action="append", help="strategies that the study may try; default: all that exports say"
    )
    parser.add_argument("--budget", type=float, default=300.0, help="seconds of the study")
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--warm-up", type=float, default=4.0, help="seconds; twice that where something is compiled")
    parser.add_argument("--measure", type=float, default=8.0, help="seconds of each process")
    parser.add_argument("--out", type=Path, default=RESULTS / "export_fidelity.jsonl", help="one line an example")
    arguments = parser.parse_args()
    if not OWN_PYTHON.exists() and not all(map(find_spec, LIBRARY_PACKAGES)):
        parser.error(
            "no .venv-exports-accelerate, and this Python lacks a library: `make export-environments` makes it"
        )
    for example in arguments.examples:
        with tempfile.TemporaryDirectory() as folder:
            recommendation = recommended(example, Path(folder), arguments)
            rates: list[dict[str, float]] = []
            for block in measured_blocks(example, recommendation, Path(folder), arguments):
                rates.append(block)
                report = reported(example, recommendation, rates)
                keep(report, arguments.out)  # a run that is cut off leaves what it had
        print(json.dumps({name: value for name, value in report.items() if name != "blocks"}, indent=2))


def reported(example: str, recommendation: Recommendation, rates: list[dict[str, float]]) -> dict:
    """One line of the results file."""
    return {
        "question": "the part of a recommendation's gain that arrives in other libraries' own loops",
        **stamp(" ".join(["python", "benchmarks/export_fidelity.py", *sys.argv[1:]]), ("tuner", "benchmarks")),
        "libraries": {name: exporter_named(formats[0]).version for name, formats in TARGETS.items()},
        "hardware": hardware(Environment(hardware=recommendation.hardware)),
        **summary(recommendation, rates),
        "workload": EXAMPLES[example],
        "blocks": [{side: round(block[side], 1) for side in SIDES} for block in rates],
    }


def keep(report: dict, path: Path) -> None:
    """The line of this example replaces an older one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    known = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    others = [row for row in known if row["workload"] != report["workload"]]
    path.write_text("".join(json.dumps(row) + "\n" for row in [*others, report]))


def recommended(example: str, folder: Path, arguments: argparse.Namespace) -> Recommendation:
    """Recommendation of a study of the strategies that Accelerate can express."""
    known = exporter_named("accelerate_python").rules  # type: ignore[attr-defined]
    only = tuple(s.name for s in STRATEGIES if s.name in known and s.name not in NEEDS_STEP)
    command = [
        sys.executable,
        "-m",
        "steptune",
        "tune",
        EXAMPLES[example],
        "--budget",
        f"{arguments.budget:.0f}s",
    ]
    command += ["--database", f"sqlite:///{folder / 'study.db'}", "--output", str(folder / "results")]
    command += [word for name in arguments.only or only for word in ("--only", name)]
    variables = {**os.environ, "STEPTUNE_DATA_DIRECTORY": str(folder / "data"), "PYTHONPATH": str(ROOT / "src")}
    subprocess.run(command, cwd=ROOT, env=variables, check=True, stdout=subprocess.DEVNULL)
    found = load_recommendation(folder / "results" / "steptune.json")
    print(f"recommended: {found.candidate.label}", flush=True)
    return found


def measured_blocks(
    example: str, recommendation: Recommendation, folder: Path, arguments: argparse.Namespace
) -> Iterator[dict[str, float]]:
    """Samples (tokens) per second of every script, by block."""
    compiles = recommendation.choices["compile"]["mode"] is not None
    times = [str(arguments.warm_up * (2 if compiles else 1)), str(arguments.measure)]
    settings = {"": recommendation, "_today": today(recommendation)}
    commands = {
        f"{library}{suffix}": [
            *command(library, example, exported(library, chosen, folder / f"{library}{suffix}")),
            *times,
        ]
        for library in LIBRARIES
        for suffix, chosen in settings.items()
    }
    order = random.Random(0)
    for number in range(arguments.blocks):
        block = {side: rate(commands[side]) for side in order.sample(SIDES, len(SIDES))}
        print(f"{number:3d}  " + "  ".join(f"{side} {block[side]:.1f}/s" for side in SIDES), flush=True)
        yield block


def exported(library: str, recommendation: Recommendation, folder: Path) -> Path:
    """A folder with the files that a script of the library uses."""
    folder.mkdir()
    for name in TARGETS.get(library, ("json",)):
        exporter = exporter_named(name)
        (folder / exporter.file_name(recommendation)).write_text(exporter.export(recommendation))
    return folder


def command(library: str, example: str, folder: Path) -> list[str]:
    python = str(OWN_PYTHON) if OWN_PYTHON.exists() else sys.executable
    if library == "apply":
        return [python, str(SCRIPTS / "plain.py"), str(folder / "steptune.json"), EXAMPLES[example]]
    begun = [python]
    if library == "accelerate":
        begun = [python, "-m", "accelerate.commands.launch", "--config_file", str(folder / "accelerate.yaml")]
    return [*begun, str(SCRIPTS / f"{library}_script.py"), str(folder), example]


def today(recommendation: Recommendation) -> Recommendation:
    """Return the record with the user's own settings (the workload's `current` is empty)."""
    choices = {strategy.name: dict(strategy.defaults) for strategy in STRATEGIES}
    return msgspec.structs.replace(recommendation, candidate=BASELINE, choices=choices, environment_variables={})


def rate(command: list[str]) -> float:
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "ACCELERATE_"))}
    done = subprocess.run(
        command,
        env={**variables, "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "src", ROOT, SCRIPTS)))},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
    printed = next(line for line in done.stdout.splitlines() if line.startswith('{"units_per_s"'))
    return float(json.loads(printed)["units_per_s"])


def summary(recommendation: Recommendation, blocks: list[dict[str, float]]) -> dict:
    gain = recommendation.gain
    stated = None if gain is None else {"ratio": gain.ratio, "prediction": [gain.prediction.low, gain.prediction.high]}
    return {
        "candidate": recommendation.candidate.label,
        "recommended": {"units_per_s": round(recommendation.units_per_s, 1), "gain": stated},
        "carries": {name: [exporter_named(f).carries(recommendation) for f in TARGETS[name]] for name in TARGETS},
        "measured": {library: figures(recommendation, blocks, library) for library in LIBRARIES},
    }


def figures(recommendation: Recommendation, blocks: list[dict[str, float]], library: str) -> dict:
    """Medians and spread (the smallest and the largest block)."""
    gain = gain_in(blocks, library)
    found: dict = {
        "today_units_per_s": spread([block[f"{library}_today"] for block in blocks], 1),
        "units_per_s": spread([block[library] for block in blocks], 1),
        "over_today": spread([block[library] / block[f"{library}_today"] for block in blocks], 4),
        "share_of_gain": round(math.log(gain) / math.log(gain_in(blocks, "apply")), 3),
    }
    if recommendation.gain is not None:
        interval = recommendation.gain.prediction
        found["inside_prediction"] = interval.low <= gain <= interval.high
    return found


def gain_in(blocks: list[dict[str, float]], library: str) -> float:
    return statistics.median(block[library] / block[f"{library}_today"] for block in blocks)


def spread(values: list[float], digits: int) -> dict:
    named = {"median": statistics.median(values), "low": min(values), "high": max(values)}
    return {name: round(value, digits) for name, value in named.items()}


if __name__ == "__main__":
    main()
