"""Summary of a trace on a terminal: first the verdict, then the evidence."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from steptune.dashboards import units
from steptune.dashboards.rank_groups import MOST_ROWS, grouped_ranks, grouped_variation
from steptune.dashboards.roofline import get_roofline_info
from steptune.dashboards.theme import category_colour, category_title
from steptune.dashboards.trace_info import (
    Row,
    TraceAdvice,
    breakdown_rows,
    get_findings_info,
    get_late_ns,
    get_memory_classes,
    get_overlapped_info,
    get_trace_headline,
    is_rescaled,
    phase_rows,
    rank_rows,
    variation_rows,
)
from steptune.service.tables import modules_table, plain_table, roofline_tables
from steptune.tuner.profiling.process_groups import hosts_of, reach
from steptune.tuner.profiling.rank_comparison import main_rank
from steptune.tuner.records import CollectiveStats
from steptune.tuner.trace_records import (
    Comparison,
    Difference,
    Gap,
    GapDifference,
    GapStats,
    KernelDifference,
    ModuleDifference,
    ProcessGroup,
    QueueStats,
    RankAnalysis,
    Synchronisation,
    TraceAnalysis,
)

if TYPE_CHECKING:
    import pandas as pd

BAR_WIDTH = 24
SMALL_SHARE = 0.005
"""Minimum share of the step at which a category has its own row; categories with smaller shares are summed in one row.
"""
NUM_GAPS = 3
NUM_PLACES = 1
END = "the end of the steps"
_SEVERITY = {"high": "red", "warning": "yellow", "note": "blue"}


def print_analysis(console: Console, analysis: TraceAnalysis, top: int) -> None:
    """Print whether the capture is trusted, the verdict, the advice, the breakdown of the step, and the times that are
    not part of the breakdown's sum.
    """
    headline = get_trace_headline(analysis)
    trust, *notes = headline.quality
    style = "dim" if headline.trusted else "yellow"
    console.print(_hanging(Text("capture  ", style="dim"), Text(trust, style=style)))
    console.print(Text(headline.title, style="bold" if headline.trusted else "bold yellow"))
    if headline.utilisation:
        console.print(Text(headline.utilisation))
    console.print(Text(headline.what, style="dim"))
    if headline.already_on:
        console.print(_hanging(Text("already on: ", style="dim"), Text(headline.already_on)))
    for line in notes:
        console.print(_hanging(Text("note: ", style="dim"), Text(line, style="dim")))
    console.print()
    console.print(_findings(get_findings_info(analysis), nothing_stands_out=headline.nothing_stands_out))
    console.print(_breakdown(analysis))
    if main_rank(analysis).what_ifs:
        console.print()
        console.print(_what_ifs(main_rank(analysis)))
    for part in _details(analysis, main_rank(analysis), top):
        console.print()
        console.print(part)


def _hanging(mark: Text, text: Text) -> RenderableType:
    grid = Table.grid()
    grid.add_column(no_wrap=True)
    grid.add_column()
    grid.add_row(mark, text)
    return grid


def _findings(findings: Sequence[TraceAdvice], *, nothing_stands_out: bool) -> RenderableType:
    """Return the advice, the largest potential gain first."""
    lines: list[RenderableType] = []
    for finding in findings:
        mark = Text("! " if finding.severity != "note" else "· ", style=_SEVERITY.get(finding.severity, ""))
        lines.append(_hanging(mark, Text(finding.message, style="bold")))
        advice = Text(finding.advice)
        advice.append(f"; gain: {finding.gain}" if finding.gain else "")
        advice.append(f" ({', '.join(finding.strategies)})" if finding.strategies else "", style="dim")
        lines.append(Padding(advice, (0, 0, 0, 2), expand=False))
        for place in finding.places[:NUM_PLACES]:
            text = Text(units.place_name(place), style="dim", no_wrap=True, overflow="ellipsis")
            lines.append(Padding(text, (0, 0, 0, 4), expand=False))
    if nothing_stands_out:
        lines.append(Text("no findings: no category takes an unusually large share of the step", style="dim"))
    return Group(*lines, *([Text()] if lines else []))


def _breakdown(analysis: TraceAnalysis) -> RenderableType:
    table = plain_table("step breakdown", "per step", "share", "")
    for column in table.columns[1:]:
        column.no_wrap, column.justify = True, "right"
    table.columns[3].justify = "left"
    info = breakdown_rows(analysis)
    small = [row for row in info if row["share"] < SMALL_SHARE and row["category"] != "unknown"]
    hidden = small if len(small) > 1 else []
    longest = info[0]["share"]
    for row in [row for row in info if row not in hidden]:
        width = max(1, round(row["share"] / longest * BAR_WIDTH))
        bar = Text("█" * width, style=category_colour(row["category"]))
        table.add_row(row["title"], units.short_time(row["time_ns"]), units.percent(row["share"]), bar)
    if hidden:
        time_ns, share = (sum(row[name] for row in hidden) for name in ("time_ns", "share"))
        table.add_row(
            Text(f"{len(hidden)} more", style="dim"), units.short_time(time_ns), units.percent(share), Text("")
        )
    return Group(table, *_beside(analysis))


def _beside(analysis: TraceAnalysis) -> Iterable[RenderableType]:
    """Yield the times that are not part of the sum of the step's breakdown, such as the phases of compute, and work
    that overlaps with compute.
    """
    phases = [
        f"{row['phase']} {units.short_time(row['time_ns'])} ({units.percent(row['share'])})"
        for row in phase_rows(analysis)
    ]
    if phases:
        yield _hanging(Text("compute by phase: ", style="dim"), Text(", ".join(phases)))
    late_ns = get_late_ns(analysis)
    if late_ns > 0:
        late = f"{units.short_time(late_ns)} is waiting for a late rank, not network time"
        yield _hanging(Text("of exposed communication: ", style="dim"), Text(late))
    parts = [
        f"{category_title(name).removeprefix('exposed ')} {units.short_time(value)}"
        for name, value in get_overlapped_info(analysis).items()
    ]
    if parts:
        beside = ", as profiled" if is_rescaled(analysis) else ""
        yield _hanging(
            Text(f"hidden by compute, not included in the sum{beside}: ", style="dim"), Text(", ".join(parts))
        )


def _what_ifs(rank: RankAnalysis) -> RenderableType:
    table = plain_table("step time (lower bound, unless replayed)", "if", "gain")
    for column in (table.columns[0], table.columns[2]):
        column.no_wrap, column.justify = True, "right"
    for one in rank.what_ifs:
        how = " (replayed)" if one.replayed else ""
        table.add_row(units.short_time(one.step_time_ns), one.scenario + how, units.ratio(one.gain))
    return table


def _details(analysis: TraceAnalysis, rank: RankAnalysis, top: int) -> Iterable[RenderableType]:
    """Yield the details of one rank: the straggler, if there are several ranks."""
    several = len(analysis.ranks) > 1
    if several:
        yield _ranks(analysis)
    of = f" of rank {rank.rank}" if several else ""
    profiled = ", as profiled" if is_rescaled(analysis) else ""
    over = f", over its {len(rank.breakdowns)} devices" if len(rank.breakdowns) > 1 else ""
    num_steps = rank.breakdowns[0].num_steps
    for device, stats in rank.gaps.items():
        if stats.count:
            yield _gaps(device, stats, num_steps, rank.queues.get(device, ()), of + profiled)
    yield from _work(rank, num_steps, top, of, over, profiled)
    collectives = analysis.collectives or rank.collectives
    if collectives:
        yield _collectives(collectives, [group for one in analysis.ranks for group in one.groups], top)
    if rank.memory:
        yield _memory(rank, of)
    variation = _few(variation_rows(analysis), grouped_variation)
    if variation:
        yield _variation(variation)


def _work(rank: RankAnalysis, num_steps: int, top: int, of: str, over: str, profiled: str) -> Iterable[RenderableType]:
    """Yield tables of the host's waits, then of kernels, operators and modules."""
    if rank.synchronisations:
        yield _synchronisations(rank.synchronisations, of)
    if rank.kernels:
        yield _kernels(rank, num_steps, top, of + over)
    if rank.operators:
        yield _operators(rank, num_steps, top, of + over + profiled)
    roofline = get_roofline_info(rank.roofline, rank.breakdowns, top)
    if roofline is not None:
        yield Group(*roofline_tables(roofline, of + over + profiled))
    if rank.modules:
        title = f"Modules{of}{over}{profiled}, with their submodules"
        yield modules_table(rank.modules[:top], num_steps, title)


