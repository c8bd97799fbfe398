"""`analyze`: bottleneck of the steps in captures of torch.profiler and other profilers, from any program."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from steptune.service.cli.analysed import show_analysis
from steptune.service.cli.options import AsJson


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
            help="Write tracks for ui.perfetto.dev to this path (.json or .json.gz), together with the "
            "trace's own events if there is only one torch.profiler trace.",
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
    show_analysis(traces, compare or (), html, perfetto, unprofiled_step_ms, top, as_json=as_json)
