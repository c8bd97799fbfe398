"""`analyze`: bottleneck of the steps in captures of torch.profiler and other profilers, from any program."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from steptune.service.cli.console import errors, output, print_json, say
from steptune.service.cli.options import AsJson
from steptune.tuner.errors import ChoiceError

if TYPE_CHECKING:
    from steptune.tuner.trace_records import Comparison, TraceAnalysis

PAGE_ROWS = 500
"""Maximum rows of a page's tables, which can be searched."""
NUM_COMPARED = 10_000
"""Maximum kernels on either side of a comparison: enough for all, because a kernel left out for its low rank would seem
new.
"""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(analyze)


def analyze(
    traces: Annotated[
        list[str],
        typer.Argument(
            help="Captures of one run, one file per rank: files, folders, patterns or a .zip. Traces of torch.profiler "
            "(.json, .json.gz), exports of Nsight Systems (.sqlite), results of rocprofv3 (.json, _kernel_trace.csv), "
            "profiles of JAX (.trace.json.gz).",
            metavar="TRACE...",
        ),
    ],
    compare: Annotated[
        list[str] | None,
        typer.Option(
            "--compare",
            help="Trace of another run, to list the changes; repeat the option for further ranks.",
            show_default=False,
        ),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option("--html", help="Write a self-contained HTML page with figures to this path.", show_default=False),
    ] = None,
    perfetto: Annotated[
        Path | None,
        typer.Option(
            "--perfetto",
            help="Write tracks for ui.perfetto.dev to this path (.json or .json.gz); a single torch.profiler trace is "
            "included.",
            show_default=False,
        ),
    ] = None,
    unprofiled_step_ms: Annotated[
        float | None,
        typer.Option(
            "--unprofiled-step-ms",
            help="Step time without the profiler, in milliseconds; removes the profiler's overhead from the breakdown.",
            show_default=False,
        ),
    ] = None,
    top: Annotated[
        int, typer.Option("--top", min=1, help="Maximum rows of kernels, operators and differences in the terminal.")
    ] = 10,
    as_json: AsJson = False,
) -> None:
    """Find what limits the training steps in a capture of torch.profiler or another profiler, with advice."""
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
