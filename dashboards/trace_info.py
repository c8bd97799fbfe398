"""Tables of a trace's analysis: data of the figures on the terminal and on the page."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from steptune.dashboards import theme, units
from steptune.dashboards.finding_gain import finding_gain, refusal_of
from steptune.dashboards.rank_groups import named_devices
from steptune.dashboards.roofline import get_utilisation
from steptune.tuner.costs.categories import COMPUTING, HOST_CATEGORIES, WAITS, Category, bottleneck
from steptune.tuner.profiling.diagnosis import BAD_CAPTURE, RULES
from steptune.tuner.profiling.evidence import busiest
from steptune.tuner.profiling.facts import already_on
from steptune.tuner.profiling.gains import ASIDE
from steptune.tuner.profiling.rank_comparison import late_part, main_rank, straggler
from steptune.tuner.records import Breakdown
from steptune.tuner.trace_records import MemoryStats, RankWait, Timeline, TraceAnalysis

if TYPE_CHECKING:
    import pandas as pd

Row = dict[str, Any]

LIMITS = {
    "input": "input: the device waits for data for {share} of the step",
    "communication": "communication, exposed for {share} of the step",
    "host": "the host: the device waits for launches for {share} of the step",
    "synchronisation": "synchronisation: work waits for other work, or for the host, for {share} of the step",
    "optimizer": "the optimizer: {share} of the step",
    "compute": "compute: {share} of the step",
}
CPU_LIMITS = {
    **LIMITS,
    "input": "input: {share} of the step is spent waiting for data",
    "host": "Python and the dispatch of operators: {share} of the step",
}
STALLED = "stalls in {steps}: long pauses without a launch take {share} of the step"
CPU_STALLED = "stalls in {steps}: long pauses without an operator take {share} of the step"
LATE = "late ranks: waiting for them takes {share} of the step, mostly for rank {rank}"
STANDS_OUT = 0.03
"""Minimum delay of a straggler relative to the median rank, as a share of the straggler's step."""
_IDLE = (*HOST_CATEGORIES, Category.DATA_WAIT, Category.EPOCH_RESTART, Category.QUEUED, Category.UNKNOWN)
"""Categories of time in which a device recorded no activity."""

_CATEGORIES_OF = {rule.name: tuple(category.value for category in rule.categories) for rule in RULES}


class TraceHeadline(NamedTuple):
    """Headline of a trace's analysis. `tone` is "neutral" or "warning"."""

    tone: str
    title: str
    what: str
    """Description of the capture: files, ranks, devices, steps."""
    already_on: str
    """Techniques that the steps already use; empty where none are known."""
    utilisation: str
    """Model FLOPs utilisation; empty where it is not known."""
    quality: tuple[str, ...]
    """Notes on whether the capture can be trusted, and on its limits."""
    trusted: bool
    nothing_stands_out: bool


class TraceAdvice(NamedTuple):
    """A finding in the words of the page."""

    severity: str
    message: str
    advice: str
    gain: str
    """Potential gain, and whether it was replayed; empty if removing the finding's cause alone would gain nothing."""
    strategies: tuple[str, ...]
    places: tuple[str, ...]
    """Kernels, operators and source lines that the finding names."""
    categories: tuple[str, ...] = ()
    """Categories of time that the finding is about."""


def get_trace_headline(analysis: TraceAnalysis) -> TraceHeadline:
    """Name the bottleneck of the step; for a capture that cannot be trusted, say that there is no verdict, and why."""
    breakdowns = main_breakdowns(analysis)
    problems = _unique(problem for b in breakdowns for problem in b.quality.problems)
    times = mean_step_ns(analysis)
    limit = bottleneck(times)
    step = units.short_time(sum(times.values()))
    if problems:
        title = f"no verdict: the capture cannot be trusted ({step} a step as recorded)"
    else:
        title = f"{step} a step, limited by {_limited_by(analysis, times, limit)}"
    return TraceHeadline(
        tone="warning" if problems else "neutral",
        title=title,
        what=_what(analysis),
        already_on=", ".join(already_on(busiest(main_rank(analysis).breakdowns).facts)),
        utilisation="" if problems else get_utilisation([rank.roofline for rank in analysis.ranks]),
        quality=_quality(analysis, problems),
        trusted=not problems,
        nothing_stands_out=not (problems or analysis.findings or limit in WAITS),
    )


