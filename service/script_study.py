"""Study of an unmodified training script: its inspection, and the summary printed before its first trial."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from steptune._version import __version__
from steptune.service.settings import Settings
from steptune.tuner.errors import BudgetError, StoreError, WorkloadError
from steptune.tuner.objectives import check_device, parse_objective
from steptune.tuner.records import Part, ScriptFacts, Study, StudySettings, choice_label, new_id
from steptune.tuner.scripts.facts import command_digest
from steptune.tuner.scripts.look import Look
from steptune.tuner.scripts.runner import ScriptRunner
from steptune.tuner.search.searches import check_search
from steptune.tuner.search.space import NEEDS_WORKLOAD, Space, check_names
from steptune.tuner.strategies import strategy_named
from steptune.tuner.strategies.api import Outside
from steptune.tuner.workloads.reference import workload_of

SHARDS_PARAMETERS = ("FSDP", "FSDP2", "DeepSpeed")
LEAST_BUDGET_S = 1.0
"""Minimum budget in seconds for the trials of a study, even if its inspection has used up the whole budget."""
MOST_LABELS = 4


def new_script_study(look: Look, settings: StudySettings, service_settings: Settings) -> Study:
    """Create a study of a command from the steps that an inspection has recorded; the inspection's time counts against
    the study's budget.

    Raises:
        ChoiceError: A strategy, a search or an objective that does not exist.
        WorkloadError: The script shards its parameters.
        BudgetError: The inspection took the whole budget.
    """
    refuse_sharded(look)
    check_names(settings.only, settings.skip)
    check_search(settings.search)
    check_device(parse_objective(settings.objective), look.record.device)
    study_id = new_id()
    left_s = budget_left_s(settings.budget_s, look.seconds)
    return Study(
        study_id=study_id,
        workload=workload_of(look.command),
        settings=msgspec.structs.replace(
            settings, budget_s=left_s, num_ranks=look.record.num_ranks, device=look.record.device
        ),
        created_at=datetime.now(UTC).isoformat(),
        directory=str((service_settings.data_directory / "studies" / study_id).resolve()),
        facts=look.facts,
        source_digest=command_digest(look.command, look.folder),
        steptune_version=__version__,
    )


def refuse_sharded(look: Look) -> None:
    """Refuse a script whose parameters are sharded.

    Raises:
        WorkloadError: The parameters are sharded.
    """
    sharded = [name for name in look.script.wrappers if name in SHARDS_PARAMETERS]
    if sharded:
        raise WorkloadError(
            f"the script shards its parameters ({sharded[0]}), so each rank sees only a part of them, and "
            "Steptune cannot check that a candidate trains like the script. Write a Workload: Steptune then shards "
            "the model itself"
        )


def script_of(study: Study) -> ScriptFacts:
    """Return the script facts from the inspection at the beginning of a study of a command.

    Raises:
        StoreError: The folder in which it ran is gone.
    """
    script = script_facts_of(study)
    if not Path(script.folder).is_dir():
        raise StoreError(f"study {study.study_id} ran in {script.folder}, which no longer exists: begin a new study")
    return script


def check_same_script(study: Study, look: Look) -> None:
    """Refuse to continue a study if its script trains differently than at the study's beginning.

    Raises:
        StoreError: The inspection recognised something else.
    """
    if look.script != script_of(study):
        raise StoreError(
            f"the command of study {study.study_id} trains differently than when the study began (another "
            "loader, optimizer or model was recognised): the study would mix two training jobs. Begin a new study"
        )


def budget_left_s(budget_s: float, look_s: float) -> float:
    """Return the seconds of a budget that are left after an inspection.

    Raises:
        BudgetError: No time is left.
    """
    if look_s >= budget_s:
        raise BudgetError(
            f"the budget of {budget_s:g} s is too short: the inspection of the script took {look_s:.0f} s, and "
            "every trial needs more. Give a larger --budget"
        )
    return budget_s - look_s


class Choices(NamedTuple):
    """Choices of a study by strategy: the tried ones, and the reasons why others need a `Workload` or cannot be tried
    here.
    """

    tried: dict[str, list[str]]
    need_workload: dict[str, str]
    not_here: dict[str, str]


def choices_of(runner: ScriptRunner, study: Study) -> Choices:
    """Inspect the machine, and return the choices of a study before its first trial."""
    assert study.facts is not None, "a study of a command must have workload facts"
    space = Space(runner.describe(), study.facts, study.settings)
    tried: dict[str, list[str]] = {}
    for move in space.moves:
        tried.setdefault(move.strategy, []).append(choice_label(move.choice))
    needs: dict[str, str] = {}
    others: dict[str, str] = {}
    for exclusion in space.excluded:
        group = needs if exclusion.reason.startswith(NEEDS_WORKLOAD) else others
        group.setdefault(exclusion.move.strategy, exclusion.reason.removeprefix(NEEDS_WORKLOAD))
    return Choices(tried, needs, {name: why for name, why in others.items() if not why.startswith("left out by")})


def why_nothing(choices: Choices) -> str:
    """Return a message that no choice can be tried, with each strategy's reason."""
    reasons = {name: f"needs a Workload ({why})" for name, why in choices.need_workload.items()}
    reasons |= {name: why for name, why in choices.not_here.items() if name not in reasons}
    told = [f"{name}: {why}" for name, why in reasons.items()]
    more = f"; and {len(told) - MOST_LABELS} more" if len(told) > MOST_LABELS else ""
    return f"no choice can be tried in this script's own training loop. {'; '.join(told[:MOST_LABELS])}{more}"


