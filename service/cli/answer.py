"""A study's answer on one screen: the claim, the changes, how to use them, and the next command."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from steptune.dashboards import units
from steptune.dashboards.headline import get_headline_info
from steptune.dashboards.sources import TrialSource
from steptune.service.cli.console import short_name
from steptune.service.script_study import Change, changes_of
from steptune.service.studies import Results
from steptune.tuner.records import GuardVerdict, Recommendation, Study, StudyState, Verdict, choice_label
from steptune.tuner.speeds import contribution_of
from steptune.tuner.workloads.reference import is_command

SCREEN_LINES = 23
"""A terminal of 24 lines less the prompt that follows."""
SENTENCE_LINES, PROSPECT_LINES, PROOF_LINES = 6, 4, 3
SHORT_ID = 8
INDENT = "  "
_TONES = {"good": "green", "neutral": "blue", "warning": "yellow"}
_UNFINISHED = (StudyState.INTERRUPTED, StudyState.PAUSED)


def print_answer(console: Console, source: TrialSource, study_id: str, results: Results | None = None) -> None:
    """Prints at most `SCREEN_LINES` lines; `steptune show STUDY --all` prints everything else.

    Args:
        results: Where the study's files were written just now; None where they were not.
    """
    study, recommendation = source.get_study(study_id), source.recommendation(study_id)
    head = [*_claim(console, source, study), *_proof(console, recommendation), *_prospect(console, recommendation)]
    if recommendation is None:
        head += _facts(source, study_id)
    tail = [*_use(study, recommendation, results), *_next(study, recommendation)]
    room = SCREEN_LINES - sum(_height(console, line) for line in (*head, *tail))
    changes = [] if is_command(study.workload) else _changes(console, recommendation, room)
    for line in (*head, *changes, *tail):
        console.print(line, soft_wrap=True)


def _claim(console: Console, source: TrialSource, study: Study) -> list[Text]:
    info = get_headline_info(source, study.study_id)
    wrapped = _wrapped(console, Text(info.sentence), SENTENCE_LINES)
    name = Text(_fitting(short_name(study.workload), console.width), style="dim")
    return [name, Text(f"{info.figure} {info.title}".strip(), style=f"bold {_TONES[info.tone]}"), *wrapped]


def _wrapped(console: Console, text: Text, most: int) -> list[Text]:
    """A text on at most so many lines."""
    wrapped = list(text.wrap(console, console.width))
    if len(wrapped) > most:
        wrapped = wrapped[:most]
        wrapped[-1].truncate(console.width - 2)
        wrapped[-1].append(" …")
    for line in wrapped:
        line.rstrip()
    return wrapped


def _prospect(console: Console, recommendation: Recommendation | None) -> list[Text]:
    """The probable gain of more time."""
    if recommendation is None or not recommendation.prospect:
        return []
    return _wrapped(console, Text(recommendation.prospect, style="dim"), PROSPECT_LINES)


def _proof(console: Console, recommendation: Recommendation | None) -> list[Text]:
    """Evidence for the claim, and the cost of finding it."""
    if recommendation is None:
        return []
    parts = []
    if recommendation.gain is not None and recommendation.verdict is not Verdict.NOT_SEARCHED:
        interval = recommendation.gain.interval
        parts.append(f"{units.percent(interval.level)} interval {units.ratio_interval(interval)}")
    if recommendation.guard is not None and not recommendation.candidate.is_baseline:
        parts.append(_training(recommendation.guard))
    cost = recommendation.cost
    parts.append(f"{units.duration(cost.tuning_s)}, {units.counted(cost.num_trials, 'trial')}")
    texts = (Text(" · ".join(parts), style="dim"), *_compared(recommendation))
    return [line for text in texts for line in _wrapped(console, text, PROOF_LINES)]


def _training(guard: GuardVerdict) -> str:
    """Say whether it is the same training, as far as anything could be compared."""
    if not guard.checks:
        return "not guarded: nothing could be compared"
    return "same training" if guard.passed else "not the same training"


def _compared(recommendation: Recommendation) -> list[Text]:
    """The meaning of "same training" here, and what could not be judged."""
    guard = recommendation.guard
    if guard is None or recommendation.candidate.is_baseline or not (guard.compared or guard.notes):
        return []
    notes = [f"not judged: {note}" for note in guard.notes]
    return [Text("compared: " + "; ".join((*guard.compared, *notes)), style="dim")]


def _facts(source: TrialSource, study_id: str) -> list[Text]:
    """Facts about a study without a recommendation: its state, its trials, rates so far."""
    lines = []
    for fact in get_headline_info(source, study_id).facts:
        note = f" ({fact.note})" if fact.note else ""
        lines.append(Text(f"{INDENT}{fact.name}: {fact.value}{note}", style="dim"))
    return lines


def _changes(console: Console, recommendation: Recommendation | None, room: int) -> list[Text]:
    """The recommended changes, each on a line, as many as there is room for."""
    if recommendation is None or not recommendation.parts:
        return []
    lines = [Text(), Text("Changes", style="bold")]
    parts = recommendation.parts
    num_shown = len(parts) if len(parts) <= room - len(lines) else max(1, room - len(lines) - 1)
    for part in parts[:num_shown]:
        known = contribution_of(recommendation, part)
        gain = "" if known is None or len(parts) == 1 else units.ratio(known.ratio)
        change = f"{gain:>6}  {part.strategy}: {choice_label(part.choice)}"
        lines.append(Text(INDENT + _fitting(change, console.width - len(INDENT))))
    if num_shown < len(parts):
        lines.append(Text(f"{INDENT}and {len(parts) - num_shown} more", style="dim"))
    return lines


def _use(study: Study, recommendation: Recommendation | None, results: Results | None) -> list[Text]:
    if recommendation is None or recommendation.candidate.is_baseline:
        return [] if results is None else [Text(), _file("report", results.report)]
    lines = [Text(), Text("How to use it", style="bold")]
    if is_command(study.workload):
        lines += [_change(recommendation, change) for change in changes_of(study, recommendation.parts)]
        return lines if results is None else [*lines, _file("report", results.report)]
    if results is None:
        return [*lines, _command(f"steptune export {_short(study)}", "writes a training script and the report")]
    script = next((path for path in results.exports if path.suffix == ".py"), None)
    if script is not None:
        lines.append(Text(f"{INDENT}python {shlex.quote(str(script))}"))
    lines.append(_file("your own script: steptune.apply with", _named(results.exports, ".json")))
    return [*lines, _file("report", results.report)]


def _change(recommendation: Recommendation, change: Change) -> Text:
    """A line of the user's script, what is written there, and its contribution where that was measured."""
    known = contribution_of(recommendation, change.part) if len(recommendation.parts) > 1 else None
    gain = "" if known is None else f"{units.ratio(known.ratio):>6}  "
    return Text(f"{INDENT}{gain}{change.place or 'at the start'}  ", style="dim").append(
        change.words, style="default not dim"
    )


