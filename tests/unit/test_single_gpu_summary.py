"""Summary by the benchmark of one GPU of its results file: missing rows, and whether its aims are reached."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def single_gpu() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        spec = importlib.util.spec_from_file_location("single_gpu", BENCHMARKS / "single_gpu.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, "single_gpu", module)
        spec.loader.exec_module(module)
        yield module


def line(
    row: str, ratio: float, interval: list[float] | None = None, allow: str = "", pure: float | None = None
) -> dict:
    by_hand: dict[str, dict] = {
        "best by hand, O1": {"ratio": ratio, "interval": interval, "units_per_s": 100.0},
        "best by hand, pure bf16": {"unsupported": "needs CUDA"},
    }
    if pure is not None:
        by_hand["best by hand, pure bf16"] = {"ratio": pure, "interval": None, "units_per_s": 100.0}
    return {
        "row": row,
        "allow": allow,
        "unit": "sample",
        "gain": 2.0,
        "tuning_s": 300.0,
        "trials": 20,
        "beside": {"units_per_s": 100.0 * ratio},
        "by_hand": by_hand,
    }


def test_seven_rows_with_their_columns(single_gpu: Any) -> None:
    assert [row.name for row in single_gpu.ROWS] == [
        "vit_large",
        "swin_base",
        "swin_tiny_16",
        "resnet50",
        "resnet50_16",
        "gpt2_large",
        "gpt2_small",
    ]
    for row in single_gpu.ROWS:
        columns = single_gpu.by_hand(row)
        assert list(columns)[:5] == ["fp32", "TF32", "O1 fp16", "O1 bf16", "best by hand, O1"]
        assert len(columns) == 5 + row.blocks + row.pure
        assert all(c["optimizer_implementation"] == {"implementation": "fused"} for c in columns.values())
        assert all("compile" in choices for name, choices in columns.items() if name.startswith("best"))


def test_compiled_blocks_are_by_hand_too_where_an_expert_would_try_them(single_gpu: Any) -> None:
    """A whole ViT compiles to slower attention with some versions of transformers: then blocks are what to beat."""
    found = line("vit_large", 1.5)
    found["by_hand"]["by hand, O1, compiled blocks"] = {"ratio": 1.1, "interval": None, "units_per_s": 100.0}
    assert single_gpu.target(found)["ratio"] == 1.1
    assert [row.name for row in single_gpu.ROWS if row.blocks] == ["vit_large", "gpt2_large"]


def test_missing_rows_are_named(single_gpu: Any) -> None:
    text = single_gpu.summary([line("vit_large", 1.2), line("gpt2_large", 1.0)])
    assert "swin_base      missing" in text
    assert text.count("missing") == 7 - 2 + 7
    mean = math.sqrt(1.2)
    assert f"geometric mean of 2 rows {mean:.3f}; wanted 1.05: reached" in text


def test_the_last_line_of_a_row_counts(single_gpu: Any) -> None:
    text = single_gpu.summary([line("vit_large", 0.5), line("vit_large", 1.2)])
    assert "geometric mean of 1 rows 1.200" in text


@pytest.mark.parametrize(
    ("ratio", "interval", "reached"),
    [(1.1, None, True), (0.99, [0.97, 1.01], True), (0.99, [0.97, 0.995], False), (0.97, [0.9, 1.1], False)],
)
def test_at_least_as_fast_is_not_inferior(
    single_gpu: Any, ratio: float, interval: list[float] | None, reached: bool
) -> None:
    assert single_gpu.reached({"ratio": ratio, "interval": interval}) is reached


def test_where_lossy_is_allowed_the_better_of_both_columns_is_to_be_reached(single_gpu: Any) -> None:
    """The better column is the one over which the recommendation gains less."""
    assert single_gpu.target(line("vit_large", 1.2, pure=1.0, allow="lossy"))["ratio"] == 1.0
    assert single_gpu.target(line("vit_large", 1.2, pure=1.0))["ratio"] == 1.2
    assert single_gpu.target(line("resnet50", 1.2, allow="lossy"))["ratio"] == 1.2
