"""A script that trains on a GPU is profiled as it is: its steps are timed and recorded with the device's work."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from steptune.service.script_profile import script_profile
from steptune.tuner.errors import PlatformError
from steptune.tuner.scripts.launch import ran_script

SCRIPT = """
import os
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
data = TensorDataset(torch.randn(16000, 256), torch.randint(0, 10, (16000,)))
loader = DataLoader(data, batch_size=128, shuffle=True, num_workers=2, pin_memory=True)
model = nn.Sequential(nn.Linear(256, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
scaler = torch.amp.GradScaler("cuda")
for x, y in loader:
    x, y = x.cuda(non_blocking=True), y.cuda(non_blocking=True)
    with torch.autocast("cuda", dtype=torch.float16):
        loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""


def test_a_script_on_a_gpu_is_timed_and_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    command = (sys.executable, "train.py")
    try:
        with ran_script(command) as ended:
            profile = script_profile(command, ended)
    except PlatformError:  # many GPU hosts are containers without namespaces
        with ran_script(command, in_place=True) as ended:
            profile = script_profile(command, ended)

    assert not profile.refusal
    record = profile.records[0]
    assert (record.device, record.step.num_backwards, record.step.num_batches) == ("cuda", 1, 1)
    assert record.notes["scalers"]
    assert "cuda float16" in record.notes["autocast"]
    assert record.training_loader is not None
    assert record.training_loader.num_workers == 2
    assert all(place.cuda for place in record.places if place.what == "forward")
    [breakdown] = profile.breakdowns
    assert breakdown.device == "cuda:0"
    assert breakdown.facts.own_capture
    assert breakdown.quality.missing_share < 0.05
    assert breakdown.num_steps == len(record.recorded_step_ns)
