"""Dtype in which FP32 matmuls are computed, whichever function of torch the workload has used to set it.

PyTorch has flags that operators share, and since 2.9 one for each operator, and refuses to read the former once one of
the latter was set by itself: https://docs.pytorch.org/docs/stable/notes/cuda.html#tensorfloat-32-tf32-on-ampere-and-later-devices
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def fp32_products() -> str:
    """Return the precision of FP32 matmuls, by its name in `torch.set_float32_matmul_precision`; if operators differ,
    the precision of CUDA matmuls.
    """
    import torch

    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return "high" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "highest"


@contextmanager
def without_tf32() -> Iterator[None]:
    """Compute FP32 matmuls and convolutions without TF32 while the context is active."""
    import torch

    try:
        before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    except RuntimeError:
        with _each_without_tf32():
            yield
        return
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


@contextmanager
def _each_without_tf32() -> Iterator[None]:
    import torch

    backends: Any = torch.backends  # whose stubs do not know all of them
    operators: tuple[Any, ...] = (
        backends.cuda.matmul,
        backends.cudnn.conv,
        backends.cudnn.rnn,
        backends.mkldnn.matmul,
        backends.mkldnn.conv,
        backends.mkldnn.rnn,
    )
    before = [operator.fp32_precision for operator in operators]
    for operator in operators:
        operator.fp32_precision = "ieee"
    try:
        yield
    finally:
        for operator, precision in zip(operators, before, strict=True):
            operator.fp32_precision = precision
