"""Compression of the activations that the forward pass keeps for the backward pass.

Hooks see every tensor that autograd saves, but not which operator saves it. Unchanged: parameters and buffers (kept
anyway), the batch, parts of a larger tensor (encoding a part frees nothing while the rest is kept), integers, and
what is too small to matter. A tensor that several operators save is encoded once.

Source: https://docs.pytorch.org/docs/stable/autograd.html#torch.autograd.graph.saved_tensors_hooks
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from steptune.tuner.training.encodings import Blocks, Form, Half, Sparse, Whole, is_dense
from steptune.tuner.training.relu_masks import keep_masks
from steptune.tuner.workloads.workload import leaves

if TYPE_CHECKING:
    import torch

MIN_BYTES = 4096
RELU_MASK, RELU_SPARSE, BFLOAT16, INT8 = "relu_mask", "relu_sparse", "bfloat16", "int8"
FORMS = (RELU_MASK, RELU_SPARSE, BFLOAT16, INT8)
LOSSLESS = (RELU_MASK, RELU_SPARSE)


@dataclass
class Count:
    """Bytes of the tensors saved in one forward pass: before encoding, and as kept."""

    bytes_in: int = 0
    bytes_kept: int = 0

    def add(self, bytes_in: int, bytes_kept: int) -> None:
        self.bytes_in += bytes_in
        self.bytes_kept += bytes_kept


class SavedActivations:
    """Encoder of the activations that one model keeps.

    Args:
        kept_as: One of `FORMS`. `relu_mask`: a bit for each element that a ReLU module keeps, and a byte for each
            window of a MaxPool2d module. `relu_sparse`: also what other operators keep of their outputs, without the
            zeros. `bfloat16`, `int8`: masks, and everything else in 16 or 8 bits.

    Attributes:
        last: Bytes of the last forward pass that kept anything.
    """

    def __init__(self, kept_as: str) -> None:
        self.kept_as = kept_as
        self.last = Count()
        self._count = Count()
        self._model: torch.nn.Module | None = None
        self._others: set[int] | None = None
        self._batch: list[Any] = []
        self._rectified: dict[int, Any] = {}
        self._encoded: dict[tuple[Any, ...], tuple[Any, weakref.ref[Form]]] = {}

    # --- where it is put ------------------------------------------------------------------------

    def attach(self, model: torch.nn.Module, workload: Any = None) -> torch.nn.Module:
        """Make the model's ReLU and MaxPool2d modules keep masks, the smallest encoding.

        Lossy encodings would round small activations to zero, where a ReLU's backward pass blocks the gradient.
        """
        self._model = model
        keep_masks(model, self._count_masks, self._note_rectified)
        return model

    def note_batch(self, batch: Any) -> Any:
        """Exclude the batch's tensors from encoding: the training loop keeps them until the step ends anyway."""
        self._batch = [_storage(leaf) for leaf in leaves(batch) if hasattr(leaf, "untyped_storage")]
        return batch

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Encode saved tensors in the forward and backward pass inside the context."""
        from torch.autograd.graph import saved_tensors_hooks

        self._others = None
        self._encoded.clear()
        self._rectified.clear()
        self._count = Count()
        try:
            if self.kept_as == RELU_MASK:
                yield
            else:
                with saved_tensors_hooks(self._pack, _unpack):
                    yield
        finally:
            if self._count.bytes_in:
                self.last = self._count
            self._encoded.clear()
            self._rectified.clear()

    # --- hooks ----------------------------------------------------------------------------------

    def _pack(self, tensor: torch.Tensor) -> Any:
        if not self._is_worth(tensor):
            return tensor
        storage = _storage(tensor)
        if storage.cdata in self._untouched():
            return tensor
        if self.kept_as == RELU_SPARSE and storage.cdata not in self._rectified:
            return tensor
        key = (storage.cdata, tensor._version, tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
        known = self._encoded.get(key)
        form = known[1]() if known else None
        if form is None:
            form = self._form(tensor)
            # The weak reference to the storage keeps its address from being given to another one.
            self._encoded[key] = storage, weakref.ref(form)
            if not isinstance(form, Whole):
                self._count.add(tensor.numel() * tensor.element_size(), form.num_bytes)
        return tensor if isinstance(form, Whole) else form

    def _form(self, tensor: torch.Tensor) -> Form:
        if self.kept_as == RELU_SPARSE:
            return Sparse.encode(tensor)
        return Half.encode(tensor) if self.kept_as == BFLOAT16 else Blocks.encode(tensor)

    def _is_worth(self, tensor: torch.Tensor) -> bool:
        import torch

        plain = tensor.layout is torch.strided and type(tensor) in (torch.Tensor, torch.nn.Parameter)
        if not plain or not tensor.is_floating_point() or tensor.dtype is torch.float64:
            return False
        num_bytes = tensor.numel() * tensor.element_size()
        if num_bytes < MIN_BYTES or (self.kept_as == BFLOAT16 and tensor.element_size() <= 2):
            return False
        return tensor.untyped_storage().nbytes() == num_bytes and is_dense(tensor)

    def _untouched(self) -> set[int]:
        """Return the storages of parameters, buffers and the batch, which are not encoded; looked up once per pass."""
        if self._others is None:
            assert self._model is not None, "attach must be called before the first step"
            state = (*self._model.parameters(), *self._model.buffers())
            self._others = {tensor.untyped_storage()._cdata for tensor in state}
            self._others |= {storage.cdata for storage in self._batch}
        return self._others

    # --- masks ----------------------------------------------------------------------------------

    def _count_masks(self, bytes_in: int, bytes_kept: int) -> None:
        self._count.add(bytes_in, bytes_kept)

    def _note_rectified(self, output: torch.Tensor) -> None:
        storage = _storage(output)
        self._rectified[storage.cdata] = storage


def _unpack(kept: Any) -> torch.Tensor:
    """Decode a kept tensor for the operator that saved it."""
    return kept if not isinstance(kept, Form) else kept.decode()


def _storage(tensor: torch.Tensor) -> Any:
    from torch.multiprocessing.reductions import StorageWeakRef

    return StorageWeakRef(tensor.untyped_storage())
