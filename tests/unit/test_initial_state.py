"""One initial state for all trials: built without its random fills, then exactly what was saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from steptune.tuner.errors import WorkloadRejectedError
from steptune.tuner.training.initial_state import build_initialised, named_state, save_initial_state


class Net(nn.Module):
    """Initialisers of all kinds, tied weights, and buffers of both persistences."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.conv = nn.Conv1d(4, 4, 3)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.rand(()))
        nn.init.trunc_normal_(self.conv.weight)
        nn.init.orthogonal_(self.embedding.weight)
        self.register_buffer("table", torch.randn(3), persistent=False)
        self.register_buffer("missing", None)
        self.frozen = nn.Parameter(torch.randn(2), requires_grad=False)


class CountsFills(TorchDispatchMode):
    """Counts in-place random fills that reach the operators."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += any(name in str(func) for name in ("uniform_", "normal_"))
        return func(*args, **(kwargs or {}))


class CountsOperators(TorchDispatchMode):
    """Names of the operators that are run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "initial.tensors"


def assert_same_state(one: nn.Module, other: nn.Module) -> None:
    left, right = dict(named_state(one)), dict(named_state(other))
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name


class TestBuilding:
    def test_restores_every_value_whatever_the_seed(self, path: Path) -> None:
        torch.manual_seed(1)
        original = Net()
        save_initial_state(original, path)
        torch.manual_seed(2)
        assert_same_state(build_initialised(Net, path), original)

    def test_runs_no_random_fill(self, path: Path) -> None:
        save_initial_state(nn.Linear(4, 4), path)
        with CountsFills() as plain:
            nn.Linear(4, 4)
        with CountsFills() as fills:
            build_initialised(lambda: nn.Linear(4, 4), path)
        assert plain.count > 0
        assert fills.count == 0

    @pytest.mark.parametrize(("low", "high"), [(-2.0, 2.0), (-0.5, 0.5), (1.0, 2.0), (0.001, 0.002)])
    def test_truncated_normal_numbers_are_not_waited_for(self, path: Path, low: float, high: float) -> None:
        """Drawn again until they are in bounds, numbers that are never drawn would be drawn for ever."""
        held = [torch.full((4096,), 1e30) for _ in range(8)]

        def make() -> nn.Module:
            held.clear()  # memory full of numbers out of bounds is likely to be used again
            model = nn.Linear(64, 64)
            nn.init.trunc_normal_(model.weight, a=low, b=high)
            return model

        original = make()
        save_initial_state(original, path)
        held.extend(torch.full((4096,), 1e30) for _ in range(8))
        assert_same_state(build_initialised(make, path), original)

    def test_arithmetic_on_what_was_not_drawn_is_skipped_and_other_arithmetic_is_not(self, path: Path) -> None:
        class Scaled(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.drawn = nn.Parameter(torch.empty(4))
                with torch.no_grad():
                    self.untouched = self.drawn.uniform_().mul_(2)
                self.table = torch.ones(4).mul_(2).add_(1)
                self.written = torch.empty(4).normal_().zero_().add_(5)

        with torch.no_grad():
            save_initial_state(Scaled(), path)
        with CountsOperators() as counted:
            built = build_initialised(Scaled, path)
        assert counted.names.count("aten.mul_.Tensor") == 1
        assert built.table.tolist() == [3.0] * 4
        assert built.written.tolist() == [5.0] * 4

    def test_random_fills_work_again_afterwards(self, path: Path) -> None:
        save_initial_state(nn.Linear(4, 4), path)
        build_initialised(lambda: nn.Linear(4, 4), path)
        assert not torch.equal(nn.Linear(4, 4).weight, nn.Linear(4, 4).weight)

    def test_keeps_tied_weights_tied_and_frozen_ones_frozen(self, path: Path) -> None:
        save_initial_state(Net(), path)
        built = build_initialised(Net, path)
        assert built.head.weight is built.embedding.weight
        assert not built.frozen.requires_grad
        assert built.scale.requires_grad

    def test_training_one_trial_leaves_the_next_as_it_was(self, path: Path) -> None:
        original = nn.Linear(4, 1)
        save_initial_state(original, path)
        trained = build_initialised(lambda: nn.Linear(4, 1), path)
        trained(torch.ones(2, 4)).sum().backward()
        torch.optim.SGD(trained.parameters(), lr=1.0).step()
        assert not torch.equal(trained.weight, original.weight)
        assert_same_state(build_initialised(lambda: nn.Linear(4, 1), path), original)

    def test_a_structure_drawn_at_random_is_built_with_its_random_numbers(self, path: Path) -> None:
        """Skipped fills would leave the width at zero."""

        def make() -> nn.Module:
            width = 1 + int(torch.zeros(1).uniform_(3, 4).item())
            return nn.Linear(width, width)

        save_initial_state(make(), path)
        assert build_initialised(make, path).in_features == 4

    def test_a_model_that_differs_each_time_is_refused_with_the_pieces(self, path: Path) -> None:
        widths = iter((3, 4, 5))
        save_initial_state(nn.Linear(next(widths), 2), path)
        with pytest.raises(
            WorkloadRejectedError, match=r"same structure every time; these parts differ: .*weight.*random numbers"
        ):
            build_initialised(lambda: nn.Linear(next(widths), 2), path)


class TestNamedState:
    def test_lists_each_tensor_once_under_its_first_name(self) -> None:
        names = [name for name, _ in named_state(Net())]
        assert "embedding.weight" in names
        assert "head.weight" not in names
        assert "table" in names
        assert len(names) == len(set(names))