def _next(study: Study, recommendation: Recommendation | None) -> list[Text]:
    lines = [Text(), Text("Next", style="bold")]
    short = _short(study)
    if study.state in _UNFINISHED:
        lines.append(_command(f"steptune resume {study.study_id}", "goes on with the search"))
    elif study.state is StudyState.FAILED:
        lines.append(_command(f"steptune delete {short}", "removes this study"))
    elif recommendation is not None and not recommendation.candidate.is_baseline and not is_command(study.workload):
        lines.append(_command(f"steptune verify {short}", "trains both settings and compares their losses"))
    return [*lines, _command(f"steptune show {short} --all", "the breakdown, all trials, what was not tried")]


def _command(command: str, purpose: str) -> Text:
    return Text(f"{INDENT}{command}").append(f"  {purpose}", style="dim")


def _file(what: str, path: Path) -> Text:
    return Text(f"{INDENT}{what} ", style="dim").append(str(path), style="default not dim")


def _named(paths: Sequence[Path], suffix: str) -> Path:
    return next(path for path in paths if path.suffix == suffix)


def _short(study: Study) -> str:
    return study.study_id[-SHORT_ID:]


def _fitting(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 2]} …"


def _height(console: Console, line: Text) -> int:
    return max(1, -(-line.cell_len // console.width))