def _few(rows: list[Row], grouped: Callable[[pd.DataFrame], pd.DataFrame]) -> list[Row]:
    """Return the rows of a table of ranks; if there are many, return one row per group of ranks instead. Only the
    grouping loads pandas.
    """
    if len(rows) <= MOST_ROWS:
        return rows
    import pandas as pd

    return [{str(name): value for name, value in row.items()} for row in grouped(pd.DataFrame(rows)).to_dict("records")]


def _numbers(*names: str, title: str) -> Table:
    """Return a table with columns of figures, then one text column that takes the remaining width."""
    table = plain_table(*names, title=title)
    for column in table.columns[:-1]:
        column.no_wrap, column.justify = True, "right"
    return table


def _one_line(text: str) -> Text:
    """Return a text that is shortened where it does not fit, so that the numbers in the same row are shown in full."""
    return Text(text, no_wrap=True, overflow="ellipsis")


def _ranks(analysis: TraceAnalysis) -> RenderableType:
    table = _numbers("rank", "step", "compute", "comm.", "in/out", "gaps", "waits", "comes last", "", title="Ranks")
    for row in _few(rank_rows(analysis), grouped_ranks):
        waits = "" if row["wait_ns"] is None or math.isnan(row["wait_ns"]) else units.short_time(row["wait_ns"])
        late = "" if row["late_share"] is None or math.isnan(row["late_share"]) else units.percent(row["late_share"])
        shares = (units.percent(row[name]) for name in ("compute", "communication", "input", "gaps"))
        said = Text("straggler", style="yellow") if row["straggler"] else Text("")
        table.add_row(str(row["rank"]), units.short_time(row["step_ns"]), *shares, waits, late, said)
    return table


