"""Numbers formatted for reading: with a unit, and with no more digits than are significant."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable

from steptune.tuner.records import Interval, Move, SampleUnit, choice_label
from steptune.tuner.wording import counted as counted
from steptune.tuner.wording import ratio as ratio
from steptune.tuner.wording import ratio_range as ratio_range

UNKNOWN = "unknown"
NO_LIMIT = 100
"""Maximum speed-up that is stated as an upper limit; a higher limit says nothing."""
_LAMBDAS = re.compile(r"\([^()]*\)(?=::\{lambda)|::\{lambda\([^()]*\)#\d+\}|::operator\(\)\([^()]*\)(?: const)?")
_RUNS = re.compile(r": [\d.e+-]+ ms in \d+ runs$")
_NAMESPACES = re.compile(r"\(anonymous namespace\)::|\bat::native::|\bat::cuda::|\bstd::")


def significant(value: float, digits: int = 3) -> str:
    """Format a number with this many significant digits and no exponent: `1,280`, `15.8`, `0.0342`."""
    if not math.isfinite(value):
        return UNKNOWN
    if value == 0:
        return "0"
    places = digits - 1 - math.floor(math.log10(abs(value)))
    return f"{round(value, places):,.{max(0, places)}f}"


def rate(units_per_s: float, unit: SampleUnit) -> str:
    return f"{significant(units_per_s)} {unit.value}s/s"


def milliseconds(value_ms: float) -> str:
    return f"{significant(value_ms)} ms"


def short_time(time_ns: float) -> str:
    """Format a time in the unit that fits: `640 ns`, `12.3 µs`, `4.56 ms`, `1.23 s`."""
    if not math.isfinite(time_ns):
        return UNKNOWN
    length = abs(time_ns)
    for unit, size in (("s", 1e9), ("ms", 1e6), ("µs", 1e3)):
        # What would round up to a thousand of a unit is one of the next.
        if length >= 0.9995 * size:
            value = max(1.0, length / size)
            places = 2 if value < 9.995 else 1 if value < 99.95 else 0  # a timeline has ten thousand cells
            said = f"{value:.{places}f}" if value < 999.5 else significant(value)
            return f"{'-' if time_ns < 0 else ''}{said} {unit}"
    return f"{time_ns:.0f} ns"


def short_time_change(time_ns: float) -> str:
    """Format a change of a time: `+1.20 ms`, `−340 µs`."""
    sign = "+" if time_ns > 0 else "−" if time_ns < 0 else ""
    return f"{sign}{short_time(abs(time_ns))}"


@functools.lru_cache(4096)
def kernel_name(name: str) -> str:
    """Shorten a kernel's name: without return type, arguments and PyTorch's namespaces."""
    name = _LAMBDAS.sub("", _NAMESPACES.sub("", name.removeprefix("void ")))
    depth = 0
    for position, letter in enumerate(name):
        depth += {"<": 1, ">": -1}.get(letter, 0)
        if letter == "(" and depth == 0 and position and not name.lower().startswith("mem"):
            return name[:position]
    return name


def per_second(value: float, unit: str) -> str:
    """Format a rate: `7.66 TFLOP/s`, `122 MB/s`."""
    return f"{amount(value, unit)}/s"


def amount(value: float, unit: str) -> str:
    """Format an amount: `7.66 TFLOP`, `122 MB`; GB is the largest unit of bytes."""
    prefix, size = next(((p, s) for p, s in (("T", 1e12), ("G", 1e9)) if value >= s), ("M", 1e6))
    if unit == "B" and prefix == "T":
        prefix, size = "G", 1e9
    return f"{significant(value / size)} {prefix}{unit}"


def place_name(place: str) -> str:
    """Return a place that a finding names, such as `KERNEL: 3.5 ms in 30 runs`, with the kernel's name shortened."""
    found = _RUNS.search(place)
    return kernel_name(place[: found.start()]) + found.group() if found else _NAMESPACES.sub("", place)


def end_of_path(path: str, most: int) -> str:
    """Shorten a dotted path to its last components, as many as fit into `most` characters. The last components are kept
    because they distinguish paths that begin alike.
    """
    names = path.split(".")
    while len(names) > 1 and len(".".join(names)) > most - 2:
        names = names[1:]
    return path if len(path) <= most else f"….{'.'.join(names)}"


def change(value_ms: float) -> str:
    """Format a change in milliseconds, with a minus sign and not a hyphen: `+0.40`, `−14.50`."""
    return f"{value_ms:+.2f}".replace("-", "−")


def ratio_interval(interval: Interval) -> str:
    """Format an interval of ratios: `0.990× to 1.20×`."""
    return ratio_range(interval.low, interval.high)


def percent(share: float) -> str:
    """Format a share as a percentage: `63 %`, `4.1 %`, `0.8 %`."""
    if not math.isfinite(share):
        return UNKNOWN
    value = 100 * share
    return f"{value:.0f} %" if abs(value) >= 9.95 else f"{value:.1f} %"


def gain_limit(bound: float) -> float:
    """Return the maximum speed-up, as a ratio, if this share of the step is saved. Return infinity where it would
    exceed about `NO_LIMIT`: such a limit says nothing.
    """
    return math.inf if bound > 1 - 1 / NO_LIMIT else 1 / (1 - max(0.0, bound))


def duration(seconds: float) -> str:
    """Format a duration: `45 s`, `7 min 42 s`, `2 h 5 min`."""
    if not math.isfinite(seconds):
        return UNKNOWN
    if seconds < 10:
        return f"{significant(seconds, 2)} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if minutes else f"{hours} h"


def memory(num_bytes: float) -> str:
    """Format an amount of memory: `612 MiB`, `1.43 GiB`."""
    if num_bytes < 1000 << 20:
        return f"{significant(num_bytes / (1 << 20))} MiB"
    return f"{significant(num_bytes / (1 << 30))} GiB"


def message_size(num_bytes: float) -> str:
    """Format the size of a message: `4 KiB`, `64 MiB`."""
    return f"{num_bytes / (1 << 20):.3g} MiB" if num_bytes >= 1 << 20 else f"{num_bytes / 1024:.3g} KiB"


def moves_label(moves: Iterable[Move]) -> str:
    """Describe the changes of settings: `data_loading: num_workers=2; compile: as today`."""
    return "; ".join(f"{m.strategy}: {choice_label(m.choice) if m.choice else 'as today'}" for m in moves)


def words(identifier: str) -> str:
    """Return an identifier as words: `no_gain` as `no gain`."""
    return identifier.replace("_", " ")
