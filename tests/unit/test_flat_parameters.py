"""Contiguous parameters: the same training, under the user's names, over a few buffers."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any, cast

import pytest
import torch
from tiny_workloads import Everything
from torch import nn

from steptune.tuner.errors import UnsupportedError
from steptune.tuner.training.assemble import assemble
from steptune.tuner.training.casting import cast_model
from steptune.tuner.training.flat_parameters import ALIGNMENT, ELEMENT_WISE, FlatParameters
from steptune.tuner.training.job import TrainingJob
from steptune.tuner.training.plan import OptimizerArguments, Plan

ROUNDING = {"rtol": 1e-4, "atol": 1e-6}
"""Norms of a few large tensors are summed otherwise than those of many small ones; eight updates."""


class Groups(Everything):
    """Two groups, a convolution in channels_last, a clipped gradient; no gradient that is zero but for rounding, as
    that of a key's bias is, whose sign decides about Adam's update.
    """

    max_grad_norm = 0.05

    def __init__(self, optimizer: str = "AdamW") -> None:
        self._class = optimizer

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        layers = [nn.Conv2d(3, 6, 3), nn.Tanh(), nn.Flatten(), nn.Linear(6 * 36, 5), nn.Tanh(), nn.Linear(5, 4)]
        return nn.Sequential(*layers).to(memory_format=torch.channels_last)

    def optimizer(self, named_parameters: Any) -> torch.optim.Optimizer:
        named = list(named_parameters)
        groups = [
            {"params": [p for _, p in named if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for _, p in named if p.dim() <= 1]},
        ]
        return getattr(torch.optim, self._class)(groups, lr=1e-2)


class Large(Everything):
    """A layer of a million elements, and updates larger than what they update: these show how they were clipped."""

    max_grad_norm = 0.05

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        layers = [nn.Linear(192, 1024), nn.Tanh(), nn.Linear(1024, 1024), nn.Tanh(), nn.Linear(1024, 4)]
        return nn.Sequential(nn.Flatten(), *layers)

    def optimizer(self, named_parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for _, p in named_parameters], lr=1e6)


def build(contiguous: bool, workload: Any = None, implementation: str | None = None, **stages: Any) -> TrainingJob:
    arguments = OptimizerArguments(contiguous=contiguous, implementation=implementation, **stages.pop("optimizer", {}))
    return assemble(workload or Groups(), Plan(optimizer=arguments, **stages), device=torch.device("cpu"))


def trained(job: TrainingJob, epochs: int = 2) -> list[float]:
    return [float(job.step(batch)) for _ in range(epochs) for batch in job]


def assert_same(first: TrainingJob, second: TrainingJob) -> None:
    ours, theirs = first.state_dict(), second.state_dict()
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert value.shape == theirs[name].shape
        torch.testing.assert_close(value, theirs[name], **ROUNDING, msg=lambda m, name=name: f"{name}: {m}")


class TestTraining:
    @pytest.mark.parametrize("name", ELEMENT_WISE)
    def test_is_that_of_the_parameters_alone(self, name: str) -> None:
        """For every class that is said to treat every element alike."""
        plain, flat = build(False, Groups(name)), build(True, Groups(name))
        assert trained(flat) == pytest.approx(trained(plain), rel=1e-5)
        assert_same(flat, plain)

    @pytest.mark.parametrize("implementation", ["for_loop", "foreach", "fused"])
    def test_goes_with_every_implementation(self, implementation: str) -> None:
        plain, flat = build(False, implementation=implementation), build(True, implementation=implementation)
        assert trained(flat) == pytest.approx(trained(plain), rel=1e-5)
        assert_same(flat, plain)
        assert len([p for g in flat.optimizer.param_groups for p in g["params"]]) == 2

    def test_large_gradients_are_clipped_as_without_buffers(self) -> None:
        """A CPU's FP32 sum of squares over one buffer is off by more than all other rounding of the step."""
        plain, flat = (build(contiguous, Large()) for contiguous in (False, True))
        for job in (plain, flat):
            job.step(next(iter(job)))
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(flat.state_dict()[name], value, rtol=1e-6, atol=0)

    def test_trains_on_after_gradients_that_are_not_finite(self) -> None:
        """Clipping leaves no numbers between the parts of a buffer, which belong to no parameter."""
        job = build(True, Large())
        (buffer,) = (p for group in job.optimizer.param_groups for p in group["params"])
        batch, runner = next(iter(job)), cast(Any, job.runner)
        runner.forward_backward(*runner.pieces(batch))
        job.finish_gradients()
        buffer.grad.fill_(float("inf"))
        job.clip()
        assert not bool(buffer.grad.isfinite().any())
        job.optimizer.zero_grad(set_to_none=True)
        runner.forward_backward(*runner.pieces(batch))
        job.finish_gradients()
        assert bool(buffer.grad.isfinite().all())

    def test_goes_with_masters(self) -> None:
        stages: dict[str, Any] = {
            "cast": [lambda model, workload: cast_model(model, "bfloat16", keep_fp32=True)],
            "optimizer": {"master_weights": True},
        }
        plain, flat = build(False, Groups("SGD"), **copy.copy(stages)), build(True, Groups("SGD"), **copy.copy(stages))
        assert trained(flat) == pytest.approx(trained(plain), rel=1e-3)  # a master may round to the next of 8 bits
        assert_same(flat, plain)
        assert all(value.dtype == torch.float32 for value in flat.state_dict().values())

    def test_goes_with_micro_batches(self) -> None:
        from steptune.tuner.training.plan import StepArguments

        step = StepArguments(num_micro_batches=4)
        plain, flat = build(False, step=step), build(True, step=step)
        assert trained(flat) == pytest.approx(trained(plain), rel=1e-5)
        assert_same(flat, plain)

    @pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
    def test_goes_with_compilation_without_another_graph(self) -> None:
        """Parameters that share one storage are no aliases of each other to the compiler: nothing is compiled again."""
        from torch._dynamo.utils import counters

        def compiled(model: nn.Module, workload: Any) -> nn.Module:
            model.forward = torch.compile(model.forward, backend="aot_eager")  # type: ignore[method-assign]
            return model

        losses, graphs = [], []
        for contiguous in (False, True):
            torch._dynamo.reset()
            counters.clear()
            losses.append(trained(build(contiguous, whole_compilation=[compiled])))
            graphs.append(counters["stats"]["unique_graphs"])
        assert losses[1] == pytest.approx(losses[0], rel=1e-5)
        assert graphs == [1, 1]

    def test_the_scheduler_moves_the_rates_of_the_buffers(self) -> None:
        class Decays(Groups):
            def scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
                return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

        job = build(True, Decays())
        trained(job, 1)
        assert job.optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 * 0.5**4)


