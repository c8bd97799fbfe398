"""Training scripts, run with the hooks armed and without, in a folder of their own."""

from __future__ import annotations

import shutil
import subprocess
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
from _pytest.mark import ParameterSet
from builders import sample_environment, sample_recommendation
from msgspec.structs import replace

from steptune.service.script_profile import ScriptProfile, script_profile
from steptune.tuner.costs.bounds import Situation
from steptune.tuner.costs.categories import Category
from steptune.tuner.guard.curves import Protocol
from steptune.tuner.records import (
    Candidate,
    Choice,
    Environment,
    MeasureSettings,
    Numerics,
    Purpose,
    Recommendation,
    ScriptFacts,
    Study,
    StudySettings,
    TrialResult,
    WorkloadFacts,
)
from steptune.tuner.scripts.launch import ran_script
from steptune.tuner.scripts.look import Look, look_at
from steptune.tuner.scripts.record import ScriptRecord
from steptune.tuner.scripts.runner import ScriptRunner
from steptune.tuner.search.space import Space
from steptune.tuner.search.specs import SpecMaker
from steptune.tuner.strategies import STRATEGIES, Strategy
from steptune.tuner.strategies.api import Outside, Way
from steptune.tuner.strategies.combine import environment_variables
from steptune.tuner.strategies.in_scripts import script_changes
from steptune.tuner.trace_records import TraceAnalysis
from steptune.tuner.trials.analysis_files import read_analysis
from steptune.tuner.trials.reference import ReferenceRequest
from steptune.tuner.trials.study_files import StudyFiles

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parents[1] / "frontdoor" / "scripts"
LIBRARIES = ROOT / ".venv-exports-accelerate" / "bin" / "python"
VARIABLES = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


@dataclass(frozen=True)
class Run:
    """A script that was profiled, and what it printed meanwhile."""

    profile: ScriptProfile
    out: str
    err: str

    @property
    def first(self) -> ScriptRecord:
        return self.profile.records[0]


