"""Do exports run as fast as what was recommended?

    make export-environments && python benchmarks/export_fidelity.py digits photo gpt

A study of each example recommends. Then three scripts train the same model, in blocks of one process each,
in random order: `steptune.apply` with today's settings, `steptune.apply` with the recommended ones, and an Accelerate
script under `accelerate launch` with the exported YAML and the exported settings. The ratios of the last two to the
first should fall into the recommendation's prediction interval. The search is kept to strategies that Accelerate has
words for; what its exports list as not said is printed beside the figures.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
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
    "gpt": "examples/char_gpt.py:CharGPT",
}
SCRIPTS = ROOT / "benchmarks" / "fidelity"
BIN = ROOT / ".venv-exports-accelerate" / "bin"
EXPORTS = ("json", "accelerate", "accelerate_python")
SIDES = ("today", "apply", "accelerate")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("examples", nargs="+", choices=EXAMPLES)
    parser.add_argument("--budget", type=float, default=300.0, help="seconds of the study")
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--warm-up", type=float, default=4.0, help="seconds; twice that where something is compiled")
    parser.add_argument("--measure", type=float, default=8.0, help="seconds of each process")
    parser.add_argument("--out", type=Path, default=RESULTS / "export_fidelity.jsonl", help="one line an example")
    arguments = parser.parse_args()
    if not (BIN / "accelerate").exists():
        parser.error("no .venv-exports-accelerate: `make export-environments` makes it")
    for example in arguments.examples:
        with tempfile.TemporaryDirectory() as folder:
            recommendation = recommended(example, Path(folder), arguments.budget)
            rates = measure(example, recommendation, Path(folder), arguments)
        report = {
            "question": "speed of exports over today's settings, against the recommendation's prediction interval",
            **stamp(" ".join(["python", "benchmarks/export_fidelity.py", *sys.argv[1:]]), ("tuner", "benchmarks")),
            "accelerate": exporter_named("accelerate").version,
            "hardware": hardware(Environment(hardware=recommendation.hardware)),
            **summary(recommendation, rates),
            "blocks": [{side: round(block[side], 1) for side in SIDES} for block in rates],
        }
        print(json.dumps({name: value for name, value in report.items() if name != "blocks"}, indent=2))
        keep(report, arguments.out)


def keep(report: dict, path: Path) -> None:
    """The line of this example replaces an older one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    known = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    others = [row for row in known if row["workload"] != report["workload"]]
    path.write_text("".join(json.dumps(row) + "\n" for row in [*others, report]))


def recommended(example: str, folder: Path, budget_s: float) -> Recommendation:
    """Recommendation of a study of the strategies that Accelerate can express."""
    known = exporter_named("accelerate_python").rules  # type: ignore[attr-defined]
    only = tuple(strategy.name for strategy in STRATEGIES if strategy.name in known)
    command = [
        sys.executable,
        "-m",
        "steptune",
        "tune",
        EXAMPLES[example],
        "--budget",
        f"{budget_s:.0f}s",
    ]
    command += ["--database", f"sqlite:///{folder / 'study.db'}", "--output", str(folder / "results")]
    command += [word for name in only for word in ("--only", name)]
    variables = {**os.environ, "STEPTUNE_DATA_DIRECTORY": str(folder / "data"), "PYTHONPATH": str(ROOT / "src")}
    subprocess.run(command, cwd=ROOT, env=variables, check=True, stdout=subprocess.DEVNULL)
    found = load_recommendation(folder / "results" / "steptune.json")
    print(f"recommended: {found.candidate.label}", flush=True)
    return found


def measure(
    example: str, recommendation: Recommendation, folder: Path, arguments: argparse.Namespace
) -> list[dict[str, float]]:
    """Samples (tokens) per second of every script, by block."""
    for name in EXPORTS:
        exporter = exporter_named(name)
        (folder / exporter.file_name(recommendation)).write_text(exporter.export(recommendation))
    (folder / "today.json").write_text(exporter_named("json").export(today(recommendation)))
    compiles = recommendation.choices["compile"]["mode"] is not None
    times = [str(arguments.warm_up * (2 if compiles else 1)), str(arguments.measure)]
    apply = [str(BIN / "python"), str(SCRIPTS / "plain.py")]
    launch = [str(BIN / "accelerate"), "launch", "--config_file", str(folder / "accelerate.yaml")]
    commands = {
        "today": [*apply, str(folder / "today.json"), EXAMPLES[example], *times],
        "apply": [*apply, str(folder / "steptune.json"), EXAMPLES[example], *times],
        "accelerate": [*launch, str(SCRIPTS / f"{example}_accelerate.py"), str(folder), *times],
    }
    order = random.Random(0)
    blocks = []
    for number in range(arguments.blocks):
        block = {side: rate(commands[side]) for side in order.sample(SIDES, len(SIDES))}
        blocks.append(block)
        print(f"{number:3d}  " + "  ".join(f"{side} {block[side]:.1f}/s" for side in SIDES), flush=True)
    return blocks


def today(recommendation: Recommendation) -> Recommendation:
    """The same record with the user's own settings (the workload's `current` is empty)."""
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
    return float(json.loads(done.stdout.splitlines()[-1])["units_per_s"])


def summary(recommendation: Recommendation, blocks: list[dict[str, float]]) -> dict:
    gain = recommendation.gain
    stated = None if gain is None else {"ratio": gain.ratio, "prediction": [gain.prediction.low, gain.prediction.high]}
    return {
        "workload": recommendation.workload,
        "candidate": recommendation.candidate.label,
        "recommended": {"units_per_s": round(recommendation.units_per_s, 1), "gain": stated},
        "not_expressible": {name: exporter_named(name).not_expressible(recommendation) for name in EXPORTS},
        "measured": {side: figures(recommendation, blocks, side) for side in SIDES},
    }


def figures(recommendation: Recommendation, blocks: list[dict[str, float]], side: str) -> dict:
    """Medians and spread (the smallest and the largest block)."""
    rates = [block[side] for block in blocks]
    found: dict = {"units_per_s": spread(rates, 1)}
    if side != "today":
        ratios = [block[side] / block["today"] for block in blocks]
        found["over_today"] = spread(ratios, 4)
        if recommendation.gain is not None:
            interval = recommendation.gain.prediction
            found["inside_prediction"] = interval.low <= statistics.median(ratios) <= interval.high
    return found


def spread(values: list[float], digits: int) -> dict:
    named = {"median": statistics.median(values), "low": min(values), "high": max(values)}
    return {name: round(value, digits) for name, value in named.items()}


if __name__ == "__main__":
    main()
