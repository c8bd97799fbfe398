"""Steps of plans, as people see them."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial

import pytest

from steptune.tuner.errors import ChoiceError, PlatformError
from steptune.tuner.records import Choice
from steptune.tuner.strategies import STRATEGIES, Strategy
from steptune.tuner.strategies.cpu_threads.strategy import CpuThreads
from steptune.tuner.strategies.planned import BEFORE_TORCH, STAGES, planned_steps
from steptune.tuner.training.plan import Plan

DEFAULTS: dict[str, Choice] = {strategy.name: dict(strategy.defaults) for strategy in STRATEGIES}


def seen(**choices: Choice) -> list[tuple[str, str, str]]:
    complete = {**DEFAULTS, **{name: {**DEFAULTS[name], **choice} for name, choice in choices.items()}}
    return [(step.stage, step.does, step.strategy) for step in planned_steps(complete)]


def test_plain_pytorch_has_no_step() -> None:
    assert seen() == []


def test_steps_come_in_the_order_in_which_they_are_carried_out() -> None:
    found = seen(
        compile={"mode": "default"},
        data_loading={"num_workers": 2, "prefetch_factor": 4},
        precision={"level": "O1", "dtype": "bfloat16"},
        cpu_threads={"num_threads": 1, "bind": "close"},
    )
    assert found == [
        (BEFORE_TORCH, "OMP_PROC_BIND=close", "cpu_threads"),
        (BEFORE_TORCH, "OMP_PLACES=cores", "cpu_threads"),
        ("process", "set threads (num_threads=1, bind=close)", "cpu_threads"),
        ("precision of the model", "keep routers in fp32 (level=O1, dtype=bfloat16)", "precision"),
        ("step", "autocast_dtype=bfloat16", "precision"),
        ("compilation of the model", "compile model (mode=default)", "compile"),
        ("loader", "num_workers=2", "data_loading"),
        ("loader", "prefetch_factor=4", "data_loading"),
    ]


def test_an_argument_that_two_strategies_set_is_of_both() -> None:
    found = seen(larger_global_batch={"factor": 2, "rule": "sqrt"}, optimizer_implementation={"contiguous": True})
    assert ("optimizer", "contiguous=True", "optimizer_implementation") in found
    assert {strategy for stage, _, strategy in found if stage == "optimizer"} == {
        "larger_global_batch",
        "optimizer_implementation",
    }


def test_choices_of_an_older_version_lack_parameters() -> None:
    steps = planned_steps({"data_loading": {"num_workers": 2}})
    assert [step.does for step in steps] == ["num_workers=2", "prefetch_factor=2"]


def test_a_parameter_that_this_version_does_not_have_is_not_left_out_silently() -> None:
    with pytest.raises(ChoiceError, match=r"data_loading has no parameter timeout in this version"):
        planned_steps({"data_loading": {"num_workers": 2, "timeout": 0.5}})


def test_every_stage_of_a_plan_is_shown() -> None:
    assert set(STAGES) == set(vars(Plan()))


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.name)
def test_each_strategy_is_named_where_it_asks_for_something(strategy: Strategy) -> None:
    asked = []
    for parameter, values in strategy.values.items():
        for value in values:
            with contextlib.suppress(ChoiceError):  # a dtype without its level, say
                asked.append(seen(**{strategy.name: {parameter: value[-1] if isinstance(value, range) else value}}))
    assert any(asked)
    assert all(name == strategy.name and "<lambda>" not in does for steps in asked for _, does, name in steps)


class Doubled:
    def __call__(self) -> None: ...


def set_level(level: int) -> None: ...


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (lambda: None, "num_threads=3"),
        (partial(partial(set_level), 2), "set level (num_threads=3)"),
        (Doubled(), "Doubled (num_threads=3)"),
    ],
    ids=["lambda", "partial", "object"],
)
def test_what_a_strategy_of_another_package_asks_for_has_words(
    asked: Callable[[], None], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A contribution may be any callable: the tutorial's own is a lambda."""
    monkeypatch.setattr(CpuThreads, "contribute", lambda self, plan, choice: plan.environment.append(asked))
    assert seen(cpu_threads={"num_threads": 3}) == [("process", told, "cpu_threads")]


def test_no_torch_is_loaded_to_say_it() -> None:
    """Pages are made by servers that have none; kernels alone say by their own code what they are for."""
    choices = {name: choice for name, choice in DEFAULTS.items() if name != "fused_kernels"}
    code = (
        "import json, sys; from steptune.tuner.strategies.planned import planned_steps;"
        f"choices = json.loads({json.dumps(json.dumps(choices))});"
        "choices['precision'].update(level='O2', dtype='bfloat16'); choices['compile'].update(mode='default');"
        "choices['moe_experts'].update(execution='batched'); choices['optimizer_algorithm'].update(algorithm='lamb');"
        "print(len(planned_steps(choices)), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[1] == "False"


def test_a_plan_with_kernels_names_the_remedy_where_torch_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    for name in [name for name in sys.modules if name.startswith("steptune.kernels.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(PlatformError, match=r"pip install 'steptune\[torch\]'"):
        seen(fused_kernels={"lamb": True})
