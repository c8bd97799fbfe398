"""File format of named tensors for memory mapping: 64-byte aligned data after a JSON header.

Steptune maps the initial state of a model into every trial in milliseconds. Mapped pages are
private and copy-on-write, so a trial may train on them and the file stays as it was. The alignment
is that of torch's own CPU allocator; safetensors packs tensors at 8 bytes, which would make every
trial measure unaligned parameters. Nothing is pickled.

Layout: magic (8 bytes), header length (8 bytes, little endian), header (JSON), padding, data.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    import torch

MAGIC = b"STPTENS1"
ALIGNMENT = 64


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: list[int]
    offset: int
    nbytes: int


class _Header(msgspec.Struct, frozen=True):
    tensors: dict[str, _Entry]
    metadata: dict[str, Any]


def _align(position: int) -> int:
    return (position + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


def save_tensors(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, Any]) -> None:
    """Write CPU tensors (any layout, any dtype) and JSON metadata; replace `path` atomically."""
    import torch

    entries: dict[str, _Entry] = {}
    offset = 0
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    for name, tensor in contiguous.items():
        nbytes = tensor.numel() * tensor.element_size()
        entries[name] = _Entry(str(tensor.dtype).removeprefix("torch."), list(tensor.shape), offset, nbytes)
        offset = _align(offset + nbytes)
    header = msgspec.json.encode(_Header(entries, metadata))
    start = _align(len(MAGIC) + 8 + len(header))
    temporary = path.with_name(f"{path.name}.{os.getpid()}.part")
    with temporary.open("wb") as file:
        file.write(MAGIC + len(header).to_bytes(8, "little") + header)
        for name, tensor in contiguous.items():
            file.seek(start + entries[name].offset)
            if tensor.numel():
                file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
        file.truncate(start + offset)
    temporary.replace(path)


def map_tensors(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Map a file written by `save_tensors`, privately: writing to a tensor does not change it.

    Returns:
        Tensors by name (CPU, contiguous), and the metadata.

    Raises:
        ValueError: The file is not of this format, or a part of it is missing.
    """
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise ValueError(f"{path} is not a tensor file: it does not begin with {MAGIC!r}")
        length = int.from_bytes(file.read(8), "little")
        try:
            header = msgspec.json.decode(file.read(length), type=_Header)
        except msgspec.DecodeError as error:
            raise ValueError(f"{path} is damaged: its header cannot be read ({error})") from None
        start = _align(len(MAGIC) + 8 + length)
        end = max((start + entry.offset + entry.nbytes for entry in header.tensors.values()), default=0)
        size = os.fstat(file.fileno()).st_size
        if size < end:
            raise ValueError(f"{path} is truncated: it has {size} of {end} bytes")
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    return {name: _view(mapping, start, entry) for name, entry in header.tensors.items()}, header.metadata


def _view(mapping: mmap.mmap, start: int, entry: _Entry) -> torch.Tensor:
    """Return a tensor whose data is its part of the mapped file. It has its own storage, because torch.compile treats
    tensors that share a storage as aliases.
    """
    import torch

    dtype = getattr(torch, entry.dtype)
    if not entry.nbytes:
        return torch.empty(entry.shape, dtype=dtype)
    count = entry.nbytes // torch.empty(0, dtype=dtype).element_size()
    return torch.frombuffer(mapping, dtype=dtype, count=count, offset=start + entry.offset).view(entry.shape)
