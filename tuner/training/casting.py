"""Model part of the precision levels: casting to 16 bits at O2 and O3, and exclusion of routers from autocast at O1.

Weights and buffers are cast in place, so tied weights stay tied; weights that are not trained are cast too. At O2
normalisation layers, their statistics and mixture-of-experts routers keep FP32 weights and compute in FP32; hooks
cast what goes in and out of them. The whole model takes inputs in any floating-point format and returns FP32, and its
`state_dict` is in FP32, as in apex.

A normalisation layer is one of torch's, frozen ones and subclasses included; or a module whose class, or a base of it,
is named so (`LlamaRMSNorm`, `FrozenBatchNorm2d`, `RMSNormGated`) and that does not only hold others. Where the name
continues beyond the number of dimensions, all of the module's weights must be vectors: `LayerNormLinear` is more than a
norm.

Complex numbers have no 16-bit form: such weights and buffers stay as they are, and a module that has complex weights
of its own and no modules with weights inside computes in FP32 at O3 too.

A router of its own class, which may choose experts too, gives back 16 bits; one that is a bare projection gives its
logits in FP32, so that what chooses experts from them does so in FP32 (Fedus et al., "Switch Transformers" (2021),
section 2.4).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from steptune.tuner.training.structure import map_structure

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

_NORM_CLASS = re.compile(r"([Nn]orm|Normali[sz]ation)(\d+d)?$")
_NORM_IN_NAME = re.compile(r"[Nn]orm(?![a-z])")
_ROUTER = re.compile(r"(^|[._])router($|[._])|Router$")


def is_router(name: str, module: torch.nn.Module) -> bool:
    """Say whether a module is a router, by the name of its class or attribute."""
    return bool(_ROUTER.search(type(module).__name__) or _ROUTER.search(name))


def is_norm(module: torch.nn.Module) -> bool:
    """Say whether a module is a normalisation layer, by the names of its class and base classes; a module that only
    contains normalisation layers is not one.
    """
    from torch import nn

    if isinstance(module, nn.modules.batchnorm._NormBase | nn.LayerNorm | nn.GroupNorm | nn.RMSNorm):
        return True
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    if not own and any(_has_state(child) for child in module.children()):
        return False
    vectors = all(sum(size > 1 for size in tensor.shape) <= 1 for tensor in own)
    if not vectors and _weights_inside(module):
        return False
    names = [cls.__name__ for cls in type(module).__mro__]
    if any(_NORM_CLASS.search(name) for name in names):
        return True
    return vectors and not _weights_inside(module) and any(_NORM_IN_NAME.search(name) for name in names)


def is_complex(module: torch.nn.Module) -> bool:
    """Say whether a module's own weights are complex and it contains no other modules with weights."""
    own = module.parameters(recurse=False)
    return any(parameter.is_complex() for parameter in own) and not _weights_inside(module)


def keeps_fp32(name: str, module: torch.nn.Module) -> bool:
    """Say whether a module keeps FP32: normalisation layers, routers and complex modules do."""
    return is_norm(module) or is_router(name, module) or is_complex(module)


def _has_state(module: torch.nn.Module) -> bool:
    return next(module.parameters(), None) is not None or next(module.buffers(), None) is not None


def _weights_inside(module: torch.nn.Module) -> bool:
    return any(next(child.parameters(), None) is not None for child in module.children())


def fp32_modules(model: torch.nn.Module, *, keep_fp32: bool = True) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the outermost modules that keep FP32; everything inside them keeps FP32 too.

    Args:
        keep_fp32: As in `cast_model`.
    """
    inside: set[torch.nn.Module] = set()
    for name, module in model.named_modules():
        if module not in inside and (keeps_fp32(name, module) if keep_fp32 else is_complex(module)):
            inside.update(module.modules())
            yield name, module


def cast_model(
    model: torch.nn.Module, dtype_name: str, *, keep_fp32: bool, cast_parameters: bool = True
) -> torch.nn.Module:
    """Cast parameters and floating-point buffers, and insert casts where tensors enter and leave the model.

    Args:
        keep_fp32: Leave normalisation layers and routers in FP32 (level O2).
        cast_parameters: False where they are gathered in 16 bits from FP32 parts (`sharding`).
    """
    import torch

    dtype: torch.dtype = getattr(torch, dtype_name)
    kept: set[torch.nn.Module] = set()
    for name, module in list(fp32_modules(model, keep_fp32=keep_fp32)):
        _compute_in_fp32(name, module, dtype)
        kept.update(module.modules())
    for module in model.modules():
        if module in kept:
            continue
        parameters = module.parameters(recurse=False) if cast_parameters else ()
        for tensor in [*parameters, *module.buffers(recurse=False)]:
            if tensor.is_floating_point():
                tensor.data = tensor.data.to(dtype)
        if isinstance(module, torch.nn.RNNBase):
            module.flatten_parameters()  # in one piece, as cuDNN wants them
    model.register_forward_pre_hook(
        lambda _, args, kwargs: (_cast(args, dtype), _cast(kwargs, dtype)), with_kwargs=True
    )
    model.register_forward_hook(lambda _, args, output: _cast(output, torch.float32))
    model.register_state_dict_post_hook(_state_in_fp32)
    return model


def compute_routers_in_fp32(model: torch.nn.Module) -> torch.nn.Module:
    """Exclude routers from autocast (level O1)."""
    for name, module in model.named_modules():
        if is_router(name, module):
            module.forward = _without_autocast(module.forward, _device_type(model))
    return model


def _without_autocast(forward: Any, device_type: str) -> Any:
    import torch

    def in_fp32(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device_type, enabled=False):
            return forward(*_cast(args, torch.float32), **_cast(kwargs, torch.float32))

    return in_fp32


def _device_type(model: torch.nn.Module) -> str:
    return next((parameter.device.type for parameter in model.parameters()), "cpu")


def _compute_in_fp32(name: str, module: torch.nn.Module, dtype: torch.dtype) -> None:
    """Make a module with 16-bit inputs and outputs compute in FP32.

    Torch's batch normalisation and its subclasses take 16-bit inputs with FP32 weights already; torch's stateless norms
    compute in FP32 anyway.
    """
    import torch

    batch_norm = isinstance(module, torch.nn.modules.batchnorm._BatchNorm)
    if type(module).__module__.startswith("torch.nn.") and (batch_norm or not _has_state(module)):
        return
    if not batch_norm:
        module.register_forward_pre_hook(
            lambda _, args, kwargs: (_cast(args, torch.float32), _cast(kwargs, torch.float32)), with_kwargs=True
        )
    if not (is_router(name, module) and isinstance(module, torch.nn.Linear)):
        module.register_forward_hook(lambda _, args, output: _cast(output, dtype))


def _state_in_fp32(module: torch.nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    import torch

    for name, value in state.items():
        if name.startswith(prefix):
            state[name] = _cast(value, torch.float32)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    import torch

    def convert(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    return map_structure(convert, value)
