"""Registry of kernels: ours, and those of other packages."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import entry_points

import torch

from steptune.kernels import window_attention
from steptune.kernels.base import Case, Kernel, Pattern
from steptune.kernels.names import GROUP, OURS
from steptune.kernels.window_attention import pattern


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
    pattern=Pattern(
        what=pattern.WHAT,
        refusal=pattern.refusal,
        replace=pattern.replace,
        operators=pattern.OPERATORS,
        unavailable=pattern.unavailable,
    ),
)


def _registered() -> tuple[Kernel, ...]:
    """Load the kernels of other packages.

    Raises:
        ImportError: An entry point cannot be loaded.
        TypeError: An entry point names something else.
        ValueError: A name is taken, is not that of the entry point, or the kernel has no pattern.
    """
    found: list[Kernel] = []
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        where = f"the entry point {entry.name} of {GROUP} ({entry.value})"
        try:
            kernel = entry.load()
        except Exception as error:
            raise ImportError(f"{where} cannot be loaded ({error}): mend or uninstall its package") from error
        if not isinstance(kernel, Kernel):
            raise TypeError(f"{where} must name a steptune.kernels.Kernel, not {kernel!r}")
        if kernel.name != entry.name:
            raise ValueError(f"{where} names the kernel {kernel.name!r}: give both one name")
        if kernel.name in (*OURS, *(other.name for other in found)):
            raise ValueError(f"{where} has a name that another kernel has: choose another")
        if kernel.pattern is None:
            raise ValueError(f"{where} has no pattern: say which modules of a model it computes")
        found.append(kernel)
    return tuple(found)


KERNELS: tuple[Kernel, ...] = (WINDOW_ATTENTION, *_registered())


def kernel_named(name: str) -> Kernel:
    """Find a kernel.

    Raises:
        KeyError: There is none of that name.
    """
    return {kernel.name: kernel for kernel in KERNELS}[name]
