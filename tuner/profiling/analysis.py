"""Analysis of traces in one call: everything that `steptune analyze` shows.

    from pathlib import Path
    from steptune.tuner.profiling.analysis import analyse_traces

    analysis = analyse_traces([Path("rank0.json.gz"), Path("rank1.json.gz")])

Several traces are read in parallel processes, one file each. These do not import the script that calls this: it needs
no `if __name__ == "__main__":`.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np

from steptune.tuner.profiling.breakdown import breakdown_of
from steptune.tuner.profiling.call_work import group_calls
from steptune.tuner.profiling.capture import Capture, link
from steptune.tuner.profiling.claims import causes_of, claimed
from steptune.tuner.profiling.collectives import CollectiveCalls, collective_calls, collective_stats
from steptune.tuner.profiling.cpu_time import cpu_time
from steptune.tuner.profiling.details import (
    Details,
    DetailsFile,
    joined_lines,
    matched,
    read_details,
    seen_in,
    with_shapes,
)
from steptune.tuner.profiling.device_time import device_time
from steptune.tuner.profiling.diagnosis import BAD_CAPTURE, SUBJECTS, diagnose
from steptune.tuner.profiling.evidence import SEVERITIES, Evidence, busiest
from steptune.tuner.profiling.extra_work import extra_work, with_extra_work
from steptune.tuner.profiling.flame import stack_tree
from steptune.tuner.profiling.gains import by_worth, late_first
from steptune.tuner.profiling.intervals import Ints
from steptune.tuner.profiling.kernel_gaps import gap_stats
from steptune.tuner.profiling.kernels import kernel_stats, tensor_core_share
from steptune.tuner.profiling.lanes import MAX_CELLS, lanes_of
from steptune.tuner.profiling.launch_queue import queue_stats
from steptune.tuner.profiling.memory import memory_stats
from steptune.tuner.profiling.modules import module_stats
from steptune.tuner.profiling.operator_calls import OperatorCalls, device_time_of_operators, operator_calls
from steptune.tuner.profiling.operators import operator_stats
from steptune.tuner.profiling.process_groups import process_groups
from steptune.tuner.profiling.rank_comparison import RankComparison, compare_ranks, late_part, straggler
from steptune.tuner.profiling.rank_findings import diagnose_ranks
from steptune.tuner.profiling.reader import read_trace
from steptune.tuner.profiling.replay.answers import NO_LAUNCHES, of_all_steps, replay, replay_ranks
from steptune.tuner.profiling.replay.graph import Graph, build_graph
from steptune.tuner.profiling.replay.together import with_ranks_together, with_together
from steptune.tuner.profiling.roofline import roofline
from steptune.tuner.profiling.roofline_replay import with_floors
from steptune.tuner.profiling.segments import Segments
from steptune.tuner.profiling.source_lines import SourceLines
from steptune.tuner.profiling.synchronisations import synchronisations
from steptune.tuner.profiling.timeline import timeline
from steptune.tuner.profiling.trace import Trace, TraceError
from steptune.tuner.profiling.what_if import what_ifs
from steptune.tuner.records import Finding, Replay, TrialProfile
from steptune.tuner.trace_records import (
    ExtraWork,
    GapStats,
    QueueStats,
    RankAnalysis,
    StackNode,
    Synchronisation,
    TraceAnalysis,
)

_APART = """
import pickle, sys
path, *arguments = pickle.load(sys.stdin.buffer)
sys.path[:] = path
from steptune.tuner.profiling.analysis import answer_apart
answer_apart(*arguments)
"""
"""Python program that a subprocess runs to read a trace."""


@dataclass(frozen=True, kw_only=True)
class RankResult:
    """Result of a subprocess that reads a trace: without events, so that it is small.

    Attributes:
        calls: Collectives of the device that has the most of them, in wall-clock time.
        graph: Dependency graph of the steps, for a replay with other ranks; None without device work.
    """

    analysis: RankAnalysis
    says_rank: bool
    calls: CollectiveCalls
    graph: Graph | None = None


def analyse_rank(path: Path, unprofiled_step_time_ns: int | None = None, top: int = 20) -> RankAnalysis:
    """Analyse one trace.

    Args:
        unprofiled_step_time_ns: Step time measured without the profiler; the breakdown is rescaled to it.
        top: Maximum number of kernels, operators and gaps to list.

    Raises:
        TraceError: The file is not a trace that can be read.
    """
    return analyse_file(path, unprofiled_step_time_ns, top).analysis


def analyse_traces(
    paths: Sequence[Path],
    unprofiled_step_time_ns: int | None = None,
    top: int = 20,
    details: Mapping[Path, DetailsFile] | None = None,
    max_cells: int = MAX_CELLS,
) -> TraceAnalysis:
    """Analyse the traces of one run, from one rank or several.

    Args:
        details: For each trace, another window of the same steps with call stacks and shapes.
        max_cells: Maximum cells of each lane; with 0 there are no lanes, timelines and stacks.

    Raises:
        TraceError: No file, a file that cannot be read, one rank twice, or ranks of different runs.
    """
    if not paths:
        raise TraceError("no trace was given: give at least one file")
    notes: list[str] = []
    results = _analyse_files(paths, unprofiled_step_time_ns, top, details or {}, max_cells)
    return together(_numbered(paths, results, notes), notes)


def together(results: Sequence[RankResult], notes: Sequence[str] = ()) -> TraceAnalysis:
    """Combine the results of ranks, in their order, into the analysis of one run.

    Args:
        notes: Remarks for the reader on how the results were found.
    """
    if len(results) == 1:
        only = results[0].analysis
        return TraceAnalysis(ranks=(only,), collectives=only.collectives, findings=only.findings)
    missing = _missing_ranks([result.analysis for result in results])
    compared = compare_ranks({result.analysis.rank: result.calls for result in results})
    replayed = _replay_of_ranks(results)
    evidence = _evidence_of_ranks([result.analysis for result in results], compared, replayed)
    ranks = tuple(
        msgspec.structs.replace(result.analysis, findings=diagnose(evidence[result.analysis.rank]))
        for result in results
    )
    found = _findings_of_run(ranks, evidence, compared, replayed)
    if replayed is not None and not replayed.refusal and (causes := causes_of(found, SUBJECTS)):
        replayed = with_ranks_together(replayed, _graphs(results), causes, workers=_have_workers(results))
        evidence = {rank: replace(one, run=replayed) for rank, one in evidence.items()}
    return TraceAnalysis(
        ranks=ranks,
        collectives=compared.collectives,
        waits=compared.waits,
        clock_offsets_ns=compared.offsets_ns,
        findings=claimed(found, list(evidence.values()), SUBJECTS),
        replay=replayed,
        notes=(*notes, *missing, *compared.notes),
    )


def analyse_trace(
    trace: Trace,
    file: str,
    unprofiled_step_time_ns: int | None = None,
    top: int = 20,
    details: Details | None = None,
    max_cells: int = MAX_CELLS,
) -> tuple[RankAnalysis, CollectiveCalls, Graph | None]:
    """Analyse a trace in memory; return its collectives and its graph too, for a comparison with other ranks.

    Args:
        details: Another window of the same steps, with call stacks and shapes.
        max_cells: Maximum cells of each lane; with 0 there are no lanes, timelines and stacks.
    """
    capture = link(trace)
    if capture.steps.span[0] == capture.steps.span[1]:
        raise TraceError(
            f"{file}: the steps have zero length, because no event in them has a duration: record the trace again"
        )
    calls = operator_calls(trace, capture.launches, capture.steps.span)
    source = SourceLines(trace, calls)
    match = None
    if details is not None and not source.modules.paths:
        match = matched(trace, capture.steps, details)
        trace = with_shapes(trace, details, match)
        capture = replace(capture, trace=trace)
        source = joined_lines(trace, calls, capture.steps, details, match)
    tiles: dict[str, Segments] = {}
    gaps: dict[str, GapStats] = {}
    queues: dict[str, tuple[QueueStats, ...]] = {}
    for device in capture.device_numbers:
        name = f"cuda:{device}"
        tiles[name], gaps[name] = _device(capture, device, calls, source, top)
        queues[name] = queue_stats(capture, device)
    numbers: Sequence[int | None] = capture.device_numbers
    if not tiles:
        tiles, numbers = {"cpu": cpu_time(capture)}, [None]
    breakdowns = [breakdown_of(capture, name, tiled, unprofiled_step_time_ns) for name, tiled in tiles.items()]
    graph = build_graph(capture) if capture.device_numbers else None
    groups = group_calls(capture, calls)
    step_ns = sum(busiest(breakdowns).per_step_ns.values())
    against_peaks, floors = roofline(capture, calls, groups, source.modules, step_ns, top)
    extra = extra_work(capture, busiest(breakdowns), _number(busiest(breakdowns).device))
    waits: tuple[Synchronisation, ...] = ()
    if capture.device_numbers:
        workers = breakdowns[0].facts.loader == "workers"
        replayed = _replayed(capture, graph, extra, unprofiled_step_time_ns, workers=workers)
        num_replayed = graph.num_steps if graph is not None else 0
        if graph is not None:
            waits = synchronisations(capture, source, graph, replayed, unprofiled_step_time_ns)
        if graph is not None and floors is not None:
            against_peaks, replayed = with_floors(
                capture, against_peaks, floors, graph, replayed, unprofiled_step_time_ns
            )
        breakdowns = [
            msgspec.structs.replace(breakdown, replay=of_all_steps(replayed, breakdown, num_replayed))
            for breakdown in breakdowns
        ]
    breakdowns = [
        msgspec.structs.replace(breakdown, step_flops=against_peaks.step_flops, mfu=against_peaks.mfu)
        for breakdown in breakdowns
    ]
    by_device = zip(tiles.values(), numbers, strict=True)
    most = max((collective_calls(capture, tiled, number) for tiled, number in by_device), key=len)
    analysis = RankAnalysis(
        file=file,
        rank=trace.rank or 0,
        num_ranks=trace.num_ranks,
        framing=trace.framing,
        num_events=trace.num_events,
        num_lost=trace.num_lost,
        device_names=_device_names(capture),
        breakdowns=tuple(breakdowns),
        timelines=tuple(timeline(capture, tiled, name) for name, tiled in tiles.items()) if max_cells else (),
        lanes=lanes_of(capture, tiles, max_cells) if max_cells else (),
        gaps=gaps,
        queues=queues,
        kernels=kernel_stats(capture, top),
        operators=operator_stats(capture, calls, groups, source, top),
        synchronisations=waits,
        modules=module_stats(capture, calls, groups, source.modules, top),
        stacks=_stacks(capture, calls, details, match) if max_cells else (),
        memory=memory_stats(capture),
        collectives=collective_stats(most),
        groups=process_groups(trace, capture.device_numbers),
        tensor_core_share=tensor_core_share(capture),
        step_time_cv=step_time_cv(capture),
        extra_work=extra,
        what_ifs=what_ifs(busiest(breakdowns)),
        roofline=against_peaks,
        first_step_ns=trace.origin_ns + trace.base_time_ns + capture.steps.span[0],
    )
    if graph is not None:
        analysis = _replayed_together(analysis, graph, unprofiled_step_time_ns)
    return msgspec.structs.replace(analysis, findings=diagnose(Evidence(analysis=analysis))), most, graph


def _device(
    capture: Capture, device: int, calls: OperatorCalls, source: SourceLines, top: int
) -> tuple[Segments, GapStats]:
    """Return the time of a device and the statistics of its gaps, without the gaps themselves, which would take much
    memory.
    """
    segments, found = device_time(capture, device)
    return segments, gap_stats(capture, device, found, calls, source, top)


def _stacks(
    capture: Capture, calls: OperatorCalls, details: Details | None, match: Ints | None
) -> tuple[StackNode, ...]:
    """Return the time by call stack. The stacks are those of the details window if it matches the steps, else those of
    the trace.
    """
    time_ns = device_time_of_operators(capture, calls) if capture.device_numbers else calls.self_ns
    if match is None or details is None:
        return stack_tree(capture.trace, time_ns)
    return stack_tree(details.trace, seen_in(match, time_ns, len(details.trace.host)))


def _replayed_together(analysis: RankAnalysis, graph: Graph, unprofiled_step_time_ns: int | None) -> RankAnalysis:
    """Add to the replay the joint savings of the findings' causes: what each cause saves beyond the causes before
    it.
    """
    breakdown = busiest(analysis.breakdowns)
    causes = causes_of(diagnose(Evidence(analysis=analysis)), SUBJECTS)
    if breakdown.replay is None or breakdown.replay.refusal or not causes:
        return analysis
    workers = breakdown.facts.loader == "workers"
    replay = with_together(breakdown.replay, graph, unprofiled_step_time_ns, causes, workers=workers)
    breakdowns = (
        msgspec.structs.replace(one, replay=replay) if one.replay == breakdown.replay else one
        for one in analysis.breakdowns
    )
    return msgspec.structs.replace(analysis, breakdowns=tuple(breakdowns))


def _number(device: str) -> int | None:
    """Return the number in a device's name; None for a CPU."""
    return None if device == "cpu" else int(device.partition(":")[2])


