"""Runs of a script's trials: the time limits of those from a frozen copy."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from steptune.tuner.scripts.starts import FORK_LOOKS, FORK_MORE_S, ScriptStarts, Start

LOOK_S, LONGEST_S = 10.0, 900.0


class Copy:
    """A frozen copy that runs nothing and keeps the time limits that it got."""

    def __init__(self) -> None:
        self.limits_s: list[float | None] = []

    @contextlib.contextmanager
    def ran(self, trial: Mapping[str, Any], log: Path, longest_s: float | None, check: Any) -> Iterator[None]:
        self.limits_s.append(longest_s)
        yield


@pytest.mark.parametrize(
    ("changes", "limit_s"),
    [
        ({}, FORK_LOOKS * LOOK_S + FORK_MORE_S),
        ({"tf32": True}, FORK_LOOKS * LOOK_S + FORK_MORE_S),
        ({"compile": "default"}, LONGEST_S),
    ],
)
def test_a_trial_from_a_copy_has_time_to_compile_where_its_candidate_does(
    changes: dict[str, Any], limit_s: float
) -> None:
    """Elsewhere a trial that hangs is found early."""
    copy = Copy()
    look = SimpleNamespace(copy=copy, seconds=LOOK_S)
    starts = ScriptStarts(look, seed=0, variables=None, check=None)
    with starts.ran({"changes": changes, "guard": None}, Start(command=("train",), anew=False), Path("log"), LONGEST_S):
        pass
    assert copy.limits_s == [limit_s]
