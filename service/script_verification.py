"""Verification of a recommendation for a script, or of an edited script, against the unchanged script."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from steptune.dashboards import units
from steptune.service.script_study import script_facts_of
from steptune.service.store import SqlStudyStore
from steptune.tuner.errors import ChoiceError, RecommendationError, StoreError, StudyNotFoundError
from steptune.tuner.export.base import headline
from steptune.tuner.export.native import NativeJson
from steptune.tuner.records import Candidate, MeasureSettings, Recommendation, Study, TrialResult
from steptune.tuner.scripts.agent import OUTSIDE
from steptune.tuner.scripts.diff import script_diff
from steptune.tuner.scripts.look import Look
from steptune.tuner.scripts.starts import Start
from steptune.tuner.scripts.verification import UNCHANGED, Changed, ScriptVerification, verify_script
from steptune.tuner.speeds import answer_of, proven_gain
from steptune.tuner.workloads.reference import workload_of

MOST_STUDIES = 1000
CHANGES = ("enable", "diff")


def study_of_command(store: SqlStudyStore, command: tuple[str, ...], folder: Path) -> Study:
    """Return the newest study with a recommendation for a command in a folder.

    Raises:
        StudyNotFoundError: There is no such study.
    """
    for study in store.list_studies(MOST_STUDIES):
        is_of_it = study.workload == workload_of(command) and script_facts_of(study).folder == str(folder)
        if is_of_it and store.recommendation(study.study_id) is not None:
            return study
    raise StudyNotFoundError(
        f"no study of this command in {folder} has a recommendation: make one with `steptune tune "
        f"{workload_of(command)}`, or compare a file of your own with --edited FILE"
    )


@contextmanager
def changed_by(recommendation: Recommendation, how: str, command: tuple[str, ...]) -> Iterator[Changed]:
    """Yield the script with a recommendation's changes, applied by `steptune.enable` or by the diff.

    Raises:
        ChoiceError: There is no such method.
        RecommendationError: The recommendation changes nothing, or cannot be applied by this method.
    """
    if how not in CHANGES:
        raise ChoiceError(f"--by {how}: write one of {', '.join(CHANGES)}")
    if recommendation.candidate.is_baseline or recommendation.in_script is None:
        raise RecommendationError("the recommendation changes nothing in the script: there is nothing to verify")
    variables = recommendation.environment_variables
    with tempfile.TemporaryDirectory(prefix="steptune-verify-") as folder:
        if how == "enable":
            path = Path(folder) / "steptune.json"
            path.write_text(NativeJson().export(recommendation), encoding="utf-8")
            start = Start(command=command, variables={**variables, OUTSIDE: str(path)})
        else:
            diff = script_diff(recommendation)
            options = [part for option in diff.options for part in option.split()]
            start = Start(command=(*command, *options), variables={**variables, **UNCHANGED}, texts=diff.texts)
        yield Changed(start=start, candidate=recommendation.candidate, choices=recommendation.choices)


def changed_file(edited: Path, command: tuple[str, ...], folder: Path) -> Changed:
    """Return the script with the text of an edited file in place of the file that the command names.

    Raises:
        ChoiceError: The file cannot be read, or the command names no Python file of the folder.
    """
    try:
        text = edited.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ChoiceError(f"--edited {edited} cannot be read: {error}") from None
    named = [argument for argument in command if argument.endswith(".py") and (folder / argument).is_file()]
    if len(named) != 1 or Path(named[0]).is_absolute():
        raise ChoiceError(
            "--edited replaces the script of the command, which must name exactly one Python file by its path "
            f"in {folder}, got {len(named)}"
        )
    candidate = Candidate(choices={"edited": {"file": str(edited)}})
    return Changed(start=Start(command=command, texts={named[0]: text}), candidate=candidate, choices={})


def verified(
    look: Look,
    changed: Changed,
    *,
    num_blocks: int,
    settings: MeasureSettings,
    say: Callable[[str], None],
    longest_s: float = math.inf,
    earlier: Mapping[str, Sequence[TrialResult]] | None = None,
) -> ScriptVerification:
    """Run both scripts side by side, and compare them, as `verify_script` does; their logs are removed at the end."""
    with tempfile.TemporaryDirectory(prefix="steptune-verify-") as folder:
        (Path(folder) / "logs").mkdir()
        limits: dict[str, Any] = {"num_blocks": num_blocks, "longest_s": longest_s, "earlier": earlier}
        return verify_script(look, changed, Path(folder), settings=settings, say=say, **limits)


def good_results(store: SqlStudyStore, study_id: str) -> dict[str, list[TrialResult]]:
    """Return the results of a study's trials that count, by candidate key."""
    found: dict[str, list[TrialResult]] = {}
    for trial in store.trials(study_id):
        if trial.result is not None and trial.result.ok:
            found.setdefault(trial.candidate.key, []).append(trial.result)
    return found


def with_claim(found: ScriptVerification, recommendation: Recommendation | None) -> ScriptVerification:
    """Return a verification with the speed that a recommendation claims, if it claims one."""
    if recommendation is None or proven_gain(recommendation) is None:
        return found
    return msgspec.structs.replace(found, claimed=answer_of(recommendation))


def print_script_verification(
    console: Console, found: ScriptVerification, recommendation: Recommendation | None
) -> None:
    """Print the script's measured gain, the gain that the recommendation claims (its headline if it claims none), and
    the verdict on the script's loss.
    """
    gain = found.gain
    interval = f"{units.percent(gain.interval.level)} interval {units.ratio_interval(gain.interval)}"
    console.print(f"own speed  {units.ratio(gain.ratio)} ({interval}, {gain.num_blocks} runs of each)")
    claimed = found.claimed
    if claimed is not None:
        words = "" if claimed.interval is None else f" ({units.ratio_interval(claimed.interval)})"
        console.print(f"claimed    {units.ratio(claimed.ratio)}{words}")
    elif recommendation is not None:
        console.print(f"no claim   {headline(recommendation)}")
    console.print(f"own loss   {found.reason}", style="green" if found.same else "red")
    console.print(f"runs       {found.runs}", style="dim")
    if found.missing:
        console.print(
            f"missing    {', '.join(found.missing)}: the script never reached the code that these changes modify",
            style="yellow",
        )


def recommendation_of(store: SqlStudyStore, study: Study) -> Recommendation:
    """Return the recommendation of a study.

    Raises:
        StoreError: The study has no recommendation.
    """
    recommendation = store.recommendation(study.study_id)
    if recommendation is None:
        raise StoreError(f"study {study.study_id} has no recommendation to verify ({study.state.value})")
    return recommendation
