"""Trials of a script that nobody rewrites: a candidate is applied from outside and is shown to be the same training."""

from __future__ import annotations

import contextlib
import shutil
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from script_runs import SCRIPTS, VARIABLES, ScriptFolder, Trials, losses

from steptune.tuner.records import Choice, FailureKind
from steptune.tuner.scripts.agent import calls, guard_watch
from steptune.tuner.strategies.api import BF16_ROUNDOFF, FP32_ROUNDOFF

FUSED: dict[str, Choice] = {"optimizer_implementation": {"implementation": "fused"}}
WORKER: dict[str, Choice] = {"data_loading": {"num_workers": 1}}
AUTOCAST: dict[str, Choice] = {"precision": {"level": "O1", "dtype": "bfloat16"}}
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2")


@dataclass(frozen=True)
class Idiom:
    """A script, a candidate, and what its verdict says.

    Attributes:
        kinds: Of checks that must be there.
        why_no_copy: Why its trials start anew; empty where they start from a frozen copy.
        note: A part of what could not be judged.
    """

    script: str
    choices: dict[str, Choice]
    kinds: set[str]
    note: str = ""
    launcher: tuple[str, ...] = ()
    why_no_copy: str = ""
    roundoffs: tuple[float, ...] = (FP32_ROUNDOFF,)


ALL = {"pointwise", "update", "gradient", "loader"}
IDIOMS = (
    Idiom(
        script="plain.py",
        choices=WORKER | FUSED,
        kinds=ALL,
        note="dropout",
        roundoffs=(FP32_ROUNDOFF, BF16_ROUNDOFF),  # for other candidates: the reference has more steps than this one
    ),
    Idiom(script="gan.py", choices=FUSED, kinds=ALL),
    Idiom(
        script="own_batches.py",
        choices={"backend_flags": {"flush_denormals": True}},
        kinds=ALL - {"loader"},
        note="makes its batches itself",
        roundoffs=(FP32_ROUNDOFF, BF16_ROUNDOFF),
    ),
    Idiom(
        script="by_hand.py",
        choices=AUTOCAST,
        kinds={"pointwise"},
        note="no torch optimizer",
        roundoffs=(BF16_ROUNDOFF,),
    ),
    Idiom(script="own_trainer.py", choices={"data_loading": {"num_workers": 2}}, kinds=ALL),
    Idiom(
        script="lbfgs.py",
        choices={"cpu_threads": {"num_threads": 1}},
        kinds={"pointwise"},
        note="LBFGS",
        why_no_copy="inside an optimizer",
    ),
    Idiom(
        script="augmented.py",
        choices=WORKER | {"memory_format": {"layout": "channels_last"}},
        kinds=ALL,
        note="content of samples: random",
    ),
    Idiom(script="two_ranks.py", choices=FUSED, kinds=ALL, launcher=TORCHRUN, why_no_copy="ranks of a process group"),
)


@pytest.mark.parametrize("idiom", IDIOMS, ids=lambda idiom: idiom.script.removesuffix(".py"))
def test_a_candidate_is_applied_and_is_the_same_training(folder: ScriptFolder, tmp_path: Path, idiom: Idiom) -> None:
    command = (sys.executable, *idiom.launcher, folder.add(idiom.script))
    before = folder.files()
    with contextlib.closing(Trials(folder.path, tmp_path / "study", command, forked=True)) as trials:
        trials.reference(*idiom.roundoffs)
        result = trials.run(**idiom.choices)

    assert result.failure is None, result.failure
    assert result.interpreter == ("started" if idiom.why_no_copy else "forked"), trials.look.why_no_copy
    assert idiom.why_no_copy in trials.look.why_no_copy
    assert result.guard is not None
    assert result.guard.passed, result.guard.reason
    assert {check.kind for check in result.guard.checks} >= idiom.kinds
    assert idiom.note in "; ".join(result.guard.notes)
    assert [effect.strategy for effect in result.effects if effect.took] == list(idiom.choices)
    assert result.windows
    assert folder.files() == before, "trials leave nothing in the folder"


FAULTY = pytest.mark.xdist_group("faulty.py")
"""Mark of all tests that ask for these trials, so that they are prepared once."""


@pytest.fixture(scope="module")
def faulty(view: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trials]:
    """Trials of a script that trains otherwise where a choice says so, with what they are compared with."""
    work = tmp_path_factory.mktemp("faulty")
    shutil.copyfile(SCRIPTS / "faulty.py", work / "faulty.py")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in VARIABLES.items():
            patch.setenv(name, value)
        trials = Trials(work, tmp_path_factory.mktemp("study"), (sys.executable, "faulty.py"))
        trials.reference(FP32_ROUNDOFF)
        yield trials


@FAULTY
def test_the_script_of_the_faults_passes_without_one(faulty: Trials) -> None:
    result = faulty.run(**FUSED)

    assert result.guard is not None, result.failure
    assert result.guard.passed, result.guard.reason
    assert {"update", "gradient", "state", "loader", "pointwise"} <= {check.kind for check in result.guard.checks}


@FAULTY
@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("rate", "update"),
        ("between", "update"),
        ("gradients", "gradient"),
        ("data", "loader"),
        ("order", "loader"),
        ("state", "state"),
    ],
)
def test_a_candidate_that_trains_otherwise_is_rejected(fault: str, kind: str, faulty: Trials) -> None:
    """The check that is there for the fault rejects it."""
    result = faulty.run(planted={"fault": fault})

    assert result.guard is not None, result.failure
    assert kind in {check.kind for check in result.guard.checks if not check.passed}
    assert not result.ok