class ScriptFolder:
    """A folder with scripts, which must look the same after every run."""

    def __init__(self, path: Path, capture: pytest.CaptureFixture[str]) -> None:
        self.path = path
        self._capture = capture

    def add(self, name: str) -> str:
        shutil.copyfile(SCRIPTS / name, self.path / name)
        return name

    def profiled(self, *command: str, full: bool = False, in_place: bool = False) -> Run:
        """Profile a command, without the printing."""
        self._capture.readouterr()
        with ran_script(command, full=full, in_place=in_place) as ended:
            profile = script_profile(command, ended)
        out, err = self._capture.readouterr()
        return Run(profile, out, err)

    def plain(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command without Steptune, in a copy of the folder."""
        copy = self.path.with_name(f"{self.path.name}-plain")
        shutil.copytree(self.path, copy, dirs_exist_ok=True)
        return subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=120, check=False)

    def ran(self, *command: str, within_s: float = 120.0, **own: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, cwd=self.path, capture_output=True, text=True, timeout=within_s, check=False, **own
        )

    def files(self) -> dict[str, int]:
        """Size of every file, by its name."""
        return {
            str(path.relative_to(self.path)): path.stat().st_size for path in self.path.rglob("*") if path.is_file()
        }


class Planted(Strategy):
    """A choice that sets a variable of the environment, by which a script of the tests trains otherwise."""

    name = "planted"
    summary = "a fault that a script of the tests reads from its environment"
    defaults: ClassVar[Choice] = {"fault": "none"}
    values: ClassVar = {
        "fault": ("none", "rate", "gradients", "data", "order", "state", "between", "raises", "crashes")
    }
    attacks: ClassVar = (Category.OPTIMIZER,)

    def choices(self, environment: Environment, workload: WorkloadFacts) -> tuple[Choice, ...]:
        return tuple({"fault": fault} for fault in self.values["fault"])

    def numerics(self, choice: Choice) -> Numerics:
        return Numerics.ROUNDING

    def environment_variables(self, choice: Choice) -> dict[str, str]:
        return {"PLANTED": str(choice["fault"])}

    def contribute(self, plan: Any, choice: Choice) -> None:
        """Nothing."""

    def outside(self, choice: Choice, script: ScriptFacts) -> Outside:
        return Outside(way=Way.START, changes={}, words=f"PLANTED={choice['fault']}")

    def savings(self, situation: Situation, choice: Choice) -> dict[Category, float]:
        return {}


STEPS_ONLY = MeasureSettings(window_s=0.001, min_rounds=2, max_rounds=2, cap_s=0.0)
"""Two windows of a step or two: these tests look at what is trained, not at how long it takes."""


class Trials:
    """Trials of a command in a folder, each of a fixed candidate.

    Args:
        forked: From a frozen copy of the look's process, where a choice allows it.
        look: An earlier one at the same command, in another folder with the same files; its frozen copy is not used.
    """

    def __init__(
        self, folder: Path, study: Path, command: tuple[str, ...], *, forked: bool = False, look: Look | None = None
    ) -> None:
        study.mkdir(exist_ok=True)
        self.look = look = _looked(command, folder, study, forked=forked) if look is None else _moved(look, folder)
        strategies = STRATEGIES if forked else (*STRATEGIES, Planted())  # which needs another environment
        self._runner = ScriptRunner(look, study, strategies=strategies)
        self.close = weakref.finalize(self, self._runner.close)  # at the latest when nobody has them any more
        self._settings = StudySettings(num_ranks=look.record.num_ranks)
        self._environment = sample_environment("cpu")
        self.space = Space(self._environment, look.facts, self._settings, strategies)
        self._study = Study(
            study_id="study",
            workload=look.facts.reference,
            settings=self._settings,
            created_at="",
            directory=str(study),
        )
        StudyFiles(study).make_folders()

    def reference(self, *roundoffs: float) -> None:
        """Make what candidates of these unit roundoffs are compared with."""
        self._runner.make_reference(
            ReferenceRequest(
                workload=self._study.workload,
                study_directory=self._study.directory,
                choices={},
                device="cpu",
                protocol=Protocol(num_pointwise=3, num_curve=0, num_horizon=0, randomness="none"),
                unit_roundoffs=roundoffs,
                own_roundoff=self.space.unit_roundoff(Candidate()),
            )
        )

    def run(self, **choices: Choice) -> TrialResult:
        """One trial of a candidate; the first of its kind, so that it is guarded where it is no baseline."""
        return self._run(choices, profile=False)

    def profiled(self, **choices: Choice) -> tuple[TrialResult, TraceAnalysis]:
        """One trial of a candidate with a profile, and the analysis that result pages read."""
        result = self.asked_for_a_profile(**choices)
        with StudyFiles(Path(self._study.directory)).analysis(result.trial_id).open("rb") as file:
            *ranks, whole = read_analysis(file)
        return result, replace(whole, ranks=tuple(ranks))

    def asked_for_a_profile(self, **choices: Choice) -> TrialResult:
        """One trial of a candidate that should be profiled."""
        return self._run(choices, profile=True)

    def _run(self, choices: dict[str, Choice], *, profile: bool) -> TrialResult:
        candidate = Candidate(choices=choices)
        purpose = Purpose.EXPLORE if choices else Purpose.BASELINE
        spec = replace(SpecMaker(self._study, self.space, Candidate()).spec(candidate, purpose, 0), profile=profile)
        (result,) = self._runner.run([spec], [purpose], STEPS_ONLY, "group", lambda progress: None)
        return result

    def log(self, result: TrialResult) -> list[str]:
        """Lines that a trial printed."""
        path = Path(self._study.directory) / "logs" / f"{result.trial_id}.log"
        return path.read_text().splitlines()

    def recommended(self, **choices: Choice) -> Recommendation:
        """A recommendation of a fixed candidate for this script, on this machine."""
        candidate = Candidate(choices=choices)
        complete = self.space.complete(candidate)
        hardware = replace(self._environment.hardware, versions={"torch": self.look.record.torch})
        return replace(
            sample_recommendation(candidate=candidate, hardware=hardware, num_ranks=self.look.record.num_ranks),
            workload=self.look.facts.reference,
            choices=complete,
            environment_variables=environment_variables(complete),
            in_script=script_changes(candidate, complete, self.look.script),
        )


TrialsOf = Callable[..., Trials]
"""Make trials of the words of a command."""


def case(script: str, *rest: Any, id: str) -> ParameterSet:
    """Parameters in the group of the script, which is looked at once."""
    return pytest.param(script, *rest, id=id, marks=pytest.mark.xdist_group(script))


def _looked(command: tuple[str, ...], folder: Path, study: Path, *, forked: bool) -> Look:
    look, ended = look_at(command, folder, study / "look.log", frozen_seed=0 if forked else None)
    assert look is not None, [record.refusal for record in ended.records] or (study / "look.log").read_text()
    return look


def _moved(look: Look, folder: Path) -> Look:
    text = msgspec.json.encode(look.record).replace(str(look.folder).encode(), str(folder).encode())
    record = msgspec.json.decode(text, type=ScriptRecord)
    return Look(look.command, folder, record, look.analysis, look.seconds)


def losses(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("loss ")]


def interpreter(library: str | None) -> str:
    """An interpreter that has a library; skips the test where there is none."""
    if library is None:
        return sys.executable
    if not LIBRARIES.exists():
        pytest.skip(f"{library} is not installed: make export-environments")
    return str(LIBRARIES)
