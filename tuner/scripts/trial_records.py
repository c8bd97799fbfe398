"""Records of a trial in a script's process: the settings sent to it, and the timings and changes that it reports."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from steptune.tuner.records import Effect, MeasureSettings, Phase, TrialSpec, Window
from steptune.tuner.scripts.load_watch import LoadWatch
from steptune.tuner.strategies.api import Outside, Settings
from steptune.tuner.strategies.data_loading.choice import DataLoadingSetting

WARM_UP_WINDOWS = 2.5
"""Minimum length of the warm-up, in windows."""


def measure_settings(spec: TrialSpec, settings: MeasureSettings) -> dict[str, Any]:
    """Return the settings of the windows as plain values."""
    return {
        "warm_up_s": WARM_UP_WINDOWS * settings.window_s,
        "window_s": settings.window_s,
        "min_rounds": settings.min_rounds,
        "max_rounds": settings.max_rounds,
        "half_width": settings.half_width,
        "cap_s": settings.cap_s,
        "profile": spec.profile,
        "queue": _queue(spec),
    }


def _queue(spec: TrialSpec) -> int:
    """Return the number of batches that the candidate's loader may have loaded ahead."""
    loading = Settings(spec.choices)[DataLoadingSetting]
    return loading.num_workers * (loading.prefetch_factor or 0)


def phases_of(seen: Mapping[str, Any], windows: Sequence[Window], began_ns: int) -> dict[str, int]:
    """Return the time of each phase; the sum is the time of the trial."""
    whole = time.perf_counter_ns() - began_ns
    first = seen.get("first_step_ns", 0)
    build = first - began_ns if first else whole
    warm_up = seen.get("warm_up_ns", 0)
    measure = sum(window.duration_ns for window in windows)
    return {
        Phase.BUILD.value: build,
        Phase.WARM_UP.value: warm_up,
        Phase.MEASURE.value: measure,
        Phase.PROFILE.value: max(0, whole - build - warm_up - measure),
    }


def windows_of(
    seen: Mapping[str, Any], settings: MeasureSettings, load: LoadWatch, global_batch: int
) -> tuple[Window, ...]:
    """Return the timed windows of a trial. Windows in which other programs ran are marked, or void if the settings
    require a quiet machine.
    """
    found = []
    for number, window in enumerate(seen.get("windows", ())):
        begin_ns = window.pop("begin_ns")
        share = load.share(begin_ns, begin_ns + window["duration_ns"])
        busy = f"other programs used {share:.0%} of the cores" if share > settings.foreign_cpu_share else None
        found.append(
            Window(
                round=number,
                position=-1,
                num_samples=window["num_steps"] * global_batch,
                num_units=window["num_steps"] * global_batch,
                queue_depth_start=0,
                queue_depth_end=0,
                foreign_cpu_share=share,
                void=busy if settings.quiet_machine else None,
                marked=None if settings.quiet_machine else busy,
                **window,
            )
        )
    return tuple(found)


def read_record(path: Path) -> dict[str, Any]:
    """Return the record that a trial wrote; empty if it wrote none."""
    if not path.exists():
        return {}
    found: dict[str, Any] = msgspec.json.decode(path.read_bytes())
    return found


def effects_of(applied: Mapping[str, Outside], seen: Mapping[str, str]) -> tuple[Effect, ...]:
    """Return, for each choice, whether it took effect, that is, whether the script reached all code that the choice
    changes.
    """
    effects = []
    for name, outside in applied.items():
        missing = [change for change in outside.changes if change not in seen]
        detail = outside.words if not missing else f"{', '.join(missing)}: the script never reached the code to change"
        effects.append(Effect(strategy=name, took=not missing, detail=detail))
    return tuple(effects)
