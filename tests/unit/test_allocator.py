"""The allocator's settings: what is asked for, and how it is read back."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
from builders import sample_environment, sample_facts

from steptune.tuner.strategies.allocator.strategy import MAX_SPLIT_MB, VARIABLES, Allocator, settings_of

UNLIMITED = 2**63 - 1
EXPANDABLE = {"expandable_segments": True, "max_split_size_mb": None}


def snapshot(**settings: Any) -> dict[str, Any]:
    """Record in the form that torch.cuda.memory._snapshot gives."""
    return {"segments": [], "allocator_settings": {"expandable_segments": False, "max_split_size": -1, **settings}}


class TestVariables:
    @pytest.mark.parametrize(
        ("choice", "text"),
        [
            (EXPANDABLE, "expandable_segments:True"),
            ({"expandable_segments": True, "max_split_size_mb": 64}, "expandable_segments:True,max_split_size_mb:64"),
            ({"expandable_segments": False, "max_split_size_mb": 21}, "expandable_segments:False,max_split_size_mb:21"),
        ],
    )
    def test_both_names_say_the_same(self, choice: Any, text: str) -> None:
        """If the two differed, torch's version would decide which one counts."""
        assert Allocator().environment_variables(choice) == dict.fromkeys(VARIABLES, text)

    def test_the_defaults_need_none(self) -> None:
        assert Allocator().environment_variables(Allocator.defaults) == {}

    def test_torch_takes_the_text(self) -> None:
        """A wrong key or size is refused."""
        code = "import sys, torch\nfor text in sys.argv[1:]: torch._C._accelerator_setAllocatorSettings(text)"
        variables = map(Allocator().environment_variables, Allocator().choices(sample_environment(), sample_facts()))
        texts = [found[VARIABLES[0]] for found in variables if found]
        command = [sys.executable, "-c", code, *texts]
        done = subprocess.run(command, env={**os.environ}, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert len(texts) == 3


class TestReading:
    @pytest.mark.parametrize("size", [-1, UNLIMITED])
    def test_no_limit_is_none(self, size: int) -> None:
        assert settings_of(snapshot(max_split_size=size)) == Allocator.defaults

    def test_a_limit_is_in_mebibytes(self) -> None:
        found = settings_of(snapshot(max_split_size=128 << 20, expandable_segments=True))
        assert found == {"expandable_segments": True, "max_split_size_mb": 128}

    def test_the_largest_limit_is_one(self) -> None:
        assert settings_of(snapshot(max_split_size=(MAX_SPLIT_MB - 1) << 20))["max_split_size_mb"] == MAX_SPLIT_MB - 1


class TestEffect:
    def evidence(self, **settings: Any) -> dict[str, Any]:
        return {**settings_of(snapshot(**settings)), "num_device_alloc": 12, "num_alloc_retries": 1}

    def test_what_was_asked_for_took(self) -> None:
        effect = Allocator().took_effect(self.evidence(expandable_segments=True), EXPANDABLE)
        assert effect.took
        assert effect.detail == "12 device allocations, 1 allocation retries"

    def test_a_variable_that_torch_did_not_read_is_noticed(self) -> None:
        effect = Allocator().took_effect(self.evidence(), EXPANDABLE)
        assert not effect.took
        assert "expandable_segments is False" in effect.detail
