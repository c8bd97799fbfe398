"""Causes that keep a step from being recorded: operator, line and reason, from the texts of torch and CUDA."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_workloads import Everything
from torch import nn

from steptune.tuner.errors import CaptureError
from steptune.tuner.installation import PACKAGE
from steptune.tuner.records import FailureKind, Phase
from steptune.tuner.training.assemble import assemble
from steptune.tuner.training.capture_failure import FailingOperator, HostReads, explained, waits
from steptune.tuner.training.plan import Plan
from steptune.tuner.trials.failures import classify, failure_of
from steptune.tuner.user_code import is_models, is_users, model_line

CPU = torch.device("cpu")
WAITING = "called a synchronizing CUDA operation"
CAPTURING = (
    "CUDA error: operation not permitted when stream is capturing\n"
    "Search for `cudaErrorStreamCaptureUnsupported' in https://docs.nvidia.com/cuda/ for more information."
)
GENERATOR = (
    "Cannot call CUDAGeneratorImpl::current_seed during CUDA graph capture. If you need this call to be captured"
)
UNJOINED = "CUDA error: capturing stream has unjoined work\nSearch for `cudaErrorStreamCaptureUnjoined' in https://docs"


def raised(text: str) -> RuntimeError:
    """Error that an operator raises when this file calls it."""
    try:
        raise RuntimeError(text)
    except RuntimeError as error:
        return error


class TestExplained:
    @pytest.mark.parametrize(
        ("text", "operator", "reason"),
        [
            (
                WAITING,
                "aten::_local_scalar_dense",
                r"aten::_local_scalar_dense .*reads a device value.*\.item\(\)",
            ),
            (
                WAITING,
                "aten::nonzero",
                r"aten::nonzero .*the shape of the result depends on device values.*torch\.where",
            ),
            (WAITING, "aten::index.Tensor", "the shape of the result depends on device values"),
            (WAITING, "aten::_to_copy", "copies a tensor between host and device"),
            (WAITING, "", "the host waits for the device"),
            (CAPTURING, "", r"operation not permitted when stream is capturing \(.*the host waits for the device"),
            (GENERATOR, "", "random generator"),
            (UNJOINED, "", "work on another stream was not joined"),
            (
                "Attempting CUDA graph capture of step() ... param_groups' capturable is False.",
                "",
                "step count on the host",
            ),
            ("something new", "aten::new_operator", "aten::new_operator .*the reason is unknown"),
        ],
    )
    def test_names_what_where_and_why(self, text: str, operator: str, reason: str) -> None:
        error = raised(text)
        told = explained(error, operator)
        assert isinstance(told, CaptureError)
        assert f"({__file__}, line " in str(told)
        assert "raise RuntimeError(text)" in str(told)
        assert "\n" not in str(told)
        with pytest.raises(CaptureError, match=reason):
            raise told

    def test_only_waiting_is_waiting(self) -> None:
        assert waits(raised(WAITING))
        assert not waits(raised(CAPTURING))

    def test_is_no_error_of_the_workload(self) -> None:
        """The workload itself runs as it is: only the choice is impossible."""
        told = explained(raised(CAPTURING))
        assert classify(told) is FailureKind.UNSUPPORTED
        failure = failure_of(told, Phase.GUARD, 0)
        assert failure.message == str(told)


class TestModelLine:
    def test_is_the_innermost_of_the_model_or_the_loss(self) -> None:
        """Below it are torch's frames; above it, ours. A library of models is a model too."""
        packages = sysconfig.get_path("purelib")
        torch_file = str(Path(torch.__file__).parent / "nn" / "functional.py")
        frames = [
            traceback.FrameSummary("/home/me/train.py", 12, "loss", line="model(x)"),
            traceback.FrameSummary(
                f"{packages}/transformers/models/gpt2/modeling_gpt2.py", 7, "forward", line="mask.any()"
            ),
            traceback.FrameSummary(torch_file, 99, "linear", line="x"),
        ]
        assert model_line(frames) == f"{packages}/transformers/models/gpt2/modeling_gpt2.py, line 7: mask.any()"
        assert model_line(frames[:1]) == "/home/me/train.py, line 12: model(x)"
        assert model_line(frames[2:]) == ""

    def test_ours_are_none_of_it_but_ready_workloads_are(self) -> None:
        ours = PACKAGE / "tuner"
        assert not is_models(str(ours / "training" / "job.py"))
        assert is_models(str(ours / "workloads" / "zoo" / "synthetic.py"))
        assert not is_users(str(ours / "workloads" / "zoo" / "synthetic.py"))
        assert not is_models("<string>")
        assert not is_models(traceback.__file__)


