"""The state of a real device, read by NVML around work of known kind."""

import os

import pytest
import torch

from steptune.tuner.trials.device_state import reading_between, why_void
from steptune.tuner.trials.device_watch import NvmlLook, uuid_of, watch_device

pynvml = pytest.importorskip("pynvml", reason="needs nvidia-ml-py: pip install 'steptune[cuda]'")
DEVICE = torch.device("cuda", 0)


def work(num_products: int = 200) -> None:
    left, right = (torch.randn(4096, 4096, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    for _ in range(num_products):
        left @ right
    torch.cuda.synchronize(DEVICE)


@pytest.fixture
def look() -> NvmlLook:
    work(1)  # a context, so that the driver lists this process
    return NvmlLook(pynvml, uuid_of(DEVICE))


def test_the_device_is_found_by_its_uuid_whatever_its_number() -> None:
    """NVML counts all devices of the machine, CUDA those that it may see."""
    handle = pynvml.nvmlDeviceGetHandleByUUID(uuid_of(DEVICE)) if pynvml.nvmlInit() is None else None
    name = pynvml.nvmlDeviceGetName(handle)
    name = name.decode() if isinstance(name, bytes) else name
    assert name == torch.cuda.get_device_name(DEVICE)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle).total
    assert memory == pytest.approx(torch.cuda.get_device_properties(DEVICE).total_memory, rel=0.05)


def test_clock_power_and_temperature_are_those_of_a_device(look: NvmlLook) -> None:
    state = look.look()
    assert state.sm_clock_mhz is not None
    assert 100 < state.sm_clock_mhz < 4000
    assert state.power_w is not None
    assert state.power_limit_w is not None
    assert 5 < state.power_w < 1.5 * state.power_limit_w
    assert state.temperature_c is not None
    assert 10 < state.temperature_c < 110


def test_work_draws_more_power_than_idling_and_is_not_void(look: NvmlLook) -> None:
    before = look.look()
    work(2000)
    after = look.look(since_us=before.at_us)
    reading = reading_between(before, after, look.own_processes())
    assert reading.power_w is not None
    assert before.power_w is not None
    assert reading.power_w > 0
    assert why_void(reading, after.power_limit_w) is None
    if before.energy_mj is not None and after.energy_mj is not None:
        assert after.energy_mj > before.energy_mj


def test_this_process_is_its_own_or_that_is_said(look: NvmlLook) -> None:
    before = look.look()
    work()
    state = look.look(since_us=before.at_us)
    if state.uses is None:
        assert any(text.startswith("use by other processes") for text in look.unmeasured)
        return
    assert os.getpid() in look.own_processes()
    assert all(0 <= use.share <= 1 for use in state.uses)


def test_a_watched_trial_s_windows_have_readings() -> None:
    work(1)
    watch = watch_device(DEVICE)
    watch.begin()
    work(500)
    reading, reason = watch.end()
    assert reading is not None
    assert reading.sm_clock_mhz
    assert reason is None
