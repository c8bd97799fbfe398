"""Location of a vision transformer's class token, for the models of three libraries.

A class token is the first of the tokens. It can be left out before the block that takes it first, and its replacement
can be inserted after the normalisation whose first token is classified.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def known_class_token(model: torch.nn.Module) -> tuple[torch.nn.Module, torch.nn.Module] | None:
    """Return the first block and the last normalisation of an image classifier of transformers, torchvision or timm;
    None for any other model.
    """
    library = type(model).__module__.partition(".")[0]
    finder = {"transformers": _of_transformers, "torchvision": _of_torchvision, "timm": _of_timm}.get(library)
    return finder(model) if finder is not None else None


def _of_transformers(model: Any) -> tuple[torch.nn.Module, torch.nn.Module] | None:
    if type(model).__name__ != "ViTForImageClassification":
        return None
    trunk = model.vit
    blocks = trunk.layers if hasattr(trunk, "layers") else trunk.encoder.layer  # transformers 4
    return blocks[0], trunk.layernorm


def _of_torchvision(model: Any) -> tuple[torch.nn.Module, torch.nn.Module] | None:
    if type(model).__name__ != "VisionTransformer":
        return None
    return model.encoder.layers[0], model.encoder.ln


def _of_timm(model: Any) -> tuple[torch.nn.Module, torch.nn.Module] | None:
    if type(model).__name__ != "VisionTransformer" or model.global_pool != "token" or model.num_prefix_tokens != 1:
        return None
    return model.blocks[0], model.norm
