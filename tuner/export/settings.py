"""Settings of a recommendation: everything that a target must express, or list as not expressible."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from steptune.tuner.records import Choice, Recommendation, Scalar, choice_label
from steptune.tuner.strategies import STRATEGIES
from steptune.tuner.strategies.api import Settings
from steptune.tuner.strategies.combine import DROPPED
from steptune.tuner.strategies.cpu_threads.choice import CpuThreadsSetting
from steptune.tuner.strategies.knobs import is_knob
from steptune.tuner.strategies.micro_batch.choice import MicroBatchSetting

_DEFAULTS = {strategy.name: strategy.defaults for strategy in STRATEGIES}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One parameter of a strategy, with a value that an export must express: it differs from plain PyTorch's, or the
    candidate resets it to plain PyTorch's.
    """

    strategy: str
    parameter: str
    value: Scalar


def settings_of(recommendation: Recommendation) -> tuple[Setting, ...]:
    """Return the settings in the order of the strategies. For a strategy unknown to this version, all parameters are
    included.
    """
    choices = recommendation.choices
    names = [name for name in _DEFAULTS if name in choices] + [name for name in choices if name not in _DEFAULTS]
    return tuple(
        Setting(strategy=name, parameter=parameter, value=value)
        for name in names
        for parameter, value in choices[name].items()
        if _counts(recommendation, name, parameter, value)
    )


def _counts(recommendation: Recommendation, strategy: str, parameter: str, value: Scalar) -> bool:
    defaults = _DEFAULTS.get(strategy, {})
    if parameter in recommendation.candidate.choices.get(strategy, {}):
        return True
    if is_knob(strategy):  # as the workload has it
        return False
    if parameter in defaults and defaults[parameter] == value:
        return False
    complete = {**_DEFAULTS, **recommendation.choices}
    return not any(
        row.setting.strategy == strategy and parameter in row.parameters and row.when(Settings(complete))
        for row in DROPPED
    )


def sentence(settings: Iterable[Setting], reason: str) -> str:
    """Return a sentence about settings of one strategy: `data_loading: num_workers=2, pin_memory=on: the reason`."""
    listed = list(settings)
    return f"{listed[0].strategy}: {choice_label({s.parameter: s.value for s in listed})}: {reason}"


def choice_of(recommendation: Recommendation, strategy: str) -> Choice:
    """Return the complete choice of a strategy; PyTorch's defaults where the recommendation predates the strategy."""
    return {**_DEFAULTS.get(strategy, {}), **recommendation.choices.get(strategy, {})}


def batch_per_rank(recommendation: Recommendation) -> tuple[int, int] | None:
    """Return the number of samples in a rank's micro-batch, and of micro-batches in a step; None if the batch does not
    divide evenly.
    """
    pieces = int(choice_of(recommendation, MicroBatchSetting.strategy)["num_micro_batches"] or 1)
    size, rest = divmod(recommendation.global_batch, recommendation.num_ranks * pieces)
    return (size, pieces) if size and not rest else None


def grouped(settings: Sequence[Setting]) -> dict[str, list[Setting]]:
    """Return the settings by strategy, in order."""
    found: dict[str, list[Setting]] = {}
    for setting in settings:
        found.setdefault(setting.strategy, []).append(setting)
    return found


def threads_lost(recommendation: Recommendation) -> bool:
    """Say whether a launcher that sets OMP_NUM_THREADS would change the measured configuration: one rank on a CPU, with
    torch's default threads.
    """
    cpu = recommendation.hardware.device_kind == "cpu"
    return (
        cpu
        and recommendation.num_ranks == 1
        and choice_of(recommendation, CpuThreadsSetting.strategy)["num_threads"] is None
    )
