"""The arguments of an operator as a trace records them: shapes and types.

The text is `Input Dims|Input type`, for instance `[[32, 64], [], []]|["float", "Scalar", ""]`. Lists of
tensors are nested one deeper in new traces; whatever is not understood is simply not known.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import msgspec

DTYPE_BYTES = {
    "float": 4,
    "double": 8,
    "half": 2,
    "bfloat16": 2,
    "int": 4,
    "long": 8,
    "short": 2,
    "char": 1,
    "byte": 1,
    "bool": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "complexhalf": 4,
    "complexfloat": 8,
    "complexdouble": 16,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
}
"""By the names of `c10::ScalarType`, in lower case."""
_ALIASES = {
    "unsigned char": "byte",
    "signed char": "char",
    "long int": "long",
    "long long": "long",
    "short int": "short",
    "c10::complex<float>": "complexfloat",
    "c10::complex<double>": "complexdouble",
    "c10::complex<c10::half>": "complexhalf",
    "float16": "half",
    "float32": "float",
    "float64": "double",
    "int8": "char",
    "uint8": "byte",
    "int16": "short",
    "int32": "int",
    "int64": "long",
}

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Tensor:
    """One tensor among the arguments. `item_bytes` is 0 where the type is not known."""

    shape: Shape
    item_bytes: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.item_bytes


@dataclass(frozen=True)
class Arguments:
    """Those of one call, by position; None for what is no tensor (a scalar, a list, nothing)."""

    tensors: tuple[Tensor | None, ...]
    text: str

    def shape(self, position: int) -> Shape:
        """Shape of the tensor at a position; empty where there is none."""
        tensor = self.tensors[position] if position < len(self.tensors) else None
        return tensor.shape if tensor else ()


def item_bytes(dtype: str) -> int:
    """Size of one element by any of the names that traces use; 0 where the name is not known."""
    name = dtype.lower()
    name = _ALIASES.get(name, name)
    return DTYPE_BYTES.get(_ALIASES.get(name.removeprefix("c10::"), name.removeprefix("c10::")), 0)


def parse_arguments(text: bytes) -> Arguments:
    """Arguments of a recorded text, as far as it can be understood."""
    dims_text, _, types_text = text.partition(b"|")
    dims, types = _decoded(dims_text), _decoded(types_text)
    named = [str(types[i]) if i < len(types) else "" for i in range(len(dims))]
    tensors = tuple(_tensor(dim, name) for dim, name in zip(dims, named, strict=True))
    if not dims:
        return Arguments((), text.decode(errors="replace"))
    parts = [f"{name}{dim}" if tensor else name or "-" for dim, name, tensor in zip(dims, named, tensors, strict=True)]
    return Arguments(tensors, ", ".join(parts))


def _decoded(text: bytes) -> list[Any]:
    if not text:
        return []
    try:
        value = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return []
    return value if isinstance(value, list) else []


def _tensor(dim: Any, name: str) -> Tensor | None:
    if not isinstance(dim, list) or not all(type(size) is int and size >= 0 for size in dim):
        return None
    size = item_bytes(name)
    return Tensor(tuple(dim), size) if dim or size else None
