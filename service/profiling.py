"""Profile of one run of an unchanged workload."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from steptune.dashboards import units
from steptune.dashboards.finding_gain import finding_gain
from steptune.dashboards.roofline import get_roofline_info, get_utilisation
from steptune.dashboards.theme import category_colour, category_title
from steptune.dashboards.trace_info import get_memory_classes, trusted_step_ns
from steptune.service.running import chosen_level, isolated_runner
from steptune.service.settings import Settings
from steptune.service.studies import compressed
from steptune.service.tables import modules_table, roofline_tables
from steptune.tuner.costs.categories import bottleneck
from steptune.tuner.errors import BaselineError
from steptune.tuner.estimates import units_per_s
from steptune.tuner.profiling.diagnosis import diagnose
from steptune.tuner.profiling.evidence import Evidence
from steptune.tuner.profiling.facts import already_on
from steptune.tuner.protocols import ProgressListener
from steptune.tuner.records import (
    BASELINE,
    Breakdown,
    Finding,
    MeasureSettings,
    Purpose,
    Record,
    SampleUnit,
    TrialSpec,
    new_id,
)
from steptune.tuner.search.designer import why_not
from steptune.tuner.strategies.combine import complete_choices, environment_variables
from steptune.tuner.strategies.situations import situation_of
from steptune.tuner.trace_records import MemoryStats, ModuleStats, RankAnalysis, Roofline
from steptune.tuner.trials.analysis_files import read_analysis
from steptune.tuner.trials.study_files import StudyFiles
from steptune.tuner.trials.untrusted import open_below
from steptune.tuner.workloads.reference import format_reference
from steptune.tuner.workloads.zoo import known_reference

BAR_WIDTH = 40
NUM_MODULES = 8
NUM_ABOVE = 4
"""Maximum rows in each table of the operators, kernels or modules with the most time above their roofline minimum."""


class WorkloadProfile(Record):
    """Profile of a workload: its step time, breakdown and findings."""

    workload: str
    hardware: str
    units_per_s: float
    sample_unit: SampleUnit
    step_time_ns: float
    bottleneck: str
    """Bottleneck of the step; "unknown" where the profile cannot be trusted."""
    breakdowns: tuple[Breakdown, ...]
    findings: tuple[Finding, ...]
    already_on: tuple[str, ...] = ()
    """Techniques that the workload already uses."""
    modules: tuple[ModuleStats, ...] = ()
    """Time of each `nn.Module` over all profiled steps, the most time first."""
    roofline: Roofline | None = None
    """FLOP of a step, their share of the device's peak, and the calls that take much longer than their roofline
    minimum.
    """
    memory: tuple[MemoryStats, ...] = ()
    """Memory of each device, by class of tensor."""


def profile_workload(
    workload: str,
    directory: Path,
    *,
    trace: Path | None,
    seed: int,
    device: str | None,
    python: str | None,
    foreign_load: float,
    settings: Settings,
    listener: ProgressListener,
) -> WorkloadProfile:
    """Measure and profile the unchanged workload in a single run.

    Raises:
        BaselineError: The workload could not be measured.
    """
    reference = format_reference(known_reference(workload))
    with isolated_runner(
        workload=reference,
        directory=directory,
        settings=settings,
        level=chosen_level(settings, python=python),
        device=device or "",
        seed=seed,
        listener=listener,
        python=python,
    ) as runner:
        environment, facts = runner.describe(), runner.inspect()
        choices = complete_choices(BASELINE, facts)
        spec = TrialSpec(
            trial_id=new_id(),
            workload=reference,
            candidate=BASELINE,
            choices=choices,
            study_directory=str(directory),
            device=environment.hardware.device_kind,
            seed=seed,
            guard=False,
            keep_trace=trace is not None,
            environment_variables=environment_variables(choices),
        )
        measuring = MeasureSettings(cap_s=5.0, foreign_cpu_share=foreign_load)
        [result] = runner.run([spec], [Purpose.BASELINE], measuring, new_id(), listener)
    if not result.ok or not result.breakdowns:
        raise BaselineError(f"the workload could not be profiled: {why_not(result)}")
    if trace is not None:
        kept = StudyFiles(directory).trace(spec.trial_id)
        _keep(directory, kept, trace)
    situation = situation_of(result, facts, environment, choices)
    assert situation is not None, "situation_of() must not return None for a result with breakdowns"
    evidence = Evidence(situation=situation, analysis=_analysis_of(directory, spec.trial_id))
    return WorkloadProfile(
        workload=reference,
        hardware=environment.hardware.label,
        units_per_s=units_per_s(result),
        sample_unit=facts.sample_unit,
        step_time_ns=situation.step_ns,
        bottleneck="unknown" if situation.breakdown.quality.problems else bottleneck(situation.breakdown.per_step_ns),
        breakdowns=result.breakdowns,
        findings=diagnose(evidence),
        already_on=already_on(evidence.facts),
        modules=evidence.analysis.modules if evidence.analysis is not None else (),
        roofline=evidence.analysis.roofline if evidence.analysis is not None else None,
        memory=evidence.analysis.memory if evidence.analysis is not None else (),
    )


def _analysis_of(directory: Path, trial_id: str) -> RankAnalysis | None:
    """Read the analysis that a trial wrote; user code may have replaced it with anything."""
    try:
        with open_below(directory, StudyFiles(directory).analysis(trial_id)) as file:
            first = next(read_analysis(file))
    except (OSError, ValueError, StopIteration):
        return None
    return first if isinstance(first, RankAnalysis) else None


def _keep(directory: Path, kept: Path, trace: Path) -> None:
    if trace.suffix == ".gz":
        with compressed(directory, kept) as packed:
            shutil.copyfile(packed, trace)
        return
    with open_below(directory, kept) as source, trace.open("wb") as sink:
        shutil.copyfileobj(source, sink)


def print_profile(console: Console, profile: WorkloadProfile) -> None:
    """Print whether the profile is trusted, the verdict, the breakdown as bars, then the advice."""
    print_head(
        console,
        profile.breakdowns,
        step_time_ns=profile.step_time_ns,
        rate=units.rate(profile.units_per_s, profile.sample_unit),
        limit=profile.bottleneck,
        hardware=profile.hardware,
        already_on=profile.already_on,
        utilisation=get_utilisation([profile.roofline]),
    )
    print_breakdowns(console, profile.breakdowns)
    print_findings(console, profile.findings)
    print_roofline(console, profile.roofline, profile.breakdowns)
    print_modules(console, profile.modules, profile.breakdowns[0].num_steps)
    print_memory(console, profile.memory)


def print_head(
    console: Console,
    breakdowns: Sequence[Breakdown],
    *,
    step_time_ns: float,
    rate: str,
    limit: str,
    hardware: str,
    already_on: Sequence[str],
    utilisation: str,
) -> None:
    """Print whether the profile is trusted, the time of a step, and its bottleneck."""
    problems = list(dict.fromkeys(problem for b in breakdowns for problem in b.quality.problems))
    step = units.milliseconds(step_time_ns / 1e6)
    if problems:
        console.print(Text(f"the profile cannot be trusted: {'; '.join(problems)}", style="yellow"))
        console.print(Text(f"{step} a step, {rate}, on {hardware}; no verdict on the bottleneck", style="bold"))
    else:
        events = sum(b.quality.num_events for b in breakdowns)
        console.print(Text(f"profile good: {units.counted(events, 'event')}", style="dim"))
        console.print(
            Text(f"{step} a step, {rate}", style="bold")
            .append("; limited by ", style="not bold")
            .append(limit)
            .append(f", on {hardware}", style="not bold")
        )
        if utilisation:
            console.print(Text(utilisation))
    for note in dict.fromkeys(note for b in breakdowns for note in b.quality.notes):
        console.print(Text(f"note: {note}", style="dim"))
    if already_on:
        console.print(Text("already on: ", style="dim").append(", ".join(already_on), style="not dim"))
    console.print()


def print_breakdowns(console: Console, breakdowns: Sequence[Breakdown]) -> None:
    """Print a step's breakdown as bars: a table for each device."""
    several = len(breakdowns) > 1
    ranks = len({breakdown.rank for breakdown in breakdowns}) > 1
    for breakdown in breakdowns:
        name = f"rank {breakdown.rank}, {breakdown.device}" if ranks else breakdown.device
        console.print(_bars(breakdown, name if several else None))
    console.print()


