"""Parts of GPUs taken for devices."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from steptune.tuner import hardware
from steptune.tuner.emulation import DEVICES_VARIABLE, ranks_per_device
from steptune.tuner.errors import PlatformError
from steptune.tuner.export import apply
from steptune.tuner.hardware import describe_hardware
from steptune.tuner.trials.rank_device import rank_device
from steptune.tuner.trials.topology import kind_inside

MEMORY_BYTES = 80_000


@pytest.fixture
def fractions(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, int]]:
    """Two GPUs; what a rank may take of which."""
    found: list[tuple[float, int]] = []
    properties = SimpleNamespace(name="H", total_memory=MEMORY_BYTES, major=9, minor=0, uuid="u")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(
        torch.cuda,
        "set_per_process_memory_fraction",
        lambda share, device: found.append((share, device.index)),
    )
    monkeypatch.setattr(hardware, "device_links", lambda uuids: {"0-1": "NV18"})
    monkeypatch.delenv(DEVICES_VARIABLE, raising=False)
    return found


def test_every_rank_has_a_gpu_of_its_own_without_it(fractions: list) -> None:
    assert [rank_device("cuda", rank).index for rank in range(2)] == [0, 1]
    assert fractions == []
    profile = describe_hardware("cuda")
    assert (profile.label, profile.links) == ("2 x H", {"0-1": "NV18"})
    with pytest.raises(PlatformError, match=r"rank 2 has no GPU: 2 are visible, for 2 ranks.*STEPTUNE_EMULATED"):
        rank_device("cuda", 2)


def test_ranks_share_gpus_and_their_memory(fractions: list, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DEVICES_VARIABLE, "4")
    assert [rank_device("cuda", rank).index for rank in range(4)] == [0, 0, 1, 1]
    assert fractions == [(0.5, 0), (0.5, 0), (0.5, 1), (0.5, 1)]
    rank_device("cuda", 3, memory_limit_bytes=MEMORY_BYTES // 4)
    rank_device("cuda", 3, memory_limit_bytes=MEMORY_BYTES)
    assert fractions[4:] == [(0.25, 1), (0.5, 1)]
    with pytest.raises(PlatformError, match="rank 4 has no GPU: 2 are visible, for 4 ranks"):
        rank_device("cuda", 4)


def test_the_profile_says_that_they_are_parts(fractions: list, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that no figure of theirs is taken for one of whole devices."""
    whole = describe_hardware("cuda").fingerprint
    monkeypatch.setenv(DEVICES_VARIABLE, "4")
    profile = describe_hardware("cuda")
    assert profile.label == "4 x H, shared by 2 ranks"
    assert {device.memory_bytes for device in profile.devices} == {MEMORY_BYTES // 2}
    assert kind_inside(profile) == "loopback"
    assert profile.fingerprint != whole


@pytest.mark.parametrize(
    ("text", "said"), [("3", "a multiple of 2"), ("0", "must be a number"), ("two", "must be a number")]
)
def test_what_is_no_multiple_of_the_gpus_is_refused(monkeypatch: pytest.MonkeyPatch, text: str, said: str) -> None:
    monkeypatch.setenv(DEVICES_VARIABLE, text)
    with pytest.raises(PlatformError, match=said):
        ranks_per_device(2)


def test_without_gpus_there_is_nothing_to_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asked for it would otherwise find a study on the CPU."""
    monkeypatch.setenv(DEVICES_VARIABLE, "2")
    with pytest.raises(PlatformError, match="no GPU is visible here: unset it"):
        ranks_per_device(0)
    with pytest.raises(PlatformError, match="training does not run on GPUs: unset it"):
        describe_hardware("cpu")


@pytest.mark.usefixtures("fractions")
def test_what_is_exported_trains_on_whole_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DEVICES_VARIABLE, "4")
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(PlatformError, match=r"steptune.apply trains on whole GPUs: unset it"):
        apply._device("cuda", describe_hardware("cuda"), 2)
