"""A training that leaves the range of float16 within the guard's steps is rejected there, and passes in bfloat16."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from precision_trials import CANDIDATES, PrecisionTrials


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrecisionTrials]:
    directory: Path = tmp_path_factory.mktemp("study")
    with PrecisionTrials(directory, "cpu") as made:
        yield made


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_float16_is_rejected(trials: PrecisionTrials, level: str) -> None:
    """The scaler skips every step from the third on: no scale brings the weight itself back into range."""
    trials.check_rejected(CANDIDATES[level, "float16"])


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_bfloat16_is_the_same_training(trials: PrecisionTrials, level: str) -> None:
    trials.check_passed(CANDIDATES[level, "bfloat16"])
