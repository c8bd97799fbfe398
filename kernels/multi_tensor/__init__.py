"""Shared parts of kernels that update all parameters of an optimizer at once: tables of tensor addresses, and chunking.

A launch covers the tensors of one dtype: each is cut into chunks of `CHUNK` elements, one program each. A program finds
its tensor by its number, and addresses and numbers of that tensor in two tables on the device, which are sent anew for
every step: gradients move. Sums over a tensor are sums of its chunks in a fixed order, without atomics, so that two
runs give the same bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

CHUNK = 4096
"""Elements per program: with 8 warps, four 16-byte accesses per thread to each FP32 tensor."""
NUM_WARPS = 8
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_ALIGNMENT = 16


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Device tables that describe the tensors of one launch.

    Attributes:
        addresses: (T, columns) int64: for each tensor its number of elements, the number of its first chunk, its number
            of chunks, its row in `numbers`, and the addresses of the tensors that belong to it.
        numbers: (rows, K) FP32: hyperparameters, one row for all tensors that share them.
        tensor_of_chunk: (C,) int32.
        constants: Compile-time constants that all kernels share.
    """

    addresses: Tensor
    numbers: Tensor
    tensor_of_chunk: Tensor
    constants: dict[str, Any]

    @property
    def num_tensors(self) -> int:
        return len(self.addresses)

    @property
    def num_chunks(self) -> int:
        return len(self.tensor_of_chunk)

    @property
    def parts_block(self) -> int:
        """Number of partial sums added at a time when a tensor's chunks are summed."""
        return min(1024, self.longest)

    @property
    def longest(self) -> int:
        """Upper limit of the number of chunks per tensor, a power of two."""
        most: int = self.constants["LONGEST"]
        return most


def reason_against(parameters: Sequence[Tensor]) -> str:
    """Return why multi-tensor kernels cannot update the parameters; empty where they can."""
    devices = {parameter.device for parameter in parameters}
    if len(devices) > 1:
        return f"requires all parameters on one device; they are on {', '.join(sorted(map(str, devices)))}"
    for parameter in parameters:
        if hasattr(parameter, "to_local"):
            return "does not support sharded parameters (DTensor)"
        if parameter.dtype not in DTYPES:
            return f"requires float32, float16 or bfloat16 parameters, not {parameter.dtype}"
        if parameter.stride() != dense_strides(parameter):
            return f"requires parameters without gaps in memory; one of shape {tuple(parameter.shape)} has gaps"
    return ""


def dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides of a gap-free copy with the same order of dimensions."""
    return torch.empty_like(tensor, device="meta", memory_format=torch.preserve_format).stride()


def laid_out_like(value: Tensor, parameter: Tensor) -> Tensor:
    """Return a value in a parameter's dtype and strides; copy it only if its dtype or strides differ.

    Raises:
        RuntimeError: The value is sparse.
    """
    if value.layout is not torch.strided:
        raise RuntimeError("requires dense gradients: create the embedding with sparse=False")
    if value.stride() == parameter.stride() and value.dtype == parameter.dtype:
        return value
    return torch.empty_like(parameter, memory_format=torch.preserve_format).copy_(value)


def prepare(tensors: Sequence[Sequence[Tensor]], settings: Sequence[tuple[float, ...]]) -> Launch:
    """Build the tables of a launch and send them to the device.

    Args:
        tensors: For each parameter, it and the tensors that belong to it, of one dtype, shape and strides.
        settings: Hyperparameters of each parameter.

    Raises:
        RuntimeError: A CUDA graph is being captured: the tables, and the number of the step, come from the host.
    """
    device = tensors[0][0].device
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "multi-tensor LAMB and LARS cannot be captured in a CUDA graph: run the optimizer step outside the graph"
        )
    chunks = tuple(-(-own[0].numel() // CHUNK) for own in tensors)
    first = (0, *itertools.accumulate(chunks))
    numbers = {id(own): own for own in settings}
    row_of = {key: row for row, key in enumerate(numbers)}
    addresses = [
        [own[0].numel(), first[n], chunks[n], row_of[id(settings[n])], *(tensor.data_ptr() for tensor in own)]
        for n, own in enumerate(tensors)
    ]
    aligned = all(address % _ALIGNMENT == 0 for row in addresses for address in row[4:])
    return Launch(
        addresses=_sent(torch.tensor(addresses, dtype=torch.int64), device),
        numbers=_sent(torch.tensor(list(numbers.values()), dtype=torch.float32), device),
        tensor_of_chunk=_tensor_of_chunk(chunks, device),
        constants={
            "DTYPE": _triton_dtype(tensors[0][0].dtype),
            "COLUMNS": len(addresses[0]),
            "NUMBERS": len(settings[0]),
            "ALIGNED": aligned,
            "CHUNK": CHUNK,
            "LONGEST": 1 << (max(chunks) - 1).bit_length(),
            "num_warps": NUM_WARPS,
        },
    )


@lru_cache(maxsize=32)
def _tensor_of_chunk(chunks: tuple[int, ...], device: torch.device) -> Tensor:
    counts = torch.tensor(chunks)
    return torch.arange(len(chunks), dtype=torch.int32).repeat_interleave(counts).to(device)


def _sent(table: Tensor, device: torch.device) -> Tensor:
    """Copy a table to the device asynchronously, from pinned memory that is kept until the copy is done."""
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table


def _triton_dtype(dtype: torch.dtype) -> Any:
    import triton.language as tl

    return {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[dtype]
