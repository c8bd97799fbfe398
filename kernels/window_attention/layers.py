"""Parts shared by the attention layers of all libraries: reasons for refusal, and the scale and bias of cosine
attention.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from steptune.kernels.window_attention import Geometry, unsupported

SCALE = "_steptune_scale"
"""Name of the attribute that holds each head's scale, in layers whose scale is constant."""
LARGEST_SCALE = 40.0
"""Maximum cosine scale for which the published mask of -100 is equivalent to -inf."""


def reason_against(
    geometry: Geometry, heads: int, projections: tuple[Any, ...], bypassed: tuple[torch.nn.Module, ...]
) -> str | None:
    """Return why a layer fails the checks common to all kinds of layers (plain qkv projections, no hooks on bypassed
    modules); None where it passes them.
    """
    if any(type(p) is not torch.nn.Linear for p in projections):
        return "the projection to queries, keys and values must be a plain torch.nn.Linear"
    if any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in bypassed):
        return "hooks are attached to a module that the kernel bypasses"
    channels = sum(p.out_features for p in projections) // 3
    return unsupported(geometry, channels, heads, projections[0].weight.dtype)


def scale_reason(logit_scale: Tensor) -> str | None:
    """Return the reason why the scale of a cosine attention is too large for the published mask; None if it is small
    enough.
    """
    scale = float(cosine_scale(logit_scale.detach()).max())
    if scale > LARGEST_SCALE:
        return (
            f"the scale of the cosine attention must be at most {LARGEST_SCALE:g}, got {scale:.3g}: above it, "
            "the published mask of -100 does not fully exclude masked scores"
        )
    return None


def cosine_scale(logit_scale: Tensor) -> Tensor:
    """Return the factor by which each head scales its cosine similarities."""
    return torch.clamp(logit_scale.float(), max=math.log(100.0)).exp().flatten()


def cosine_table(mlp: torch.nn.Module, coordinates: Tensor, heads: int) -> Tensor:
    """Return the bias by relative position, as a small network computes it from the coordinates."""
    return 16 * torch.sigmoid(mlp(coordinates).view(-1, heads))


def plain_scale(module: Any, like: Tensor) -> Tensor:
    """Return the factor by which each head scales its scores, on the device of the tokens."""
    kept: Tensor = module.__dict__[SCALE]
    return kept if kept.device == like.device else kept.to(like.device)
