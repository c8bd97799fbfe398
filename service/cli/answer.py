"""A study's answer on one screen: the claim, the changes, how to use them, and the next command."""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from steptune.dashboards import units
from steptune.dashboards.headline import get_headline_info, more_time_command, resume_command
from steptune.dashboards.sources import TrialSource
from steptune.service.cli.console import database_option, short_name
from steptune.service.script_study import Change, changes_of
from steptune.service.studies import Results
from steptune.tuner.errors import RecommendationError
from steptune.tuner.records import GuardVerdict, Part, Recommendation, Study, StudyState, Verdict, choice_label
from steptune.tuner.scripts.diff import script_diff
from steptune.tuner.speeds import contribution_of, needed_by, unclear_contribution
from steptune.tuner.workloads.reference import is_command

SCREEN_LINES = 23
"""Maximum lines of an answer: a terminal of 24 lines less the prompt that follows."""
SENTENCE_LINES, PROSPECT_LINES, PROOF_LINES = 6, 4, 3
SHORT_ID = 8
INDENT = "  "
READS_STORE = re.compile(r"\s*steptune (?:export|show|verify|resume|delete) \S+")
_TONES = {"good": "green", "neutral": "blue", "warning": "yellow"}
_UNFINISHED = (StudyState.INTERRUPTED, StudyState.PAUSED)


def print_answer(
    console: Console,
    source: TrialSource,
    study_id: str,
    results: Results | None = None,
    *,
    database: str | None = None,
) -> None:
    """Print at most `SCREEN_LINES` lines; `steptune show STUDY --all` prints everything else.

    Args:
        results: Paths of the study's files, if they were written just now; else None.
        database: Database as given on the command line; suggested commands name it too, without its password.
    """
    study, recommendation = source.get_study(study_id), source.recommendation(study_id)
    option = database_option(database)
    plain = _use(study, recommendation, results), _next(study, recommendation)
    use, following = ([_of_database(line, option) for line in lines] for lines in plain)
    taken = _height(console, *use, *following) - _height(console, *plain[0], *plain[1])
    claim = _claim(console, source, study, option, SENTENCE_LINES - taken)
    proof, prospect = _proof(console, recommendation), []
    if recommendation is None:
        proof += _facts(source, study_id)
    else:
        prospect = _prospect(console, recommendation)
    room = SCREEN_LINES - _height(console, *claim, *use, *following)
    least = len(_changes(console, study, recommendation, 0))
    proof = proof[: max(1, room - least)]
    room -= _height(console, *proof)
    if room - least < len(prospect):
        prospect = []
    changes = _changes(console, study, recommendation, room - len(prospect))
    for line in (*claim, *proof, *prospect, *changes, *use, *following):
        console.print(line, soft_wrap=True)


def _claim(console: Console, source: TrialSource, study: Study, option: str, most: int) -> list[Text]:
    info = get_headline_info(source, study.study_id)
    resume = resume_command(study)
    sentence = info.sentence.replace(f"`{resume}", f"`{resume}{option}")
    wrapped = _wrapped(console, Text(sentence), most)
    name = Text(_fitting(short_name(study.workload), console.width), style="dim")
    return [name, Text(f"{info.figure} {info.title}".strip(), style=f"bold {_TONES[info.tone]}"), *wrapped]


def _wrapped(console: Console, text: Text, most: int) -> list[Text]:
    """Wrap a text to at most `most` lines, but at least one: the lines above may have left no room."""
    most = max(1, most)
    wrapped = list(text.wrap(console, console.width))
    if len(wrapped) > most:
        wrapped = wrapped[:most]
        wrapped[-1].truncate(console.width - 2)
        wrapped[-1].append(" …")
    for line in wrapped:
        line.rstrip()
    return wrapped


def _prospect(console: Console, recommendation: Recommendation | None) -> list[Text]:
    """State the probable gain from continuing the search for longer."""
    if recommendation is None or not recommendation.prospect:
        return []
    return _wrapped(console, Text(recommendation.prospect, style="dim"), PROSPECT_LINES)


def _proof(console: Console, recommendation: Recommendation | None) -> list[Text]:
    """State the evidence for the claim, and the cost of finding it."""
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
    """Say whether the recommendation keeps the same training, as far as that could be compared."""
    if not guard.checks:
        return "not guarded: nothing could be compared"
    return "same training" if guard.passed else "not the same training"


def _compared(recommendation: Recommendation) -> list[Text]:
    """State what "same training" means here, and what could not be judged."""
    guard = recommendation.guard
    if guard is None or recommendation.candidate.is_baseline or not (guard.compared or guard.notes):
        return []
    notes = [f"not judged: {note}" for note in guard.notes]
    return [Text("compared: " + "; ".join((*guard.compared, *notes)), style="dim")]


def _facts(source: TrialSource, study_id: str) -> list[Text]:
    """State facts about a study without a recommendation: its state, its trials, rates so far."""
    lines = []
    for fact in get_headline_info(source, study_id).facts:
        note = f" ({fact.note})" if fact.note else ""
        lines.append(Text(f"{INDENT}{fact.name}: {fact.value}{note}", style="dim"))
    return lines


