"""Mistakes in a user's input are refused with status 2: what was wrong, its value, and the way out."""

from pathlib import Path

import pytest
from command import PATIENT, WORKLOADS

FLAWED = WORKLOADS / "flawed.py"
FINE = f"{FLAWED}:Fine"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["tune", "nowhere.py:Model"], ["nowhere.py does not exist", "give the path of a Python file"]),
        (["tune", "train.py"], ["'train.py' names no class", "path/to/file.py:ClassName", "zoo:NAME"]),
        (["tune", "zoo:nothing"], ["no zoo workload 'nothing'", "synthetic"]),
        (["tune", FINE, "--budget", "soon"], ["'soon' is not a duration", "5m"]),
        (["tune", FINE, "--budget", "0s"], ["'0s'", "positive"]),
        (["tune", FINE, "--budget", "5"], ["'5' has no unit", "5s, 5m or 5h"]),
        (["tune", f"{FLAWED}:Fien"], ["no class Fien", "did you mean 'Fine'?"]),
        (["tune", "zoo:gtp2"], ["no zoo workload 'gtp2'", "did you mean 'gpt2'?"]),
        (["tune", "zoo:timm"], ["zoo:timm needs name", "zoo:timm?name="]),
        (["profile", "zoo:lstm?batc=3"], ["zoo:lstm has no argument 'batc'", "did you mean 'batch'?"]),
        (["export", "--format", "jsno"], ["no export format 'jsno'", "did you mean 'json'?"]),
        (["show", "lsat"], ["no study 'lsat'"]),
        (["tune", FINE, "--budget", "-5m"], ["'-5m' is not a duration"]),
        (["tune", FINE, "--phase-timeout", "ages"], ["'ages' is not a duration"]),
        (["tune", FINE, "--memory-limit", "lots"], ["'lots' is not a size", "8g"]),
        (["tune", FINE, "--only", "data_loding"], ["no strategy 'data_loding'", "did you mean 'data_loading'?"]),
        (["tune", FINE, "--skip", "compile,magic"], ["no strategy 'magic'", "precision"]),
        (["tune", FINE, "--only", "precision=O9"], ["no strategy 'precision=O9'", "precision"]),
        (["tune", FINE, "--allow", "anything"], ["to allow 'anything'", "lossy", "recipe"]),
        (["tune", FINE, "--device", "tpu"], ["no device 'tpu'", "cpu", "cuda"]),
        (["tune", FINE, "--database", "nonsense"], ["'nonsense' is not a database URL", "sqlite:///steptune.db"]),
        (["profile", "nowhere.py:Model"], ["nowhere.py does not exist"]),
        (["resume", "last"], ["no study yet", "steptune tune"]),
        (["show", "last"], ["no study yet", "steptune tune"]),
        (["show", "zzzz"], ["no study 'zzzz'", "steptune tune"]),
        (["resume", "zzzz"], ["no study 'zzzz'", "steptune tune"]),
        (["export", "zzzz"], ["no study 'zzzz'", "steptune tune"]),
        (["verify", "zzzz", "--json"], ["no study 'zzzz'", "steptune tune"]),
        (["export", "--format", "docx"], ["'docx'", "json, yaml, python"]),
        (["profile", "--"], ["no command after `--`"]),
        (["profile"], ["nothing to profile"]),
        (["profile", "zoo:synthetic", "--", "true"], ["profile one of them"]),
        (["profile", "--seed", "1", "--", "true"], ["--seed is for workloads"]),
        (["profile", "--full", "zoo:synthetic"], ["require a command"]),
        (["tune", "--"], ["no command after `--`"]),
        (["tune"], ["nothing to tune"]),
        (["tune", "zoo:synthetic", "--", "true"], ["tune one of them"]),
        (["tune", "--device", "cpu", "--", "true"], ["--device is for workloads"]),
    ],
    ids=lambda value: " ".join(value).replace(str(WORKLOADS), "") if isinstance(value, list) else None,
)
def test_wrong_arguments_are_refused_before_anything_runs(inside, arguments, said):
    message = inside(*arguments, status=2).error
    for part in said:
        assert part in message
    assert not list(Path(".steptune").glob("*"))


