"""Which GPUs are connected how, as NVML says it."""

import ctypes
import sys
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from steptune.tuner.device_links import device_links, links_between

GPU, SWITCH = 0, 2


class NVMLError(Exception):
    pass


@dataclass
class Nvml:
    """The functions of `pynvml` that are called.

    Attributes:
        ends: By device: what is at the other end of each NVLink, another device's number or None for a switch.
        levels: By pair: the common ancestor on PCIe.
        strangers: Pairs of which one cannot read the other's memory.
        off: By device and link: a link that is not active.
    """

    num_devices: int
    ends: dict[int, list[int | None]] = field(default_factory=dict)
    levels: dict[tuple[int, int], int] = field(default_factory=dict)
    strangers: set[tuple[int, int]] = field(default_factory=set)
    off: set[tuple[int, int]] = field(default_factory=set)
    NVMLError = NVMLError
    NVML_P2P_CAPS_INDEX_READ = (0,)  # as the bindings have it
    NVML_P2P_STATUS_OK = 0

    def nvmlInit(self):
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid):
        return int(uuid.removeprefix("GPU-"))

    def nvmlDeviceGetPciInfo(self, device):
        return SimpleNamespace(busId=f"0000:{device}")

    def nvmlDeviceGetNvLinkState(self, device, link):
        if link >= len(self.ends.get(device, [])):
            raise NVMLError("Invalid Argument")
        return int((device, link) not in self.off)

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, device, link):
        return SWITCH if self.ends[device][link] is None else GPU

    def nvmlDeviceGetNvLinkRemotePciInfo(self, device, link):
        return self.nvmlDeviceGetPciInfo(self.ends[device][link])

    def nvmlDeviceGetTopologyCommonAncestor(self, first, second):
        return self.levels[first, second]

    def nvmlDeviceGetP2PStatus(self, first, second, index):
        assert ctypes.c_uint(index).value == 0
        return 5 if (first, second) in self.strangers else 0


def links(nvml: Nvml) -> dict[str, str]:
    return links_between(nvml, [f"GPU-{number}" for number in range(nvml.num_devices)])


def test_all_links_of_devices_behind_switches_reach_each_other():
    nvml = Nvml(3, ends={number: [None] * 18 for number in range(3)})
    assert links(nvml) == {"0-1": "NV18", "0-2": "NV18", "1-2": "NV18"}


def test_direct_links_are_counted_by_pair():
    """Two bridges between 0 and 1, one between 1 and 2, none between 0 and 2."""
    nvml = Nvml(3, ends={0: [1, 1], 1: [0, 0, 2], 2: [1]}, levels={(0, 2): 50})
    assert links(nvml) == {"0-1": "NV2", "0-2": "SYS", "1-2": "NV1"}


def test_links_that_are_down_do_not_count():
    nvml = Nvml(2, ends={0: [1, 1, 1], 1: [0, 0, 0]}, off={(0, 0)})
    assert links(nvml) == {"0-1": "NV2"}


@pytest.mark.parametrize(
    ("level", "kind"), [(0, "PIX"), (10, "PIX"), (20, "PXB"), (30, "PHB"), (40, "NODE"), (50, "SYS")]
)
def test_without_nvlink_it_is_what_lies_between_on_pcie(level, kind):
    assert links(Nvml(2, levels={(0, 1): level})) == {"0-1": kind}


def test_without_peer_access_it_says_so():
    nvml = Nvml(2, levels={(0, 1): 30}, strangers={(0, 1)})
    assert links(nvml) == {"0-1": "PHB (no peer access)"}


def test_one_device_has_no_links():
    assert device_links(["GPU-0"]) == {}


def test_without_nvml_nothing_is_known(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert device_links(["GPU-0", "GPU-1"]) == {}


def test_where_the_driver_refuses_nothing_is_known(monkeypatch):
    nvml = Nvml(2)
    monkeypatch.setattr(nvml, "nvmlInit", refuse, raising=False)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert device_links(["GPU-0", "GPU-1"]) == {}


def refuse():
    raise NVMLError("Driver Not Loaded")
