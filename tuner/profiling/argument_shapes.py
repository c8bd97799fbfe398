"""Arguments of an operator as a trace records them: shapes, types, and the values that determine its work.

The text is `Input Dims|Input type`, for instance `[[32, 64], [], []]|["float", "Scalar", ""]`; operators named in
`NEEDS_VALUES` have `|Concrete Inputs` behind it. Lists of tensors are nested one level deeper in new traces, and empty
where they are long; text that cannot be parsed counts as unknown.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import msgspec

NEEDS_VALUES = re.compile(r"conv|attention|attn|index_select|embedding", re.IGNORECASE)
"""Pattern for operators with work that depends on numeric arguments: strides, masks, table sizes. The numbers of other
operators are left out, because learning rates would make every call different.
"""
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
"""Bytes of an element, by the dtype's name in `c10::ScalarType`, in lower case."""
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
    """Tensor argument of an operator call. `item_bytes` is 0 if the dtype is unknown."""

    shape: Shape
    item_bytes: int
    dtype: str = ""
    """Name of the dtype in `c10::ScalarType`, in lower case."""

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.size * self.item_bytes


@dataclass(frozen=True)
class Arguments:
    """Arguments of one call: the tensor at each position, or None for an argument of another kind.

    Attributes:
        lists: Shapes of the tensors in each list of tensors; empty for other arguments, and for lists too long to be
            recorded.
        values: Numbers as text ("[2, 2]", "True"), where they were recorded.
    """

    tensors: tuple[Tensor | None, ...]
    text: str
    lists: tuple[tuple[Shape, ...], ...] = ()
    values: tuple[str, ...] = ()

    def shape(self, position: int) -> Shape:
        """Return the shape of the tensor at a position; empty if there is none."""
        tensor = self.tensors[position] if position < len(self.tensors) else None
        return tensor.shape if tensor else ()

    def integers(self, position: int) -> tuple[int, ...]:
        """Return the integers at a position, from a list or a single value; empty if unknown."""
        text = self.values[position] if position < len(self.values) else ""
        return (
            tuple(int(number) for number in re.findall(r"-?\d+", text)) if re.fullmatch(r"[\[\]\s,\d-]*", text) else ()
        )

    def flags(self, position: int) -> tuple[bool, ...]:
        """Return the booleans at a position, from a list or a single value; empty if unknown."""
        text = self.values[position] if position < len(self.values) else ""
        return tuple(word == "True" for word in re.findall(r"True|False", text))

    def elements(self, position: int) -> int:
        """Return the total number of elements of the tensors in the list at a position."""
        return sum(map(math.prod, self.lists[position])) if position < len(self.lists) else 0


def dtype_name(dtype: str) -> str:
    """Return a dtype's name in `c10::ScalarType`, in lower case, from any spelling that traces use."""
    name = dtype.lower()
    name = _ALIASES.get(name, name).removeprefix("c10::")
    return _ALIASES.get(name, name)


def item_bytes(dtype: str) -> int:
    """Return the bytes per element of a dtype in any spelling that traces use; 0 if the name is unknown."""
    return DTYPE_BYTES.get(dtype_name(dtype), 0)


def parse_arguments(text: bytes) -> Arguments:
    """Parse recorded arguments, as far as they can be understood."""
    dims_text, types_text, values_text = (*text.split(b"|", 2), b"", b"")[:3]
    dims, types, values = _decoded(dims_text), _decoded(types_text), _decoded(values_text)
    if not dims:
        return Arguments((), text.decode(errors="replace"))
    named = [str(types[i]) if i < len(types) else "" for i in range(len(dims))]
    tensors = tuple(_tensor(dim, name) for dim, name in zip(dims, named, strict=True))
    parts = [f"{name}{dim}" if tensor else name or "-" for dim, name, tensor in zip(dims, named, tensors, strict=True)]
    return Arguments(tensors, ", ".join(parts), tuple(map(_list, dims)), tuple(map(str, values)))


def _decoded(text: bytes) -> list[Any]:
    if not text:
        return []
    try:
        value = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return []
    return value if isinstance(value, list) else []


def _tensor(dim: Any, name: str) -> Tensor | None:
    if not _is_shape(dim):
        return None
    size = item_bytes(name)
    return Tensor(tuple(dim), size, dtype_name(name) if size else "") if dim or size else None


def _list(dim: Any) -> tuple[Shape, ...]:
    """Return the shapes in a list argument; empty if it is no list of tensors."""
    if not isinstance(dim, list) or not all(map(_is_shape, dim)):
        return ()
    return tuple(map(tuple, dim))


def _is_shape(dim: Any) -> bool:
    return isinstance(dim, list) and all(type(size) is int and size >= 0 for size in dim)
