"""The identity of a candidate, and what a record is."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
import pytest
from builders import sample_breakdown, sample_window
from hypothesis import given
from hypothesis import strategies as st

from steptune.tuner.records import BASELINE, Candidate, Numerics, choice_label, new_id

SCALARS = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | st.text()
CHOICES = st.dictionaries(st.text(min_size=1), st.dictionaries(st.text(min_size=1), SCALARS, min_size=1), max_size=4)


def reversed_order(value: Any) -> Any:
    """Copy of a mapping, written in the opposite order."""
    if not isinstance(value, dict):
        return value
    return {key: reversed_order(item) for key, item in reversed(value.items())}


class TestKey:
    def test_is_the_hash_of_the_canonical_json(self) -> None:
        """Golden: a changed hash would orphan every stored trial."""
        candidate = Candidate(
            choices={"precision": {"level": "O1", "dtype": "bfloat16"}, "compile": {"mode": "default"}}
        )
        canonical = b'{"compile":{"mode":"default"},"precision":{"dtype":"bfloat16","level":"O1"}}'
        assert candidate.key == hashlib.sha256(canonical).hexdigest()[:16] == "d12bb6407e978a3a"

    def test_of_the_baseline_is_that_of_nothing(self) -> None:
        assert BASELINE.key == hashlib.sha256(b"{}").hexdigest()[:16] == "44136fa355b3678a"
        assert BASELINE.is_baseline

    @given(CHOICES)
    def test_ignores_the_order_of_strategies_and_parameters(self, choices: dict[str, Any]) -> None:
        assert Candidate(choices=reversed_order(choices)).key == Candidate(choices=choices).key

    @given(CHOICES)
    def test_survives_storage(self, choices: dict[str, Any]) -> None:
        candidate = Candidate(choices=choices)
        again = msgspec.json.decode(msgspec.json.encode(candidate), type=Candidate)
        assert again.key == candidate.key

    @pytest.mark.parametrize(("one", "other"), [(1, True), (0, False), (None, False), (2, "2"), ("", None)])
    def test_tells_values_of_different_types_apart(self, one: Any, other: Any) -> None:
        assert Candidate(choices={"s": {"p": one}}).key != Candidate(choices={"s": {"p": other}}).key


class TestCandidate:
    def test_with_choice_replaces_one_strategy_and_leaves_the_original(self) -> None:
        candidate = Candidate(choices={"compile": {"mode": "default"}, "cpu_threads": {"num_threads": 1}})
        changed = candidate.with_choice("compile", {"mode": "max-autotune"})
        assert changed.choices == {"compile": {"mode": "max-autotune"}, "cpu_threads": {"num_threads": 1}}
        assert candidate.choices["compile"] == {"mode": "default"}

    def test_with_an_empty_choice_is_back_at_today(self) -> None:
        assert Candidate(choices={"compile": {"mode": "default"}}).with_choice("compile", {}) == BASELINE

    def test_label_reads_the_same_in_any_order(self) -> None:
        choices = {"precision": {"level": "O1"}, "data_loading": {"pin_memory": True, "prefetch_factor": None}}
        expected = "data_loading: pin_memory=on, prefetch_factor=default; precision: level=O1"
        assert Candidate(choices=choices).label == expected
        assert Candidate(choices=dict(reversed(choices.items()))).label == expected

    def test_labels_of_nothing(self) -> None:
        assert BASELINE.label == "baseline"
        assert choice_label({}) == "unchanged"
        assert choice_label({"num_workers": 0, "persistent_workers": False}) == "num_workers=0, persistent_workers=off"


class TestRecord:
    def test_cannot_be_changed(self) -> None:
        with pytest.raises(AttributeError):
            BASELINE.choices = {}  # type: ignore[misc]

    def test_takes_keywords_only(self) -> None:
        with pytest.raises(TypeError):
            Candidate({})  # type: ignore[misc]

    def test_refuses_fields_that_it_does_not_have(self) -> None:
        """A record of a newer version is not read as if the field did not matter."""
        with pytest.raises(msgspec.ValidationError, match="colour"):
            msgspec.json.decode(b'{"choices": {}, "colour": 1}', type=Candidate)

    def test_refuses_a_wrong_type(self) -> None:
        with pytest.raises(msgspec.ValidationError):
            msgspec.json.decode(b'{"choices": {"compile": ["default"]}}', type=Candidate)

    def test_a_breakdown_whose_categories_do_not_sum_cannot_exist(self) -> None:
        with pytest.raises(AssertionError, match="sum to the step"):
            sample_breakdown(step_time_ns=99)

    def test_window_rates_come_from_whole_counts(self) -> None:
        window = sample_window(num_steps=4, num_units=64, duration_ns=2_000_000_000)
        assert window.units_per_s == 32.0
        assert window.step_time_ns == 500_000_000

    def test_ids_sort_by_time_and_never_repeat(self, monkeypatch: pytest.MonkeyPatch) -> None:
        now = iter(range(10**18, 10**18 + 50 * 10**6, 10**6))
        monkeypatch.setattr("steptune.tuner.records.ids.time.time_ns", lambda: next(now))
        ids = [new_id() for _ in range(50)]
        assert ids == sorted(ids)
        assert len(set(ids)) == 50
        assert {len(made) for made in ids} == {26}


class TestNumerics:
    def test_are_ordered_from_mild_to_strong(self) -> None:
        assert sorted(Numerics, key=lambda n: n.rank) == ["exact", "sampling", "rounding", "lossy", "recipe"]

    def test_only_lossy_and_recipe_need_consent(self) -> None:
        assert [n for n in Numerics if n.needs_consent] == [Numerics.LOSSY, Numerics.RECIPE]
