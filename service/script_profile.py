"""Profile of an unmodified training script: what was recognised, and the breakdown of its step."""

from __future__ import annotations

import gzip
import shutil
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from steptune.dashboards import units
from steptune.dashboards.roofline import get_utilisation
from steptune.service.profiling import (
    print_breakdowns,
    print_findings,
    print_head,
    print_memory,
    print_modules,
    print_roofline,
)
from steptune.tuner.costs.categories import bottleneck
from steptune.tuner.errors import ChoiceError
from steptune.tuner.profiling.evidence import busiest
from steptune.tuner.profiling.facts import already_on
from steptune.tuner.profiling.rank_comparison import main_rank
from steptune.tuner.records import Breakdown, Finding, Record, SampleUnit
from steptune.tuner.scripts.launch import Ended, find_script_traces
from steptune.tuner.scripts.recognised import recognised, remarks, remarks_on_processes
from steptune.tuner.scripts.record import ScriptRecord, read_records
from steptune.tuner.scripts.traces import analyse_script
from steptune.tuner.trace_records import MemoryStats, ModuleStats, Roofline


class ScriptProfile(Record):
    """Profile of a command: what it trains, and where the time of its steps goes.

    Attributes:
        status: Exit status of the command; 0 where it was ended because its steps were recorded.
        records: One record for each process that built or trained a model, the recorded ones first.
        refusal: Why there is no profile; empty where there is one.
        units_per_s: Samples a second, of all ranks; None where the batch size is not known.
        step_time_ns: Step time without the profiler, in nanoseconds.
        bottleneck: Bottleneck of the step; "unknown" where the profile cannot be trusted.
        modules: Modules of the straggler, over all recorded steps; the most time first.
        roofline: FLOP of a step of that rank, and the calls far above their floor.
        memory: Memory of that rank by class of tensor.
    """

    command: tuple[str, ...]
    status: int
    records: tuple[ScriptRecord, ...]
    refusal: str = ""
    units_per_s: float | None = None
    step_time_ns: float | None = None
    bottleneck: str = "unknown"
    breakdowns: tuple[Breakdown, ...] = ()
    findings: tuple[Finding, ...] = ()
    already_on: tuple[str, ...] = ()
    modules: tuple[ModuleStats, ...] = ()
    roofline: Roofline | None = None
    memory: tuple[MemoryStats, ...] = ()


def script_profile(command: tuple[str, ...], ended: Ended) -> ScriptProfile:
    """Build the profile of a command that was run with Steptune's hooks enabled."""
    recorded = [record for record in ended.records if record.complete]
    if not recorded or not ended.traces:
        refusal = refusal_of(ended)
        return ScriptProfile(command=command, status=ended.status, records=ended.records, refusal=refusal)
    first = recorded[0]
    unprofiled_ns = round(first.step_time_ns) if first.step_time_ns else None
    analysis = analyse_script(ended.traces, first, unprofiled_ns)
    breakdowns = tuple(breakdown for rank in analysis.ranks for breakdown in rank.breakdowns)
    main = busiest(analysis.ranks[0].breakdowns)
    return ScriptProfile(
        command=command,
        status=ended.status,
        records=ended.records,
        units_per_s=_units_per_s(first),
        step_time_ns=first.step_time_ns or sum(main.per_step_ns.values()),
        bottleneck="unknown" if main.quality.problems else bottleneck(main.per_step_ns),
        breakdowns=breakdowns,
        findings=analysis.findings,
        already_on=already_on(main.facts),
        modules=main_rank(analysis).modules,
        roofline=main_rank(analysis).roofline,
        memory=main_rank(analysis).memory,
    )


def _units_per_s(record: ScriptRecord) -> float | None:
    loader = record.training_loader
    if loader is None or not loader.batch_size or not record.step_time_ns:
        return None
    return loader.batch_size * record.step.num_batches * record.num_ranks * 1e9 / record.step_time_ns


