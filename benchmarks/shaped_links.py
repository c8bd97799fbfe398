"""The tuner's choice of a gradient reduction, by the link between hosts.

    python benchmarks/shaped_links.py --repeats 5 --output benchmarks/results/shaped_links.json

Two emulated hosts with two ranks each (gloo) and a model of 4 MiB that trains on little data: one study for each link,
the same but for the link's rate. On a link without a limit two levels only add calls, on a slow one they send a third
less over it. The exit status is 1 where a study recommends the other. Where network namespaces are not permitted, it
says so.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from pathlib import Path

from stamp import ROOT, hardware, stamp
from tuned import Tuned, tuned

from steptune.tuner.emulation import NETWORKS_VARIABLE
from steptune.tuner.errors import PlatformError
from steptune.tuner.network.emulated import emulated_hosts
from steptune.tuner.records import Candidate, MeasureSettings, StudySettings

WORKLOAD = "benchmarks/workloads/large_table.py:LargeTable"
GRADIENT_MIB = 4.0
NUM_RANKS = 4
ONLY = ("hierarchical_allreduce", "ddp_buckets")
LINKS = {"unlimited": (None, 1), "500mbit": ("500mbit", 2)}
"""Rate, and the levels that are right for it."""
MAX_TRIALS = 8
"""Enough for both to be tried; they, not the budget, end the search, or a busy machine would try fewer."""
BUDGET_S = 300.0
"""Studies end by themselves well before that, but for those on a busy machine."""
OTHERS_LOAD = 1000.0
"""The ranks of this and the kernel's work for the network take all cores of a small machine; trials take turns."""
CAP_S = 1.5
"""Seconds of windows: a dozen steps or so. With fewer, one that was disturbed decides."""


def study(link: str, budget_s: float, seed: int) -> dict:
    """Run one study, and return its row. The study is right where it recommends the choice that suits the link; choices
    that the measured links rule out need not be tried for that.
    """
    rate, right = LINKS[link]
    settings = StudySettings(
        budget_s=budget_s,
        only=ONLY,
        seed=seed,
        max_trials=MAX_TRIALS,
        num_finalists=1,
        measure=MeasureSettings(foreign_cpu_share=OTHERS_LOAD, cap_s=CAP_S),
        num_ranks=NUM_RANKS,
        device="cpu",
    )
    with emulated_hosts(2, rate) as networks:
        os.environ[NETWORKS_VARIABLE] = ",".join(map(str, networks))
        try:
            with tuned(f"{ROOT}/{WORKLOAD}", settings, say=f"{link}: ") as found:
                levels = _levels(found.recommendation.candidate)
                tried = {_levels(trial.candidate) for trial in found.store.trials(found.study.study_id)}
                return {
                    "link": link,
                    "seed": seed,
                    "levels": levels,
                    "right": levels == right,
                    "tried": sorted(tried),
                    "recommended": found.recommendation.candidate.label,
                    "verdict": found.recommendation.verdict.value,
                    **_gain(found),
                    "step_ms": _step_ms(found),
                    "seconds": round(found.seconds, 1),
                    **hardware(found.space.environment),
                }
        finally:
            del os.environ[NETWORKS_VARIABLE]


def _levels(candidate: Candidate) -> int:
    return int(candidate.choices.get("hierarchical_allreduce", {}).get("levels", 1))


def _gain(found: Tuned) -> dict:
    gain = found.recommendation.gain
    if gain is None:
        return {}
    low, high = gain.interval.low, gain.interval.high
    return {"gain": round(gain.ratio, 3), "interval": [round(low, 3), round(high, 3)], "blocks": gain.num_blocks}


def _step_ms(found: Tuned) -> dict[str, float]:
    """Median step time of each candidate over all its windows, in ms."""
    steps: dict[str, list[float]] = {}
    for trial in found.store.trials(found.study.study_id):
        if trial.result is not None:
            steps.setdefault(trial.candidate.label, []).extend(w.step_time_ns / 1e6 for w in trial.result.clean_windows)
    return {label: round(statistics.median(values), 1) for label, values in steps.items() if values}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--link", choices=LINKS, action="append", help="only this one")
    parser.add_argument("--repeats", type=int, default=1, help="studies for each link, with seeds 0, 1, ...")
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="most seconds of each")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # as torchrun sets it for several processes
    studies = []
    try:
        for seed in range(arguments.repeats):
            for link in arguments.link or LINKS:
                studies.append(study(link, arguments.budget, seed))
                print(json.dumps(studies[-1]), flush=True)
    except PlatformError as error:
        print(f"skipped: {error}")
        return 0
    right = {link: [s["right"] for s in studies if s["link"] == link] for link in arguments.link or LINKS}
    for link, found in right.items():
        print(f"{link}: right in {sum(found)} of {len(found)} studies")
    if arguments.output:
        record = {
            **stamp(f"python benchmarks/shaped_links.py --repeats {arguments.repeats} --budget {arguments.budget:g}"),
            "workload": WORKLOAD,
            "gradient_mib": GRADIENT_MIB,
            "ranks": NUM_RANKS,
            "right": {link: f"{sum(found)} of {len(found)}" for link, found in right.items()},
            "studies": studies,
        }
        arguments.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0 if all(s["right"] for s in studies) else 1


if __name__ == "__main__":
    sys.exit(main())