def _gaps(device: str, stats: GapStats, num_steps: int, queues: Sequence[QueueStats], of: str) -> RenderableType:
    times = Text(
        f"{units.counted(round(stats.count / num_steps), 'gap')} and {units.short_time(stats.total_ns / num_steps)} "
        f"a step; median {units.short_time(stats.median_ns)}, 99 % below {units.short_time(stats.p99_ns)}"
    )
    lines: list[RenderableType] = [Text(f"Gaps on {device}{of}", style="bold"), times]
    by_length = ", ".join(
        f"{length} {units.percent(time / stats.total_ns)}"
        for length, time in stats.time_ns.items()
        if time >= 0.005 * stats.total_ns
    )
    lines.append(Text(f"time in gaps by length: {by_length}".replace(" us", " µs"), style="dim"))
    busiest = max(queues, key=lambda queue: queue.num_launches, default=None)
    if busiest is not None:
        lines.append(
            Text(
                f"launch queue of stream {busiest.stream}: {units.significant(busiest.mean_depth, 2)} operations on "
                f"average, empty at {units.percent(busiest.empty_share)} of the launches, median delay from call to "
                f"start {units.short_time(busiest.median_delay_ns)}",
                style="dim",
            )
        )
    if stats.sites:
        table = _numbers("per step", "gaps", "cause, and the kernel that ended them", title="")
        table.title = None
        for site in stats.sites[:NUM_GAPS]:
            ended = units.kernel_name(site.kernel_after) or END
            cause = _one_line(f"{category_title(site.category)}, until {ended}")
            table.add_row(units.short_time(site.total_ns / num_steps), _count(site.count / num_steps), cause)
        lines.append(table)
    if stats.longest:
        lines.append(_hanging(Text("longest: ", style="dim"), _longest_gap(stats.longest[0])))
    return Group(*lines)


def _longest_gap(gap: Gap) -> Text:
    ends = (gap.operator_after or units.kernel_name(gap.kernel_after) or END).removeprefix("the ")
    text = Text(f"{units.short_time(gap.length_ns)} of {category_title(gap.category)}")
    before = gap.operator_before or units.kernel_name(gap.kernel_before)
    text.append(f", between {before} and {ends}" if before else f", before {ends}")
    return text.append(f"  {gap.source}" if gap.source else "", style="dim")


def _synchronisations(waits: Sequence[Synchronisation], of: str) -> RenderableType:
    table = _numbers("costs", "a step", "waits", "where the host waits for the device", title=f"Synchronisations{of}")
    for one in waits:
        costs = "" if one.saved_share is None else units.percent(one.saved_share)
        name = _one_line(one.call)
        for place in (one.source, one.module):
            name.append(f"  {place}" if place else "", style="dim")
        table.add_row(costs, _count(one.count / one.num_steps), units.short_time(one.wait_ns / one.num_steps), name)
    return table