def _limited_by(analysis: TraceAnalysis, times: dict[str, float], limit: str) -> str:
    on_cpu = all(b.device == "cpu" for b in main_breakdowns(analysis))
    limits = CPU_LIMITS if on_cpu else LIMITS
    step_ns, late_ns = sum(times.values()), get_late_ns(analysis)
    late = LATE.format(share=units.percent(late_ns / step_ns), rank=straggler(analysis.waits))
    if limit == "communication" and late_ns > times.get(Category.COMMUNICATION.value, 0.0) / 2:
        return late
    if limit == "host":
        stalled_ns = _stalled_ns(analysis)
        if stalled_ns > times.get(Category.HOST.value, 0.0) / 2:
            # Where one rank stalls, the others wait for it: that it comes late is the first thing to say.
            if _comes_late(analysis):
                return late
            said = CPU_STALLED if on_cpu else STALLED
            return said.format(steps=_stalled_steps(analysis), share=units.percent(stalled_ns / step_ns))
    categories = WAITS.get(limit, COMPUTING if limit == "compute" else (Category.OPTIMIZER,))
    share = sum(times.get(category, 0.0) for category in categories) / step_ns
    return limits[limit].format(share=units.percent(share))


def _stalled_ns(analysis: TraceAnalysis) -> float:
    """Return the part of the category `host` that lies in stalls, in nanoseconds per step, averaged over ranks."""
    parts = [b.stalled_share * b.per_step_ns.get(Category.HOST.value, 0.0) for b in main_breakdowns(analysis)]
    return sum(parts) / len(parts)


def _stalled_steps(analysis: TraceAnalysis) -> str:
    """Count the stalled steps of the rank that stalls most: "all 6 steps", "2 of 6 steps"."""
    most = max(main_breakdowns(analysis), key=lambda b: b.stalls.idle_ns if b.stalls is not None else 0)
    count = len(most.stalls.steps) if most.stalls is not None else 0
    if count == most.num_steps:
        return "all steps" if count > 1 else "the only step"
    return f"{count} of {most.num_steps} steps"


def _comes_late(analysis: TraceAnalysis) -> bool:
    return any(finding.rule == "rank_skew" and finding.severity != "note" for finding in analysis.findings)


def _what(analysis: TraceAnalysis) -> str:
    first = analysis.ranks[0]
    breakdowns = all_breakdowns(analysis)
    names = _unique(rank.device_names.get(b.device, b.device) for rank in analysis.ranks for b in rank.breakdowns)
    ranks = units.counted(len(analysis.ranks), "rank")
    if first.num_ranks > len(analysis.ranks):
        ranks = f"{ranks} of {first.num_ranks}"
    steps = sorted({b.num_steps for b in breakdowns})
    counted = units.counted(steps[0], "step") if len(steps) == 1 else f"{steps[0]} to {steps[-1]} steps"
    return ", ".join((ranks, named_devices(names), counted)) + _spoken_of(analysis)


def _spoken_of(analysis: TraceAnalysis) -> str:
    """Say which device the figures describe, or that they are means over ranks; empty if there is only one device."""
    shared = [(rank, b) for rank, b in zip(analysis.ranks, main_breakdowns(analysis), strict=True)]
    chosen = _unique(b.device for rank, b in shared if len(rank.breakdowns) > 1)
    said = [f"the busiest device of each process ({', '.join(chosen)})"] if chosen else []
    said += ["the mean over the ranks"] if len(analysis.ranks) > 1 else []
    return f"; figures: {', '.join(said)}" if said else ""


def _quality(analysis: TraceAnalysis, problems: tuple[str, ...]) -> tuple[str, ...]:
    breakdowns = main_breakdowns(analysis)
    notes = _unique(note for b in breakdowns for note in b.quality.notes)
    others = (b for b in all_breakdowns(analysis) if b not in breakdowns)
    notes += _unique(f"{device_label(analysis, b)}: {problem}" for b in others for problem in b.quality.problems)
    notes = tuple(note for note in notes if not any(note.endswith(problem) for problem in problems))
    events = sum(rank.num_events for rank in analysis.ranks)
    lost = sum(rank.num_lost for rank in analysis.ranks)
    said = [f"bad: {problem}" for problem in problems]
    if not problems:
        linked = 1 - max(b.quality.unlinked_share for b in breakdowns)
        devices = any(b.device != "cpu" for b in breakdowns)
        links = f", {units.percent(linked)} of the device work has a recorded launch" if devices else ""
        said.append(f"good: {units.counted(events, 'event')}{links}")
    if lost:
        said.append(f"{units.counted(lost, 'event')} could not be read")
    said += [*notes, *analysis.notes]
    ratio = max(b.quality.overhead_ratio for b in breakdowns)
    if all(b.unprofiled_step_time_ns is None for b in breakdowns) and not problems:
        said.append(
            "the step includes the profiler's overhead: --unprofiled-step-ms removes it from the host's categories"
        )
    elif ratio > 1:
        said.append(f"profiled steps took {ratio:.2f} times as long as unprofiled ones: times are scaled back")
    return tuple(said)


