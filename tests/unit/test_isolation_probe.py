"""The probe of an isolation level, on a host with GPUs for which a stand-in of CUDA's library answers."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from steptune.service.isolation.base import NO_DEVICE, probe_code


@pytest.fixture
def cuda_answers(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    answers = SimpleNamespace(code=0)
    exists = os.path.exists
    monkeypatch.setattr(os.path, "exists", lambda path: path == "/dev/nvidiactl" or exists(path))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(cuInit=lambda flags: answers.code))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return answers


@pytest.mark.parametrize("hidden", ["", "-1", " "])
def test_hidden_devices_are_no_fault_of_the_level(
    cuda_answers: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hidden: str
) -> None:
    cuda_answers.code = NO_DEVICE
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    exec(probe_code(tmp_path), {})
    assert (tmp_path / "probe").exists()


@pytest.mark.parametrize(("visible", "code"), [(None, NO_DEVICE), ("0", NO_DEVICE), ("", 999)])
def test_devices_that_the_sandbox_takes_away_are(
    cuda_answers: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, code: int
) -> None:
    cuda_answers.code = code
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(SystemExit, match=f"cuInit returns {code}"):
        exec(probe_code(tmp_path), {})
