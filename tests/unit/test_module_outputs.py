"""Outputs of modules in 16 bits, held to FP32 from the same inputs: rounding passes, faults of 16 bits alone do not."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from guarded import BF16, FP32, PROTOCOL, make_study
from guarded_trainings import Regression, of_model
from guarded_unseen import in_16_bits
from msgspec.structs import replace
from torch import nn

from steptune.tuner.guard.outputs import LIMIT, ModuleOutput, worst_output
from steptune.tuner.trials.output_watch import OutputWatch

O1: dict[str, Any] = {"precision": {"level": "O1", "dtype": "bfloat16"}}
SHORT = replace(PROTOCOL, num_pointwise=2, num_curve=0, num_horizon=0)


@pytest.mark.parametrize("own", [False, True], ids=["FP32 to bf16", "bf16"])
def test_outputs_that_are_larger_in_16_bits_alone_are_seen(tmp_path: Path, own: bool) -> None:
    roundoffs = (BF16,) if own else (FP32, BF16)
    study = make_study(
        tmp_path / "study", Regression, protocol=SHORT, unit_roundoffs=roundoffs, choices=O1 if own else {}
    )
    checks = study.checks(study.job(**O1), unit_roundoff=BF16, choices=O1)
    assert [name for name, check in checks.items() if not check.passed] == []
    assert checks["outputs of modules"].observed < 0.5
    larger = of_model(in_16_bits(lambda output: output * 1.02))(Regression)
    assert larger is not None
    assert "outputs of modules" in study.failed(study.job(larger(), **O1), unit_roundoff=BF16, choices=O1)


def watched(model: nn.Module, *arguments: torch.Tensor) -> dict[str, ModuleOutput | None]:
    watch = OutputWatch(SimpleNamespace(model=model))  # type: ignore[arg-type]
    with watch.step(), torch.autocast("cpu", torch.bfloat16):
        model(*arguments)
    return watch.outputs


class TestWatching:
    def test_sums_that_cancel_round_by_more_than_they_are_worth_and_pass(self) -> None:
        """Autocast's first layer has such sums with inputs that have a large mean in common."""
        layer = nn.Linear(64, 8)
        with torch.no_grad():
            layer.weight -= layer.weight.mean(dim=1, keepdim=True)
        found = worst_output(output for output in watched(layer, 1000 + torch.rand(16, 64)).values() if output)
        assert found is not None
        assert found.ratio < 0.5

    def test_a_module_that_changes_its_input_in_place_is_left_out(self) -> None:
        outputs = watched(nn.Sequential(nn.Linear(4, 4), nn.SiLU(inplace=True)), torch.randn(8, 4))
        assert outputs["0"] is not None
        assert outputs["1"] is None

    def test_a_module_that_draws_numbers_is_left_out(self) -> None:
        class Noisy(nn.Module):
            def forward(self, values: torch.Tensor) -> torch.Tensor:
                return values + torch.randn_like(values)

        outputs = watched(nn.Sequential(nn.Linear(4, 4), Noisy(), nn.Linear(4, 4)), torch.randn(8, 4))
        assert outputs["1"] is None
        assert all(outputs[name] is not None for name in ("0", "2"))

    def test_statistics_and_draws_go_on_as_if_nobody_looked(self) -> None:
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
        states = []
        for look in (False, True):
            torch.manual_seed(1)
            model[1].reset_running_stats()
            inputs = torch.randn(16, 4)
            if look:
                watched(model, inputs)
            else:
                with torch.autocast("cpu", torch.bfloat16):
                    model(inputs)
            states.append((model[1].running_mean.clone(), int(model[1].num_batches_tracked), torch.rand(1)))
        assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(*states, strict=True))

    def test_only_the_first_step_is_watched(self) -> None:
        model = nn.Linear(4, 4)
        watch = OutputWatch(SimpleNamespace(model=model))  # type: ignore[arg-type]
        for _ in range(2):
            watch.outputs.clear()
            with watch.step(), torch.autocast("cpu", torch.bfloat16):
                model(torch.randn(2, 4))
        assert watch.outputs == {}
        assert not model._forward_hooks
        assert not model._forward_pre_hooks

    def test_an_output_that_is_not_finite_does_not_pass(self) -> None:
        class Broken(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x / 0 if x.dtype == torch.bfloat16 else x

        (found,) = watched(Broken(), torch.ones(4, dtype=torch.bfloat16)).values()
        assert found is not None
        assert found.ratio == float("inf")


def test_the_limit_is_in_unit_roundoffs() -> None:
    at_limit, beyond = (ModuleOutput(name=f"{d}", size=0.1, difference=d * LIMIT) for d in (1.0, 1.5))
    found = worst_output([at_limit, beyond])
    assert found is not None
    assert found is beyond
    assert found.ratio == pytest.approx(1.5)