def _replayed(
    capture: Capture,
    graph: Graph | None,
    extra: ExtraWork | None,
    unprofiled_step_time_ns: int | None,
    *,
    workers: bool,
) -> Replay:
    """Replay the steps without each cause in turn, and without the extra work that only some steps do."""
    if graph is None:
        low, high = capture.steps.span
        return Replay(recorded_ns=round((high - low) / len(capture.steps)), refusal=NO_LAUNCHES)
    found = replay(graph, unprofiled_step_time_ns, workers=workers)
    return with_extra_work(found, graph, extra, len(capture.steps), unprofiled_step_time_ns)


def profile_of(analysis: RankAnalysis, top: int) -> TrialProfile:
    """Return the profile that a trial's result stores with the breakdown: at most `top` rows in each list."""
    gaps = analysis.gaps.get(analysis.breakdowns[0].device)
    return TrialProfile(
        kernels=analysis.kernels[:top],
        gap_sites=gaps.sites[:top] if gaps is not None else (),
        collectives=analysis.collectives,
    )


def without_timelines(analysis: TraceAnalysis) -> TraceAnalysis:
    """Return the analysis without file names and without the data that is kept in separate files."""
    ranks = (msgspec.structs.replace(rank, timelines=(), lanes=(), file="") for rank in analysis.ranks)
    return msgspec.structs.replace(analysis, ranks=tuple(ranks))


