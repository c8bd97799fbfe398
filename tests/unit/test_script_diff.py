"""A recommendation as a change to a script's own lines: what is written where, and what is left to `enable`."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
from builders import sample_recommendation
from msgspec.structs import replace

from steptune.tuner.errors import RecommendationError
from steptune.tuner.records import Candidate, Choice, Recommendation, ScriptFacts
from steptune.tuner.scripts.agent.sources import counted_lines, source_digest
from steptune.tuner.scripts.diff import MOST_LINES, ScriptDiff, script_diff
from steptune.tuner.strategies import STRATEGIES
from steptune.tuner.strategies.in_scripts import script_changes

SCRIPT = """\
import argparse

import torch
from torch.utils.data import DataLoader


def main(args, data, model):
    loader = DataLoader(  # as it was
        data,
        batch_size=8,
        shuffle=True,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for x, y in loader:
        output = model(x)
        loss = torch.nn.functional.cross_entropy(output, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""
LINES = {"loader": 8, "optimizer": 13, "model": 15, "step": 19}
WORKERS: Choice = {"num_workers": 4, "pin_memory": True}
FUSED: Choice = {"implementation": "fused"}


def recommended(folder: Path, text: str = SCRIPT, at: Mapping[str, int] = LINES, **choices: Choice) -> Recommendation:
    """The choices for a script in a folder, whose objects are made at these lines."""
    (folder / "train.py").write_text(text)
    counted = counted_lines(text)
    script = ScriptFacts(
        command=("python", "train.py"),
        folder=str(folder),
        loader="DataLoader",
        loader_number=0,
        optimizers=("AdamW",),
        optimizer_numbers=(0,),
        models=("Net",),
        places={name: f"{folder}/train.py:{line} in main" for name, line in at.items()},
        files={"train.py": source_digest(text)},
        lines={name: ("train.py", counted.index(line)) for name, line in at.items() if line in counted},
    )
    complete = {s.name: {**s.defaults, **choices.get(s.name, {})} for s in STRATEGIES}
    candidate = Candidate(choices=choices)
    return replace(
        sample_recommendation(candidate=candidate, choices=complete),
        workload="-- python train.py",
        in_script=script_changes(candidate, complete, script),
    )


def added(diff: ScriptDiff) -> list[str]:
    return [line[1:].strip() for line in diff.diff.splitlines() if line.startswith("+") and not line.startswith("+++")]


@pytest.mark.parametrize(
    ("choices", "expected"),
    [
        pytest.param({"data_loading": WORKERS}, ["shuffle=True, num_workers=4, pin_memory=True,"], id="loader"),
        pytest.param(
            {"optimizer_implementation": FUSED},
            ["optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)"],
            id="fused",
        ),
        pytest.param({"compile": {"mode": "default"}}, ["model.compile()"], id="compile"),
        pytest.param(
            {"memory_format": {"layout": "channels_last"}},
            ["model.to(memory_format=torch.channels_last)"],
            id="channels_last",
        ),
        pytest.param(
            {"precision": {"level": "O1", "dtype": "bfloat16"}},
            [
                'with torch.autocast("cpu", dtype=torch.bfloat16):',
                "output = model(x)",
                "loss = torch.nn.functional.cross_entropy(output, y)",
            ],
            id="autocast",
        ),
        pytest.param({"cpu_threads": {"num_threads": 1}}, ["torch.set_num_threads(1)"], id="threads"),
        pytest.param({"backend_flags": {"flush_denormals": True}}, ["torch.set_flush_denormal(True)"], id="flags"),
    ],
)
def test_a_choice_with_a_plain_idiom_is_written_at_its_line(
    tmp_path: Path, choices: dict[str, Choice], expected: list[str]
) -> None:
    diff = script_diff(recommended(tmp_path, **choices))

    assert added(diff) == expected
    assert diff.expressed == tuple(choices)
    assert not diff.left_out


@pytest.mark.parametrize("end", ["\n", ""], ids=["with a last line break", "without"])
def test_git_applies_the_diff_below_the_top_of_a_repository(tmp_path: Path, end: str) -> None:
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    folder = tmp_path / "below"
    folder.mkdir()
    choices: dict[str, Choice] = {"data_loading": WORKERS, "optimizer_implementation": FUSED}
    diff = script_diff(recommended(folder, SCRIPT.rstrip("\n") + end, **choices))

    subprocess.run(["git", "apply", "-"], input=diff.diff, text=True, cwd=folder, check=True)

    assert (folder / "train.py").read_text() == diff.texts["train.py"]
    assert "# as it was" in diff.texts["train.py"]


def test_an_argument_that_comes_from_the_command_line_stays_there(tmp_path: Path) -> None:
    parser = '    parser.add_argument("-j", "--workers", type=int, default=0)\n'
    text = SCRIPT.replace("        shuffle=True,\n", "        shuffle=True, num_workers=args.workers,\n") + parser

    diff = script_diff(recommended(tmp_path, text, data_loading=WORKERS))

    assert diff.options == ("--workers 4",)
    assert added(diff) == ["shuffle=True, num_workers=args.workers, pin_memory=True,"]


@pytest.mark.parametrize(
    ("line", "other", "choices", "reason"),
    [
        pytest.param(
            "        shuffle=True,\n",
            "        **settings,\n",
            {"data_loading": WORKERS},
            "its arguments come from a dictionary",
            id="dictionary",
        ),
        pytest.param(
            "DataLoader(  #", "make_loader(  #", {"data_loading": WORKERS}, "no calls of DataLoader", id="function"
        ),
        pytest.param(
            "AdamW(model.parameters()",
            "AdamW(groups(model)",
            {"compile": {"mode": "default"}},
            "do not come from a single variable",
            id="groups",
        ),
        pytest.param(
            "        loss.backward()\n",
            "        finish(loss, optimizer)\n",
            {"precision": {"level": "O1", "dtype": "bfloat16"}},
            "are not in the same block of code",
            id="backward",
        ),
    ],
)
def test_a_line_that_cannot_say_a_change_leaves_it_to_enable(
    tmp_path: Path, line: str, other: str, choices: dict[str, Choice], reason: str
) -> None:
    text = SCRIPT.replace(line, other)
    assert text != SCRIPT

    with pytest.raises(RecommendationError, match=r"steptune\.enable") as refused:
        script_diff(recommended(tmp_path, text, **choices))

    assert reason in str(refused.value)
    partly = script_diff(recommended(tmp_path, text, **choices, backend_flags={"flush_denormals": True}))
    assert partly.expressed == ("backend_flags",)
    assert reason in partly.left_out[next(iter(choices))]


def test_autocast_goes_around_a_context_of_the_scripts_own(tmp_path: Path) -> None:
    text = SCRIPT.replace("        output = model(x)\n", "        with context: output = model(x)\n")
    autocast: Choice = {"level": "O1", "dtype": "bfloat16"}

    diff = script_diff(recommended(tmp_path, text, precision=autocast))

    assert added(diff)[:2] == ['with torch.autocast("cpu", dtype=torch.bfloat16):', "with context: output = model(x)"]


def test_a_diff_of_many_lines_is_none(tmp_path: Path) -> None:
    many = "".join(f"        output = output + {number}\n" for number in range(MOST_LINES // 2))
    text = SCRIPT.replace("        output = model(x)\n", f"        output = model(x)\n{many}")

    with pytest.raises(RecommendationError, match=f"more than the limit of {MOST_LINES}"):
        script_diff(recommended(tmp_path, text, precision={"level": "O1", "dtype": "bfloat16"}))


def test_an_edited_file_is_refused(tmp_path: Path) -> None:
    recommendation = recommended(tmp_path, data_loading=WORKERS)
    (tmp_path / "train.py").write_text(SCRIPT.replace("batch_size=8", "batch_size=4"))

    with pytest.raises(RecommendationError, match="was edited since it was tuned"):
        script_diff(recommendation)


def test_a_recommendation_of_a_workload_has_no_script() -> None:
    with pytest.raises(RecommendationError, match="this one is for a Workload"):
        script_diff(sample_recommendation())


AUTOCAST: Choice = {"level": "O1", "dtype": "bfloat16"}
ALL: dict[str, Choice] = {
    "data_loading": WORKERS,
    "precision": AUTOCAST,
    "compile": {"mode": "default"},
}


def test_indentation_and_line_ends_stay_those_of_the_file(tmp_path: Path) -> None:
    """Tabs, Windows' line ends, a form feed between functions, and letters of two bytes before what is edited."""
    text = SCRIPT.replace("    ", "\t").replace("import argparse\n", "import argparse  # für alle\x0c\n")
    text = text.replace("\n", "\r\n")
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    recommendation = recommended(tmp_path, text, **ALL)
    (tmp_path / "train.py").write_bytes(text.encode())

    diff = script_diff(recommendation)
    subprocess.run(["git", "apply", "-"], input=diff.diff.encode(), cwd=tmp_path, check=True)

    assert diff.expressed == tuple(ALL)
    edited = (tmp_path / "train.py").read_bytes().decode()
    assert edited == diff.texts["train.py"]
    assert edited.count("\n") == edited.count("\r\n")
    assert not any(line.startswith(" ") for line in edited.splitlines())


@pytest.mark.parametrize(
    ("line", "other"),
    [
        pytest.param("        loss = torch", '        note = """of\nseveral lines"""\n        loss = torch', id="text"),
        pytest.param("y)\n        optimizer.zero_grad()\n        loss", "y); loss", id="semicolon"),
    ],
)
def test_statements_that_cannot_be_indented_as_they_are_are_left_alone(tmp_path: Path, line: str, other: str) -> None:
    text = SCRIPT.replace(line, other)
    assert text != SCRIPT

    with pytest.raises(RecommendationError, match="cannot be indented without changing"):
        script_diff(recommended(tmp_path, text, precision=AUTOCAST))


LOSS = "        loss = torch.nn.functional.cross_entropy(output, y)\n"


@pytest.mark.parametrize(
    ("line", "other", "reason"),
    [
        pytest.param(
            "        output = model(x)\n",
            "        with torch.autocast('cpu', enabled=args.amp): output = model(x)\n",
            "inside its own autocast",
            id="switched_off",
        ),
        pytest.param(
            "        output = model(x)\n",
            "        with context: output = model(x)\n        context = torch.autocast('cpu', enabled=args.amp)\n",
            "inside its own autocast",
            id="switched_off_before",
        ),
        pytest.param(
            "        optimizer.step()\n",
            "        optimizer.first_step()\n        torch.nn.functional.mse_loss(model(x), y).backward()\n",
            "backward several times",
            id="two_passes",
        ),
        pytest.param(
            LOSS, "        torch.nn.functional.mse_loss(output, y).backward()\n", "backward several", id="twice"
        ),
        pytest.param(
            f"{LOSS}        optimizer.zero_grad()\n        loss.backward()\n",
            "        scaler.scale(torch.nn.functional.cross_entropy(output, y)).backward()\n",
            "computed in the statement",
            id="loss_in_backward",
        ),
        pytest.param(
            "        optimizer.step()\n",
            "        optimizer.step()\n        shown = output.detach().cpu().numpy()\n",
            "NumPy",
            id="numpy",
        ),
    ],
)
def test_autocast_that_would_be_another_training_is_left_alone(
    tmp_path: Path, line: str, other: str, reason: str
) -> None:
    text = SCRIPT.replace(line, other)
    assert text != SCRIPT

    with pytest.raises(RecommendationError, match=reason):
        script_diff(recommended(tmp_path, text, precision=AUTOCAST))


def test_autocast_ends_where_the_loss_is_made(tmp_path: Path) -> None:
    """The next batch, which nanoGPT loads before backward, is not made in bfloat16."""
    text = SCRIPT.replace("        loss.backward()\n", "        x = augmented(x)\n        (loss / 2).backward()\n")

    diff = script_diff(recommended(tmp_path, text, precision=AUTOCAST))

    assert len(added(diff)) == 3


def test_autocast_around_one_of_several_models_is_left_alone(tmp_path: Path) -> None:
    recommendation = recommended(tmp_path, precision=AUTOCAST)
    assert recommendation.in_script is not None
    script = replace(recommendation.in_script.script, models=("Discriminator", "Generator"))

    with pytest.raises(RecommendationError, match="a step calls 2 models"):
        script_diff(replace(recommendation, in_script=replace(recommendation.in_script, script=script)))


@pytest.mark.parametrize(
    ("line", "other", "choices", "reason"),
    [
        pytest.param(
            "torch.optim.AdamW(",
            "AdamW(",
            {"optimizer_implementation": FUSED},
            "AdamW is not a class of torch",
            id="optimizer",
        ),
        pytest.param(
            "from torch.utils.data import DataLoader",
            "from mine import DataLoader",
            {"data_loading": WORKERS},
            "DataLoader is not a class of torch",
            id="loader",
        ),
    ],
)
def test_a_class_of_another_library_is_given_no_argument_that_it_may_not_take(
    tmp_path: Path, line: str, other: str, choices: dict[str, Choice], reason: str
) -> None:
    with pytest.raises(RecommendationError, match=reason):
        script_diff(recommended(tmp_path, SCRIPT.replace(line, other), **choices))


def test_a_class_is_known_by_its_imports(tmp_path: Path) -> None:
    text = SCRIPT.replace("import argparse\n", "from torch import optim as choices\n")
    text = text.replace("torch.optim.AdamW(", "choices.AdamW(")

    assert script_diff(recommended(tmp_path, text, optimizer_implementation=FUSED)).expressed


@pytest.mark.parametrize(
    ("today", "wanted", "expected"),
    [
        ("foreach=True", "fused", "foreach=False, fused=True)"),
        ("fused=True", "foreach", "fused=False, foreach=True)"),
        ("fused=True", "for_loop", "fused=False, foreach=False)"),
    ],
)
def test_the_implementation_that_stands_there_goes(tmp_path: Path, today: str, wanted: str, expected: str) -> None:
    """torch refuses `fused` beside `foreach`, and a fused update stays one beside `foreach=False`."""
    text = SCRIPT.replace("lr=1e-3)", f"lr=1e-3, {today})")

    diff = script_diff(recommended(tmp_path, text, optimizer_implementation={"implementation": wanted}))

    assert added(diff)[0].endswith(expected)


@pytest.mark.parametrize(
    ("line", "other", "reason"),
    [
        pytest.param(
            "        output = model(x)\n",
            "        output = wrapper(x)\n",
            "does not call model",
            id="inside_another",
        ),
        pytest.param(
            "    for x, y in loader:\n",
            "    model = Wrapper(model)\n    for x, y in loader:\n",
            "model is assigned again later",
            id="wrapped_later",
        ),
        pytest.param(
            "torch.optim.AdamW(model.parameters(), lr=1e-3)",
            "[torch.optim.AdamW(model.parameters()) for model in models]",
            "exists only inside a comprehension or lambda",
            id="comprehension",
        ),
    ],
)
@pytest.mark.parametrize(
    "choices",
    [{"compile": {"mode": "default"}}, {"memory_format": {"layout": "channels_last"}}],
    ids=["compile", "layout"],
)
def test_a_model_that_is_not_surely_the_one_that_is_called_is_left_alone(
    tmp_path: Path, line: str, other: str, reason: str, choices: dict[str, Choice]
) -> None:
    text = SCRIPT.replace(line, other)
    at = {**LINES, "model": next(n for n, each in enumerate(text.split("\n"), start=1) if "output = " in each)}

    with pytest.raises(RecommendationError, match=reason):
        script_diff(recommended(tmp_path, text, at, **choices))


def test_a_model_that_is_only_moved_later_is_the_same(tmp_path: Path) -> None:
    text = SCRIPT.replace(
        "        optimizer.step()\n", "        optimizer.step()\n        model = model.to(x.device).train()\n"
    )

    assert script_diff(recommended(tmp_path, text, compile={"mode": "default"})).expressed


@pytest.mark.parametrize(
    "own", ["torch.set_flush_denormal(args.flush)", "torch.backends.cudnn.benchmark = True"], ids=["wanted", "default"]
)
def test_flags_that_the_script_sets_itself_are_left_alone(tmp_path: Path, own: str) -> None:
    """Below the optimizer, as in the ImageNet example, they would win; a default is none where the script sets it."""
    text = SCRIPT.replace("    for x, y in loader:\n", f"    {own}\n    for x, y in loader:\n")
    at = {**LINES, "model": 16, "step": 20}

    with pytest.raises(RecommendationError, match="the script sets"):
        script_diff(recommended(tmp_path, text, at, backend_flags={"flush_denormals": True}))


def test_torch_is_imported_where_only_another_function_does(tmp_path: Path) -> None:
    text = SCRIPT.replace("import torch\n", "from torch.optim import AdamW\n", 1).replace("torch.optim.AdamW", "AdamW")
    text = f"{text}\n\ndef other():\n    import torch\n    return torch\n"

    diff = script_diff(recommended(tmp_path, text, cpu_threads={"num_threads": 1}))

    assert added(diff) == ["import torch", "torch.set_num_threads(1)"]


@pytest.mark.parametrize(
    ("command", "line"),
    [
        pytest.param(("python", "train.py"), "    args.workers = args.workers // 2\n", id="assigned"),
        pytest.param(("bash", "run.sh"), "", id="shell"),
    ],
)
def test_an_option_that_may_not_arrive_is_written_as_an_argument(
    tmp_path: Path, command: tuple[str, ...], line: str
) -> None:
    parser = f'{line}    parser.add_argument("-j", "--workers", type=int, default=0)\n'
    text = SCRIPT.replace("        shuffle=True,\n", "        shuffle=True, num_workers=args.workers,\n") + parser
    recommendation = recommended(tmp_path, text, data_loading=WORKERS)
    assert recommendation.in_script is not None
    script = replace(recommendation.in_script.script, command=command)

    diff = script_diff(replace(recommendation, in_script=replace(recommendation.in_script, script=script)))

    assert not diff.options
    assert added(diff) == ["shuffle=True, num_workers=4, pin_memory=True,"]


def test_loaders_that_a_comprehension_makes_are_changed_as_in_the_trial(tmp_path: Path) -> None:
    """The trial changes all loaders that are made in the line."""
    text = SCRIPT.replace("    loader = DataLoader(  # as it was\n", "    loaders = [DataLoader(  # as it was\n")
    text = text.replace("        shuffle=True,\n    )\n", "        shuffle=True,\n    ) for data in sets]\n")

    assert script_diff(recommended(tmp_path, text, data_loading=WORKERS)).expressed