def _kernels(rank: RankAnalysis, num_steps: int, top: int, of: str) -> RenderableType:
    table = _numbers("per step", "share", "runs", "mean", "kernel", title=f"Kernels{of}")
    for kernel in rank.kernels[:top]:
        name = _one_line("").append("■ ", style=category_colour(kernel.category)).append(units.kernel_name(kernel.name))
        table.add_row(
            units.short_time(kernel.total_ns / num_steps),
            units.percent(kernel.share),
            _count(kernel.count / num_steps),
            units.short_time(kernel.mean_ns),
            name,
        )
    if rank.tensor_core_share is None:
        return table
    return Group(
        table,
        Text(
            f"tensor cores: {units.percent(rank.tensor_core_share)} of the time of matmuls and convolutions",
            style="dim",
        ),
    )


def _operators(rank: RankAnalysis, num_steps: int, top: int, of: str) -> RenderableType:
    on_device = any(breakdown.device != "cpu" for breakdown in rank.breakdowns)
    table = _numbers("device" if on_device else "", "host", "calls", "", "operator", title=f"Operators{of}")
    for operator in rank.operators[:top]:
        rates = []
        if operator.flops_per_s:
            rates.append(units.per_second(operator.flops_per_s, "FLOP"))
        elif operator.bytes_per_s:
            rates.append(units.per_second(operator.bytes_per_s, "B"))
        name = _one_line(operator.name).append(f" {operator.shapes}" if operator.shapes else "", style="dim")
        for place in (operator.source, operator.module):
            name.append(f"  {place}" if place else "", style="dim")
        table.add_row(
            units.short_time(operator.device_ns / num_steps) if on_device else "",
            units.short_time(operator.host_ns / num_steps),
            _count(operator.count / num_steps),
            " ".join(rates),
            name,
        )
    return table


def _count(per_step: float) -> str:
    return f"{per_step:,.0f}" if per_step >= 10 or per_step == round(per_step) else units.significant(per_step, 2)


def _collectives(collectives: Sequence[CollectiveStats], groups: Sequence[ProcessGroup], top: int) -> RenderableType:
    table = _numbers(
        "total", "exposed", "calls", "size", "latency", "skew", "bus", "collective", title="Collectives, over all steps"
    )
    for c in collectives[:top]:
        where = reach(hosts_of(groups, c.group))
        table.add_row(
            units.short_time(c.total_ns),
            units.short_time(c.exposed_ns),
            str(c.count),
            units.memory(c.message_bytes),
            "" if c.latency_ns is None else units.short_time(c.latency_ns),
            "" if c.skew_ns is None else units.short_time(c.skew_ns),
            "" if c.bus_bytes_per_s is None else units.per_second(c.bus_bytes_per_s, "B"),
            _one_line(f"{' '.join((c.name, c.dtype)).strip()}, {c.group_size} ranks {where}".rstrip()),
        )
    return table


def _memory(rank: RankAnalysis, of: str) -> RenderableType:
    lines = [Text(f"Memory{of}", style="bold")]
    for stats in rank.memory:
        total = f" of {units.memory(stats.total_memory_bytes)}" if stats.total_memory_bytes else ""
        lines.append(
            Text(
                f"{stats.device}: peak of {units.memory(stats.peak_allocated_bytes)} allocated"
                + (f", {units.memory(stats.peak_reserved_bytes)} reserved{total}" if stats.peak_reserved_bytes else "")
            )
        )
        lines += [Text(get_memory_classes(stats), style="dim")] if stats.classes else []
    return Group(*lines)


def _variation(rows: Iterable[Row]) -> RenderableType:
    lines = [Text("Steps", style="bold")]
    for row in rows:
        cv = "" if row["cv"] is None or math.isnan(row["cv"]) else f", deviation {units.percent(row['cv'])}"
        low, middle, high = (units.short_time(row[name]) for name in ("min_ns", "median_ns", "max_ns"))
        lines.append(
            Text(f"{row['device']}: {row['num_steps']} steps of {low} to {high} as profiled, median {middle}{cv}")
        )
    return Group(*lines)


# --- two runs -----------------------------------------------------------------------------------


