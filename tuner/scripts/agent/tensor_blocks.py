"""Memory of the known tensors of a script's training, by class. `known_blocks` in `tuner.profiling.tensor_memory` does
this for workloads, with the same class names.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

TensorBlock = tuple[str, str, int, int]
"""Memory of a tensor: device, class, address and number of bytes."""


def tensor_blocks(modules: Iterable[torch.nn.Module], optimizers: Iterable[Any]) -> list[TensorBlock]:
    """Return the memory of parameters, buffers, gradients and the optimizers' states, each storage once."""
    modules, optimizers = list(modules), list(optimizers)
    parameters = [parameter for module in modules for parameter in module.parameters()]
    parameters += [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    states = [state for optimizer in optimizers for state in optimizer.state.values() if isinstance(state, dict)]
    tensors: dict[str, list[Any]] = {
        "parameters": [*parameters, *(buffer for module in modules for buffer in module.buffers())],
        "gradients": [parameter.grad for parameter in parameters],
        "optimizer state": [value for state in states for value in state.values()],
    }
    found: dict[tuple[str, int], TensorBlock] = {}
    for kind, members in tensors.items():
        for tensor in members:
            storage = _storage(tensor)
            if storage is not None and storage.nbytes():
                device = "cpu" if tensor.device.type == "cpu" else f"cuda:{tensor.device.index}"
                address = storage.data_ptr()
                found.setdefault((device, address), (device, kind, address, storage.nbytes()))
    return list(found.values())


def _storage(tensor: Any) -> Any:
    """Return the storage of a tensor, or of this rank's part of a tensor that is sharded across ranks; None if it has
    no storage of its own.
    """
    if not isinstance(tensor, torch.Tensor) or tensor.device.type not in ("cpu", "cuda"):
        return None
    try:
        local: Any = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        return local.untyped_storage()
    except (RuntimeError, ValueError):  # a sparse tensor; a parameter of a lazy module that was never called
        return None
