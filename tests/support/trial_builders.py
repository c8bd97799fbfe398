"""Real trials of small workloads, with settings under which a trial takes about a second."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from steptune.tuner.guard.curves import Protocol
from steptune.tuner.protocols import ProgressListener
from steptune.tuner.records import (
    BASELINE,
    Candidate,
    Deadlines,
    MeasureSettings,
    Purpose,
    Scalar,
    TrialResult,
    TrialSpec,
    WorkloadFacts,
    new_id,
)
from steptune.tuner.strategies.combine import complete_choices, environment_variables
from steptune.tuner.trials.reference import ReferenceRequest
from steptune.tuner.trials.runner import LocalRunner

WORKLOADS = Path(__file__).parents[1] / "workloads"
QUICK = MeasureSettings(window_s=0.02, min_rounds=2, max_rounds=2, cap_s=0.5, foreign_cpu_share=1000.0)
"""Load from other tests must not void a window."""
THREE_THREADS = Candidate(choices={"cpu_threads": {"num_threads": 3}})
"""A candidate that no machine runs by default: by it a workload tells the candidate from the baseline."""


def reference(file: str, name: str, **arguments: Scalar) -> str:
    """`.../tests/workloads/FILE.py:NAME?argument=value&...`"""
    query = "&".join(f"{key}={value}" for key, value in arguments.items())
    return f"{WORKLOADS / file}.py:{name}" + (f"?{query}" if query else "")


@dataclass
class Prepared:
    """A runner whose workload was looked at and has a reference."""

    runner: LocalRunner
    workload: str
    directory: Path
    facts: WorkloadFacts
    num_ranks: int

    def spec(self, candidate: Candidate = BASELINE, **changes: Any) -> TrialSpec:
        choices = complete_choices(candidate, self.facts)
        spec = TrialSpec(
            trial_id=new_id(),
            workload=self.workload,
            candidate=candidate,
            choices=choices,
            study_directory=str(self.directory),
            num_ranks=self.num_ranks,
            environment_variables=environment_variables(choices),
            deadlines=Deadlines(),
        )
        return replace(spec, **changes)

    def run(
        self,
        *specs: TrialSpec,
        settings: MeasureSettings = QUICK,
        listener: ProgressListener = lambda progress: None,
    ) -> list[TrialResult]:
        return self.runner.run(specs, [Purpose.EXPLORE] * len(specs), settings, new_id(), listener)

    def run_baseline(self) -> TrialResult:
        """The cheapest whole trial."""
        return self.run(self.spec(guard=False, profile=False))[0]


def prepare(
    workload: str,
    directory: Path,
    *,
    num_ranks: int = 1,
    with_reference: bool = True,
    num_horizon: int = 0,
    candidate: Candidate = BASELINE,
    **options: Any,
) -> Prepared:
    """Looks at a workload and makes its reference. Close the runner afterwards."""
    runner = LocalRunner(workload=workload, directory=directory, num_ranks=num_ranks, **options)
    try:
        facts = runner.inspect()
        if with_reference:
            runner.make_reference(
                ReferenceRequest(
                    workload=workload,
                    study_directory=str(directory),
                    choices=complete_choices(candidate, facts),
                    device="cpu",
                    protocol=Protocol(
                        num_pointwise=3, num_curve=0, num_horizon=num_horizon, randomness=facts.randomness
                    ),
                    unit_roundoffs=(2.0**-24, 2.0**-8),
                )
            )
    except BaseException:
        runner.close()
        raise
    return Prepared(runner=runner, workload=workload, directory=directory, facts=facts, num_ranks=num_ranks)