class TestLayout:
    def test_parameters_keep_identity_shape_and_layout(self) -> None:
        model = Groups().model()
        before = {name: (id(p), p.shape, p.stride(), p.detach().clone()) for name, p in model.named_parameters()}
        FlatParameters(Groups().optimizer(model.named_parameters()))
        for name, p in model.named_parameters():
            identity, shape, stride, value = before[name]
            assert (id(p), p.shape, p.stride()) == (identity, shape, stride)
            assert torch.equal(p, value)

    def test_every_parameter_begins_aligned_and_none_overlap(self) -> None:
        model = Groups().model()
        optimizer = Groups().optimizer(model.named_parameters())
        FlatParameters(optimizer)
        for group in optimizer.param_groups:
            ends = sorted((p.storage_offset(), p.storage_offset() + p.numel()) for p in group["params"])
            assert all(start * 4 % ALIGNMENT == 0 for start, _ in ends)
            assert all(end <= start for (_, end), (start, _) in pairwise(ends))
            assert len({p.untyped_storage().data_ptr() for p in group["params"]}) == 1

    def test_dtypes_have_buffers_of_their_own(self) -> None:
        mixed = [
            nn.Parameter(torch.ones(3)),
            nn.Parameter(torch.ones(4, dtype=torch.bfloat16)),
            nn.Parameter(torch.ones(5)),
        ]
        flat = FlatParameters(torch.optim.SGD(mixed, lr=0.1))
        assert [p.dtype for p in flat.buffer_groups[0]["params"]] == [torch.float32, torch.bfloat16]

    def test_tied_weights_stay_tied(self) -> None:
        class Tied(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.embedding = nn.Embedding(5, 4)
                self.head = nn.Linear(4, 5, bias=False)
                self.head.weight = self.embedding.weight

        model = Tied()
        FlatParameters(torch.optim.SGD(model.parameters(), lr=0.1))
        assert model.head.weight is model.embedding.weight


class TestCheckpoints:
    def test_the_optimizers_state_is_that_of_the_users_own(self) -> None:
        plain, flat = build(False), build(True)
        trained(plain), trained(flat)
        ours, theirs = flat.optimizer_state_dict(), plain.optimizer_state_dict()
        assert ours["param_groups"] == theirs["param_groups"]
        assert ours["state"].keys() == theirs["state"].keys()
        for number, state in theirs["state"].items():
            assert ours["state"][number].keys() == state.keys()
            for key, value in state.items():
                assert ours["state"][number][key].shape == value.shape
                torch.testing.assert_close(ours["state"][number][key], value, **ROUNDING)

    @pytest.mark.parametrize("name", ["AdamW", "NAdam", "ASGD", "SGD", "Adagrad"])
    def test_training_goes_on_where_it_stopped(self, name: str) -> None:
        first = build(True, Groups(name))
        trained(first)
        saved = copy.deepcopy((first.state_dict(), first.optimizer_state_dict()))
        second = build(True, Groups(name))
        second.model.load_state_dict(saved[0])
        second.load_optimizer_state_dict(saved[1])
        assert trained(second) == trained(first)

    @pytest.mark.parametrize("contiguous", [False, True])
    def test_a_checkpoint_moves_between_both_ways(self, contiguous: bool) -> None:
        first = build(contiguous)
        trained(first)
        saved = copy.deepcopy((first.state_dict(), first.optimizer_state_dict()))
        second = build(not contiguous)
        second.model.load_state_dict(saved[0])
        second.load_optimizer_state_dict(saved[1])
        assert trained(second) == pytest.approx(trained(first), rel=1e-5)

    def test_a_state_before_the_first_step_is_empty_both_ways(self) -> None:
        flat = build(True)
        assert flat.optimizer_state_dict()["state"] == {}
        flat.load_optimizer_state_dict(build(False).optimizer_state_dict())
        assert flat.optimizer.state_dict()["state"] == {}

    def test_a_state_of_parameters_of_different_ages_is_refused(self) -> None:
        plain, flat = build(False), build(True)
        trained(plain)
        state = plain.optimizer_state_dict()
        state["state"][0]["step"] += 1
        with pytest.raises(UnsupportedError, match=r"differ in step count.*without contiguous parameters"):
            flat.load_optimizer_state_dict(state)


class TestMemory:
    def test_a_parameter_that_was_moved_out_of_its_buffer_is_refused(self) -> None:
        """The buffer would be updated, and the model would go on with what it had."""
        job = build(True)
        batch = next(iter(job))
        job.step(batch)
        job.model[0].weight.data = job.model[0].weight.data.clone()
        with pytest.raises(
            UnsupportedError, match=r"of shape \(6, 3, 3, 3\) no longer uses its part.*parameter\.copy_"
        ):
            job.step(batch)


class TestMissingGradients:
    def test_are_refused_because_alone_they_would_be_left_out(self) -> None:
        class Unused(Groups):
            def model(self) -> nn.Module:
                model = super().model()
                model[0].unused = nn.Linear(3, 5)
                return model

        job = build(True, Unused())
        with pytest.raises(UnsupportedError, match=r"of shape \(5, 3\) has no gradient.*without contiguous parameters"):
            job.step(next(iter(job)))