def step_time_cv(capture: Capture) -> float | None:
    """Return the coefficient of variation of the step times (sample standard deviation over mean); None for
    fewer than two marked steps.
    """
    lengths = np.diff(capture.steps.boundaries)
    if len(lengths) < 2 or not lengths.any():
        return None
    return float(lengths.std(ddof=1) / lengths.mean())


def _device_names(capture: Capture) -> dict[str, str]:
    """Return the names of the devices with recorded work, if the trace has the names."""
    names = {device.number: device.name for device in capture.trace.devices}
    return {f"cuda:{number}": names[number] for number in capture.device_numbers if names.get(number)}


def analyse_file(
    path: Path,
    unprofiled_step_time_ns: int | None,
    top: int,
    details_file: DetailsFile | None = None,
    max_cells: int = MAX_CELLS,
) -> RankResult:
    """Analyse the trace in one file.

    Args:
        details_file: Another window of the same steps, with call stacks, shapes, and possibly every allocation.
        max_cells: Maximum cells of each lane; with 0 there are no lanes, timelines and stacks.
    """
    trace = read_trace(path)
    details = read_details(details_file) if details_file is not None else None
    analysis, calls, graph = analyse_trace(trace, str(path), unprofiled_step_time_ns, top, details, max_cells)
    if details is not None and details.memory:
        analysis = msgspec.structs.replace(analysis, memory=details.memory)
    wall = trace.origin_ns + trace.base_time_ns
    return RankResult(
        analysis=analysis,
        says_rank=trace.rank is not None,
        calls=calls.shifted(wall),
        graph=graph,
    )


