"""`worker`: claim studies from the service's queue, and run them on this machine."""

from __future__ import annotations

import logging
import os
import signal
import sys
from typing import Annotated

import typer

from steptune.service.cli.console import settings_with
from steptune.service.cli.options import (
    ClusterAddress,
    InsecureRay,
    Isolation,
    NumHosts,
    Python,
    RunnerName,
    cluster_of,
)
from steptune.tuner.hardware import check_platform


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(worker)


def worker(
    database_url: Annotated[
        str | None,
        typer.Option(
            "--database-url",
            help="The service's database; default STEPTUNE_DATABASE_URL or sqlite:///steptune.db.",
            show_default=False,
        ),
    ] = None,
    cpus: Annotated[
        str | None,
        typer.Option(help="Cores to use as one device, like 0-3,6; default all that this process may use."),
    ] = None,
    gpus: Annotated[str | None, typer.Option(help="GPUs to use, like 0,1, or `none` (default: all).")] = None,
    name: Annotated[str, typer.Option(help="Name of this worker in lists.")] = "",
    once: Annotated[bool, typer.Option("--once", help="Exit when no study is waiting.")] = False,
    runner: RunnerName = "local",
    address: ClusterAddress = None,
    num_hosts: NumHosts = None,
    insecure_ray: InsecureRay = False,
    isolation: Isolation = None,
    python: Python = None,
    supervised_by: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Run studies that were submitted to the service, one after the other.

    On SIGTERM, the worker finishes its running trials and returns the study to the queue for another worker; on a
    second signal, or Ctrl-C, it returns the study at once.
    """
    from steptune.service.database import check_schema, create_engine_for
    from steptune.service.launched import num_hosts_of, refuse_isolated
    from steptune.service.permissions import keep_private
    from steptune.service.running import worker_level
    from steptune.service.worker.loop import Worker
    from steptune.service.worker.machine import offer_of_this_machine, parse_numbers, use_cores, use_gpus
    from steptune.tuner.trials.processes import become_subreaper, die_with_parent

    check_platform()
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("alembic").setLevel(logging.WARNING)
    if supervised_by is not None:
        die_with_parent(supervised_by, signal.SIGINT)
    become_subreaper()  # what a killed trial server leaves comes to us, and is ended
    settings = settings_with(database_url, isolation)
    interpreter = str(python) if python else sys.executable
    cores = use_cores(parse_numbers(cpus) if cpus else None)
    use_gpus(gpus)
    keep_private(settings)
    level = worker_level(settings, python=interpreter)
    cluster = cluster_of(runner, address, insecure=insecure_ray)
    max_hosts = num_hosts_of(None, num_hosts, reserved=cluster is not None)
    if max_hosts > 1:
        refuse_isolated(level)
    engine = create_engine_for(settings.database_url)
    check_schema(engine)
    offer = offer_of_this_machine(
        settings,
        level,
        name=name or f"worker-{os.getpid()}",
        cores=cores,
        python=interpreter,
        max_hosts=max_hosts,
        reserves=cluster is not None,
    )
    running = Worker(engine, settings, offer, level, python=interpreter, once=once, cluster=cluster)
    signals: list[int] = []

    def told(number: int, _: object) -> None:
        signals.append(number)
        patient = number == signal.SIGTERM and len(signals) == 1
        running.stop(within_s=settings.drain_s if patient else 0.0)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, told)
    try:
        running.run()
    finally:
        engine.dispose()
