"""Counting what tensors take on a CPU, where no allocator does: every storage that an operator returned and that is
alive, by its size at that moment (FSDP frees storages by resizing them).
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """
    Attributes:
        peak: The most that was there after any operator.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                storage = getattr(leaf, "_local_tensor", leaf).untyped_storage()  # of a DTensor its own part
                self._storages.setdefault(storage._cdata, weakref.ref(storage))
        self.peak = max(self.peak, self.now())
        return result

    def now(self) -> int:
        total = 0
        for key, reference in list(self._storages.items()):
            storage = reference()
            if storage is None:
                del self._storages[key]
            else:
                total += storage.nbytes()
        return total
