"""Formats of FP32's products, set for all operators at once or for one by itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from steptune.tuner.training.fp32_products import fp32_products, without_tf32


@pytest.fixture
def operators() -> Iterator[tuple[Any, ...]]:
    """Operators whose precision can be set by itself; put back afterwards."""
    backends: Any = torch.backends
    found = (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn, backends.mkldnn.matmul)
    before = [operator.fp32_precision for operator in found]
    yield found
    for operator, precision in zip(found, before, strict=True):
        operator.fp32_precision = precision


@pytest.mark.parametrize("number", range(4))
def test_an_operator_that_was_set_by_itself_is_put_back(operators: tuple[Any, ...], number: int) -> None:
    """The flags that operators share raise errors there."""
    operators[number].fp32_precision = "tf32"
    before = [operator.fp32_precision == "tf32" for operator in operators]
    with without_tf32():
        assert "tf32" not in {operator.fp32_precision for operator in operators}
    assert [operator.fp32_precision == "tf32" for operator in operators] == before
    assert fp32_products() == ("high" if number == 0 else "highest")


def test_what_operators_share_is_put_back() -> None:
    torch.set_float32_matmul_precision("high")
    try:
        with without_tf32():
            assert fp32_products() == "highest"
            assert not torch.backends.cudnn.allow_tf32
        assert fp32_products() == "high"
        assert torch.backends.cudnn.allow_tf32
    finally:
        torch.set_float32_matmul_precision("highest")
