"""Findings on a window from the device's state before and after it, as the driver gives it."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from builders import sample_result, sample_window

from steptune.tuner.records import DeviceReading
from steptune.tuner.search.designer import why_not
from steptune.tuner.trials.device_state import DeviceState, Use, limits_of, reading_between, why_void
from steptune.tuner.trials.device_watch import NOT_INSTALLED, DeviceWatch, NvmlLook, watch_device

OURS, THEIRS = 100, 200
SECOND_US = 1_000_000
POWER_CAP, HARDWARE, SOFTWARE_THERMAL, HARDWARE_THERMAL, BRAKE = 0x4, 0x8, 0x20, 0x40, 0x80


def state(at_s: float = 0.0, **changes: Any) -> DeviceState:
    return DeviceState(at_us=int(at_s * SECOND_US), **changes)


def between(before: DeviceState, after: DeviceState) -> DeviceReading:
    return reading_between(before, after, frozenset({OURS}))


class TestReading:
    def test_power_is_the_energy_of_the_window(self) -> None:
        reading = between(state(0, energy_mj=1000, power_w=700.0), state(0.5, energy_mj=151_000, power_w=90.0))
        assert reading.power_w == 300.0

    def test_without_that_counter_it_is_the_last_look_s(self) -> None:
        assert between(state(0), state(0.5, power_w=90.0)).power_w == 90.0

    def test_what_the_driver_does_not_tell_is_none(self) -> None:
        assert between(state(0), state(1)) == DeviceReading()

    def test_clock_and_temperature_are_those_of_its_end(self) -> None:
        reading = between(state(0, sm_clock_mhz=1980, temperature_c=50), state(1, sm_clock_mhz=1755, temperature_c=61))
        assert (reading.sm_clock_mhz, reading.temperature_c) == (1755, 61)

    def test_limits_are_those_of_both_edges(self) -> None:
        reading = between(state(0, reasons=POWER_CAP), state(1, reasons=BRAKE))
        assert reading.limits == ("power cap", "hardware power brake")

    def test_idling_is_no_limit(self) -> None:
        assert limits_of(0x1) == ()

    def test_heat_is_a_share_of_the_window(self) -> None:
        assert between(state(0, thermal_ns=10**9), state(2, thermal_ns=10**9 + 5 * 10**8)).slowed_share == 0.25

    def test_a_counter_that_was_reset_says_nothing_bad(self) -> None:
        assert between(state(0, thermal_ns=10**9), state(1, thermal_ns=5)).slowed_share == 0.0


class TestOthers:
    def share(self, *uses: Use) -> float | None:
        return between(state(1), state(2, uses=uses)).foreign_share

    def use(self, pid: int, share: float, at_s: float = 1.5) -> Use:
        return Use(pid=pid, share=share, at_us=int(at_s * SECOND_US))

    def test_own_processes_are_no_others(self) -> None:
        assert self.share(self.use(OURS, 0.9)) == 0.0

    def test_those_of_others_add_up(self) -> None:
        assert self.share(self.use(OURS, 0.5), self.use(THEIRS, 0.2), self.use(THEIRS + 1, 0.1)) == pytest.approx(0.3)

    def test_several_samples_are_averaged(self) -> None:
        assert self.share(self.use(THEIRS, 0.2, 1.2), self.use(THEIRS, 0.4, 1.8)) == pytest.approx(0.3)

    def test_one_that_came_and_went_counts_in_full(self) -> None:
        """The driver saw it last in the middle of the window, and ours at its end."""
        assert self.share(self.use(THEIRS, 0.4, 1.3), self.use(OURS, 0.5, 1.9)) == pytest.approx(0.4)

    def test_what_was_before_the_window_is_not_in_it(self) -> None:
        assert self.share(self.use(THEIRS, 0.9, 0.9), self.use(OURS, 0.5)) == 0.0

    def test_a_window_without_a_sample_is_unknown(self) -> None:
        assert self.share(self.use(THEIRS, 0.9, 0.9)) is None
        assert self.share() is None


class TestVerdict:
    @pytest.mark.parametrize(
        ("reading", "reason"),
        [
            (DeviceReading(), None),
            (DeviceReading(limits=("power cap", "clocks set by an application", "sync boost")), None),
            (DeviceReading(slowed_share=0.005), None),
            (DeviceReading(foreign_share=0.04), None),
            (DeviceReading(power_limit_w=700.4), None),
            (
                DeviceReading(slowed_share=0.25, temperature_c=88),
                "the device was slowed down by heat for 25% of the window (at 88 °C)",
            ),
            (
                DeviceReading(limits=limits_of(POWER_CAP | HARDWARE | HARDWARE_THERMAL)),
                "the device's clock was throttled: hardware slowdown, hardware thermal slowdown",
            ),
            (
                DeviceReading(limits=limits_of(SOFTWARE_THERMAL), temperature_c=85),
                "the device's clock was throttled: software thermal slowdown (at 85 °C)",
            ),
            (DeviceReading(limits=limits_of(BRAKE)), "the device's clock was throttled: hardware power brake"),
            (DeviceReading(foreign_share=0.3), "other processes used 30% of the device"),
            (DeviceReading(power_limit_w=350.0), "the device's power limit was changed from 700 W to 350 W"),
        ],
    )
    def test_is_void_from_heat_protection_others_and_another_limit(
        self, reading: DeviceReading, reason: str | None
    ) -> None:
        """Not from the ordinary power cap: whoever draws more power is rightly the slower for it."""
        assert why_void(reading, first_power_limit_w=700.0) == reason

    def test_without_a_first_limit_nothing_has_changed(self) -> None:
        assert why_void(DeviceReading(power_limit_w=350.0), None) is None


# --- watching -----------------------------------------------------------------------------------


class States:
    """Gives prepared states, one a look."""

    def __init__(self, *states: DeviceState, unmeasured: tuple[str, ...] = ()) -> None:
        self._states = list(states)
        self.unmeasured = unmeasured
        self.asked_since_us: list[int | None] = []

    def look(self, since_us: int | None = None) -> DeviceState:
        self.asked_since_us.append(since_us)
        return self._states.pop(0)

    def own_processes(self) -> frozenset[int]:
        return frozenset({OURS})


class TestWatch:
    def test_a_window_is_between_its_two_looks(self) -> None:
        watch = DeviceWatch(States(state(0), state(1, sm_clock_mhz=1), state(2), state(3, sm_clock_mhz=2)))
        clocks = []
        for _ in range(2):
            watch.begin()
            reading, reason = watch.end()
            assert reading is not None
            assert reason is None
            clocks.append(reading.sm_clock_mhz)
        assert clocks == [1, 2]

    def test_others_are_asked_for_from_its_beginning(self) -> None:
        """However long it was: ten seconds here, of which another process took the first."""
        theirs = Use(pid=THEIRS, share=0.1, at_us=3 * SECOND_US)
        look = States(state(2), state(12, uses=(theirs,)))
        watch = DeviceWatch(look)
        watch.begin()
        assert watch.end()[1] == "other processes used 10% of the device"
        assert look.asked_since_us == [None, 2 * SECOND_US]

    def test_the_first_window_s_power_limit_holds_for_all(self) -> None:
        limits = (700.0, 700.0, 500.0, 700.0)
        watch = DeviceWatch(States(*(s for w in limits for s in (state(0), state(1, power_limit_w=w)))))
        reasons = []
        for _ in limits:
            watch.begin()
            reasons.append(watch.end()[1])
        assert [reason is not None for reason in reasons] == [False, False, True, False]

    def test_nothing_to_look_at_says_nothing(self) -> None:
        watch = DeviceWatch()
        watch.begin()
        assert watch.end() == (None, None)
        assert watch.unmeasured == ()

    def test_a_cpu_is_not_watched_and_lacks_nothing(self) -> None:
        assert watch_device(torch.device("cpu")).unmeasured == ()

    def test_without_the_library_that_is_said(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
        assert watch_device(torch.device("cuda", 0)).unmeasured == (NOT_INSTALLED,)
        assert "steptune[cuda]" in NOT_INSTALLED

    def test_what_cannot_be_read_is_said_once(self) -> None:
        missing = States(state(0), state(1), unmeasured=("energy of the device: Not Supported",))
        assert DeviceWatch(missing, ("all else",)).unmeasured == ("all else", "energy of the device: Not Supported")


class NVMLError(Exception):
    pass


class NVMLError_NotFound(NVMLError):
    pass


class Struct:
    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


class Nvml:
    """The functions of `pynvml` that are called, over one device; `lacks` names those that the driver refuses."""

    NVML_CLOCK_SM = 1
    NVML_TEMPERATURE_GPU = 0
    NVML_PERF_POLICY_THERMAL = 1
    NVMLError = NVMLError
    NVMLError_NotFound = NVMLError_NotFound

    def __init__(self, *, lacks: tuple[str, ...] = (), pid: int | None = None) -> None:
        self.lacks = lacks
        self.pid = os.getpid() if pid is None else pid
        self.asked: list[str] = []
        self.samples: list[Struct] = []
        self.since_us: list[int] = []

    def __getattr__(self, name: str) -> Any:
        answers = {
            "nvmlInit": None,
            "nvmlDeviceGetHandleByUUID": "handle",
            "nvmlDeviceGetClockInfo": 1755,
            "nvmlDeviceGetPowerUsage": 650_500,
            "nvmlDeviceGetEnforcedPowerLimit": 700_000,
            "nvmlDeviceGetTemperature": 61,
            "nvmlDeviceGetCurrentClocksThrottleReasons": POWER_CAP,
            "nvmlDeviceGetTotalEnergyConsumption": 123_456,
            "nvmlDeviceGetViolationStatus": Struct(violationTime=7),
            "nvmlDeviceGetComputeRunningProcesses": [Struct(pid=self.pid)],
        }

        def call(*arguments: Any) -> Any:
            self.asked.append(name)
            if name in self.lacks:
                raise NVMLError("Not Supported")
            if name == "nvmlDeviceGetProcessUtilization":
                self.since_us.append(arguments[1])
                if not self.samples:
                    raise NVMLError_NotFound("Not Found")
                return self.samples
            return answers[name]

        return call


class TestNvml:
    def test_units_are_ours(self) -> None:
        found = NvmlLook(Nvml(), "GPU-1").look()
        assert (found.sm_clock_mhz, found.power_w, found.power_limit_w, found.temperature_c) == (1755, 650.5, 700.0, 61)
        assert (found.reasons, found.energy_mj, found.thermal_ns) == (POWER_CAP, 123_456, 7)
        assert found.uses is None

    def test_uses_are_shares_by_process(self) -> None:
        nvml = Nvml()
        nvml.samples = [Struct(pid=7, smUtil=40, timeStamp=5), Struct(pid=0, smUtil=9, timeStamp=5)]
        look = NvmlLook(nvml, "GPU-1")
        assert look.look(since_us=3).uses == (Use(pid=7, share=0.4, at_us=5),)
        assert nvml.since_us == [3]
        nvml.samples = []
        assert look.look(since_us=3).uses == ()

    def test_what_the_driver_refuses_is_none_said_and_asked_once(self) -> None:
        nvml = Nvml(lacks=("nvmlDeviceGetTotalEnergyConsumption", "nvmlDeviceGetCurrentClocksThrottleReasons"))
        look = NvmlLook(nvml, "GPU-1")
        for _ in range(2):
            found = look.look()
            assert (found.energy_mj, found.reasons, found.power_w) == (None, 0, 650.5)
        assert sorted(look.unmeasured) == [
            "energy of the device: Not Supported",
            "throttling of the device: Not Supported",
        ]
        assert nvml.asked.count("nvmlDeviceGetTotalEnergyConsumption") == 1

    def test_in_another_pid_namespace_others_cannot_be_told_apart(self) -> None:
        nvml = Nvml(pid=999_999_999)
        look = NvmlLook(nvml, "GPU-1")
        assert look.look(since_us=3).uses is None
        assert "nvmlDeviceGetProcessUtilization" not in nvml.asked
        assert look.unmeasured == (
            "use by other processes of the device: the driver's process ids differ from those inside this "
            "container or sandbox",
        )

    def test_own_processes_hold_this_one_and_its_siblings_parent(self) -> None:
        assert os.getpid() in NvmlLook(Nvml(), "GPU-1").own_processes()


@pytest.mark.parametrize(
    ("void", "remedy"),
    [
        (
            "other programs used 25% of the cores",
            "end these programs, or measure without --quiet-machine (in a service, without quiet_machine)",
        ),
        ("other processes used 30% of the device", "end these processes"),
        (
            "the device was slowed down by heat for 30% of the window",
            "cool the device or lower its power limit, and resume",
        ),
    ],
)
def test_a_trial_without_a_clean_window_says_what_to_do(void: str, remedy: str) -> None:
    result = sample_result(windows=(sample_window(0, void=void),), guard=None)
    assert why_not(result) == f"no clean window could be measured ({void}): {remedy}"
