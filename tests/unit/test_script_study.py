"""A study of a command: what its look leaves of the budget, and what is said before its first trial."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from steptune.service.script_study import Choices, budget_left_s, print_choices
from steptune.tuner.errors import BudgetError


def test_the_look_is_off_the_budget() -> None:
    assert budget_left_s(60.0, 20.0) == 40.0


def test_a_look_that_took_all_of_it_is_named_with_the_budget_that_was_given() -> None:
    with pytest.raises(
        BudgetError, match=r"budget of 45 s is too short: the inspection of the script took 61 s.*--budget"
    ):
        budget_left_s(45.0, 61.0)


def test_what_needs_a_workload_is_one_sentence_that_names_the_place_of_its_reasons() -> None:
    needs = {f"strategy_{number}": "a reason\n" * 5 for number in range(15)} | {"precision": "O2 owns the step"}
    out = io.StringIO()
    print_choices(Console(file=out, width=80), Choices({"precision": ["level=O1"]}, needs, {}))
    _, said = out.getvalue().split("needs a Workload")
    assert all(name in " ".join(said.split()) for name in needs)
    assert "some of precision" in " ".join(said.split())
    assert "steptune show --all" in " ".join(said.split())
    assert "a reason" not in said
    assert len(said.splitlines()) <= 6
