"""Tensors on disk: what is written comes back, mapped, aligned and private."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from steptune.tuner.training.tensor_file import ALIGNMENT, map_tensors, save_tensors

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.float8_e4m3fn,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
]  # fmt: skip


def sample(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return (torch.arange(max(1, torch.Size(shape).numel())) % 5)[: torch.Size(shape).numel()].reshape(shape).to(dtype)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit; 8-bit floats have no comparison of their own."""
    flat = [t.contiguous().reshape(-1).view(torch.uint8) for t in (one, other)]
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*flat)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state.tensors"


class TestRoundTrip:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_every_dtype(self, path: Path, dtype: torch.dtype) -> None:
        original = sample(dtype, 3, 5)
        save_tensors(path, {"t": original}, {})
        assert same(map_tensors(path)[0]["t"], original)

    def test_special_values_keep_their_bits(self, path: Path) -> None:
        values = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 1e-45])
        save_tensors(path, {"t": values}, {})
        assert same(map_tensors(path)[0]["t"], values)

    @pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,), (1, 1, 7)])
    def test_scalars_and_empty_tensors(self, path: Path, shape: tuple[int, ...]) -> None:
        original = sample(torch.float32, *shape)
        save_tensors(path, {"before": torch.ones(1), "t": original, "after": torch.ones(2)}, {})
        mapped, _ = map_tensors(path)
        assert same(mapped["t"], original)
        assert mapped["after"].tolist() == [1.0, 1.0]

    def test_strided_tensors_come_back_contiguous(self, path: Path) -> None:
        base = torch.arange(24.0).reshape(4, 6)
        views = {"transposed": base.T, "sliced": base[:, ::2], "expanded": torch.ones(1).expand(3, 2)}
        save_tensors(path, views, {})
        mapped, _ = map_tensors(path)
        for name, view in views.items():
            assert same(mapped[name], view)
            assert mapped[name].is_contiguous()

    def test_no_tensors_and_any_metadata(self, path: Path) -> None:
        metadata = {"structure": [["a", [1, 2], None]], "name": "café", "share": 0.1}
        save_tensors(path, {}, metadata)
        assert map_tensors(path) == ({}, metadata)

    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
    @given(
        st.dictionaries(
            st.text(max_size=8), st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3)), max_size=5
        )
    )
    def test_any_set_of_tensors(self, path: Path, shapes: dict[str, tuple[torch.dtype, list[int]]]) -> None:
        tensors = {name: sample(dtype, *shape) for name, (dtype, shape) in shapes.items()}
        save_tensors(path, tensors, {})
        mapped, _ = map_tensors(path)
        assert mapped.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert same(mapped[name], tensor)


class TestMapping:
    def test_tensors_are_aligned_as_torch_aligns_its_own(self, path: Path) -> None:
        """Kernels run at another speed on data that are not."""
        save_tensors(path, {str(size): torch.zeros(size) for size in (1, 3, 17, 100)}, {"padding": "x" * 13})
        mapped, _ = map_tensors(path)
        assert [tensor.data_ptr() % ALIGNMENT for tensor in mapped.values()] == [0, 0, 0, 0]

    def test_training_on_them_leaves_the_file_as_it_was(self, path: Path) -> None:
        save_tensors(path, {"t": torch.zeros(4)}, {})
        before = path.read_bytes()
        map_tensors(path)[0]["t"].add_(1)
        assert path.read_bytes() == before
        assert map_tensors(path)[0]["t"].tolist() == [0.0] * 4

    def test_each_has_a_storage_of_its_own(self, path: Path) -> None:
        """Tensors of one storage look like aliases of each other to a compiler."""
        save_tensors(path, {"a": torch.zeros(4), "b": torch.zeros(4)}, {})
        a, b = map_tensors(path)[0].values()
        assert a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr()
        assert a.untyped_storage().nbytes() == 16

    def test_they_outlive_the_file(self, path: Path) -> None:
        save_tensors(path, {"t": torch.ones(4)}, {})
        mapped, _ = map_tensors(path)
        path.unlink()
        assert mapped["t"].sum() == 4.0


class TestWriting:
    def test_leaves_one_whole_file_and_nothing_else(self, path: Path) -> None:
        save_tensors(path, {"t": torch.zeros(4)}, {})
        save_tensors(path, {"t": torch.ones(4)}, {})
        assert [found.name for found in path.parent.iterdir()] == [path.name]
        assert map_tensors(path)[0]["t"].sum() == 4.0

    def test_that_fails_leaves_the_old_file(self, path: Path) -> None:
        save_tensors(path, {"t": torch.ones(4)}, {})
        with pytest.raises(TypeError):
            save_tensors(path, {"t": torch.zeros(4)}, {"unstorable": object()})
        assert map_tensors(path)[0]["t"].sum() == 4.0


class TestRefused:
    def test_a_file_of_another_format(self, path: Path) -> None:
        path.write_bytes(b"\x80\x04 a pickle perhaps")
        with pytest.raises(ValueError, match="not a tensor file"):
            map_tensors(path)

    @pytest.mark.parametrize("share", [0.0, 0.01, 0.02, 0.1, 0.3, 0.6, 0.9])
    def test_a_truncated_file(self, path: Path, share: float) -> None:
        """At whatever place it was cut: never a tensor of other numbers."""
        save_tensors(path, {"t": torch.ones(100), "u": torch.ones(100)}, {})
        whole = path.read_bytes()
        path.write_bytes(whole[: int(len(whole) * share)])
        with pytest.raises(ValueError, match=path.name):
            map_tensors(path)
