"""The engine without a search: a runner, the space and the specs of one workload, for benchmarks."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from steptune.tuner.records import (
    BASELINE,
    Candidate,
    MeasureSettings,
    Purpose,
    Study,
    StudySettings,
    TrialResult,
    new_id,
)
from steptune.tuner.search.space import Space
from steptune.tuner.search.specs import SpecMaker, expected_step_ns, guard_protocol
from steptune.tuner.trials.reference import ReferenceRequest, draws_masks
from steptune.tuner.trials.runner import LocalRunner
from steptune.tuner.workloads.reference import format_reference, parse_reference

GUARD_S = 20.0


@dataclass(frozen=True, kw_only=True)
class Engine:
    """A study's parts before its search begins."""

    study: Study
    runner: LocalRunner
    space: Space
    specs: SpecMaker

    def make_reference(self) -> None:
        """The guard's reference: needed by trials whose purpose is to explore."""
        space, study = self.space, self.study
        roundoffs, corrections = space.unit_roundoffs(), space.rounds_bias_corrections()
        self.runner.make_reference(
            ReferenceRequest(
                workload=study.workload,
                study_directory=study.directory,
                choices=space.complete(BASELINE),
                device=space.environment.hardware.device_kind,
                protocol=guard_protocol(
                    space.workload,
                    step_ns=expected_step_ns(space.workload, space.environment.topology),
                    seconds=GUARD_S,
                    num_roundoffs=len(roundoffs),
                    bias_corrections=corrections,
                    lossy=bool(study.settings.allow),
                    seed=study.settings.seed,
                    draws=draws_masks(study.settings.num_ranks),
                ),
                unit_roundoffs=roundoffs,
                bias_corrections=corrections,
            )
        )

    def run(
        self, candidates: list[Candidate], purposes: list[Purpose], measure: MeasureSettings, replicate: int = 0
    ) -> list[TrialResult]:
        """One trial of each, taking turns."""
        specs = [self.specs.spec(c, p, replicate) for c, p in zip(candidates, purposes, strict=True)]
        return self.runner.run(specs, purposes, measure, new_id(), lambda progress: None)


@contextmanager
def engine(workload: str, settings: StudySettings) -> Iterator[Engine]:
    """An engine in a temporary folder."""
    reference = format_reference(parse_reference(workload))
    with tempfile.TemporaryDirectory() as folder:
        runner = LocalRunner(workload=reference, directory=Path(folder), device=settings.device or "")
        try:
            environment, facts = runner.describe(), runner.inspect()
            space = Space(environment, facts, settings)
            study = Study(
                study_id=new_id(), workload=reference, settings=settings, created_at="", directory=folder, facts=facts
            )
            yield Engine(study=study, runner=runner, space=space, specs=SpecMaker(study, space, BASELINE))
        finally:
            runner.close()
