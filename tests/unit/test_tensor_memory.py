"""Memory by class of tensor, against a small training whose tensors' sizes are known."""

from pathlib import Path

import numpy as np
import pytest
import torch
from trace_events import allocation, operator, step, trace_of

from steptune.tuner.profiling.capture import link
from steptune.tuner.profiling.details import DetailsFile, read_details
from steptune.tuner.profiling.memory import memory_stats
from steptune.tuner.profiling.tensor_memory import CLASSES, Block, known_blocks, with_classes
from steptune.tuner.trace_records import MemoryStats
from steptune.tuner.trials.capture import record_details

ROWS, WIDTH, HIDDEN = 64, 256, 512
FLOAT = 4


def training() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, HIDDEN), torch.nn.ReLU(), torch.nn.Linear(HIDDEN, WIDTH))
    return model, torch.optim.AdamW(model.parameters(), foreach=False)


@pytest.mark.parametrize("num_batches", [1, 2])
@pytest.mark.parametrize("frees_first", [True, False])
def test_classes_of_a_step_have_the_sizes_of_its_tensors(num_batches: int, frees_first: bool, tmp_path: Path) -> None:
    model, optimizer = training()
    batch = torch.randn(ROWS, WIDTH)

    def run() -> None:
        if frees_first:
            optimizer.zero_grad()
        for _ in range(num_batches):
            model(batch).square().mean().backward()
        optimizer.step()
        if not frees_first:
            optimizer.zero_grad()

    run()
    before = known_blocks(model, optimizer)
    record_details(run, 1, tmp_path / "details.json")
    file = DetailsFile(
        path=tmp_path / "details.json",
        num_steps=1,
        blocks_before=before,
        blocks_after=known_blocks(model, optimizer),
    )
    (stats,) = read_details(file).memory
    found = {one.name: one for one in stats.classes}
    parameters = FLOAT * sum(parameter.numel() for parameter in model.parameters())
    assert tuple(found) == CLASSES
    assert found["parameters"].peak_bytes == found["parameters"].at_peak_bytes == parameters
    assert found["gradients"].peak_bytes == pytest.approx(parameters, rel=0.05)
    assert found["optimizer state"].peak_bytes == 2 * parameters + FLOAT * len(list(model.parameters()))
    kept = FLOAT * ROWS * (HIDDEN + WIDTH)
    # The result of the first layer is gone once ReLU has its own; the loss keeps its argument.
    assert kept <= found["activations"].peak_bytes <= kept + FLOAT * ROWS * HIDDEN + 64
    assert found["temporary"].peak_bytes > 0
    series = np.array(stats.class_timeline)
    assert series[:, 1:].sum(axis=1).max() == sum(one.at_peak_bytes for one in stats.classes)


def test_sparse_gradients_have_no_block() -> None:
    model = torch.nn.Embedding(10, 4, sparse=True)
    optimizer = torch.optim.SGD(model.parameters())
    model(torch.tensor([1, 2])).sum().backward()
    assert model.weight.grad.is_sparse
    assert [(block.kind, block.num_bytes) for block in known_blocks(model, optimizer)] == [
        ("parameters", 10 * 4 * FLOAT)
    ]


def test_of_a_device_the_rest_of_what_the_allocator_holds_is_other(tmp_path: Path) -> None:
    events = [
        step(1, 0, 100),
        operator("aten::mm", 10, 15),
        operator("autograd::engine::evaluate_function: MmBackward0", 40, 60),
        operator("aten::add_", 80, 85),
        allocation(11, 1000, num_bytes=100),
        allocation(45, 1300, num_bytes=300, address=9),
        allocation(50, 1200, num_bytes=-100),
    ]
    trace = trace_of(tmp_path, events)
    stats = memory_stats(link(trace))
    parameters = Block(device="cuda:0", kind="parameters", address=77, num_bytes=200)
    (found,) = with_classes(stats, trace, [parameters], [parameters])
    assert {one.name: one.at_peak_bytes for one in found.classes} == {
        "parameters": 200,
        "gradients": 300,
        "optimizer state": 0,
        "activations": 100,
        "temporary": 0,
        "other": 700,
    }
    assert with_classes(stats, trace, (), ()) == stats


def test_an_allocator_that_says_no_address_has_no_classes(tmp_path: Path) -> None:
    trace = trace_of(
        tmp_path, [step(1, 0, 100), operator("aten::mm", 10, 15), allocation(11, 1000, num_bytes=100, address="0x5")]
    )
    block = Block(device="cuda:0", kind="parameters", address=77, num_bytes=200)
    (found,) = with_classes(memory_stats(link(trace)), trace, [block], [block])
    assert isinstance(found, MemoryStats)
    assert not found.classes
