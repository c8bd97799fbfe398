"""Analysis of captures for the command line: what `analyze` and `compare` run.

Nothing here needs the parser of the command line, which takes longer to load than a small trace to read.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from steptune.service.cli.console import errors, output, print_json, say
from steptune.tuner.errors import ChoiceError

if TYPE_CHECKING:
    from steptune.tuner.trace_records import Comparison, TraceAnalysis

PAGE_ROWS = 500
"""Maximum number of rows in each searchable table of an HTML page."""
NUM_COMPARED = 10_000
"""Maximum number of kernels on each side of a comparison: enough for all, because a kernel left out on one side would
seem new or removed.
"""


def show_analysis(
    traces: Sequence[str],
    compare: Sequence[str] = (),
    html: Path | None = None,
    perfetto: Path | None = None,
    unprofiled_step_ms: float | None = None,
    top: int = 10,
    *,
    as_json: bool = False,
) -> None:
    """Analyse captures and print the result; the arguments are those of the command."""
    from steptune.tuner.profiling.comparison import shortened
    from steptune.tuner.profiling.trace_files import find_traces

    unprofiled_ns = _nanoseconds(unprofiled_step_ms)
    files = find_traces(traces)
    other_files = find_traces(compare) if compare else []
    _check_targets([*files, *other_files], html, perfetto)
    with errors.status("reading"):
        analysis, other, comparison = _analysed(
            files, other_files, unprofiled_ns, top, for_page=html is not None, with_lanes=as_json
        )
        if html is not None:
            _write_page(html, analysis, comparison)
            analysis = shortened(analysis, top)
        if perfetto is not None:
            from steptune.tuner.profiling.perfetto import write_perfetto

            write_perfetto(files, perfetto, clock_offsets_ns=analysis.clock_offsets_ns)
    from steptune.service.cli.trace_summary import print_analysis, print_comparison

    if as_json:
        print_json(analysis if other is None else {"before": analysis, "after": other, "comparison": comparison})
    elif comparison is None:
        print_analysis(output, analysis, top)
    else:
        print_comparison(output, comparison)
    if html is not None:
        say(f"page     {html}")
    if perfetto is not None:
        say(f"tracks   {perfetto}, for ui.perfetto.dev")


def _analysed(
    files: Sequence[Path],
    other_files: Sequence[Path],
    unprofiled_ns: int | None,
    top: int,
    *,
    for_page: bool,
    with_lanes: bool,
) -> tuple[TraceAnalysis, TraceAnalysis | None, Comparison | None]:
    """Return the analysis of a run and, if another run is given, the other run's analysis and the comparison.

    Args:
        for_page: Whether a page shows it, whose tables are long and whose timeline has every event.
        with_lanes: Whether to keep the lanes of streams and threads, which a terminal does not show.
    """
    from steptune.tuner.profiling.analysis import analyse_traces
    from steptune.tuner.profiling.lanes import FULL_CELLS, MAX_CELLS

    max_cells, shown = (FULL_CELLS, max(top, PAGE_ROWS)) if for_page else (MAX_CELLS if with_lanes else 0, top)
    if other_files:
        return compared_traces(files, other_files, unprofiled_ns, top, shown=shown, max_cells=max_cells)
    return analyse_traces(files, unprofiled_ns, top=shown, max_cells=max_cells), None, None


def compared_traces(
    files: Sequence[Path],
    other_files: Sequence[Path],
    unprofiled_ns: int | None,
    top: int,
    *,
    shown: int | None = None,
    max_cells: int | None = None,
) -> tuple[TraceAnalysis, TraceAnalysis, Comparison]:
    """Return the analyses of two runs with at most `top` rows in each list, and the changes from one to the other.

    Args:
        unprofiled_ns: Unprofiled step time of the first run, in nanoseconds.
        shown: Rows in each list of the first run, where that differs from `top`.
        max_cells: Maximum cells of its lanes; by default few.
    """
    from steptune.tuner.profiling.analysis import analyse_traces
    from steptune.tuner.profiling.comparison import compare as compare_traces
    from steptune.tuner.profiling.comparison import shortened
    from steptune.tuner.profiling.lanes import MAX_CELLS

    analysis = analyse_traces(files, unprofiled_ns, top=NUM_COMPARED, max_cells=max_cells or MAX_CELLS)
    other = analyse_traces(other_files, top=NUM_COMPARED)
    comparison = compare_traces(analysis, other, labels=_labels(analysis, other), top=top)
    first = shortened(analysis, shown or top, max_cells or MAX_CELLS)
    return first, shortened(other, top), comparison


def _write_page(path: Path, analysis: TraceAnalysis, comparison: Comparison | None) -> None:
    from steptune.dashboards.trace_page import render_trace_page

    try:
        path.write_text(render_trace_page(analysis, comparison), encoding="utf-8")
    except OSError as error:
        raise ChoiceError(f"{path} cannot be written: {error.strerror or error}") from None


def _labels(analysis: TraceAnalysis, other: TraceAnalysis) -> tuple[str, str]:
    first, second = (Path(side.ranks[0].file) for side in (analysis, other))
    if first.name != second.name:
        return first.name, second.name
    return str(first), str(second)


def _check_targets(files: Sequence[Path], *targets: Path | None) -> None:
    """Refuse, before anything is read, a target that cannot be written, or that is one of the traces."""
    sources = {path.resolve() for path in files}
    written = [target.resolve() for target in targets if target is not None]
    if len(set(written)) < len(written):
        raise ChoiceError(f"--html and --perfetto both name {written[0].name}: write them to different files")
    for target in targets:
        if target is None:
            continue
        if target.resolve() in sources:
            raise ChoiceError(f"{target} is one of the input traces: write to another file")
        if target.is_dir() or not target.resolve().parent.is_dir():
            raise ChoiceError(f"{target} cannot be written: name a file in an existing folder")


SHORTEST_MS, LONGEST_MS = 1e-3, 86_400_000.0
"""Minimum and maximum step time in milliseconds (a microsecond and a day): beyond them the unit must be wrong."""


def _nanoseconds(milliseconds: float | None) -> int | None:
    if milliseconds is None:
        return None
    if not SHORTEST_MS <= milliseconds <= LONGEST_MS:
        raise ChoiceError(
            f"--unprofiled-step-ms must be from {SHORTEST_MS:g} to {LONGEST_MS:g} ms, got {milliseconds:g}: give the "
            "time of one step in milliseconds"
        )
    return round(milliseconds * 1e6)
