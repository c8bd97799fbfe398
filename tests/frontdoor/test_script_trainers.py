"""Choices in loops that a library owns: each is made from outside, and is the same training.

Trials go on from frozen copies. Where trials start the command is the same in all scripts, and tested with others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from script_runs import SCRIPTS, VARIABLES, Trials, interpreter

from steptune.tuner.records import Choice
from steptune.tuner.strategies.api import BF16_ROUNDOFF, FP32_ROUNDOFF

LINEAR = "nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8)"
CONVOLUTION = "nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, 32, 2), nn.ReLU(), nn.Flatten(), nn.Linear(32, 8)"
SCRIPTS_OF = {
    "transformers": (
        "hf_trainer.py",
        ("    use_cpu=True,", '    use_cpu=True,\n    optim="adamw_torch",'),
    ),
    "accelerate": ("accelerated.py", ('mixed_precision="bf16", ', ""), (LINEAR, CONVOLUTION)),
    "lightning": ("lightning_automatic.py", (LINEAR, CONVOLUTION)),
}
"""Script of the tests by library, with what stands otherwise in it, so that there is something to choose."""
CHOICES: dict[str, dict[str, Choice]] = {
    "loader": {"data_loading": {"num_workers": 1}},
    "fused": {"optimizer_implementation": {"implementation": "fused"}},
    "autocast": {"precision": {"level": "O1", "dtype": "bfloat16"}},
    "tf32": {"backend_flags": {"tf32": True}},
    "compile": {"compile": {"mode": "default"}},
    "channels_last": {"memory_format": {"layout": "channels_last"}},
}


@pytest.fixture(
    scope="module", params=[pytest.param(library, marks=pytest.mark.xdist_group(library)) for library in SCRIPTS_OF]
)
def trials(request: pytest.FixtureRequest, view: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trials]:
    """Trials of a library's script, with what candidates are compared with."""
    name, *replaced = SCRIPTS_OF[request.param]
    python = interpreter(request.param)
    work = tmp_path_factory.mktemp(request.param)
    text = (SCRIPTS / name).read_text()
    for before, after in replaced:
        assert before in text
        text = text.replace(before, after)
    (work / name).write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        for variable, value in VARIABLES.items():
            patch.setenv(variable, value)
        with contextlib.closing(Trials(work, tmp_path_factory.mktemp("study"), (python, name), forked=True)) as found:
            found.reference(FP32_ROUNDOFF, BF16_ROUNDOFF)
            yield found


@pytest.mark.parametrize("choice", CHOICES)
def test_a_choice_is_made_in_a_librarys_loop_and_is_the_same_training(trials: Trials, choice: str) -> None:
    folder = trials.look.folder
    before = sorted(path.name for path in folder.iterdir())
    if choice == "channels_last" and trials.look.script.models == ("GPT2LMHeadModel",):
        pytest.skip("no convolution in it")

    result = trials.run(**CHOICES[choice])

    assert result.failure is None, result.failure
    assert result.interpreter == "forked", trials.look.why_no_copy
    assert result.windows
    assert result.guard is not None
    assert result.guard.passed, result.guard.reason
    assert {"pointwise", "update", "gradient", "loader"} <= {check.kind for check in result.guard.checks}
    assert [effect.strategy for effect in result.effects if effect.took] == list(CHOICES[choice])
    assert sorted(path.name for path in folder.iterdir()) == before
