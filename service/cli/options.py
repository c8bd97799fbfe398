"""Options shared by several commands."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from steptune.tuner.errors import ChoiceError
from steptune.tuner.records import Numerics
from steptune.tuner.wording import no_such

if TYPE_CHECKING:
    from steptune.service.on_ray.hosts import Cluster

DEVICES = ("cpu", "cuda")
RAY = "ray"
RUNNERS = ("local", RAY)
CONSENT = (Numerics.LOSSY.value, Numerics.RECIPE.value)

Database = Annotated[
    str | None,
    typer.Option(
        "--database", help="Database URL; default STEPTUNE_DATABASE_URL or sqlite:///steptune.db.", show_default=False
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as one JSON document.")]
StudyId = Annotated[
    str, typer.Argument(help="Id of a study, or its start or end; `last` is the newest study.", metavar="STUDY")
]
Python = Annotated[
    Path | None,
    typer.Option("--python", help="Python interpreter that runs the trials; default this one.", show_default=False),
]
Isolation = Annotated[
    str | None,
    typer.Option(
        "--isolation",
        help="Isolation of the trials from this machine: none, limits, bubblewrap, or strongest (the strongest that "
        "works here); default STEPTUNE_ISOLATION or none.",
        show_default=False,
    ),
]
RunnerName = Annotated[
    str,
    typer.Option(
        "--runner",
        help="Where trials run: local (this machine, or the hosts of torchrun or srun) or ray (hosts that a Ray "
        "cluster reserves, this node first).",
        callback=lambda value: _known_runner(value),
    ),
]
ClusterAddress = Annotated[
    str | None,
    typer.Option(
        "--address",
        help="Address of the Ray cluster for --runner ray, like HOST:6379; default this node's cluster.",
        show_default=False,
    ),
]
NumHosts = Annotated[
    int | None,
    typer.Option(
        "--num-hosts",
        min=1,
        help="Number of hosts, with the same number of ranks on each; requires --runner ray.",
        show_default=False,
    ),
]
InsecureRay = Annotated[
    bool,
    typer.Option("--insecure-ray", help="Allow a Ray cluster without token authentication, on a trusted network."),
]
Device = Annotated[
    str | None,
    typer.Option(
        "--device",
        help="Device type: cpu or cuda; default cuda where a GPU is available.",
        show_default=False,
        callback=lambda value: _known_device(value),
    ),
]
ForeignLoad = Annotated[
    float,
    typer.Option(
        "--foreign-load",
        min=0.0,
        help="Maximum share of the cores that other programs may use while a window is timed.",
    ),
]
QuietMachine = Annotated[
    bool,
    typer.Option(
        "--quiet-machine",
        help="Count only windows in which other programs used at most the share of the cores that --foreign-load "
        "sets; on a busy machine, the study then fails.",
    ),
]
SearchName = Annotated[
    str,
    typer.Option(
        "--search",
        help="Search algorithm that proposes the trials: model (a Gaussian model of the categories), tpe, gp, random, "
        "or one from an installed package.",
    ),
]
ObjectiveName = Annotated[
    str,
    typer.Option(
        "--objective",
        help="Objective: throughput, steps:N (time to train N steps, with compilation), energy (of one GPU), or "
        "cost:PRICE (price of one device per hour). --memory-limit applies to every objective.",
        callback=lambda value: _known_objective(value),
    ),
]
Workload = Annotated[
    str | None,
    typer.Argument(
        help="path/to/file.py:ClassName, package.module:ClassName or zoo:NAME.",
        metavar="WORKLOAD",
        show_default=False,
    ),
]
Budget = Annotated[str, typer.Option(help="Time for the whole study, like 90s, 5m or 1h30m.")]
Allow = Annotated[
    list[str] | None,
    typer.Option(help="Also try choices that change the training: lossy, recipe.", show_default=False),
]
Only = Annotated[list[str] | None, typer.Option(help="Only these strategies.", show_default=False)]
Skip = Annotated[list[str] | None, typer.Option(help="Without these strategies.", show_default=False)]
Seed = Annotated[int, typer.Option("--seed", help="Seed of the search, the samples and the initial state.")]


def _known_objective(text: str) -> str:
    from steptune.tuner.objectives import parse_objective

    parse_objective(text)
    return text


def _known_device(name: str | None) -> str | None:
    if name is not None and name not in DEVICES:
        raise ChoiceError(no_such("device", name, DEVICES))
    return name


def parse_names(values: list[str] | None) -> tuple[str, ...]:
    """Split names that are given one by one, or separated by commas."""
    return tuple(name.strip() for value in values or [] for name in value.split(",") if name.strip())


def parse_allowed(values: list[str]) -> tuple[Numerics, ...]:
    """Parse the kinds of numerics that the user allows.

    Raises:
        ChoiceError: A name is unknown.
    """
    allowed = []
    for name in parse_names(values):
        if name not in CONSENT:
            raise ChoiceError(no_such("kind of change to allow", name, CONSENT))
        allowed.append(Numerics(name))
    return tuple(allowed)


def _known_runner(value: str) -> str:
    if value not in RUNNERS:
        raise ChoiceError(no_such("runner", value, RUNNERS))
    return value


def cluster_of(runner: str, address: str | None, *, insecure: bool) -> Cluster | None:
    """Return the Ray cluster that a command uses; None where trials run on this machine or on a launcher's hosts.

    Raises:
        ChoiceError: Options of Ray are given without `--runner ray`.
        PlatformError: The cluster may not be used.
    """
    from steptune.service.on_ray.hosts import take_cluster

    if runner == RAY:
        return take_cluster(address or "auto", insecure=insecure)
    if address is not None or insecure:
        raise ChoiceError(f"--address and --insecure-ray require Ray: add --runner {RAY}, or leave them out")
    return None
