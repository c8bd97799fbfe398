"""State that modules carry from step to step: what a recorded step would freeze is refused by name, the rest runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_workloads import Line
from torch import nn

from steptune.tuner.errors import CaptureError
from steptune.tuner.training.assemble import assemble
from steptune.tuner.training.captured_step import CapturedStep
from steptune.tuner.training.job import TrainingJob
from steptune.tuner.training.plan import Plan, StepArguments


class Layer(nn.Module):
    """A linear layer that may remember something."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1, bias=False)
        nn.init.ones_(self.linear.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class AttributeTensor(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.counter = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.counter = self.counter + 1
        return super().forward(x) / self.counter


class Buffer(AttributeTensor):
    """Registered, but not changed in place."""

    def __init__(self) -> None:
        super().__init__()
        del self.counter
        self.register_buffer("counter", torch.zeros(()))


class Cached(Layer):
    cache: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if self.cache is not None:
            y = y + 0.5 * self.cache.mean()
        self.cache = y.detach()
        return y


class Number(Layer):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) / self.calls


class Growing(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(0)
        return super().forward(x) / len(self.seen)


class ListOfTensors(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.last = {"y": torch.zeros(1)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x) + self.last["y"].mean()
        self.last["y"] = y.detach()
        return y


class MadeLate(Layer):
    average: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if self.average is None:
            self.average = torch.zeros(())
        self.average.lerp_(y.detach().mean(), 0.5)
        return y - self.average


class Inner(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


class Carrying(Line):
    """Trains a model that holds a layer."""

    def __init__(self, layer: type[nn.Module]) -> None:
        self._layer = layer

    def model(self) -> nn.Module:
        return Inner(self._layer())


def job_of(workload: Any, *, captured: bool = True, **stages: Any) -> TrainingJob:
    torch.manual_seed(0)
    return assemble(workload, Plan(step=StepArguments(captured=captured), **stages), device=torch.device("cpu"))


def losses(job: TrainingJob) -> list[float]:
    return [float(job.step(batch)) for _ in range(2) for batch in job]


class TestRefused:
    @pytest.mark.parametrize(
        ("layer", "message"),
        [
            (
                AttributeTensor,
                r"layer\.counter holds a new tensor after every step, which the next step reads.*in place",
            ),
            (Buffer, r"layer\.counter holds a new tensor after every step"),
            (Cached, r"layer\.cache holds a new tensor after every step"),
            (Number, r"layer\.calls changes in every step \(from 2 to 3\).*register_buffer"),
            (Growing, r"layer\.seen changes in every step \(from 2 items to 3 items\)"),
            (ListOfTensors, r"layer\.last holds new tensors after every step, which the next step may read"),
            (MadeLate, r"layer\.average is created in the first step and changed in place"),
        ],
    )
    def test_what_a_replay_would_freeze(self, layer: type[nn.Module], message: str) -> None:
        job = job_of(Carrying(layer))
        with pytest.raises(CaptureError, match=message):
            job.step(next(iter(job)))

    def test_what_the_workload_itself_counts(self) -> None:
        class Annealed(Line):
            step = 0

            def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
                self.step += 1
                return super().loss(model, batch) / self.step

        job = job_of(Annealed())
        with pytest.raises(CaptureError, match=r"Annealed\.step changes in every step"):
            job.step(next(iter(job)))

    def test_what_changes_in_place_on_another_device(self) -> None:
        """Its operator would run when the step is recorded and never again. The other device is one without storage."""

        class Elsewhere(Layer):
            def __init__(self) -> None:
                super().__init__()
                self.count = torch.zeros((), device="meta")

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                self.count.add_(1)
                return super().forward(x)

        job = job_of(Carrying(Elsewhere))
        with pytest.raises(CaptureError, match=r"layer\.count is on the meta and changes in every step.*buffer"):
            job.step(next(iter(job)))

    def test_the_compiler_hides_none_of_it(self) -> None:
        def compiled(model: nn.Module, workload: Any) -> nn.Module:
            model.compile(backend="eager")
            return model

        torch._dynamo.reset()
        job = job_of(Carrying(Cached), whole_compilation=[compiled])
        with pytest.raises(CaptureError, match=r"layer\.cache holds a new tensor after every step"):
            job.step(next(iter(job)))


class LeavesLoss(Layer):
    """Layer that leaves a value for the loss, like the balance of experts: read in the step that wrote it."""

    aux: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        self.aux = y.square().mean()
        self.shape = x.shape
        return y


class InPlace(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(()))
        self.count = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        self.average.lerp_(y.detach().mean(), 0.5)
        self.count.add_(1)
        return y - self.average / self.count


class MadeOnce(Layer):
    """A table made when it is first needed, asked for its shape ever after."""

    table: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is None or self.table.shape[0] != x.shape[0]:
            self.table = torch.arange(x.shape[0]).float()
        return super().forward(x) + self.table.unsqueeze(1)


class Auxiliary(Carrying):
    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return F.mse_loss(model(batch[0]).squeeze(1), batch[1]) + 0.1 * model.layer.aux


class TestAccepted:
    @pytest.mark.parametrize(
        "workload",
        [Auxiliary(LeavesLoss), Carrying(InPlace), Carrying(MadeOnce)],
        ids=["left for the loss", "changed in place", "made once"],
    )
    def test_trains_as_the_eager_step(self, workload: Any) -> None:
        """Steps that warm up leave no trace in what is changed in place."""
        expected = job_of(workload, captured=False)
        captured = job_of(workload)
        assert losses(captured) == pytest.approx(losses(expected), rel=1e-6)
        assert isinstance(captured.runner, CapturedStep)
        assert captured.runner.num_replays == 6

    def test_old_weight_and_spectral_normalisation(self) -> None:
        """Whose hooks set the weight anew before every forward pass."""

        class Normed(Layer):
            def __init__(self) -> None:
                super().__init__()
                with pytest.warns(FutureWarning):
                    self.first = nn.utils.weight_norm(nn.Linear(3, 3))
                self.second = nn.utils.spectral_norm(nn.Linear(3, 3))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return super().forward(self.second(self.first(x)))

        assert losses(job_of(Carrying(Normed))) == pytest.approx(
            losses(job_of(Carrying(Normed), captured=False)), rel=1e-5
        )

    def test_the_compiler_sees_no_other_tensor(self) -> None:
        """Nothing is compiled again because of the look."""
        from torch._dynamo.utils import counters

        def compiled(model: nn.Module, workload: Any) -> nn.Module:
            model.compile(backend="eager")
            return model

        found = []
        for captured in (False, True):
            torch._dynamo.reset()
            counters.clear()
            found.append(losses(job_of(Auxiliary(LeavesLoss), captured=captured, whole_compilation=[compiled])))
            found.append(counters["stats"]["unique_graphs"])
        assert found[2] == pytest.approx(found[0], rel=1e-6)
        assert found[1] == found[3]
