"""`steptune verify -- COMMAND`: the changed script beside the unchanged one, each as a user starts it."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from builders import sample_recommendation
from msgspec.structs import replace
from script_runs import ROOT, STEPS_ONLY, ScriptFolder, Trials, TrialsOf, case, interpreter
from test_script_tuning import steptune

from steptune.service.script_verification import changed_by, changed_file, verified
from steptune.tuner.errors import ChoiceError, RecommendationError
from steptune.tuner.records import Choice
from steptune.tuner.scripts import verification
from steptune.tuner.scripts.verification import Changed, ScriptVerification

FUSED: dict[str, Choice] = {"optimizer_implementation": {"implementation": "fused"}}
WORKER: dict[str, Choice] = {"data_loading": {"num_workers": 1}}
AUTOCAST: dict[str, Choice] = {"precision": {"level": "O1", "dtype": "bfloat16"}}
PLAIN = pytest.mark.xdist_group("plain.py")
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
CASES = [
    case("plain.py", WORKER | FUSED, "enable", (), None, id="plain"),
    case("plain.py", WORKER | FUSED, "diff", (), None, id="plain_by_diff"),
    case("own_trainer.py", {"data_loading": {"num_workers": 2}}, "diff", (), None, id="own_trainer"),
    case("detection.py", WORKER, "enable", (), None, id="detection"),
    case("two_ranks.py", FUSED, "enable", TORCHRUN, None, id="two_ranks"),
    case("hf_trainer.py", WORKER, "enable", (), "transformers", id="hf_trainer"),
    case("hf_trainer.py", WORKER | AUTOCAST, "diff", (), "transformers", id="hf_trainer_by_arguments"),
    case("accelerated.py", WORKER, "diff", (), "accelerate", id="accelerated_by_diff"),
    case("lightning_automatic.py", FUSED | AUTOCAST, "diff", (), "lightning", id="lightning_by_arguments"),
]


def compared(trials: Trials, changed: Changed) -> ScriptVerification:
    return verified(trials.look, changed, num_blocks=2, settings=STEPS_ONLY, say=lambda text: None)


@pytest.mark.parametrize(("script", "choices", "how", "launcher", "library"), CASES)
def test_the_changed_script_has_a_speed_and_the_loss_of_the_unchanged_one(
    folder: ScriptFolder,
    trials_of: TrialsOf,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    script: str,
    choices: dict[str, Choice],
    how: str,
    launcher: tuple[str, ...],
    library: str | None,
) -> None:
    """Libraries take seconds to import: their scripts run on from frozen copies."""
    command = (interpreter(library), *launcher, folder.add(script))
    before = folder.files()
    with contextlib.ExitStack() as ends:
        if library is None:
            trials = trials_of(*command)
        else:
            monkeypatch.setattr(verification, "shares_layout", lambda look: False)
            trials = Trials(folder.path, tmp_path / "study", command, forked=True)
            ends.callback(trials.close)
        changed = ends.enter_context(changed_by(trials.recommended(**choices), how, command))
        found = compared(trials, changed)

    assert found.runs.startswith("each run is a fork" if library else "each run starts the command"), found.runs
    assert found.same, found.reason
    assert found.num_losses >= 8
    assert found.gain.num_blocks == 2
    assert found.gain.interval.low < found.gain.ratio < found.gain.interval.high
    assert not found.missing
    assert folder.files() == before
    assert not list((folder.path.parent / "temporary").glob("steptune*"))


@pytest.mark.parametrize("how", ["enable", "diff"])
def test_both_scripts_run_on_from_frozen_copies_where_forks_are_like_starts(
    folder: ScriptFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """The look has left one of the unchanged script; of the changed one a start leaves another."""
    monkeypatch.setattr(verification, "shares_layout", lambda look: False)
    monkeypatch.setenv("LOADS", str(tmp_path / "loads"))
    command = (interpreter(None), folder.add("loaded.py"))
    with contextlib.closing(Trials(folder.path, tmp_path / "study", command, forked=True)) as trials:
        said: list[str] = []
        with changed_by(trials.recommended(**WORKER | FUSED), how, command) as changed:
            found = verified(trials.look, changed, num_blocks=3, settings=STEPS_ONLY, say=said.append)

    assert found.runs == "each run is a fork of a frozen copy of its script"
    assert len((tmp_path / "loads").read_text().splitlines()) == 2
    assert found.same, found.reason
    assert found.num_losses >= 8
    assert found.gain.num_blocks == 3
    assert not found.missing
    assert said[0] == "starting the changed script"
    assert not list((folder.path.parent / "temporary").glob("steptune*"))


def test_a_script_that_bears_no_copy_is_started_each_time_and_says_why(
    folder: ScriptFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verification, "shares_layout", lambda look: False)
    monkeypatch.setenv("LOADS", str(tmp_path / "loads"))
    command = (interpreter(None), folder.add("loaded.py"), "--folder")
    with (
        contextlib.closing(Trials(folder.path, tmp_path / "study", command, forked=True)) as trials,
        changed_by(trials.recommended(**FUSED), "enable", command) as changed,
    ):
        found = compared(trials, changed)

    assert found.runs.startswith("each run starts the command, without a frozen copy: ")
    assert "File exists" in found.runs
    assert found.same, found.reason


@PLAIN
def test_no_block_begins_that_would_end_too_late(plain: Trials) -> None:

    with changed_by(plain.recommended(**FUSED), "enable", plain.look.command) as changed:
        found = verified(plain.look, changed, num_blocks=9, settings=STEPS_ONLY, say=lambda text: None, longest_s=0.0)

    assert found.gain.num_blocks == 2
    assert found.runs.startswith("each run starts the command")


@PLAIN
def test_a_file_that_trains_otherwise_is_found_by_its_loss(plain: Trials, tmp_path: Path) -> None:
    edited = tmp_path / "edited.py"
    edited.write_text(Path("plain.py").read_text().replace("model(x), y)", "model(x), y) * 2"))

    found = compared(plain, changed_file(edited, plain.look.command, plain.look.folder))

    assert not found.same
    assert "the changed script's loss is higher" in found.reason


@PLAIN
def test_a_line_that_stands_in_the_script_already_is_left_to_the_verification(
    plain: Trials, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both sides have it: the unchanged one is run as if it were not there."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    path = Path("plain.py")
    path.write_text('import steptune\nsteptune.enable("missing.json")\n' + path.read_text())

    with changed_by(plain.recommended(**FUSED), "enable", plain.look.command) as changed:
        found = compared(plain, changed)

    assert found.same
    assert not found.missing


@PLAIN
def test_changes_to_which_the_script_never_comes_are_named(plain: Trials) -> None:
    recommendation = plain.recommended(**WORKER)
    changes = recommendation.in_script
    assert changes is not None
    elsewhere = {"loader_number": 7, "lines": {}}

    other = replace(recommendation, in_script=replace(changes, script=replace(changes.script, **elsewhere)))
    with changed_by(other, "enable", plain.look.command) as changed:
        found = compared(plain, changed)

    assert "loader.num_workers" in found.missing


@PLAIN
def test_a_refused_recommendation_is_told_in_its_own_words(plain: Trials) -> None:
    recommendation = plain.recommended(**FUSED)
    path = Path("plain.py")
    path.write_text(path.read_text().replace("batch_size=8", "batch_size=4"))

    with (
        changed_by(recommendation, "enable", plain.look.command) as changed,
        pytest.raises(RecommendationError, match=r"plain\.py has changed since it was tuned"),
    ):
        compared(plain, changed)


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ("enable", RecommendationError, "changes nothing in the script"),
        ("magic", ChoiceError, "write one of enable, diff"),
    ],
)
def test_there_must_be_a_change(how: str, error: type[ValueError], message: str) -> None:
    with pytest.raises(error, match=message), changed_by(sample_recommendation(), how, ("python", "train.py")):
        pass


def test_the_command_must_name_the_script_that_a_file_replaces(tmp_path: Path) -> None:
    (tmp_path / "edited.py").write_text("")

    with pytest.raises(ChoiceError, match=r"exactly one Python file .*, got 0"):
        changed_file(tmp_path / "edited.py", ("bash", "run.sh"), tmp_path)


def test_the_command_prints_speed_and_loss_and_ends_with_a_status(folder: ScriptFolder) -> None:
    """Steps mostly sleep: few windows tell their time."""
    path, edited = Path(folder.add("plain.py")), folder.path.parent / "edited.py"
    text = path.read_text().replace("import os\n", "import os\nimport time\n")
    path.write_text(text.replace("scheduler.step()\n", "scheduler.step()\n        time.sleep(0.01)\n"))
    edited.write_text(path.read_text().replace("model(x), y)", "model(x), y) * 2"))
    command = (interpreter(None), "plain.py", "--steps", "4000")

    done = steptune(folder, "verify", "--blocks", "2", "--edited", str(edited), "--", *command)
    missing = steptune(folder, "verify", "--", *command)

    assert done.returncode == 1, done.stderr
    assert [line.split()[:2] for line in done.stdout.splitlines()[:2]] == [["own", "speed"], ["own", "loss"]]
    assert "loss is higher" in " ".join(done.stdout.split())
    assert missing.returncode == 2
    assert "no study of this command" in " ".join(missing.stderr.split())
    assert list(folder.files()) == ["plain.py"]