def _analyse_files(
    paths: Sequence[Path],
    unprofiled_step_time_ns: int | None,
    top: int,
    details: Mapping[Path, DetailsFile],
    max_cells: int,
) -> list[RankResult]:
    """Analyse files and return the results in order; with several files and several cores, in parallel processes."""
    num_processes = min(len(paths), len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1)
    questions = [(path, unprofiled_step_time_ns, top, details.get(path), max_cells) for path in paths]
    if num_processes < 2:
        return [analyse_file(*question) for question in questions]
    with ThreadPoolExecutor(num_processes) as pool:
        futures = [pool.submit(_analyse_apart, *question) for question in questions]
        try:
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()


def _analyse_apart(
    path: Path, unprofiled_step_time_ns: int | None, top: int, details: DetailsFile | None, max_cells: int
) -> RankResult:
    """Run `analyse_file` in a separate interpreter.

    Unlike a process spawned by `multiprocessing`, it does not import the caller's main module again: a script that
    analyses its traces needs no `__main__` guard.

    Raises:
        TraceError: As `analyse_file`; or the process was killed, or could not start.
    """
    request = pickle.dumps((sys.path, path, unprofiled_step_time_ns, top, details, max_cells))
    done = subprocess.run([sys.executable, "-c", _APART], input=request, capture_output=True, check=False)
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        cause = ", probably for lack of memory: give fewer traces at once" if name == "SIGKILL" else ""
        raise TraceError(f"the process that read {path} was killed by {name}{cause}")
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise TraceError(f"the process that read {path} exited with status {done.returncode}: {said}")
    result, error = pickle.loads(done.stdout)
    if error is not None:
        raise error
    assert isinstance(result, RankResult)
    return result