@pytest.mark.parametrize(
    ("workload", "options", "said"),
    [
        ("NanLoss", [], ["the loss of the first batch is nan", "check its data"]),
        ("SmallerThanABatch", [], ["5 samples, fewer than one batch of 8", "smaller global_batch"]),
        ("DetachedLoss", [], ["does not depend on the model's parameters", "without detach()"]),
        ("RaisingWorker", [], ["ValueError: this sample is damaged", "flawed.py, line ", "worker process"]),
        ("EndlessStep", ["--phase-timeout", "2s"], ["did not end within 2 s", "--phase-timeout"]),
        ("HugeModel", ["--memory-limit", "2g"], ["does not fit into memory", "smaller global_batch or model"]),
        ("SlowStep", ["--budget", "10s"], ["the budget of 10 s is too short", "larger --budget"]),
    ],
)
def test_a_workload_that_cannot_be_tuned_is_refused_and_remembered(steptune, inside, workload, options, said):
    message = steptune.refused(
        "tune", f"{FLAWED}:{workload}", *PATIENT, *options, variables={"CUDA_VISIBLE_DEVICES": ""}
    )
    for part in said:
        assert part in message
    [entry] = inside("list", "--json").json
    assert entry["study"]["state"] == "failed"
    assert entry["study"]["message"] == message
    assert entry["recommendation"] is None


@pytest.mark.parametrize(
    ("workload", "options", "said"),
    [
        ("flawed.py:NotAWorkload", [], ["NotAWorkload is not a workload", "subclass steptune.Workload"]),
        ("flawed.py:Fine", ["--device", "cuda"], ["no CUDA device", "--device cpu"]),
        ("scripts/imports.py:Line", [], ["No module named 'package_that_nobody_has'", "imports.py, line "]),
        ("scripts/trains.py:Line", [], ["trains.py, line ", "trains while it is imported", "__main__"]),
    ],
)
def test_what_loading_shows_is_refused_before_a_study_exists(steptune, inside, workload, options, said):
    message = steptune.refused("tune", WORKLOADS / workload, *options, variables={"CUDA_VISIBLE_DEVICES": ""})
    for part in said:
        assert part in message
    assert inside("list", "--json").json == []
    assert not list(Path(".steptune", "studies").glob("*"))


@pytest.mark.parametrize("secret", [["--api-key", "sk-0123"], ["--hub_token=hf_0123"]])
def test_a_secret_in_a_command_is_named_and_not_repeated(inside, secret):
    message = inside("tune", "--", "true", *secret, status=2).error
    assert f"{secret[0].partition('=')[0]} looks like a secret" in message
    assert "0123" not in message


def test_a_class_that_the_file_does_not_have_is_named_with_those_that_it_has(inside):
    message = inside("profile", f"{FLAWED}:Absent", status=2).error
    assert "no class Absent" in message
    assert "Fine" in message


def test_a_syntax_error_is_named_with_file_and_line(inside):
    Path("broken.py").write_text("import torch\n\nclass Model(:\n")
    message = inside("tune", "broken.py:Model", status=2).error
    assert f"{Path.cwd() / 'broken.py'}, line 3" in message
    assert "not valid Python" in message


def test_an_import_that_fails_is_named_with_file_and_line(steptune):
    (steptune.folder / "helper.py").write_text("x = 1\nimport package_that_nobody_has\n")
    (steptune.folder / "train.py").write_text("import helper\n\nclass Model:\n    pass\n")
    message = steptune.refused("tune", "train.py:Model")
    assert "No module named 'package_that_nobody_has'" in message
    assert f"{steptune.folder / 'helper.py'}, line 2" in message


def test_debug_shows_where_it_was_raised(inside):
    ended = inside("--debug", "tune", "nowhere.py:Model", status=2)
    assert "Traceback (most recent call last)" in ended.err
    assert ended.err.rstrip().splitlines()[-1].startswith("error: ")


def test_a_usage_error_names_the_option(inside):
    """Typer's own errors have the same status and stay off standard output too."""
    ended = inside("tune", "zoo:synthetic", "--trials", "0", status=2)
    assert "--trials" in ended.err
    assert "steptune tune -h" in ended.err
    assert not ended.out


def test_a_message_is_one_line_however_narrow_the_output(steptune):
    long = Path("a" * 60) / ("b" * 60 + ".py")
    assert str(long) in steptune.refused("tune", f"{long}:Model", variables={"COLUMNS": "40"})


def test_brackets_in_a_message_are_not_markup(inside):
    assert "[bold]x[/]" in inside("tune", "[bold]x[/].py:Model", status=2).error


def test_a_script_that_reads_json_gets_nothing_but_the_status_from_a_refusal(inside):
    ended = inside("show", "zzzz", "--json", status=2)
    assert "'zzzz'" in ended.error
    assert not ended.out
