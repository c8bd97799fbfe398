"""Findings of a worker on its machine, without a GPU to look at."""

from pathlib import Path

import pytest
from builders import sample_hardware

from steptune.service import serving
from steptune.service.isolation import level_named
from steptune.service.settings import Settings
from steptune.service.worker import machine
from steptune.service.worker.machine import offer_of_this_machine
from steptune.tuner.errors import ChoiceError, PlatformError

GPUS = sample_hardware()
LISTED = "0, GPU-aaaa-1\n1, GPU-aabb-2\n"


@pytest.fixture(autouse=True)
def two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A profile of two, and the driver's tool."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\nprintf '{LISTED}'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    monkeypatch.setattr(machine, "_known_profile", lambda *_: GPUS)


def offered(monkeypatch: pytest.MonkeyPatch, visible: str) -> tuple[int, ...]:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    settings = Settings(_env_file=None)
    return offer_of_this_machine(settings, level_named("none"), name="worker", cores=(0,)).gpus


@pytest.mark.parametrize(
    ("visible", "gpus"),
    [
        ("", (0, 1)),
        ("0,1", (0, 1)),
        ("1,0", (1, 0)),
        ("5, 3", (5, 3)),
        ("1,-1,0", (1,)),
        ("GPU-aabb-2,GPU-aaaa-1", (1, 0)),
        ("GPU-aab", (1,)),
        ("GPU-aabb-2,0", (1, 0)),
    ],
)
def test_gpus_are_offered_in_the_order_in_which_they_are_visible(monkeypatch, visible, gpus) -> None:
    """It is the order of the profile's devices."""
    assert offered(monkeypatch, visible) == gpus


@pytest.mark.parametrize("visible", ["GPU-cccc", "GPU-aa", "MIG-aaaa", "0,,1", "gpu"])
def test_what_is_no_whole_gpu_is_refused_by_its_name(monkeypatch, visible) -> None:
    with pytest.raises(ChoiceError, match=r"not a GPU .* name whole GPUs by number or UUID"):
        offered(monkeypatch, visible)


def test_uuids_without_the_driver_s_tool_are_refused(monkeypatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ChoiceError, match="'GPU-aaaa-1'"):
        offered(monkeypatch, "GPU-aaaa-1")


def test_parts_of_gpus_are_not_offered(monkeypatch) -> None:
    monkeypatch.setenv("STEPTUNE_EMULATED_DEVICES", "4")
    with pytest.raises(PlatformError, match="workers claim whole GPUs"):
        offered(monkeypatch, "0,1")


def test_nor_does_a_service_start_whose_worker_would_have_them(monkeypatch, tmp_path: Path) -> None:
    """Before anything is made or said."""
    monkeypatch.setenv("STEPTUNE_EMULATED_DEVICES", "4")
    settings = Settings(_env_file=None, database_url=f"sqlite:///{tmp_path}/new.db", data_directory=tmp_path / "data")
    with pytest.raises(PlatformError, match="workers claim whole GPUs"):
        serving.run(settings)
    assert not (tmp_path / "new.db").exists()
