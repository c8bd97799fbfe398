"""Cost of isolation: start of a server, a whole trial and the first compilation, with and without it.

python benchmarks/isolation.py [--repeats 5]

Levels take turns in random order, so that a busy machine disturbs all alike. Prints medians, and 20th to 80th
percentiles.
"""

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path

from steptune.service.isolation import LEVELS, Available, Level
from steptune.service.running import isolated_runner
from steptune.service.settings import Settings
from steptune.tuner.estimates import units_per_s
from steptune.tuner.records import BASELINE, Candidate, MeasureSettings, Purpose, TrialSpec, new_id
from steptune.tuner.strategies.combine import complete_choices, environment_variables
from steptune.tuner.trials.runner import LocalRunner
from steptune.tuner.workloads.reference import format_reference, parse_reference

WORKLOAD = "examples/digits_vit.py:DigitsViT"
SETTINGS = MeasureSettings(cap_s=1.0, max_rounds=4, foreign_cpu_share=100.0)
COMPILED = Candidate(choices={"compile": {"mode": "default"}})


def trial_s(runner: LocalRunner, candidate: Candidate, directory: Path, facts: object) -> tuple[float, float]:
    """Wall time of a trial, and samples per second in it."""
    choices = complete_choices(candidate, facts)
    spec = TrialSpec(
        trial_id=new_id(),
        workload=facts.reference,
        candidate=candidate,
        choices=choices,
        study_directory=str(directory),
        guard=False,
        profile=False,
        environment_variables=environment_variables(choices),
    )
    began = time.perf_counter()
    [result] = runner.run([spec], [Purpose.EXPLORE], SETTINGS, new_id(), lambda progress: None)
    assert result.ok, result.failure
    return time.perf_counter() - began, units_per_s(result)


def measure(level: Level, *, compiled: bool) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="steptune-") as folder:
        reference = format_reference(parse_reference(WORKLOAD))
        began = time.perf_counter()
        with isolated_runner(workload=reference, directory=Path(folder), settings=Settings(), level=level) as runner:
            facts = runner.inspect()
            found = {"server and a look at the workload [s]": time.perf_counter() - began}
            wall_s, rate = trial_s(runner, BASELINE, Path(folder), facts)
            found |= {"trial [s]": wall_s, "samples per second": rate}
            if compiled:
                found["first compiled trial [s]"] = trial_s(runner, COMPILED, Path(folder), facts)[0]
                found["second compiled trial [s]"] = trial_s(runner, COMPILED, Path(folder), facts)[0]
            began = time.perf_counter()
        return found | {"end [s]": time.perf_counter() - began}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--compile", action="store_true", help="also compile, which takes a minute")
    arguments = parser.parse_args()
    levels = [level for level in LEVELS if isinstance(level.probe(), Available)]
    found: dict[str, dict[str, list[float]]] = {level.name: {} for level in levels}
    for _ in range(arguments.repeats):
        for level in random.sample(levels, len(levels)):
            for name, value in measure(level, compiled=arguments.compile).items():
                found[level.name].setdefault(name, []).append(value)
    for name in next(iter(found.values())):
        for level_name, values in found.items():
            ordered = sorted(values[name])
            low, high = ordered[len(ordered) // 5], ordered[-1 - len(ordered) // 5]
            print(f"{name:40} {level_name:12} {statistics.median(ordered):8.3f}  ({low:.3f} to {high:.3f})")


if __name__ == "__main__":
    main()