def answer_apart(
    path: Path, unprofiled_step_time_ns: int | None, top: int, details: DetailsFile | None, max_cells: int
) -> None:
    """Write the pickled result of a trace, or its error, to standard output: the child side of `_analyse_apart`."""
    answer: tuple[RankResult | None, Exception | None]
    try:
        answer = analyse_file(path, unprofiled_step_time_ns, top, details, max_cells), None
    except Exception as error:
        answer = None, error
    pickle.dump(answer, sys.stdout.buffer)


def _numbered(paths: Sequence[Path], results: Sequence[RankResult], notes: list[str]) -> list[RankResult]:
    """Return the results in the order of ranks. A trace without a rank gets the first free number, in the order of the
    files.
    """
    file_of: dict[int, Path] = {}
    worlds: dict[int, Path] = {}
    for path, result in zip(paths, results, strict=True):
        if not result.says_rank:
            continue
        rank = result.analysis.rank
        if rank in file_of:
            raise TraceError(f"rank {rank} appears in two traces, {file_of[rank]} and {path}: give one trace per rank")
        file_of[rank] = path
        worlds[result.analysis.num_ranks] = path
    if len(worlds) > 1:
        listed = ", ".join(f"{path} has {size} ranks" for size, path in sorted(worlds.items()))
        raise TraceError(f"the traces come from different runs ({listed}): analyse each run separately")
    numbered = []
    for path, result in zip(paths, results, strict=True):
        if result.says_rank or len(results) == 1:
            numbered.append(result)
            continue
        rank = next(number for number in range(len(results)) if number not in file_of)
        file_of[rank] = path
        notes.append(f"{path} does not record its rank: it is treated as rank {rank}")
        numbered.append(of_rank(result, rank))
    return sorted(numbered, key=lambda result: result.analysis.rank)


