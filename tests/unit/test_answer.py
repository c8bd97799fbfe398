"""The answer of a study on one screen of 24 lines of 80 columns."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from builders import sample_facts
from msgspec.structs import replace
from report_builders import (
    STUDY_ID,
    complete_study,
    failed_study,
    make_parts,
    make_recommendation,
    make_study,
    running_study,
    stored,
    without_gain,
)
from rich.console import Console

from steptune.dashboards.sources import TrialSource
from steptune.service.cli.answer import print_answer
from steptune.service.studies import Results
from steptune.tuner.records import Candidate, Choice, GuardVerdict, Interval, ScriptFacts, StudyState, Verdict

FOLDER = Path("steptune-results") / STUDY_ID
RESULTS = Results(
    report=FOLDER / "report.html",
    exports=(FOLDER / "steptune.json", FOLDER / "steptune.yaml", FOLDER / "train_recommended.py"),
)


def printed(
    source: TrialSource, results: Results | None = None, width: int = 80, database: str | None = None
) -> list[str]:
    """The lines that a terminal of this width shows."""
    out = io.StringIO()
    print_answer(Console(file=out, width=width, color_system=None), source, STUDY_ID, results, database=database)
    return [line[at : at + width] for line in out.getvalue().splitlines() for at in range(0, max(1, len(line)), width)]


def test_it_has_the_claim_the_changes_their_use_and_the_next_command() -> None:
    text = "\n".join(printed(complete_study(), RESULTS))
    head, changes = text.partition("Changes")[::2]
    assert "2.42× as fast as today's settings" in head
    assert "95 % interval 2.37× to 2.47× · same training" in head
    for part in make_parts():
        assert f"{part.strategy}: " in changes.partition("How to use it")[0]
    use = changes.partition("How to use it")[2]
    assert f"python {FOLDER}/train_recommended.py" in use
    assert f"{FOLDER}/report.html" in use
    assert f"steptune verify {STUDY_ID[-8:]}" in use.partition("Next")[2]
    assert f"steptune show {STUDY_ID[-8:]} --all" in use


def test_a_contribution_that_may_be_none_is_told_from_one_that_was_not_measured() -> None:
    unclear, unknown, *_ = make_parts()
    unclear = replace(unclear, gain=1.01, interval=Interval(low=0.98, high=1.04), num_blocks=4)
    unknown = replace(unknown, gain=None, interval=None, num_blocks=0)
    lines = printed(stored(make_study(), recommendation=make_recommendation(parts=(unclear, unknown))), width=160)
    [line] = [line for line in lines if f" {unclear.strategy}: " in line]
    assert line.endswith("(none proven: 0.980× to 1.040×)")
    assert not any("none proven" in line for line in lines if f" {unknown.strategy}: " in line)


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("results", [RESULTS, None])
def test_it_fits_on_one_screen_whatever_it_says(width: int, results: Results | None) -> None:
    many = tuple(part for _ in range(20) for part in make_parts())
    workload = f"/home/me/{'long_name_' * 20}.py:Model"
    states = [make_study(state=state, message="it failed\n" * 50) for state in StudyState]
    sources = [
        complete_study(),
        running_study(8),
        failed_study(),
        stored(make_study(workload=workload), recommendation=make_recommendation(parts=many)),
        stored(make_study(), recommendation=without_gain()),
        *(stored(make_study(), recommendation=make_recommendation(verdict=v, gain=None)) for v in Verdict),
        *(stored(study) for study in states),
    ]
    for source in sources:
        for database in (None, f"sqlite:////home/me/{'folder/' * 6}steptune.db"):
            lines = printed(source, results, width, database)
            assert len(lines) <= 23, "\n".join(lines)
            assert "--all" in "".join(lines)


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("results", [RESULTS, None])
def test_of_a_script_it_fits_too_and_names_every_way_into_it(width: int, results: Results | None) -> None:
    prospect, notes = "The next 5 min would try more configurations. " * 9, ("what a loop does not show",) * 9
    choices: dict[str, Choice] = {
        "optimizer_implementation": {"implementation": "fused"},
        "backend_flags": {"flush_denormals": True},
        "compile": {"mode": "default"},
        "precision": {"level": "O1", "dtype": "bfloat16"},
        "cpu_threads": {"num_threads": 1},
    }
    parts = tuple(replace(make_parts()[0], strategy=name, choice=choice) for name, choice in choices.items())
    recommendation = make_recommendation(
        Candidate(choices=choices),
        workload="-- python train.py",
        parts=parts,
        prospect=prospect,
        guard=GuardVerdict(passed=True, num_steps=3, compared=("updates",) * 9, notes=notes),
    )
    script = ScriptFacts(command=("python", "train.py"), folder="/home/me", optimizers=("AdamW",), models=("Net",))
    facts = replace(sample_facts(), script=script)

    lines = printed(
        stored(make_study(workload="-- python train.py", facts=facts), recommendation=recommendation), results, width
    )

    assert len(lines) <= 23, "\n".join(lines)
    for part in ("How to use it", "steptune verify", "enable"):
        assert any(part in line for line in lines)


def test_what_was_compared_is_wrapped() -> None:
    notes = ("the gradients of tensors that a graph holds", "the scheduler, which the job makes itself")
    compared = ("the update of 200 tensors", "losses of 100 steps")
    guard = GuardVerdict(passed=True, num_steps=100, compared=compared, notes=notes)
    out = io.StringIO()
    source = stored(make_study(), recommendation=make_recommendation(guard=guard))
    print_answer(Console(file=out, width=80, color_system=None), source, STUDY_ID, RESULTS)
    lines = out.getvalue().partition("How to use it")[0].splitlines()
    assert all(len(line) <= 80 for line in lines), out.getvalue()
    assert "the scheduler, which the job makes itself" in " ".join(lines)


def test_changes_that_have_no_room_are_counted() -> None:
    many = tuple(part for _ in range(20) for part in make_parts())
    lines = printed(stored(make_study(), recommendation=make_recommendation(parts=many)), RESULTS)
    [more] = [line for line in lines if line.strip().startswith("and ")]
    shown = sum("×  " in line for line in lines)
    assert more.strip() == f"and {len(many) - shown} more"


def test_commands_name_the_database_that_was_given() -> None:
    short, option = STUDY_ID[-8:], "--database 'postgresql+psycopg://me:***@host/tune'"
    given = "postgresql+psycopg://me:hidden@host/tune"
    text = "\n".join(printed(complete_study(), width=200, database=given))
    for command in (f"export {short} {option}", f"verify {short} {option}", f"show {short} {option} --all"):
        assert f"steptune {command}" in text
    assert "hidden" not in text
    certificate = replace(make_recommendation().certificate, ended="interrupted")
    answer = make_recommendation(
        Candidate(choices={}), verdict=Verdict.NOT_SEARCHED, gain=None, certificate=certificate
    )
    interrupted = stored(make_study(state=StudyState.INTERRUPTED), recommendation=answer)
    text = " ".join(printed(interrupted, width=200, database="sqlite:///other.db"))
    assert text.count(f"steptune resume {STUDY_ID} --database sqlite:///other.db") == 2


def test_a_cancelled_study_is_not_to_be_resumed() -> None:
    certificate = replace(make_recommendation().certificate, ended="interrupted")
    answer = make_recommendation(
        Candidate(choices={}), verdict=Verdict.NOT_SEARCHED, gain=None, certificate=certificate
    )
    cancelled = stored(make_study(state=StudyState.CANCELLED), recommendation=answer)
    assert "resume" not in "\n".join(printed(cancelled))


def test_a_script_that_is_not_here_goes_on_at_its_service(tmp_path: Path) -> None:
    for folder, command in ((tmp_path, "resume"), (tmp_path / "gone", "continue")):
        script = ScriptFacts(command=("python", "train.py"), folder=str(folder))
        study = make_study(
            workload="-- python train.py", state=StudyState.PAUSED, facts=replace(sample_facts(), script=script)
        )
        assert f"steptune {command} {STUDY_ID}" in "\n".join(printed(stored(study)))


def test_a_study_whose_trials_were_spent_does_not_blame_its_budget() -> None:
    certificate = replace(make_recommendation().certificate, ended="trials spent")
    answer = make_recommendation(
        Candidate(choices={}), verdict=Verdict.NOT_SEARCHED, gain=None, certificate=certificate
    )
    text = " ".join(printed(stored(make_study(), recommendation=answer), width=200))
    assert "budget" not in text
    assert "Allow more trials with --trials" in text


def test_a_study_that_can_go_on_says_how() -> None:
    interrupted = stored(make_study(state=StudyState.INTERRUPTED), recommendation=make_recommendation())
    assert any(f"steptune resume {STUDY_ID}" in line for line in printed(interrupted))
    assert not any("steptune resume" in line for line in printed(complete_study()))


def test_a_study_that_found_no_answer_goes_on_with_its_trials() -> None:
    open_end = make_recommendation(Candidate(choices={}), verdict=Verdict.INCONCLUSIVE, gain=None)
    text = " ".join(printed(stored(make_study(), recommendation=open_end), width=200, database="sqlite:///other.db"))
    assert f"steptune resume {STUDY_ID[-8:]} --database sqlite:///other.db --budget " in text
    assert f"`steptune resume {STUDY_ID} --database sqlite:///other.db --budget " in text


def test_nothing_to_change_has_nothing_to_use() -> None:
    kept = stored(make_study(), recommendation=without_gain())
    text = "\n".join(printed(kept, RESULTS))
    assert "No significant gain" in text
    assert "Changes" not in text
    assert "python" not in text
    assert "report.html" in text


def test_paths_are_whole_off_a_terminal() -> None:
    far = replace_folder(Path("/data") / ("deep/" * 30))
    out = io.StringIO()
    print_answer(Console(file=out, width=80, color_system=None), complete_study(), STUDY_ID, far)
    assert str(far.report) in out.getvalue()


def replace_folder(folder: Path) -> Results:
    return Results(report=folder / "report.html", exports=tuple(folder / path.name for path in RESULTS.exports))


def test_a_change_too_long_for_its_line_is_cut() -> None:
    part = replace(make_parts()[0], choice={f"parameter_{n}": n for n in range(30)})
    lines = printed(stored(make_study(), recommendation=make_recommendation(parts=(part,))))
    assert any(line.endswith(" …") for line in lines)
