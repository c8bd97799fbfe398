"""Memory and unprofiled step times that a script's process records for the analysis of its steps."""

from __future__ import annotations

import pytest
import torch
from msgspec import convert

from steptune.tuner.profiling.tensor_memory import known_blocks
from steptune.tuner.scripts.agent.tensor_blocks import tensor_blocks
from steptune.tuner.scripts.record import ScriptRecord
from steptune.tuner.scripts.traces import timing_note


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Embedding(5, 3, sparse=True))
    dense = [*model[0].parameters(), *model[1].parameters()]
    optimizer = torch.optim.Adam(dense)
    model[1](model[0](torch.ones(3, 4))).square().sum().backward()
    model[2](torch.tensor([1])).sum().backward()
    optimizer.step()
    return model, optimizer


def test_a_script_records_the_same_blocks_as_a_workload() -> None:
    model, optimizer = trained()
    known = [(block.device, block.kind, block.address, block.num_bytes) for block in known_blocks(model, optimizer)]
    assert sorted(tensor_blocks([model], [optimizer])) == sorted(known)
    assert {kind for _, kind, _, _ in known} == {"parameters", "gradients", "optimizer state"}


def test_a_lazy_module_that_was_never_called_holds_nothing() -> None:
    model = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.LazyLinear(3)])
    optimizer = torch.optim.SGD(model[0].parameters())
    known = known_blocks(model, optimizer)
    assert len(known) == 2
    assert len(tensor_blocks([model], [optimizer])) == 2


def test_modules_that_share_parameters_hold_them_once() -> None:
    model, optimizer = trained()
    assert tensor_blocks([model, model[0]], [optimizer]) == tensor_blocks([model], [optimizer])


@pytest.mark.parametrize(
    ("before_ns", "after_ns", "said"),
    [
        (20e6, 20.5e6, ""),
        (20e6, 25e6, "took 20 ms before the recorded steps and 25 ms after them"),
        (25e6, 20e6, "took 25 ms before the recorded steps and 20 ms after them"),
        (20e6, None, "measured only before the recorded steps"),
        (None, None, ""),
    ],
)
def test_a_drifting_step_time_is_reported(before_ns: float | None, after_ns: float | None, said: str) -> None:
    note = timing_note(recorded(before_ns, after_ns))
    assert said in note
    assert bool(note) == bool(said)


def recorded(before_ns: float | None, after_ns: float | None) -> ScriptRecord:
    step = {"optimizers": [0], "kinds": ["SGD"], "num_backwards": 1, "num_batches": 1, "share": 1.0, "place": ""}
    texts = dict.fromkeys(("folder", "python", "torch", "refusal", "device", "device_name"), "")
    numbers = dict.fromkeys(("pid", "rank", "num_steps", "num_backwards", "num_optimizer_steps"), 0)
    lists = dict.fromkeys(
        ("command", "step_times_ns", "recorded_step_ns", "places", "loaders", "models", "optimizers"), ()
    )
    times = {"step_time_ns": before_ns, "step_time_before_ns": before_ns, "step_time_after_ns": after_ns}
    more = {"num_ranks": 1, "complete": True, "num_steps_needed": (1, 2), "step": step}
    return convert({**texts, **numbers, **lists, **times, **more}, ScriptRecord)
