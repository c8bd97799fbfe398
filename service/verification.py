"""Verification of a study's recommendation on this machine, and its printed result."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from steptune.dashboards import units
from steptune.service.settings import Settings
from steptune.service.studies import check_unchanged, local_runner
from steptune.tuner.protocols import Progress
from steptune.tuner.records import Candidate, Recommendation, Study
from steptune.tuner.search.verification import Verification, verify
from steptune.tuner.strategies.combine import complete_choices

SHOWN_STEPS = 8


def verify_study(
    study: Study,
    recommendation: Recommendation,
    num_steps: int,
    settings: Settings,
    listener: Callable[[Progress], None],
    *,
    python: str | None = None,
) -> Verification:
    """Train today's and the recommended configuration from the study's initial state, which is created again from the
    study's seed.
    """
    check_unchanged(study)
    settings.data_directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=settings.data_directory, prefix="verify-") as folder:
        here = msgspec.structs.replace(study, directory=str(Path(folder).resolve()))
        with local_runner(here, settings, python=python, variables=recommendation.environment_variables) as runner:
            environment, facts = runner.describe(), runner.inspect()
            return verify(
                runner,
                workload=study.workload,
                study_directory=here.directory,
                device=environment.hardware.device_kind,
                baseline=complete_choices(Candidate(), facts),
                recommended=recommendation.choices,
                num_steps=num_steps,
                seed=study.settings.seed,
                say=lambda text: listener(Progress(trial_id="", text=text)),
            )


def print_verification(console: Console, verification: Verification) -> None:
    """Print the losses side by side at a few steps, and the verdict."""
    last = verification.num_steps - 1
    shown = sorted({round(last * number / (SHOWN_STEPS - 1)) for number in range(SHOWN_STEPS)})
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("step", *(f"baseline, seed {n + 1}" for n in range(len(verification.baseline))), "recommended"):
        table.add_column(name, justify="right", no_wrap=True)
    for step in shown:
        curves = (*verification.baseline, verification.recommended)
        table.add_row(str(step + 1), *(f"{curve.losses[step]:.5g}" for curve in curves))
    console.print(table)
    faster = units.ratio(verification.recommended_units_per_s / verification.baseline_units_per_s)
    style = "green" if verification.same else "red"
    console.print(
        f"\n{verification.reason}; the recommendation trained at {faster} the speed of the baseline", style=style
    )