def get_findings_info(analysis: TraceAnalysis) -> list[TraceAdvice]:
    """Return the findings in the order of the analysis, except that the one named by the headline comes first, unless
    other causes must be removed before it. For a bad capture, the advice is given once.
    """
    rows = []
    bad = [finding for finding in analysis.findings if finding.rule == BAD_CAPTURE]
    if bad:
        # The headline says what is bad.
        advice = "; ".join(_unique(finding.advice for finding in bad))
        rows.append(TraceAdvice("warning", "no verdict without a better capture", advice, "", (), ()))
    named = _named_by_headline(analysis)
    said: set[str] = set()
    first = next((one for one in analysis.findings if one.rule in named and ASIDE not in one.evidence), None)
    for finding in sorted(analysis.findings, key=lambda one: one is not first):
        if finding in bad:
            continue
        message = f"rank {finding.evidence['of_rank']}: " if "of_rank" in finding.evidence else ""
        message += finding.message
        places = [str(value) for name, value in finding.evidence.items() if name.startswith("at_")]
        gain = finding_gain(finding, said)
        said |= {refusal_of(finding)} if gain else set()
        categories = _CATEGORIES_OF.get(finding.rule, ())
        rows.append(
            TraceAdvice(finding.severity, message, finding.advice, gain, finding.strategies, tuple(places), categories)
        )
    return rows


def get_memory_classes(memory: MemoryStats) -> str:
    """Name the classes of tensors that hold memory at its peak, the largest first."""
    held = sorted((one for one in memory.classes if one.at_peak_bytes), key=lambda one: -one.at_peak_bytes)
    total = units.memory(sum(one.at_peak_bytes for one in held))
    return f"peak memory of {memory.device}, {total}: " + ", ".join(
        f"{one.name} {units.memory(one.at_peak_bytes)}" for one in held
    )


def _named_by_headline(analysis: TraceAnalysis) -> set[str]:
    """Return the names of the rules that explain the bottleneck in the headline, if that is a wait; else an empty
    set.
    """
    times = mean_step_ns(analysis)
    waits = WAITS.get(bottleneck(times), ())
    if Category.COMMUNICATION in waits and get_late_ns(analysis) > times.get(Category.COMMUNICATION.value, 0.0) / 2:
        return {"rank_skew"}
    if Category.HOST in waits and _stalled_ns(analysis) > times.get(Category.HOST.value, 0.0) / 2:
        return {"rank_skew"} if _comes_late(analysis) else {"host_stall"}
    return {rule.name for rule in RULES if set(rule.categories) & set(waits)}


def all_breakdowns(analysis: TraceAnalysis) -> list[Breakdown]:
    return [breakdown for rank in analysis.ranks for breakdown in rank.breakdowns]


def main_breakdowns(analysis: TraceAnalysis) -> list[Breakdown]:
    """Return for each rank the breakdown of the device that computes most.

    All devices of one process share its steps, so their mean would describe none of them: one that waits half of
    the time beside one that computes all of it would look like a process that waits a quarter.
    """
    return [busiest(rank.breakdowns) for rank in analysis.ranks]


def mean_step_ns(analysis: TraceAnalysis) -> dict[str, float]:
    """Return nanoseconds per step by category, averaged over ranks; the categories sum to the mean step."""
    steps = [trusted_step_ns(b) for b in main_breakdowns(analysis)]
    names = [info.category.value for info in theme.categories_in_order()]
    means = {name: sum(step.get(name, 0.0) for step in steps) / len(steps) for name in names}
    return {name: value for name, value in means.items() if value > 0}


