"""Nested batches as tensors plus a description, without pickle."""

from __future__ import annotations

import collections
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from steptune.tuner.errors import WorkloadRejectedError
from steptune.tuner.training.structure import flatten, map_structure, unflatten
from steptune.tuner.training.tensor_file import map_tensors, save_tensors


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass
class Sample:
    image: Any
    label: int


class Features(dict[str, Any]):
    """Mapping like the batch encodings of tokenisers."""


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
    | st.binary(max_size=8)
)
NESTED = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(), inner, max_size=3)
        | st.builds(Pair, inner, inner)
        | st.builds(Sample, inner, st.integers())
    ),
    max_leaves=8,
)


def stored(value: Any, path: Path | None = None) -> Any:
    """There and back, with the description as JSON and the tensors through a file where one is given."""
    tensors, description = flatten(value)
    if path is None:
        return unflatten(tensors, json.loads(json.dumps(description)))
    save_tensors(path, tensors, {"structure": description})
    mapped, metadata = map_tensors(path)
    return unflatten(mapped, metadata["structure"])


class TestRoundTrip:
    @given(NESTED)
    def test_any_nesting_of_plain_values(self, value: Any) -> None:
        again = stored(value)
        assert again == value
        assert type(again) is type(value)

    def test_tensors_and_arrays_in_every_container(self, tmp_path: Path) -> None:
        batch: dict[str, Any] = {
            "pair": Pair(torch.arange(3), np.float32(1.5)),
            "sample": Sample(torch.ones(2, 2, dtype=torch.bfloat16), 7),
            "features": Features(ids=np.arange(4, dtype=np.int16), empty=np.zeros((0, 2))),
            "list": [torch.tensor(5), (b"\x00\xff", b"")],
            "a/b": {"c": torch.zeros(1)},
        }
        again = stored(batch, tmp_path / "batch.tensors")
        assert torch.equal(again["pair"].left, torch.arange(3))
        assert (type(again["pair"]), type(again["pair"].right), again["pair"].right) == (Pair, np.float32, 1.5)
        assert torch.equal(again["sample"].image, batch["sample"].image)
        assert again["sample"].label == 7
        assert type(again["features"]) is Features
        assert again["features"]["ids"].dtype == np.int16
        assert again["features"]["ids"].tolist() == [0, 1, 2, 3]
        assert again["features"]["empty"].shape == (0, 2)
        assert again["list"][0].shape == ()
        assert again["list"][1] == (b"\x00\xff", b"")
        assert torch.equal(again["a/b"]["c"], torch.zeros(1))

    def test_paths_of_keys_that_look_alike_are_kept_apart(self) -> None:
        value = {"a": {"b": torch.tensor(1)}, "a/b": torch.tensor(2), 0: torch.tensor(3), "0": torch.tensor(4)}
        again = stored(value)
        assert [int(again["a"]["b"]), int(again["a/b"]), int(again[0]), int(again["0"])] == [1, 2, 3, 4]

    def test_an_ordered_mapping_keeps_its_type(self) -> None:
        value = collections.OrderedDict(b=1, a=2)
        assert stored(value) == value
        assert type(stored(value)) is collections.OrderedDict

    def test_a_numpy_array_is_copied_not_shared(self) -> None:
        array = np.ones(3)
        tensors, description = flatten([np.asfortranarray(np.ones((2, 3))), array])
        assert unflatten(tensors, description)[0].tolist() == [[1.0] * 3] * 2


class TestRefused:
    @pytest.mark.parametrize("leaf", [object(), {1, 2}, lambda: None, np.array([object()])])
    def test_what_needs_pickle_is_named_with_the_way_out(self, leaf: Any) -> None:
        with pytest.raises(WorkloadRejectedError, match=r"without pickle: return tensors") as raised:
            flatten({"x": [leaf]})
        assert type(leaf).__name__ in str(raised.value)


class TestMap:
    def test_rebuilds_every_container_around_its_leaves(self) -> None:
        value = {"p": Pair(1, [2]), "s": Sample((3,), 4), "f": Features(x=5)}
        doubled = map_structure(lambda leaf: 2 * leaf, value)
        assert doubled == {"p": Pair(2, [4]), "s": Sample((6,), 8), "f": Features(x=10)}
        assert type(doubled["f"]) is Features
        assert value["p"] == Pair(1, [2])


def test_a_mapping_with_a_default_is_mapped_as_one_and_stored_without_it() -> None:
    """Collate functions build such batches; what a missing key would give is code."""
    batch = collections.defaultdict(list, {"x": [1, 2]})
    mapped = map_structure(lambda leaf: leaf + 1, batch)
    assert mapped == {"x": [2, 3]}
    assert mapped["more"] == []
    assert stored(batch) == {"x": [1, 2]}
