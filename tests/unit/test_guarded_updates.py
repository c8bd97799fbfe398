"""The guard and the ways in which an optimizer's update is run: each passes, and no other update does.

A small real training by AdamW runs the real protocol. An update that counts its steps on the device does so on a CPU
here too, where torch offers it to compilers alone.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from guarded import PROTOCOL, ByAdamW, Counting, Study, Wide, make_study
from msgspec.structs import replace

from steptune.tuner.records import BASELINE, TrialSpec
from steptune.tuner.training.job import TrainingJob
from steptune.tuner.trials.coordination import Coordinator
from steptune.tuner.trials.guard import run_guard

POINTWISE = replace(PROTOCOL, num_curve=0, num_horizon=0, randomness="none")
IMPLEMENTATIONS = ("for_loop", "foreach", "fused")


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    return make_study(tmp_path_factory.mktemp("adamw") / "study", ByAdamW, protocol=POINTWISE, bias_corrections=True)


@pytest.fixture
def counting_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sys.modules[torch.optim.Adam.__module__], "_get_capturable_supported_devices", lambda **_: ["cpu"]
    )


def counting(job: TrainingJob) -> TrainingJob:
    """The job with an update that counts its steps on the device."""
    for group in job.optimizer.param_groups:
        group["capturable"] = True
    job.optimizer._warned_capturable_if_run_uncaptured = True
    return job


def running(implementation: str, **also: Any) -> dict[str, Any]:
    return {"optimizer_implementation": {"implementation": implementation, **also}}


class TestSame:
    @pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
    @pytest.mark.parametrize("contiguous", [False, True])
    def test_every_implementation_passes(self, study: Study, implementation: str, contiguous: bool) -> None:
        assert study.failed(study.job(**running(implementation, contiguous=contiguous))) == []

    def test_contiguous_parameters_of_large_layers_pass(self, tmp_path: Path) -> None:
        """A CPU's FP32 sum of the squares of a million gradients depends on where they lie."""
        wide = make_study(tmp_path / "study", Wide, protocol=replace(POINTWISE, num_pointwise=2))
        assert wide.failed(wide.job(optimizer_implementation={"contiguous": True})) == []

    @pytest.mark.usefixtures("counting_on_cpu")
    @pytest.mark.parametrize("implementation", ["for_loop", "foreach"])
    def test_bias_corrections_in_fp32_pass(self, study: Study, implementation: str) -> None:
        assert study.failed(counting(study.job(**running(implementation)))) == []

    @pytest.mark.usefixtures("counting_on_cpu")
    def test_they_differ_by_more_than_other_rounding_does(self, study: Study) -> None:
        """Else what they do need not be measured."""
        unmeasured = Study(study.files, replace(study.reference, bias_corrections=None), ByAdamW)
        assert "size of the first update" in unmeasured.failed(counting(study.job(**running("foreach"))))

    @pytest.mark.usefixtures("counting_on_cpu")
    def test_exact_ones_pass_where_those_of_today_are_in_fp32(self, tmp_path: Path) -> None:
        today = make_study(tmp_path / "study", Counting, protocol=replace(POINTWISE, num_pointwise=2))
        assert today.failed(today.job(**running("fused"))) == []
        assert today.failed(today.job(FAULTS["learning rate 1 % too high"]())) != []

    @pytest.mark.usefixtures("counting_on_cpu")
    def test_a_trial_sees_how_its_update_counts(self, study: Study, tmp_path: Path) -> None:
        spec = TrialSpec(
            trial_id="t", workload="w", candidate=BASELINE, choices={}, study_directory=str(study.files.directory)
        )
        coordinator = Coordinator(0, 1, None, tmp_path, torch.device("cpu"))  # type: ignore[arg-type]
        assert run_guard(counting(study.job(**running("foreach"))), study.files, spec, 0, coordinator).passed


def altered(**options: Any) -> type[ByAdamW]:
    return type("Altered", (ByAdamW,), {"options": {**ByAdamW.options, **options}})


class CountingTwice(ByAdamW):
    """From the second step on, bias corrections are those of a later one."""

    def optimizer(self, named_parameters: Any) -> torch.optim.Optimizer:
        optimizer = super().optimizer(named_parameters)

        def count(*_: Any) -> None:
            for state in optimizer.state.values():
                state["step"] += 1

        optimizer.register_step_post_hook(count)
        return optimizer


FAULTS: dict[str, type[ByAdamW]] = {
    "learning rate 1 % too high": altered(lr=1.01e-2),
    "no weight decay": altered(weight_decay=0.0),
    "decay of the mean 0.89": altered(betas=(0.89, 0.999)),
    "decay of the squares 0.99": altered(betas=(0.9, 0.99)),
    "steps counted twice": CountingTwice,
}


class TestAnother:
    @pytest.mark.parametrize("fault", FAULTS)
    def test_is_rejected(self, study: Study, fault: str) -> None:
        assert study.failed(study.job(FAULTS[fault]())) != []

    @pytest.mark.usefixtures("counting_on_cpu")
    @pytest.mark.parametrize("fault", FAULTS)
    def test_does_not_hide_behind_bias_corrections_in_fp32(self, study: Study, fault: str) -> None:
        assert study.failed(counting(study.job(FAULTS[fault]()))) != []

    def test_what_bias_corrections_may_do_is_granted_to_updates_that_round_them_alone(self, study: Study) -> None:
        """A learning rate 0.01 % too high: FP32 bias corrections might do that, and nothing else."""
        almost = altered(lr=1.0001e-2)
        assert "size of the first update" in study.failed(study.job(almost()))


class TestReference:
    def test_disturbed_bias_corrections_are_seen_and_leave_nothing_behind(self, study: Study) -> None:
        """The error of beta ** t is (9 + 999 / 2) times as much of the first update, less what decay is of it."""
        found = study.reference.bias_corrections
        assert found is not None
        assert found.update_norm == pytest.approx(4 * 2.0**-24 * 508.5, rel=0.1)
        assert found.loss[0] == 0.0 < found.loss[-1]
        assert study.reference.repetition.update_norm < found.update_norm / 10
        assert study.failed(study.job()) == []

    def test_nothing_is_measured_where_no_candidate_counts_on_the_device(self, tmp_path: Path) -> None:
        short = replace(POINTWISE, num_pointwise=2)
        assert make_study(tmp_path / "study", ByAdamW, protocol=short).reference.bias_corrections is None