class Branching(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.mean() > 100:
            return x
        return x + 1


class Masking(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[x > 0].sum() + x


class Finding(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + x.nonzero().shape[0]


class Plain(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.where(x > 0, x, -x).masked_fill(x > 3, 0.0)


def reads_of(module: nn.Module) -> str:
    reads = HostReads(CPU)
    x = torch.randn(4, 4, requires_grad=True)
    with reads.mode():
        module(x).sum().backward()
    return reads.found


class TestHostReads:
    @pytest.mark.parametrize(
        ("module", "operator", "line"),
        [
            (Branching(), "aten::_local_scalar_dense", "if x.mean() > 100:"),
            (Masking(), "aten::index.Tensor", "return x[x > 0].sum() + x"),
            (Finding(), "aten::nonzero", "return x + x.nonzero().shape[0]"),
        ],
        ids=["control flow", "boolean mask", "shape of values"],
    )
    def test_what_the_host_waits_for_is_named_with_its_line(self, module: nn.Module, operator: str, line: str) -> None:
        found = reads_of(module)
        assert found.startswith(f"{operator} ({__file__}, line ")
        assert found.endswith(f": {line})")

    def test_a_step_that_stays_on_the_device_has_none(self) -> None:
        assert reads_of(Plain()) == ""

    def test_values_of_other_devices_cost_nothing(self) -> None:
        reads = HostReads(torch.device("meta"))
        with reads.mode():
            torch.ones(3).sum().item()
        assert reads.found == ""

    def test_a_workload_that_reads_a_value_is_known_before_anything_is_tried(self) -> None:
        """And the strategy says so instead of spending a trial."""
        from steptune.tuner.trials.model_look import look_at_model

        class Reading(Everything):
            def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
                images, labels = batch
                loss = F.cross_entropy(model(images), labels)
                return loss * (2.0 if loss.item() > 1e9 else 1.0)

        for workload, reads in ((Reading(), True), (Everything(), False)):
            job = assemble(workload, Plan(), device=CPU)
            look = look_at_model(job, next(iter(job)))
            found = look.host_read
            assert ("aten::_local_scalar_dense" in found and "loss.item()" in found) == reads
            assert bool(found) == reads
            assert look.host_read_in_loss == found

    def test_a_read_in_the_model_is_none_of_the_loss(self) -> None:
        class Reads(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x * float(x.sum() > 0)

        model = Reads()
        reads = HostReads(CPU)
        with reads.mode(), reads.loss_of(model):
            loss = model(torch.ones(3)).sum()
            first = reads.found
            assert not reads.found_in_loss, "it is one of the model"
            if loss > 0:
                loss = loss * 2
        assert first
        assert reads.found == first
        assert "if loss > 0" in reads.found_in_loss
        assert not model._forward_hooks


def test_the_operator_that_fails_is_known_and_no_other() -> None:
    watch = FailingOperator()
    with watch.mode(), pytest.raises(RuntimeError):
        torch.ones(2, 3) @ torch.ones(2, 3)
    assert watch.name == "aten::mm"
    watch = FailingOperator()
    with watch.mode():
        torch.ones(2)
    assert watch.name == ""


def test_a_read_before_the_model_is_called_is_one_of_the_loss() -> None:
    model, reads = nn.Linear(3, 1), HostReads(CPU)
    with reads.mode(), reads.loss_of(model):
        scale = torch.ones(3).sum().item()
        model(torch.ones(3) * scale)
    assert reads.found_in_loss == reads.found != ""


def test_a_loss_that_calls_parts_of_the_model_alone_is_not_told_from_it() -> None:
    model, reads = nn.Sequential(nn.Linear(3, 1)), HostReads(CPU)
    with reads.mode(), reads.loss_of(model):
        model[0](torch.ones(3)).item()
    assert reads.found
    assert not reads.found_in_loss
