"""The order of a tensor's dimensions in memory, which a fused update takes for granted.

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
    """Shape and dense strides."""

    shape: tuple[int, ...]
    strides: Strides


def dense_strides(tensor: torch.Tensor) -> Strides:
    """Strides of a copy that keeps the order of dimensions (channels_last stays so) and has no holes."""
    import torch

    return torch.empty_like(tensor, device="meta", memory_format=torch.preserve_format).stride()


def is_dense(tensor: torch.Tensor) -> bool:
    """Say whether a strided tensor's elements fill its memory without holes, each at an address of its own."""
    return _same(tensor.shape, tensor.stride(), dense_strides(tensor))


def with_strides(value: torch.Tensor, strides: Strides) -> torch.Tensor:
    """Return the same values with dense strides; the tensor itself where it has these already."""
    import torch

    if value.layout is not torch.strided or _same(value.shape, value.stride(), strides):
        return value
    return torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device).copy_(value)


def laid_out_like(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return a value in the parameter's layout where it has its shape; DTensors, whose parts are contiguous,
    unchanged.
    """
    return value if hasattr(parameter, "to_local") else with_strides(value, dense_strides(parameter))


def layout_of(parameter: torch.Tensor) -> Layout:
    """The layout that a parameter's states have."""
    return Layout(tuple(parameter.shape), dense_strides(parameter))


def layouts_of(parameters: Iterable[torch.Tensor]) -> dict[int, Layout]:
    """Layouts by the parameter's number, without DTensors."""
    return {n: layout_of(parameter) for n, parameter in enumerate(parameters) if not hasattr(parameter, "to_local")}


def in_layouts(state_dict: Mapping[str, Any], layouts: Mapping[int, Layout]) -> dict[str, Any]:
    """An optimizer's state with every tensor of its parameter's shape in that parameter's layout.

    Args:
        layouts: By the parameter's number in the state. Of others the state stays as it is.
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
    """Say whether strides address alike: those of a dimension of one element do not count."""
    return all(a == b for size, a, b in zip(shape, first, second, strict=True) if size > 1)