def print_comparison(console: Console, comparison: Comparison) -> None:
    """Print the change of the step and of its categories, and the kernels and gaps that explain it."""
    console.print(Text(_verdict(comparison), style="bold"))
    if comparison.stated_how:
        interval = f", 95 % interval {units.ratio_interval(comparison.stated)}" if comparison.stated else ""
        console.print(Text(f"speed in the study: {comparison.stated_how}{interval}", style="dim"))
    elif comparison.measured is not None:
        change = _interval(comparison.measured, ", change ")
        console.print(Text(f"measured without the profiler{change}", style="dim"))
    console.print(Text(f"from {comparison.before} ({units.counted(comparison.num_steps[0], 'step')})", style="dim"))
    console.print(Text(f"to   {comparison.after} ({units.counted(comparison.num_steps[1], 'step')})", style="dim"))
    for note in comparison.notes:
        console.print(Text(f"note: {note}", style="yellow"))
    console.print()
    console.print(_changes(comparison))
    for title, rows in (
        ("Kernels", comparison.kernels),
        ("Gaps, by cause and the kernel that ended them", comparison.gaps),
    ):
        if rows:
            console.print()
            console.print(_explaining(rows, title))
    if comparison.modules:
        console.print()
        console.print(_changed_modules(comparison.modules))


def _verdict(comparison: Comparison) -> str:
    step = comparison.measured or comparison.step
    if comparison.measured is None and not comparison.trusted:
        return "no verdict: at least one profile cannot be trusted"
    ratio = step.before_ns / step.after_ns if step.after_ns else math.inf
    verdict = f"{units.ratio(ratio)} as fast: {units.short_time(step.before_ns)} to {units.short_time(step.after_ns)}"
    if step.low_ns is not None and not step.significant:
        verdict += f"; no difference beyond the noise of the {'windows' if comparison.measured else 'steps'}"
    return verdict


def _changes(comparison: Comparison) -> Table:
    """Return a table of the step and its categories, before and after."""
    step = comparison.step
    table = plain_table("per step", "before", "after", "change", "95 % interval")
    for column in table.columns[1:]:
        column.no_wrap, column.justify = True, "right"
    for row in (*comparison.categories, step):
        if row.before_ns or row.after_ns:
            certain = comparison.trusted and (row.significant or row.low_ns is None)
            table.add_row(
                Text("step" if row is step else category_title(row.name), style="bold" if row is step else ""),
                units.short_time(row.before_ns),
                units.short_time(row.after_ns),
                Text(units.short_time_change(row.change_ns), style=_tone(row.change_ns) if certain else "dim"),
                Text(_interval(row), style="dim"),
            )
    return table


def _interval(row: Difference, before: str = "") -> str:
    if row.low_ns is None or row.high_ns is None:
        return ""
    return f"{before}{units.short_time_change(row.low_ns)} to {units.short_time_change(row.high_ns)}"


def _tone(change_ns: float) -> str:
    return "green" if change_ns < 0 else "red" if change_ns > 0 else ""


def _changed_modules(rows: Sequence[ModuleDifference]) -> RenderableType:
    table = plain_table("change", "", title="Modules, without their submodules")
    table.columns[0].no_wrap, table.columns[0].justify = True, "right"
    for row in rows:
        name = _one_line(row.name)
        name.append(f"\n{units.short_time(row.before_ns)} → {units.short_time(row.after_ns)} a step: ", style="dim")
        name.append(row.cause, style="dim")
        table.add_row(Text(units.short_time_change(row.change_ns), style=_tone(row.change_ns)), name)
    return table


def _explaining(rows: Sequence[KernelDifference], title: str) -> RenderableType:
    """Return a table with two lines per row, because the names are too long to share a line with the numbers."""
    table = plain_table("change", "", title=title)
    table.columns[0].no_wrap, table.columns[0].justify = True, "right"
    for row in rows:
        name = _one_line("").append("" if row.state == "changed" else f"{row.state}: ", style="bold")
        name.append(f"{category_title(row.category)}, until " if isinstance(row, GapDifference) else "")
        name.append(units.kernel_name(row.name) or END)
        means = [
            units.short_time(time_ns / count) if count else "–"
            for time_ns, count in ((row.before_ns, row.before_count), (row.after_ns, row.after_count))
        ]
        name.append(
            f"\n{units.short_time(row.before_ns)} → {units.short_time(row.after_ns)} a step, "
            f"{_count(row.before_count)} → {_count(row.after_count)} times, mean {' → '.join(means)}",
            style="dim",
        )
        table.add_row(Text(units.short_time_change(row.change_ns), style=_tone(row.change_ns)), name)
    return table
