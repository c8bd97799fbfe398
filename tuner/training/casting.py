"""Casting a model to 16 bits: the model half of precision levels O2 and O3.

Weights and buffers are cast in place, so tied weights stay tied. At O2 normalisation layers and
mixture-of-experts routers keep FP32 weights and compute in FP32; hooks cast what goes in and out of
them. The whole model takes inputs in any floating-point format and returns FP32, as apex did.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from tuner.training.structure import map_structure

if TYPE_CHECKING:
    import torch

_NORM_CLASS = re.compile(r"Norm(\d+d)?$")
_ROUTER = re.compile(r"(^|[._])router($|[._])|Router$")
_BATCH_NORM = re.compile(r"BatchNorm(\d+d)?$|SyncBatchNorm$")


def keeps_fp32(name: str, module: torch.nn.Module) -> bool:
    """Normalisation layers (by class name) and routers (by class or attribute name)."""
    kind = type(module).__name__
    return bool(_NORM_CLASS.search(kind) or _ROUTER.search(kind) or _ROUTER.search(name))


def cast_model(model: torch.nn.Module, dtype_name: str, *, keep_fp32: bool) -> torch.nn.Module:
    """Casts parameters and floating-point buffers, and adds the casts at the model's boundary.

    Args:
        keep_fp32: Leave normalisation layers and routers in FP32 (level O2).
    """
    import torch

    dtype: torch.dtype = getattr(torch, dtype_name)
    for name, module in model.named_modules():
        if keep_fp32 and keeps_fp32(name, module):
            _compute_in_fp32(module, dtype)
            continue
        for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
            if tensor.is_floating_point():
                tensor.data = tensor.data.to(dtype)
    model.register_forward_pre_hook(
        lambda _, args, kwargs: (_cast(args, dtype), _cast(kwargs, dtype)), with_kwargs=True
    )
    model.register_forward_hook(lambda _, args, output: _cast(output, torch.float32))
    return model


def _compute_in_fp32(module: torch.nn.Module, dtype: torch.dtype) -> None:
    """FP32 in, 16 bits out. Batch normalisation takes 16-bit inputs with FP32 weights by itself."""
    import torch

    if _BATCH_NORM.search(type(module).__name__) or not any(True for _ in module.parameters()):
        return
    module.register_forward_pre_hook(
        lambda _, args, kwargs: (_cast(args, torch.float32), _cast(kwargs, torch.float32)), with_kwargs=True
    )
    module.register_forward_hook(lambda _, args, output: _cast(output, dtype))


def _cast(value: Any, dtype: torch.dtype) -> Any:
    import torch

    def convert(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    return map_structure(convert, value)
