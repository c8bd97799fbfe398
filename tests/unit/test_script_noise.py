"""Noise of a script's disturbed runs: where it is drawn, and how far it goes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode

from steptune.tuner.scripts.agent.guard_watch import GuardWatch

FORMATS = pytest.mark.parametrize(
    ("dtype", "unit"), [(torch.float32, 2.0**-24), (torch.float32, 2.0**-8), (torch.bfloat16, 2.0**-8)], ids=str
)


class Devices(TorchDispatchMode):
    """Devices where results of operations lie."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        result = function(*arguments, **(options or {}))
        if isinstance(result, torch.Tensor):
            self.seen.add(result.device.type)
        return result


@pytest.fixture
def watch(tmp_path: Path, unit: float) -> Iterator[GuardWatch]:
    settings = {
        "reference": None,
        "seed": 0,
        "steps": 1,
        "audits": 0,
        "wide": 0,
        "outputs": False,
        "disturb": unit,
        "noise": 0,
    }
    watch = GuardWatch(settings, tmp_path / "seen", (0,))
    yield watch
    watch.give_back()


@FORMATS
def test_noise_is_drawn_where_the_tensor_lies(
    watch: GuardWatch, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """On the host a step of a GPT of 124 million parameters would draw for minutes."""
    asked: list[torch.device] = []
    make = torch.Generator

    def on_host(device: torch.device) -> torch.Generator:  # there is none for meta tensors, which need none
        asked.append(torch.device(device))
        return make()

    model = torch.nn.Linear(3, 2, device="meta", dtype=dtype)
    watch.called(model)
    monkeypatch.setattr(torch, "Generator", on_host)
    with Devices() as devices:
        model(torch.empty(4, 3, device="meta", dtype=dtype)).sum().backward()
    assert devices.seen == {"meta"}
    assert asked == [torch.device("meta")]


@FORMATS
def test_an_output_and_its_gradient_move_by_the_same_factors(
    watch: GuardWatch, unit: float, dtype: torch.dtype
) -> None:
    part = torch.nn.Identity()
    watch.called(part)
    ones = torch.ones(10_000, dtype=dtype, requires_grad=True)
    output = part(ones)
    output.sum().backward()
    assert ones.grad is not None
    assert torch.equal(output, ones.grad)
    change = (output.detach().double() - 1).abs()
    assert float(change.max()) <= max(1.01 * unit, torch.finfo(dtype).eps)
    assert float(change.mean()) > 0.4 * unit


@pytest.mark.parametrize("unit", [2.0**-24])
def test_what_it_changed_in_torch_is_given_back(watch: GuardWatch) -> None:
    part, ones = torch.nn.ReLU(), torch.ones(8)
    watch.called(part)
    assert not torch.equal(part(ones), ones)
    watch.give_back()
    counter = CompileCounter()
    compiled = torch.compile(part, backend=counter)
    assert torch.equal(compiled(ones + 1), ones + 1)
    assert counter.frame_count == 1