def of_rank(result: RankResult, rank: int) -> RankResult:
    """Return a result with its rank replaced by a given one."""
    analysis = result.analysis
    breakdowns = tuple(msgspec.structs.replace(breakdown, rank=rank) for breakdown in analysis.breakdowns)
    timelines = tuple(msgspec.structs.replace(timeline, rank=rank) for timeline in analysis.timelines)
    analysis = msgspec.structs.replace(analysis, rank=rank, breakdowns=breakdowns, timelines=timelines)
    return replace(result, analysis=analysis)


def _evidence_of_ranks(
    analyses: Sequence[RankAnalysis], compared: RankComparison, replayed: Replay | None
) -> dict[int, Evidence]:
    """Return the evidence by rank, with exposed communication divided into waits for a late rank and time on the
    network.
    """
    waits = {wait.rank: wait for wait in compared.waits}
    return {
        one.rank: Evidence(
            analysis=one, late_part=late_part(waits.get(one.rank), busiest(one.breakdowns)), run=replayed
        )
        for one in analyses
    }


def _replay_of_ranks(results: Sequence[RankResult]) -> Replay | None:
    """Replay the steps of all ranks together; None unless all of them have a graph."""
    graphs = _graphs(results)
    if len(graphs) < len(results):
        return None
    unprofiled = {result.analysis.breakdowns[0].unprofiled_step_time_ns for result in results}
    longest = max((time for time in unprofiled if time), default=None)
    replayed = replay_ranks(graphs, longest, workers=_have_workers(results))
    for result in results:
        replayed = of_all_steps(replayed, busiest(result.analysis.breakdowns), graphs[result.analysis.rank].num_steps)
    return replayed


def _graphs(results: Sequence[RankResult]) -> dict[int, Graph]:
    return {result.analysis.rank: result.graph for result in results if result.graph is not None}


def _have_workers(results: Sequence[RankResult]) -> bool:
    return any(result.analysis.breakdowns[0].facts.loader == "workers" for result in results)


def _findings_of_run(
    analyses: Sequence[RankAnalysis],
    evidence: Mapping[int, Evidence],
    compared: RankComparison,
    replayed: Replay | None,
) -> list[Finding]:
    """Return one finding per rule, for the rank where it could save most, and the findings that only the traces of
    several ranks show.
    """
    largest: dict[tuple[str, str], Finding] = {}
    for finding in (_of_rank(finding, analysis.rank) for analysis in analyses for finding in analysis.findings):
        # Problems of captures are one rule, but each says another thing.
        key = finding.rule, finding.message if finding.rule == BAD_CAPTURE else ""
        if key not in largest or _weight(finding) > _weight(largest[key]):
            largest[key] = finding
    together: list[Finding] = []
    if not any(one.breakdown.quality.problems for one in evidence.values()):
        together = diagnose_ranks(evidence, compared.waits, compared.collectives, straggler(compared.waits), replayed)
    return late_first(by_worth([*largest.values(), *together]))


def _weight(finding: Finding) -> tuple[float, int]:
    return finding.bound, SEVERITIES.index(finding.severity)


def _of_rank(finding: Finding, rank: int) -> Finding:
    return msgspec.structs.replace(finding, evidence={**finding.evidence, "of_rank": rank})


def _missing_ranks(analyses: Sequence[RankAnalysis]) -> list[str]:
    size = max(analysis.num_ranks for analysis in analyses)
    if size <= len(analyses):
        return []
    return [f"only {len(analyses)} of {size} ranks were given: the rank that the others wait for may be missing"]