def trusted_step_ns(breakdown: Breakdown) -> dict[str, float]:
    """Return nanoseconds per step by category. For a bad capture, all time without recorded activity counts as
    `unknown`.
    """
    times = breakdown.per_step_ns
    if not breakdown.quality.problems or breakdown.device == "cpu":
        return times
    known = {n: v for n, v in times.items() if n not in _IDLE}
    return {**known, Category.UNKNOWN.value: sum(times.values()) - sum(known.values())}


def _frame(rows: Sequence[Any], columns: Sequence[str]) -> pd.DataFrame:
    """Return the rows as a data frame. pandas is imported here because only pages need it, and the import takes longer
    than reading a small trace.
    """
    import pandas as pd

    return pd.DataFrame(rows, columns=list(columns))


def breakdown_rows(analysis: TraceAnalysis) -> list[Row]:
    """Return one row for each category that takes time, the longest first: `category`, `group`, `title`, `time_ns`,
    `share`.
    """
    times = mean_step_ns(analysis)
    total = sum(times.values())
    return [
        {
            "category": name,
            "group": theme.category_group(name),
            "title": theme.category_title(name),
            "time_ns": value,
            "share": value / total,
        }
        for name, value in sorted(times.items(), key=lambda item: -item[1])
    ]


def get_trace_breakdown_info(analysis: TraceAnalysis) -> pd.DataFrame:
    """Return `breakdown_rows` as a data frame."""
    return _frame(breakdown_rows(analysis), ("category", "group", "title", "time_ns", "share"))


def phase_rows(analysis: TraceAnalysis) -> list[Row]:
    """Return the computing phases of a step: `phase`, `time_ns` per step, `share` of the step.

    Where the breakdown is rescaled, phases are scaled as its compute is, so that they still sum to it.
    """
    breakdowns = [b for b in main_breakdowns(analysis) if b.phases]
    step_ns = sum(sum(b.per_step_ns.values()) for b in breakdowns) / max(1, len(breakdowns))
    rows: list[Row] = []
    for phase in dict.fromkeys(name for b in breakdowns for name in b.phases):
        time_ns = sum(b.phases.get(phase, 0) * _compute_scale(b) for b in breakdowns) / len(breakdowns)
        if time_ns > 0:
            rows.append({"phase": phase, "time_ns": time_ns, "share": time_ns / step_ns})
    return rows


def get_phases_info(analysis: TraceAnalysis) -> pd.DataFrame:
    """Return `phase_rows` as a data frame."""
    return _frame(phase_rows(analysis), ("phase", "time_ns", "share"))


def _compute_scale(breakdown: Breakdown) -> float:
    """Return the ratio of compute time per step, as the breakdown states it, to the compute time summed over all
    profiled steps.
    """
    profiled = sum(breakdown.categories.get(category, 0) for category in COMPUTING)
    return sum(breakdown.per_step_ns.get(category, 0.0) for category in COMPUTING) / max(1, profiled)


def get_overlapped_info(analysis: TraceAnalysis) -> dict[str, float]:
    """Return the time that compute hides, by category, in nanoseconds per profiled step, averaged over ranks."""
    breakdowns = main_breakdowns(analysis)
    names = dict.fromkeys(name for b in breakdowns for name in b.overlapped)
    means = {n: sum(b.overlapped.get(n, 0) / b.num_steps for b in breakdowns) / len(breakdowns) for n in names}
    return {name: value for name, value in means.items() if value > 0}


def get_late_ns(analysis: TraceAnalysis) -> float:
    """Return the time of exposed communication in which ranks wait for a late rank, in nanoseconds per step, averaged
    over ranks.
    """
    waits = {wait.rank: wait for wait in analysis.waits}
    parts = [
        late_part(waits.get(b.rank), b) * trusted_step_ns(b).get(Category.COMMUNICATION.value, 0.0)
        for b in main_breakdowns(analysis)
    ]
    return sum(parts) / len(parts)


def is_rescaled(analysis: TraceAnalysis) -> bool:
    """Say whether the breakdown is rescaled to steps without the profiler; the durations of single steps stay as
    profiled.
    """
    return any(b.rescaled for b in main_breakdowns(analysis))


def get_steps_info(analysis: TraceAnalysis, top: int | None = None) -> pd.DataFrame:
    """Return one row per step and category for the first `top` steps, as profiled: `device` (with its rank), `step`,
    `category`, `ms`.
    """
    steps = ((b, number, step) for b in all_breakdowns(analysis) for number, step in enumerate(b.steps, 1))
    rows = [
        (device_label(analysis, b), number, name, value / 1e6)
        for b, number, step in itertools.islice(steps, top)
        for name, value in step.items()
    ]
    return _frame(rows, ["device", "step", "category", "ms"])