def print_roofline(console: Console, roofline: Roofline | None, breakdowns: Sequence[Breakdown]) -> None:
    """Print the operators, kernels and modules with the most time above their roofline minimum."""
    info = get_roofline_info(roofline, breakdowns, NUM_ABOVE)
    if info is not None:
        console.print()
        for part in roofline_tables(info, ""):
            console.print(part)


def print_modules(console: Console, modules: Sequence[ModuleStats], num_steps: int) -> None:
    """Print the modules that take most of a step."""
    if modules:
        console.print()
        console.print(modules_table(modules[:NUM_MODULES], num_steps, "Modules, including their submodules"))


def print_memory(console: Console, memory: Sequence[MemoryStats]) -> None:
    """Print the classes of tensors that hold a device's memory at its peak."""
    known = [get_memory_classes(stats) for stats in memory if stats.classes]
    if known:
        console.print()
        console.print(Text("Memory", style="bold"))
        for line in known:
            console.print(line)


def print_findings(console: Console, findings: Sequence[Finding]) -> None:
    """Print the findings, with their advice."""
    for finding in findings:
        console.print(Text(finding.message, style="bold"))
        console.print(Padding(Text(_advice(finding), style="dim"), (0, 0, 0, 2), expand=False))
    if not findings:
        console.print("no findings: no category takes an unusually large share of the step", style="dim")


def _bars(breakdown: Breakdown, title: str | None) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim", title=title)
    for name in ("step breakdown", "time", "share", ""):
        number = name in ("time", "share")
        table.add_column(name, justify="right" if number else "left", no_wrap=number)
    times = trusted_step_ns(breakdown)
    total = sum(times.values())
    for category, value in sorted(times.items(), key=lambda item: -item[1]):
        if value > 0:
            bar = Text("█" * max(1, round(value / total * BAR_WIDTH)), style=category_colour(category))
            table.add_row(category_title(category), units.milliseconds(value / 1e6), units.percent(value / total), bar)
    return table


def _advice(finding: Finding) -> str:
    strategies = f" ({', '.join(finding.strategies)})" if finding.strategies else ""
    gain = finding_gain(finding)
    return f"{finding.advice}{strategies}{f'; gain: {gain}' if gain else ''}"
