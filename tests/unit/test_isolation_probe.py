"""The probe of an isolation level, on a host with GPUs for which a stand-in of CUDA's library answers."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path
from subprocess import CompletedProcess
from types import SimpleNamespace
from typing import Any

import pytest

from steptune.service.isolation import base
from steptune.service.isolation.base import NO_DEVICE, Available, Level, SandboxRequest, Unavailable, probe_code
from steptune.tuner.trials.sandbox import Sandbox

INSIDE = "inside"


@pytest.fixture
def cuda_answers(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    answers = SimpleNamespace(code=0, library=True)
    exists = os.path.exists

    def loaded(name: str) -> SimpleNamespace:
        if not answers.library:
            raise OSError(f"{name}: cannot open shared object file")
        return SimpleNamespace(cuInit=lambda flags: answers.code)

    monkeypatch.setattr(os.path, "exists", lambda path: path == "/dev/nvidiactl" or exists(path))
    monkeypatch.setattr(ctypes, "CDLL", loaded)
    return answers


@pytest.mark.parametrize(
    ("code", "library", "said"),
    [(999, True, "cuInit returns 999"), (NO_DEVICE, True, str(NO_DEVICE)), (0, False, str(NO_DEVICE))],
)
def test_a_device_that_does_not_start_ends_the_probe(
    cuda_answers: SimpleNamespace, tmp_path: Path, code: int, library: bool, said: str
) -> None:
    cuda_answers.code, cuda_answers.library = code, library
    with pytest.raises(SystemExit, match=said):
        exec(probe_code(tmp_path), {})


def test_a_device_that_starts_ends_it_well(cuda_answers: SimpleNamespace, tmp_path: Path) -> None:
    exec(probe_code(tmp_path), {})
    assert (tmp_path / "probe").exists()


class Confined(Level):
    name = "confined"

    @contextlib.contextmanager
    def sandbox(self, request: SandboxRequest) -> Iterator[Sandbox]:
        yield Sandbox(level=self.name, prefix=(INSIDE,))

    def separates(self) -> bool:
        return True

    def missing(self) -> str | None:
        return None


def probed(monkeypatch: pytest.MonkeyPatch, inside: int, outside: int) -> Available | Unavailable:
    """Answer of the probe, where programs end so inside and outside the sandbox."""

    def run(command: list[str], **options: Any) -> CompletedProcess[str]:
        return CompletedProcess(command, inside if command[0] == INSIDE else outside, "", "")

    monkeypatch.setattr(base.subprocess, "run", run)
    return Confined().probe()


def test_devices_that_are_hidden_outside_too_are_no_fault_of_the_level(monkeypatch: pytest.MonkeyPatch) -> None:
    """`CUDA_VISIBLE_DEVICES` hides them in any spelling, and a container that got none."""
    assert probed(monkeypatch, NO_DEVICE, NO_DEVICE) == Available()


def test_devices_that_the_sandbox_takes_away_are(monkeypatch: pytest.MonkeyPatch) -> None:
    found = probed(monkeypatch, NO_DEVICE, 0)
    assert isinstance(found, Unavailable)
    assert "a device outside this sandbox, but none inside" in found.reason


def test_a_driver_that_answers_otherwise_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(probed(monkeypatch, 1, NO_DEVICE), Unavailable)
