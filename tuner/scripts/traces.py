"""Analysis of the steps that were recorded in a script."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from steptune.tuner.profiling.analysis import analyse_traces
from steptune.tuner.profiling.details import DetailsFile
from steptune.tuner.profiling.lanes import MAX_CELLS
from steptune.tuner.profiling.tensor_memory import Block
from steptune.tuner.scripts.record import ScriptRecord
from steptune.tuner.trace_records import RankAnalysis, TraceAnalysis
from steptune.tuner.wording import milliseconds

DRIFT = 0.1
"""Maximum relative difference between the step times before and after the recorded steps. Above it, a note is added,
because gains may be off by as much.
"""


def analyse_script(
    traces: Sequence[Path], record: ScriptRecord | None, unprofiled_ns: int | None, max_cells: int = MAX_CELLS
) -> TraceAnalysis:
    """Analyse the traces of a script's ranks, with a note if their step time without the profiler is uncertain.

    Args:
        record: Record of the first rank; None if there is none.
        unprofiled_ns: Step time without the profiler.
        max_cells: Maximum cells of each lane.
    """
    analysis = analyse_traces(traces, unprofiled_ns, details=details_of_traces(traces), max_cells=max_cells)
    note = timing_note(record) if record is not None else ""
    if not note:
        return analysis
    return msgspec.structs.replace(analysis, ranks=tuple(_with_note(rank, note) for rank in analysis.ranks))


def timing_note(record: ScriptRecord) -> str:
    """Return the reason why the step time measured without the profiler may differ from that of the recorded steps;
    empty if there is none.
    """
    before, after = record.step_time_before_ns, record.step_time_after_ns
    if not before:
        return ""
    if not after:
        return (
            "the step time without the profiler was measured only before the recorded steps, because the script or "
            "its epoch ended soon after them: gains are less certain"
        )
    if abs(after - before) < DRIFT * min(before, after):
        return ""
    return (
        f"without the profiler a step took {milliseconds(before)} before the recorded steps and "
        f"{milliseconds(after)} after them: gains are less certain"
    )


def details_of_traces(traces: Sequence[Path]) -> dict[Path, DetailsFile]:
    """Return the recordings with call stacks, keyed by trace. A trace without one is left out: the script may have
    ended before it was made.
    """
    numbers = {trace: trace.stem.partition("-")[2] for trace in traces}
    return {
        trace: _details_file(trace.with_name(f"details-{number}.json"), trace.with_name(f"blocks-{number}.json"))
        for trace, number in numbers.items()
        if trace.with_name(f"details-{number}.json").exists()
    }


def _details_file(path: Path, blocks: Path) -> DetailsFile:
    found = msgspec.json.decode(blocks.read_bytes(), type=dict[str, list[tuple[str, str, int, int]]])
    return DetailsFile(
        path=path, num_steps=1, blocks_before=_blocks(found["before"]), blocks_after=_blocks(found["after"])
    )


def _blocks(found: Sequence[tuple[str, str, int, int]]) -> tuple[Block, ...]:
    return tuple(
        Block(device=device, kind=kind, address=address, num_bytes=num_bytes)
        for device, kind, address, num_bytes in found
    )


def _with_note(rank: RankAnalysis, note: str) -> RankAnalysis:
    breakdowns = (
        msgspec.structs.replace(
            breakdown, quality=msgspec.structs.replace(breakdown.quality, notes=(*breakdown.quality.notes, note))
        )
        for breakdown in rank.breakdowns
    )
    return msgspec.structs.replace(rank, breakdowns=tuple(breakdowns))