def refusal_of(ended: Ended) -> str:
    """Return the reason why a command that has ended gave no profile."""
    if ended.status:
        return (
            f"the command ended with status {ended.status} before its steps were recorded; its own messages are above"
        )
    if not ended.records:
        return (
            "no Python process of the command created a loader or an optimizer of torch, or ran a backward "
            "pass: nothing was trained. Steptune does not see processes that start with `python -I` or `-E`, "
            "or that run on other machines"
        )
    record = ended.records[0]
    if record.refusal:
        return record.refusal
    if not record.num_backwards:
        return "torch was used, but no process that Steptune sees ran a backward pass: nothing was trained"
    if record.step.optimizers is None:
        return (
            f"no repeating pattern was found in {units.counted(record.num_optimizer_steps, 'optimizer step')} "
            f"and {units.counted(record.num_backwards, 'backward pass', 'backward passes')}: the steps cannot "
            "be told apart"
        )
    least, most = record.num_steps_needed
    if record.num_made > most:
        return (
            f"the script ended after {units.counted(record.num_made, 'step')}, but no {most} consecutive "
            "steps had the same pattern: let it train longer"
        )
    return (
        f"the script ended after {units.counted(record.num_made, 'step')}; a recording needs {least} steps "
        f"if they are long, and up to {most} if they are short: let it train longer"
    )


def print_script_profile(console: Console, profile: ScriptProfile) -> None:
    """Print each recognised item of the script, then the profile, or the reason why there is none."""
    trained = [record for record in profile.records if record.num_backwards]
    if trained:
        print_recognised(console, *trained)
        console.print()
    if profile.refusal:
        console.print(Text("no profile: ", style="bold yellow").append(profile.refusal, style="default not bold"))
        return
    record = profile.records[0]
    assert profile.step_time_ns is not None, "a profile without a refusal must have a step time"
    rate = units.rate(profile.units_per_s, SampleUnit.SAMPLE) if profile.units_per_s else ""
    print_head(
        console,
        profile.breakdowns,
        step_time_ns=profile.step_time_ns,
        rate=rate or f"{units.significant(1e9 / profile.step_time_ns)} steps/s",
        limit=profile.bottleneck,
        hardware=record.device_name,
        already_on=profile.already_on,
        utilisation=get_utilisation([profile.roofline]),
    )
    print_breakdowns(console, profile.breakdowns)
    print_findings(console, profile.findings)
    print_roofline(console, profile.roofline, profile.breakdowns)
    print_modules(console, profile.modules, profile.breakdowns[0].num_steps)
    print_memory(console, profile.memory)


def print_recognised(console: Console, *trained: ScriptRecord) -> None:
    """Print the items recognised in each process that trained, the recorded process first."""
    record = trained[0]
    console.print(Text("recognised", style="dim"))
    table = Table.grid(padding=(0, 2, 0, 0))
    for name in ("mark", "name"):
        table.add_column(name, no_wrap=True)
    table.add_column("text", overflow="fold")
    for item in recognised(record):
        mark, style = ("✓", "") if item.found else ("·", "dim")
        table.add_row(Text(mark, style=style or "green"), Text(item.name, style=style), Text(item.text, style=style))
    for remark in (*remarks(record), *remarks_on_processes(trained)):
        table.add_row(Text("!", style="yellow"), Text("note"), Text(remark, style="yellow"))
    console.print(table)


def print_watched(folder: str) -> None:
    """Print, on standard error, the profile of a process that recorded itself."""
    path = Path(folder)
    ended = Ended(status=0, records=read_records(path), traces=find_script_traces(path))
    print_script_profile(Console(stderr=True, highlight=False), script_profile((), ended))


def keep_trace(traces: Sequence[Path], target: Path) -> tuple[Path, ...]:
    """Copy a trace to a file, compressed if the file's name ends in `.gz`. Traces of further ranks are copied to the
    same folder, with a number in their names.

    Raises:
        ChoiceError: The file cannot be written.
    """
    stem, dot, suffixes = target.name.partition(".")
    kept = []
    for number, trace in enumerate(traces):
        path = target if number == 0 else target.with_name(f"{stem}-{number}{dot}{suffixes}")
        try:
            with trace.open("rb") as source, (gzip.open if path.suffix == ".gz" else open)(path, "wb") as sink:
                shutil.copyfileobj(source, sink)
        except OSError as error:
            raise ChoiceError(f"{path} cannot be written: {error.strerror or error}") from None
        kept.append(path)
    return tuple(kept)
