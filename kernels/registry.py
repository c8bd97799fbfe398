"""Registry of kernels: for each its function, its reference, and cases on which both must agree."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import entry_points
from typing import Any

import torch
from torch import Tensor

from steptune.kernels import window_attention

GROUP = "steptune.kernels"


@dataclass(frozen=True, kw_only=True)
class Case:
    """Inputs of a kernel.

    Attributes:
        label: Names the case in tests and benchmarks.
        shapes: Shape of each tensor, by the name of its parameter. Every one of them gets a gradient.
        options: Parameters that are no tensors.
        positive: Names of tensors whose elements are positive: scales, variances.
    """

    label: str
    shapes: Mapping[str, tuple[int, ...]]
    options: Mapping[str, Any] = field(default_factory=dict)
    positive: frozenset[str] = frozenset()

    def make(self, generator: torch.Generator, dtype: torch.dtype) -> dict[str, Tensor]:
        """Draw the tensors, on the device of the generator. They are leaves that require gradients."""
        tensors = {}
        for name, shape in self.shapes.items():
            tensor = torch.randn(shape, generator=generator, device=generator.device)
            tensor = tensor.abs() + 0.5 if name in self.positive else tensor
            tensors[name] = tensor.to(dtype).requires_grad_()
        return tensors


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A fused kernel and its definition.

    Attributes:
        name: Of the folder, and in the strategy `fused_kernels`.
        summary: One line for tables.
        function: The kernel, called with the tensors and options of a case by name.
        reference: The definition in plain PyTorch, called with the same.
        cases: Small inputs with what is easy to get wrong: odd shapes, padding, every option.
        tolerances: Largest relative error, by dtype: norm of the difference to the reference in float64, over its norm.
        without_gradient: Tensors that get none from the kernel, as (label of the case or "*", name).
    """

    name: str
    summary: str
    function: Callable[..., Tensor]
    reference: Callable[..., Tensor]
    cases: tuple[Case, ...]
    tolerances: Mapping[torch.dtype, float]
    without_gradient: frozenset[tuple[str, str]] = frozenset()

    def gradients_of(self, case: Case) -> tuple[str, ...]:
        """Name the tensors that get a gradient in a case."""
        none = {name for label, name in self.without_gradient if label in ("*", case.label)}
        return tuple(name for name in case.shapes if name not in none)


def _window_case(
    label: str,
    batch: int,
    height: int,
    width: int,
    heads: int,
    head_dim: int,
    geometry: window_attention.Geometry,
    *,
    bias: bool = True,
    cosine: bool = False,
) -> Case:
    channels = heads * head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "qkv_bhwc": (batch, height, width, 3 * channels),
        "table_rh": (geometry.table_length, heads),
        "scale_h": (heads,),
    }
    if bias:
        shapes["qkv_bias_c"] = (3 * channels,)
    return Case(
        label=label, shapes=shapes, options={"geometry": geometry, "cosine": cosine}, positive=frozenset({"scale_h"})
    )


_WINDOW_7 = window_attention.Geometry(rows=7, columns=7)
_SHIFTED_7 = window_attention.Geometry(rows=7, columns=7, shift_rows=3, shift_columns=3)
_PLAIN = ("whole", "shifted", "one window", "oblong windows", "no bias")

WINDOW_ATTENTION = Kernel(
    name="window_attention",
    summary="Swin attention within shifted windows, without rolling, cutting, padding or masking in memory",
    function=window_attention.window_attention,
    reference=window_attention.reference,
    cases=(
        _window_case("whole", 1, 7, 14, 3, 16, _WINDOW_7),
        _window_case("shifted", 2, 14, 21, 1, 16, _SHIFTED_7),
        _window_case("one window", 3, 7, 7, 1, 32, _WINDOW_7),
        _window_case("padded", 1, 11, 16, 2, 16, _SHIFTED_7),
        _window_case("padded after rolling", 1, 11, 16, 2, 16, replace(_SHIFTED_7, rolls_before_padding=True)),
        _window_case("no bias", 1, 10, 7, 2, 16, _SHIFTED_7, bias=False),
        _window_case(
            "oblong windows",
            1,
            6,
            9,
            1,
            16,
            window_attention.Geometry(rows=2, columns=3, shift_rows=1, shift_columns=2),
        ),
        _window_case(
            "cosine", 1, 16, 8, 2, 16, window_attention.Geometry(rows=8, columns=8, shift_rows=4), cosine=True
        ),
        _window_case(
            "144 tokens",
            1,
            13,
            12,
            1,
            16,
            window_attention.Geometry(rows=12, columns=12, shift_rows=6, shift_columns=6),
            cosine=True,
        ),
        _window_case("256 tokens", 1, 16, 16, 1, 16, window_attention.Geometry(rows=16, columns=16)),
    ),
    tolerances={torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 1e-2},
    without_gradient=frozenset(
        (label, "scale_h") for label in (*_PLAIN, "padded", "padded after rolling", "256 tokens")
    ),
)


def _registered() -> tuple[Kernel, ...]:
    """Load the kernels of other packages. Their names must be free."""
    found = [entry.load() for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name)]
    for kernel in found:
        if not isinstance(kernel, Kernel):
            raise TypeError(f"the entry point {GROUP} must name a steptune.kernels.Kernel, not {kernel!r}")
    return tuple(found)


KERNELS: tuple[Kernel, ...] = (WINDOW_ATTENTION, *_registered())
if len({kernel.name for kernel in KERNELS}) != len(KERNELS):
    raise ValueError(f"two kernels have one name: {', '.join(sorted(kernel.name for kernel in KERNELS))}")


def kernel_named(name: str) -> Kernel:
    """Find a kernel.

    Raises:
        KeyError: There is none of that name.
    """
    return {kernel.name: kernel for kernel in KERNELS}[name]
