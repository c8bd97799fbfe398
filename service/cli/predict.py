"""`predict`: step time of a study's training on other hosts, and the best communication method there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from steptune.service.cli.console import opened_store, output, print_json, settings_with
from steptune.service.cli.inspect_study import resolve
from steptune.service.cli.options import AsJson, Database, StudyId
from steptune.service.tables import plain_table

if TYPE_CHECKING:
    from steptune.tuner.prediction.forecast import Extrapolation, Forecast
    from steptune.tuner.records import Link, SampleUnit


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(predict)


def predict(
    study_id: StudyId = "last",
    hosts: Annotated[int, typer.Option(min=1, help="Number of hosts of the cluster.")] = 1,
    devices: Annotated[
        int | None,
        typer.Option(min=1, help="Devices per host; default as many as in the study.", show_default=False),
    ] = None,
    network: Annotated[
        str, typer.Option(help="Network bandwidth of one host, like 25gbps or 3GBps.", show_default=False)
    ] = "",
    latency: Annotated[
        str,
        typer.Option(
            help="Latency of a message between hosts, like 20us; default: an assumed value.", show_default=False
        ),
    ] = "",
    inside: Annotated[
        str,
        typer.Option(
            help="Bandwidth between neighbouring devices of a host, like 400GBps; default as measured by the study.",
            show_default=False,
        ),
    ] = "",
    which: Annotated[
        str, typer.Option("--from", help="Trial to predict from: best, baseline, recommended, or a trial number.")
    ] = "best",
    contention: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=0.95,
            help="Share of compute speed lost while communication runs.",
            show_default=False,
        ),
    ] = None,
    against: Annotated[
        str,
        typer.Option(
            help="Another study of the same workload on more ranks; its measurements are compared with the "
            "predictions.",
            show_default=False,
        ),
    ] = "",
    database: Database = None,
    as_json: AsJson = False,
) -> None:
    """Predict a study's step time on other hosts, and the best way to communicate there."""
    from steptune.service.predicting import Question, predicted

    question = Question(
        hosts=hosts,
        devices=devices,
        network=network,
        latency=latency,
        inside=inside,
        which=which,
        contention=contention,
    )
    with opened_store(settings_with(database)) as store:
        study = resolve(store, study_id)
        found = predicted(store, study, question, resolve(store, against) if against else None)
    if as_json:
        print_json(found)
        return
    assert study.facts is not None
    _print(found, study.facts.sample_unit)


def _print(found: Extrapolation, unit: SampleUnit) -> None:
    from steptune.dashboards import units

    basis = found.basis
    output.print(Text(_cluster(found), style="bold"))
    output.print(
        Text(
            f"from trial {basis.sequence} ({basis.label}): {units.short_time(basis.step_time_ns)} a step on "
            f"{units.counted(basis.num_ranks, 'rank')}, of which forward {units.short_time(basis.forward_ns)}, "
            f"backward {units.short_time(basis.backward_ns)}, update {units.short_time(basis.optimizer_ns)}"
        )
    )
    output.print()
    if found.best is None:
        output.print("no lossless communication method can run on that cluster")
    else:
        output.print(Text("best: ", style="green").append(_sentence(found.best, unit)))
    if found.best_lossy is not None:
        output.print(Text("best lossy: ", style="yellow").append(_sentence(found.best_lossy, unit)))
    output.print()
    output.print(_ways(found, unit))
    output.print(_curves(found))
    _print_checks(found)
    if found.refused:
        output.print(Text("Not possible there", style="bold"))
        for label, reason in found.refused.items():
            output.print(Text(f"· {label}: {reason}", style="dim"))
    output.print(Text("Assumed", style="bold"))
    for assumption in (*found.assumptions, found.validated):
        output.print(Text(f"· {assumption}", style="dim"))


def _cluster(found: Extrapolation) -> str:
    from steptune.dashboards.units import counted

    ranks = found.num_hosts * found.devices_per_host
    links = [
        f"{_bandwidth(link)} {where}"
        for link, where in ((found.between, "between hosts"), (found.inside, "inside"))
        if link is not None
    ]
    each = counted(found.devices_per_host, "device")
    return ", ".join((f"{counted(found.num_hosts, 'host')} with {each} each ({counted(ranks, 'rank')})", *links))


def _bandwidth(link: Link) -> str:
    from steptune.dashboards.units import per_second

    return f"{per_second(link.bytes_per_s, 'B')} {'measured' if link.timings else 'given'}"


def _sentence(forecast: Forecast, unit: SampleUnit) -> str:
    from steptune.dashboards import units

    return (
        f"{forecast.label}, {units.short_time(forecast.step_time_ns)} a step, "
        f"{units.rate(forecast.units_per_s, unit)}, efficiency {units.percent(forecast.efficiency)}"
    )


def _ways(found: Extrapolation, unit: SampleUnit) -> object:
    from steptune.dashboards import units

    table = plain_table("way to communicate", "family", "step", "exposed", f"{unit.value}s/s", "efficiency", "numerics")
    for forecast in found.forecasts:
        table.add_row(
            forecast.label,
            forecast.family,
            units.short_time(forecast.step_time_ns),
            units.short_time(forecast.exposed_ns),
            units.significant(forecast.units_per_s),
            units.percent(forecast.efficiency),
            forecast.numerics.value,
        )
    return table


def _curves(found: Extrapolation) -> object:
    """Return a table of step times by number of hosts, with the fastest method of each communication family."""
    from steptune.dashboards import units

    families = list(dict.fromkeys(forecast.family for forecast in found.curves))
    table = plain_table("hosts", *families, title="Step time (efficiency) by number of hosts")
    cells = {
        (f.num_hosts, f.family): f"{units.short_time(f.step_time_ns)} ({units.percent(f.efficiency)})"
        for f in found.curves
    }
    for hosts in dict.fromkeys(forecast.num_hosts for forecast in found.curves):
        table.add_row(str(hosts), *(cells.get((hosts, family), "") for family in families))
    return table


def _print_checks(found: Extrapolation) -> None:
    from steptune.dashboards import units

    if not found.checks:
        output.print("No other communication method was measured, so the error of these predictions is unknown.\n")
        return
    table = plain_table("trial", "ranks", "hosts", "measured", "predicted", "error", title="Compared with measurements")
    for check in found.checks:
        table.add_row(
            f"{check.sequence}: {check.label}",
            str(check.num_ranks),
            str(check.num_hosts),
            units.short_time(check.measured_ns),
            units.short_time(check.predicted_ns),
            f"{check.error:+.1%}",
        )
    output.print(table)
    assert found.median_error is not None
    output.print(f"median error {units.percent(found.median_error)} of {units.counted(len(found.checks), 'step')}\n")
