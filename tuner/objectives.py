"""Objectives of a study: speed, training time (compilation included), energy, or cost.

A search maximises the rate of a trial's timed windows. For another objective the windows are converted first: their
share of the compilation is added to them, or joules replace their time. So every search, the confirmation and its
interval follow the objective without knowing which one it is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean

from msgspec.structs import replace

from steptune.tuner.errors import ChoiceError
from steptune.tuner.records import (
    Failure,
    FailureKind,
    HardwareProfile,
    Phase,
    SampleUnit,
    TrialResult,
    Window,
)

THROUGHPUT, STEPS, ENERGY, COST = "throughput", "steps", "energy", "cost"
FORMS = "throughput, steps:N (time to train N steps, including compilation), energy, cost:PRICE (per device and hour)"


_WORDS = {
    THROUGHPUT: {
        "words": "throughput",
        "compared": "as fast as today's settings",
        "better": "faster",
        "axis": "speed",
    },
    STEPS: {
        "words": "time to train {amount:,.0f} steps, including compilation",
        "compared": "as fast as today's settings over {amount:,.0f} steps, including compilation",
        "better": "faster",
        "axis": "speed with compilation",
    },
    ENERGY: {
        "words": "energy",
        "compared": "today's work per joule",
        "better": "more economical",
        "axis": "work per joule",
    },
    COST: {
        "words": "cost at {amount:g} per device hour",
        "compared": "today's work per unit of cost",
        "better": "cheaper",
        "axis": "work per unit of cost",
    },
}
"""Phrases for each objective; `amount` is filled in."""


@dataclass(frozen=True)
class Objective:
    """Objective of a study.

    Attributes:
        kind: `THROUGHPUT`, `STEPS`, `ENERGY` or `COST`.
        amount: Steps of the training, or the price of a device for an hour; 0 where the kind has none.
    """

    kind: str = THROUGHPUT
    amount: float = 0.0

    @property
    def is_rate(self) -> bool:
        """True where a larger rate means a faster training."""
        return self.kind in (THROUGHPUT, COST)

    @property
    def words(self) -> str:
        """The objective as a noun."""
        return self._said("words")

    @property
    def compared(self) -> str:
        """Phrase for a ratio, to follow `1.31×`."""
        return self._said("compared")

    @property
    def better(self) -> str:
        """Phrase for an improvement, to precede `than today's settings`."""
        return self._said("better")

    @property
    def axis(self) -> str:
        """Axis label for a figure of ratios."""
        return self._said("axis")

    def _said(self, form: str) -> str:
        return _WORDS[self.kind][form].format(amount=self.amount)

    def check(self, hardware: HardwareProfile, num_ranks: int) -> None:
        """Refuse an objective that cannot be measured on these devices.

        Raises:
            ChoiceError: The objective is energy on a CPU, or on several devices, of which only one is read.
        """
        check_device(self, hardware.device_kind)
        if self.kind == ENERGY and num_ranks > 1:
            raise ChoiceError(
                f"objective energy reads the power of one device and so requires one rank, got {num_ranks}: "
                "use one rank, or choose throughput, steps:N or cost:PRICE"
            )

    def figure(self, rate: float, *, unit: SampleUnit, units_per_step: float, num_devices: int) -> str:
        """Format a rate in the unit of this objective.

        Args:
            rate: Units per second, or per joule, as `counted` makes it.
            num_devices: Number of devices that are paid for.
        """
        if self.kind == STEPS:
            return f"{_duration(self.amount * units_per_step / rate)} for {self.amount:,.0f} steps"
        if self.kind == ENERGY:
            return f"{1 / rate:.3g} J per {unit.value}"
        if self.kind == COST:
            return f"{self.amount * num_devices * 1e6 / 3600 / rate:.3g} per million {unit.value}s"
        return f"{rate:.3g} {unit.value}s/s"

    # --- how a trial counts -------------------------------------------------------------------

    def counted(self, result: TrialResult, compile_ns: int) -> TrialResult:
        """Return a trial with its windows converted to this objective: compilation added, or energy in place of time.

        Args:
            compile_ns: Time that compiling its model took without caches.
        """
        if self.kind == STEPS and compile_ns:
            added = compile_ns / self.amount
            return replace(
                result, windows=tuple(_longer(w, w.duration_ns + w.num_steps * added) for w in result.windows)
            )
        return self._as_energy(result) if self.kind == ENERGY else result

    def _as_energy(self, result: TrialResult) -> TrialResult:
        """Return the trial with nanojoules in place of nanoseconds; a window without a power reading does not count."""
        powers = [w.device.power_w if w.device is not None else None for w in result.windows]
        known = [p for p, w in zip(powers, result.windows, strict=True) if p and w.void is None]
        if not known and result.clean_windows:
            missing = Failure(
                kind=FailureKind.UNSUPPORTED,
                phase=Phase.MEASURE,
                message="the driver does not report the power of the device, so its energy cannot be measured",
            )
            return replace(result, failure=result.failure or missing)
        windows = tuple(
            _longer(w, w.duration_ns * p) if p else replace(w, void=w.void or "the power of the device was not read")
            for w, p in zip(result.windows, powers, strict=True)
        )
        restart = result.epoch_restart_ns
        return replace(
            result,
            windows=windows,
            epoch_restart_ns=None if restart is None else round(restart * fmean(known or [1.0])),
        )

    def compile_share(self, result: TrialResult) -> float:
        """Return the compilation time, spread over the counted steps, as a share of a step's time: the most that a
        choice with less compilation could save.
        """
        if self.kind != STEPS or not result.clean_windows or result.startup is None:
            return 0.0
        return result.startup.compile_ns / self.amount / fmean(w.step_time_ns for w in result.clean_windows)


PLAIN = Objective()


def parse_objective(text: str) -> Objective:
    """Parse an objective such as `throughput` or `steps:N`.

    Raises:
        ChoiceError: The objective is unknown, or its amount is missing or wrong; the message lists all objectives.
    """
    kind, _, amount = text.partition(":")
    if kind in (THROUGHPUT, ENERGY) and kind == text:
        return Objective(kind)
    if kind not in (STEPS, COST):
        raise ChoiceError(f"there is no objective {text!r}: choose one of {FORMS}")
    try:
        value = float(amount.replace("_", ""))
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0) or (kind == STEPS and value != int(value)):
        wanted = (
            "a whole number of steps above 0, such as steps:20000"
            if kind == STEPS
            else "a price above 0, such as cost:2.5"
        )
        raise ChoiceError(f"objective {text!r}: write {wanted}")
    return Objective(kind, value)


def check_device(objective: Objective, device: str | None) -> None:
    """Refuse an objective that cannot be measured on a kind of device; None means that the device is not known yet.

    Raises:
        ChoiceError: Names the objective, the device and the way out.
    """
    if objective.kind == ENERGY and device == "cpu":
        raise ChoiceError(
            "objective energy requires a CUDA device whose driver reports its power: on a CPU choose throughput, "
            "steps:N or cost:PRICE"
        )


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"


def _longer(window: Window, duration_ns: float) -> Window:
    return replace(window, duration_ns=max(1, round(duration_ns)))