def _changes(console: Console, study: Study, recommendation: Recommendation | None, room: int) -> list[Text]:
    """List the recommended changes, one per line, as many as fit; for a script, list the lines to edit and their new
    code.
    """
    if recommendation is None or not recommendation.parts:
        return []
    if is_command(study.workload):
        title, texts = "How to use it", [_in_script(recommendation, c) for c in changes_of(study, recommendation.parts)]
    else:
        title, texts = "Changes", [_part(recommendation, part) for part in recommendation.parts]
    lines = [Text(), Text(title, style="bold")]
    num_shown = len(texts) if len(texts) <= room - len(lines) else max(1, room - len(lines) - 1)
    for text in texts[:num_shown]:
        if text.cell_len > console.width:
            text.truncate(console.width - 2)
            text.append(" …")
        lines.append(text)
    if num_shown < len(texts):
        lines.append(Text(f"{INDENT}and {len(texts) - num_shown} more", style="dim"))
    return lines


def _part(recommendation: Recommendation, part: Part) -> Text:
    words = f"{INDENT}{_contribution(recommendation, part):>6}  {part.strategy}: {choice_label(part.choice)}"
    return Text(words).append(_remark(recommendation, part), style="dim")


def _in_script(recommendation: Recommendation, change: Change) -> Text:
    """Return one change of the user's script: the line, the code to write there, and its contribution where
    measured.
    """
    gain = _contribution(recommendation, change.part)
    told = f"{INDENT}{gain:>6}  " if gain else INDENT
    line = Text(f"{told}{change.place or 'at the start'}  ", style="dim")
    return line.append(change.words, style="default not dim").append(_remark(recommendation, change.part))


def _contribution(recommendation: Recommendation, part: Part) -> str:
    """Return the measured contribution of a part, if the recommendation has other parts."""
    known = contribution_of(recommendation, part)
    return "" if known is None or len(recommendation.parts) == 1 else units.ratio(known.ratio)


def _remark(recommendation: Recommendation, part: Part) -> str:
    """Return a remark for a contribution that includes other parts, or was measured but may be zero; else an empty
    text.
    """
    interval = unclear_contribution(recommendation, part)
    if interval is not None:
        return f"  (none proven: {units.ratio_interval(interval)})"
    known = contribution_of(recommendation, part)
    return "" if known is None or not known.together else f"  ({needed_by(known.together)})"


def _use(study: Study, recommendation: Recommendation | None, results: Results | None) -> list[Text]:
    if recommendation is None or recommendation.candidate.is_baseline:
        return [] if results is None else [Text(), _file("report", results.report)]
    if is_command(study.workload):
        return _use_in_script(study, recommendation, results)
    lines = [Text(), Text("How to use it", style="bold")]
    if results is None:
        return [*lines, _command(f"steptune export {_short(study)}", "writes a training script and the report")]
    script = next((path for path in results.exports if path.suffix == ".py"), None)
    if script is not None:
        lines.append(Text(f"{INDENT}python {shlex.quote(str(script))}"))
    lines.append(_file("for steptune.apply in your script:", _named(results.exports, ".json")))
    return [*lines, _file("report", results.report)]


def _use_in_script(study: Study, recommendation: Recommendation, results: Results | None) -> list[Text]:
    """List the ways to bring the changes into the script, below the changes themselves."""
    lines = []
    with contextlib.suppress(RecommendationError):
        script_diff(recommendation)
        lines.append(_command(f"steptune export {_short(study)} -f diff -o - | git apply", "changes the lines"))
    if results is None:
        lines.append(
            _command(f"steptune export {_short(study)} -f json", "settings for steptune.enable, one line in the script")
        )
        return lines
    path = _named(results.exports, ".json")
    lines.append(Text(f"{INDENT}import steptune; steptune.enable({str(path)!r})").append("  one line", style="dim"))
    return [*lines, _file("report", results.report)]


def _next(study: Study, recommendation: Recommendation | None) -> list[Text]:
    lines = [Text(), Text("Next", style="bold")]
    short = _short(study)
    if study.state in _UNFINISHED:
        lines.append(_command(resume_command(study), "continues the search"))
    elif study.state is StudyState.FAILED:
        lines.append(_command(f"steptune delete {short}", "removes this study"))
    elif recommendation is not None and not recommendation.candidate.is_baseline:
        both = "both scripts" if is_command(study.workload) else "both settings"
        lines.append(_command(f"steptune verify {short}", f"trains {both} and compares their losses"))
    elif recommendation is not None and (command := more_time_command(study, recommendation)):
        lines.append(_command(command.replace(study.study_id, short), "continues, and keeps all trials"))
    return [*lines, _command(f"steptune show {short} --all", "the breakdown, all trials, untried choices")]


def _of_database(line: Text, option: str) -> Text:
    """Add an option after the study's id, if the line is a command that uses the database."""
    found = READS_STORE.match(line.plain)
    return line if found is None else Text.assemble(line[: found.end()], option, line[found.end() :])


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


def _height(console: Console, *lines: Text) -> int:
    """Return the number of rows that lines take on a terminal."""
    return sum(max(1, -(-line.cell_len // console.width)) for line in lines)
