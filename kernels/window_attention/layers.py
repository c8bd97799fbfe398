"""Parts that the layers of all libraries share: reasons to refuse one, and the scale and bias of cosine attention."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from steptune.kernels.window_attention import Geometry, unsupported

SCALE = "_steptune_scale"
"""Attribute of a layer whose scale is constant: the scale of each head."""
LARGEST_SCALE = 40.0
"""Published code masks by adding -100, which is out of reach for scores of cosines up to this scale."""


def reason_against(
    geometry: Geometry, heads: int, projections: tuple[Any, ...], bypassed: tuple[torch.nn.Module, ...]
) -> str | None:
    """Check what all kinds have: plain projections to qkv, and modules that nobody watches the calls of."""
    if any(type(p) is not torch.nn.Linear for p in projections):
        return "the projection to queries, keys and values is no plain Linear module"
    if any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in bypassed):
        return "hooks watch the calls of a module that the kernel goes around"
    channels = sum(p.out_features for p in projections) // 3
    return unsupported(geometry, channels, heads, projections[0].weight.dtype)


def scale_reason(logit_scale: Tensor) -> str | None:
    """Check that the published mask is out of reach for the scores of a cosine attention."""
    scale = float(cosine_scale(logit_scale.detach()).max())
    if scale > LARGEST_SCALE:
        return f"the scale of its cosines is {scale:.3g}, and masked scores would count in the published attention"
    return None


def cosine_scale(logit_scale: Tensor) -> Tensor:
    """Give the scale of each head's cosines."""
    return torch.clamp(logit_scale.float(), max=math.log(100.0)).exp().flatten()


def cosine_table(mlp: torch.nn.Module, coordinates: Tensor, heads: int) -> Tensor:
    """Give the bias by relative position, as a small network of the coordinates learns it."""
    return 16 * torch.sigmoid(mlp(coordinates).view(-1, heads))


def plain_scale(module: Any, like: Tensor) -> Tensor:
    """Give the scale of each head, where the tokens are."""
    kept: Tensor = module.__dict__[SCALE]
    return kept if kept.device == like.device else kept.to(like.device)