def print_choices(console: Console, choices: Choices) -> None:
    """Print which choices are tried, and which ones need a `Workload`."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    console.print(Text("tried", style="dim"))
    for name, labels in choices.tried.items():
        more = f", and {len(labels) - MOST_LABELS} more" if len(labels) > MOST_LABELS else ""
        table.add_row(Text(f"✓  {name}", style="green"), Text("; ".join(labels[:MOST_LABELS]) + more))
    console.print(table)
    if not choices.need_workload:
        return
    names = [name for name in choices.need_workload if name not in choices.tried]
    parts = [name for name in choices.need_workload if name in choices.tried]
    words = ", ".join([*names, *(f"some of {name}" for name in parts)])
    why = "`steptune show --all` lists the reasons; docs/tutorial.md shows how to write a Workload"
    console.print(Text(f"needs a Workload (another {len(choices.need_workload)}): {words}; {why}", style="dim"))


def print_start(console: Console, look: Look) -> None:
    """Print where trials start: at the script's beginning, or from a frozen copy of the inspected process."""
    words = (
        "each starts from a frozen copy of the inspected process, or runs the command from its beginning if a choice "
        "requires that"
    )
    if look.copy is None:
        words = f"each runs the command from its beginning, because there is no frozen copy: {look.why_no_copy}"
    console.print(Text(f"trials         {words}", style="dim"))


@dataclass(frozen=True, kw_only=True)
class Change:
    """A recommended change in the form that it takes in a script.

    Attributes:
        place: Line of the user's code; empty at the script's beginning.
        words: Code to write there.
    """

    part: Part
    place: str
    words: str


def changes_of(study: Study, parts: Sequence[Part]) -> list[Change]:
    """Return the changes to the script that apply the parts of a recommendation."""
    assert study.facts is not None, "a study of a command must have workload facts"
    script = script_facts_of(study)
    found = []
    for part in parts:
        strategy = strategy_named(part.strategy)
        outside = strategy.outside(strategy.complete(part.choice, study.facts), script)
        if isinstance(outside, Outside):
            found.append(Change(part=part, place=short_place(script.places.get(outside.at, "")), words=outside.words))
    return found


def script_facts_of(study: Study) -> ScriptFacts:
    """Return the script facts of a study of a command."""
    assert study.facts is not None, "a study of a command must have workload facts"
    assert study.facts.script is not None, "facts of a command must have a script"
    return study.facts.script


def short_place(place: str) -> str:
    """Return the short form of a location in code: `train.py:33` for `/home/me/train.py:33 in main`."""
    return Path(place.partition(" in ")[0]).name if place else ""
