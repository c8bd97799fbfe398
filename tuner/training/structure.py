"""Conversion of nested batches and samples to tensors plus a JSON description, and back.

Used where a batch must be stored (guard batches, the disk cache of a dataset) without pickle.
Containers: mappings (subclasses are rebuilt from a dict), lists, tuples, named tuples, dataclasses.
Leaves: tensors, NumPy arrays and scalars, numbers, strings, None.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from steptune.tuner.errors import WorkloadRejectedError

if TYPE_CHECKING:
    import torch


def map_structure(
    function: Callable[[Any], Any], value: Any, is_leaf: Callable[[Any], bool] = lambda value: False
) -> Any:
    """Apply a function to every leaf and rebuild the containers.

    Args:
        is_leaf: Says whether a container is treated as a leaf.
    """
    if is_leaf(value):
        return function(value)
    if isinstance(value, Mapping):
        items = {key: map_structure(function, item, is_leaf) for key, item in value.items()}
        if isinstance(value, defaultdict):
            return type(value)(value.default_factory, items)
        return items if type(value) is dict else type(value)(items)  # type: ignore[call-arg]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_structure(function, item, is_leaf) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(map_structure(function, item, is_leaf) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: map_structure(function, getattr(value, f.name), is_leaf) for f in dataclasses.fields(value)}
        return dataclasses.replace(value, **fields)
    return function(value)


def moved(batch: Any, device: torch.device, *, non_blocking: bool) -> Any:
    """Move everything in a batch that can be moved to the device, and return the batch."""
    return map_structure(
        lambda leaf: leaf.to(device, non_blocking=non_blocking) if hasattr(leaf, "to") else leaf, batch
    )


def flatten(value: Any) -> tuple[dict[str, torch.Tensor], Any]:
    """Split a structure into its tensors by path and a JSON description of the rest.

    Raises:
        WorkloadRejectedError: A leaf is of a type that cannot be stored without pickle.
    """
    tensors: dict[str, torch.Tensor] = {}
    return tensors, _describe(value, "", tensors)


def unflatten(tensors: Mapping[str, torch.Tensor], description: Any) -> Any:
    """Rebuild the structure that `flatten` split."""
    kind, *rest = description
    if kind == "tensor":
        return tensors[rest[0]]
    if kind == "array":
        return tensors[rest[0]].numpy()
    if kind == "scalar":
        return tensors[rest[0]].numpy()[()]
    if kind == "value":
        return rest[0]
    if kind == "bytes":
        return tensors[rest[0]].numpy().tobytes()
    type_name, children = rest
    if kind == "map":
        items = {key: unflatten(tensors, child) for key, child in children}
        return items if type_name is None else _resolve(type_name)(items)
    values = [unflatten(tensors, child) for child in children]
    if kind == "named":
        return _resolve(type_name)(*values)
    if kind == "dataclass":
        cls = _resolve(type_name)
        return cls(**dict(zip((f.name for f in dataclasses.fields(cls)), values, strict=True)))
    return values if kind == "list" else tuple(values)


def _leaf(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> list[Any] | None:
    """Return the description of a leaf; None for a container."""
    import numpy as np
    import torch

    if isinstance(value, torch.Tensor):
        tensors[path] = value
        return ["tensor", path]
    if isinstance(value, np.ndarray) and value.dtype != object:
        tensors[path] = torch.from_numpy(np.ascontiguousarray(value))
        return ["array", path]
    if isinstance(value, np.generic):
        tensors[path] = torch.from_numpy(np.asarray(value).copy())
        return ["scalar", path]
    if value is None or isinstance(value, bool | int | float | str):
        return ["value", value]
    if isinstance(value, bytes):
        tensors[path] = (
            torch.frombuffer(bytearray(value), dtype=torch.uint8) if value else torch.empty(0, dtype=torch.uint8)
        )
        return ["bytes", path]
    return None


def _describe(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    def children(items: Any) -> list[Any]:
        return [_describe(item, f"{path}/{number}", tensors) for number, item in enumerate(items)]

    leaf = _leaf(value, path, tensors)
    if leaf is not None:
        return leaf
    if isinstance(value, Mapping):
        pairs = [[key, child] for key, child in zip(value, children(value.values()), strict=True)]
        # What a missing key would give is code, which is not stored: a batch is complete.
        return ["map", None if isinstance(value, defaultdict) or type(value) is dict else _type_name(value), pairs]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return ["named", _type_name(value), children(value)]
    if isinstance(value, list | tuple):
        return ["list" if isinstance(value, list) else "tuple", None, children(value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return ["dataclass", _type_name(value), children(getattr(value, f.name) for f in dataclasses.fields(value))]
    raise WorkloadRejectedError(
        f"a batch or sample contains a {type(value).__module__}.{type(value).__qualname__}, which cannot be "
        "stored without pickle: return tensors, arrays, numbers or strings in dicts, lists, tuples or dataclasses"
    )


def _type_name(value: object) -> str:
    return f"{type(value).__module__}:{type(value).__qualname__}"


def _resolve(name: str) -> Any:
    module, _, qualified = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in qualified.split("."):
        found = getattr(found, part)
    return found
