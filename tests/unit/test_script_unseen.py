"""Loops in idioms that no rule was written for: their faults are rejected, their correct changes are not."""

from __future__ import annotations

import pytest
import torch
from guarded_idioms import IDIOMS, Idiom, Variation
from guarded_loops import Bench, failed

ARMS = (None, torch.bfloat16)
LEFT_OUT = [("smoothing", torch.bfloat16)]
"""Faults that pass: the state that goes on into the steps in FP32 was rounded to 16 bits in those before."""


@pytest.fixture(
    scope="module",
    params=[idiom if idiom is Variation else pytest.param(idiom, marks=pytest.mark.soak) for idiom in IDIOMS],
    ids=lambda idiom: idiom.__name__,
)
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("idiom"), request.param())


def test_correct_changes_pass(bench: Bench) -> None:
    kind = type(bench.own)
    assert issubclass(kind, Idiom)
    verdicts = {(twist, dtype): bench.verdict(kind(twist, dtype)) for twist in ("", *kind.same) for dtype in ARMS}
    assert {case: verdict.reason for case, verdict in verdicts.items() if not verdict.passed} == {}


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # one of the faults
def test_faults_are_rejected(bench: Bench) -> None:
    kind = type(bench.own)
    assert issubclass(kind, Idiom)
    found = {(twist, dtype): failed(bench.verdict(kind(twist, dtype))) for twist in kind.faults for dtype in ARMS}
    assert [case for case, names in found.items() if not names and case not in LEFT_OUT] == []