def device_label(analysis: TraceAnalysis, of: Breakdown | Timeline) -> str:
    """Return the name of the device, with its rank where there are several."""
    return f"rank {of.rank} {of.device}" if len(analysis.ranks) > 1 else of.device


_GROUP_OF_SHARE = {"compute": "compute", "communication": "communication", "input": "input/output", "gaps": "gaps"}
"""Names of the columns with shares of the step, each with the group of categories that it covers."""


def rank_rows(analysis: TraceAnalysis) -> list[Row]:
    """Return one row per rank: its step time, the share of each group of categories in the step, its wait for other
    ranks, and how often it was the last to arrive.

    `straggler`: the others wait for this rank more than it waits for them, by a share of the step; none where a capture
    cannot be trusted.
    """
    waits = {wait.rank: wait for wait in analysis.waits}
    ordered = sorted(_wait_per_step(analysis, wait) for wait in analysis.waits)
    median = ordered[len(ordered) // 2] if ordered else 0.0
    trusted = not any(b.quality.problems for b in all_breakdowns(analysis))
    rows: list[Row] = []
    for rank in analysis.ranks:
        for b in rank.breakdowns:
            times = trusted_step_ns(b)
            step_ns = sum(times.values())
            shares = {
                name: sum(v for n, v in times.items() if theme.category_group(n) == group) / step_ns
                for name, group in _GROUP_OF_SHARE.items()
            }
            wait = waits.get(rank.rank)
            wait_ns = _wait_per_step(analysis, wait) if wait else None
            straggler = trusted and wait_ns is not None and median - wait_ns > STANDS_OUT * step_ns
            late = wait.late_share if wait else None
            rows.append(
                {
                    "rank": rank.rank,
                    "device": b.device,
                    "num_steps": b.num_steps,
                    "step_ns": step_ns,
                    **shares,
                    "wait_ns": wait_ns,
                    "late_share": late,
                    "straggler": straggler,
                }
            )
    return rows


def get_ranks_info(analysis: TraceAnalysis) -> pd.DataFrame:
    """Return `rank_rows` as a data frame."""
    columns = ("rank", "device", "num_steps", "step_ns", *_GROUP_OF_SHARE, "wait_ns", "late_share", "straggler")
    return _frame(rank_rows(analysis), columns)


def _wait_per_step(analysis: TraceAnalysis, wait: RankWait) -> float:
    """Return a rank's wait per step, averaged over the steps in which its collectives were compared with those of other
    ranks.
    """
    num_steps = next((r.breakdowns[0].num_steps for r in analysis.ranks if r.rank == wait.rank), 1)
    return wait.wait_ns / (num_steps * wait.step_share)


def get_gaps_info(analysis: TraceAnalysis) -> pd.DataFrame:
    """Return the gaps by length: `device`, `length`, `count` and `ms` per step."""
    rows = []
    for rank in analysis.ranks:
        for b in rank.breakdowns:
            stats = rank.gaps.get(b.device)
            for length, count in stats.histogram.items() if stats else ():
                time_ms = stats.time_ns.get(length, 0) / 1e6 / b.num_steps if stats else 0.0
                rows.append((device_label(analysis, b), length, count / b.num_steps, time_ms))
    return _frame(rows, ["device", "length", "count", "ms"])


def variation_rows(analysis: TraceAnalysis) -> list[Row]:
    """Return the variation of the profiled steps: one row per device with its shortest, median and longest step."""
    rows: list[Row] = []
    for rank in analysis.ranks:
        for b in rank.breakdowns:
            lengths = [sum(step.values()) for step in b.steps]
            if len(lengths) > 1:
                rows.append(
                    {
                        "device": device_label(analysis, b),
                        "num_steps": len(lengths),
                        "min_ns": min(lengths),
                        "median_ns": statistics.median(lengths),
                        "max_ns": max(lengths),
                        "cv": rank.step_time_cv,
                    }
                )
    return rows


def get_variation_info(analysis: TraceAnalysis) -> pd.DataFrame:
    """Return `variation_rows` as a data frame."""
    return _frame(variation_rows(analysis), ("device", "num_steps", "min_ns", "median_ns", "max_ns", "cv"))


def _unique(values: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(values))
