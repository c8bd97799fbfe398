"""Memory layouts of tensors. A fused update requires the same layout for a parameter, its gradient and its states.

A fused kernel walks through a parameter, its gradient and its states by address, as if all had the parameter's strides;
it checks nothing. Tensors that come from elsewhere (a checkpoint, a collective, a user's own step) are therefore copied
into the parameter's layout before an optimizer sees them. A parameter with holes has no layout that its states could
share: it cannot be fused.

Source: https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/cuda/MultiTensorApply.cuh
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

Strides = tuple[int, ...]


class Layout(NamedTuple):
    """Shape and dense strides of a tensor."""

    shape: tuple[int, ...]
    strides: Strides


def dense_strides(tensor: torch.Tensor) -> Strides:
    """Return the strides of a copy that keeps the order of dimensions (e.g. channels_last) and has no holes."""
    import torch

    return torch.empty_like(tensor, device="meta", memory_format=torch.preserve_format).stride()


def is_dense(tensor: torch.Tensor) -> bool:
    """Say whether a strided tensor's elements fill its memory without holes and without overlap."""
    return _same(tensor.shape, tensor.stride(), dense_strides(tensor))


def with_strides(value: torch.Tensor, strides: Strides) -> torch.Tensor:
    """Return the same values with dense strides; the tensor itself if it already has these strides."""
    import torch

    if value.layout is not torch.strided or _same(value.shape, value.stride(), strides):
        return value
    return torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device).copy_(value)


def laid_out_like(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return a value in the parameter's layout if it has the parameter's shape. DTensors stay unchanged, because their
    parts are contiguous.
    """
    return value if hasattr(parameter, "to_local") else with_strides(value, dense_strides(parameter))


def layout_of(parameter: torch.Tensor) -> Layout:
    """Return the layout that the optimizer states of a parameter must have."""
    return Layout(tuple(parameter.shape), dense_strides(parameter))


def layouts_of(parameters: Iterable[torch.Tensor]) -> dict[int, Layout]:
    """Return the layouts of the parameters, keyed by parameter number; DTensors are left out."""
    return {n: layout_of(parameter) for n, parameter in enumerate(parameters) if not hasattr(parameter, "to_local")}


def in_layouts(state_dict: Mapping[str, Any], layouts: Mapping[int, Layout]) -> dict[str, Any]:
    """Return an optimizer's state in which each tensor with the shape of its parameter also has the parameter's layout.

    Args:
        layouts: Layout by the parameter's number in the state; the state of other parameters is unchanged.
    """

    def laid_out(value: Any, layout: Layout | None) -> Any:
        fits = layout is not None and getattr(value, "shape", None) == layout.shape and not hasattr(value, "to_local")
        return with_strides(value, layout.strides) if fits and layout else value

    state = {
        number: {name: laid_out(value, layouts.get(number)) for name, value in values.items()}
        for number, values in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


def _same(shape: Sequence[int], first: Strides, second: Strides) -> bool:
    """Say whether two tuples of strides address the same elements. Strides of dimensions of size one are ignored."""
    return all(a == b for size, a, b in zip(shape, first, second, strict=True) if size > 1)
