"""A model that is there to the end lets its process group go. That a script then ends in order is seen in
tests/integration/test_apply.py, where it did not always.
"""

from __future__ import annotations

import weakref
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from steptune.tuner.export.leaving import HOLDING, let_go


def test_what_holds_the_group_goes_and_the_state_stays(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    wrapped = DistributedDataParallel(nn.Linear(3, 2))
    model = nn.Sequential(wrapped, nn.ReLU())  # as a wrapper around it has it
    before = {name: value.clone() for name, value in model.state_dict().items()}
    dist.destroy_process_group()
    assert set(HOLDING) <= vars(wrapped).keys(), "this torch has other names for them"
    let_go(weakref.ref(model))
    assert not set(HOLDING) & vars(wrapped).keys()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    let_go(weakref.ref(model))  # once more does no harm


def test_a_model_that_is_gone_needs_nothing() -> None:
    gone = weakref.ref(nn.Linear(1, 1))
    assert gone() is None
    let_go(gone)