@pytest.mark.xdist_group("plain.py")
def test_the_baseline_is_a_run_of_the_reference_where_each_trial_starts_the_command(
    plain: Trials, tmp_path: Path
) -> None:
    """A start of several ranks takes long: one less for the reference."""
    baseline = plain.run()
    plain.reference(FP32_ROUNDOFF)

    logs = {path.stem for path in (tmp_path / "study" / "logs").iterdir()}
    assert {baseline.trial_id, "repeated"} <= logs
    assert "today" not in logs
    result = plain.run(**FUSED)
    assert result.guard is not None
    assert result.guard.passed, result.guard.reason


def test_a_profiled_trial_keeps_its_analysis_for_result_pages(folder: ScriptFolder, tmp_path: Path) -> None:
    trials = Trials(folder.path, tmp_path / "study", (sys.executable, folder.add("plain.py")))
    for result, analysis in (trials.profiled(), trials.profiled(**FUSED)):
        (rank,) = analysis.ranks
        assert rank.breakdowns == result.breakdowns
        assert 1 <= rank.breakdowns[0].num_steps <= 10
        assert rank.modules
        (memory,) = rank.memory
        held = {part.name: part.peak_bytes for part in memory.classes}
        assert min(held[kind] for kind in ("parameters", "gradients", "optimizer state", "activations")) > 0


@FAULTY
def test_a_script_that_fails_under_a_candidate_says_why_in_its_own_words(faulty: Trials) -> None:
    result = faulty.run(planted={"fault": "raises"})

    assert result.failure is not None
    assert result.failure.kind is FailureKind.WORKLOAD_ERROR
    assert result.failure.message.endswith("RuntimeError: the script's own words")


@FAULTY
def test_a_script_that_the_profiler_crashes_is_measured_without_one(faulty: Trials) -> None:
    result = faulty.asked_for_a_profile(planted={"fault": "crashes"})

    assert result.ok, result.failure
    assert result.breakdowns == ()
    assert [attempt.failure.signal for attempt in result.repeated] == [signal.SIGSEGV]


def test_what_cannot_be_applied_needs_a_workload_with_its_reason(folder: ScriptFolder, tmp_path: Path) -> None:
    trials = Trials(folder.path, tmp_path / "study", (sys.executable, folder.add("own_batches.py")))

    reasons = {exclusion.move.strategy: exclusion.reason for exclusion in trials.space.excluded}

    assert reasons["data_loading"] == "needs a Workload: the script makes its batches without a DataLoader"
    assert "autocast to bfloat16" in reasons["precision"]
    assert "data_loading" not in {move.strategy for move in trials.space.moves}


def test_a_checkpoint_does_not_put_back_what_a_candidate_changes(folder: ScriptFolder, tmp_path: Path) -> None:
    trials = Trials(folder.path, tmp_path / "study", (sys.executable, folder.add("resumed.py")))

    result = trials.run(**FUSED)

    assert result.failure is None, result.failure
    assert all(effect.took for effect in result.effects)
    (log,) = (tmp_path / "study" / "logs").glob(f"{result.trial_id}.log")
    assert {line for line in log.read_text().splitlines() if line.startswith("fused ")} == {"fused True"}


@pytest.mark.xdist_group("plain.py")
def test_workers_are_not_kept_where_a_loop_may_change_its_dataset_between_epochs(plain: Trials) -> None:
    """They would go on with the dataset of the first epoch, after the steps that are compared."""
    loaders = [move.choice for move in plain.space.moves if move.strategy == "data_loading"]

    assert any(choice.get("num_workers") for choice in loaders)
    assert not any(choice.get("persistent_workers") for choice in loaders)


class Coins(torch.utils.data.Dataset):
    """Samples that one coin decides, as RandomHorizontalFlip does."""

    def __init__(self, generator: str) -> None:
        self.generator = generator

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        heads = {"none": True, "torch": bool(torch.rand(1) < 0.5), "numpy": np.random.random() < 0.5}[self.generator]
        return torch.tensor([index, -index]) if heads else torch.tensor([-index, index])


@pytest.mark.parametrize(("generator", "expected"), [("none", True), ("torch", False), ("numpy", False)])
def test_samples_that_one_coin_decides_are_random(generator: str, expected: bool) -> None:
    assert guard_watch._repeats(torch.utils.data.DataLoader(Coins(generator))) is expected


class Dropping(torch.nn.Module):
    """Calls torch's function with a probability that no attribute has."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(value, 0.5, self.training)


class Holding(torch.nn.Module):
    """Has a part of that name."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.dropout = torch.nn.Dropout(probability)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.dropout(value)
        return found


@pytest.mark.parametrize(
    ("module", "expected"),
    [(Dropping(), True), (Holding(0.1), True), (Holding(0.0), False), (torch.nn.Dropout(0.0), False)],
    ids=["called", "held", "held at 0", "torch's at 0"],
)
def test_dropout_is_found_in_a_models_parts_and_in_its_code(module: torch.nn.Module, expected: bool) -> None:
    assert calls.may_drop(torch.nn.Sequential(module)) is expected


@FAULTY
def test_the_baseline_trains_what_the_script_trains_alone(folder: ScriptFolder, faulty: Trials) -> None:
    """Without a guard nothing is changed but where the process ends: the script's own losses, digit by digit."""
    command = (sys.executable, folder.add("faulty.py"))
    plain = losses(folder.plain(*command).stdout)

    result = faulty.run()  # the reference has its guarded steps already

    assert result.failure is None, result.failure
    seen = losses("\n".join(faulty.log(result)))
    assert len(seen) >= 8
    assert seen == plain[: len(seen)]
