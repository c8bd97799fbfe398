"""Pattern of published Swin attention that the kernel replaces: timm's, torchvision's and transformers', Swin and Swin
V2.

A changed module becomes an instance of a subclass of its class: parameters, their names, inputs and outputs
stay. Between norm and residual the subclass projects the whole map, calls the kernel and projects the
result, where the library rolls, pads, cuts, attends, merges and rolls back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from steptune.kernels.window_attention import Geometry, transformers_layers, window_attention
from steptune.kernels.window_attention.layers import (
    SCALE,
    cosine_scale,
    cosine_table,
    plain_scale,
    reason_against,
    scale_reason,
)

WHAT = "Swin's shifted-window attention from timm, torchvision or transformers"
OPERATORS = (
    "window_attention_forward",
    "window_attention_backward",
    "steptune::window_attention",
    "FusedWindowAttention",
)


def refusal(module: torch.nn.Module) -> str | None:
    """Return why the kernel cannot compute a module: empty where it can, None where it is not a Swin attention."""
    found = _KINDS.get(_name_of(type(module)))
    if found is None:
        return None
    reason = found.look(module)
    return "" if reason is None else reason


def replace(module: torch.nn.Module) -> None:
    """Change a module, in place, so that it calls the kernel; `refusal` must have accepted it."""
    cls = type(module)
    kind = _KINDS[_name_of(cls)]
    if kind.scale is not None:
        heads, scale, weight = kind.scale(module)
        module.__dict__[SCALE] = torch.full((heads,), scale, device=weight.device)
    module.__class__ = _subclass(kind.make, cls)  # type: ignore[arg-type]


@cache
def _subclass(make: Callable[[type], type], cls: type) -> type:
    made = make(cls)
    made.__name__, made.__qualname__, made.__module__ = cls.__name__, cls.__qualname__, __name__
    return made


def _name_of(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


# --- timm -------------------------------------------------------------------------------------


def _timm_geometry(block: Any) -> Geometry:
    rows, columns = block.window_size
    shift_rows, shift_columns = block.shift_size
    return Geometry(
        rows=rows, columns=columns, shift_rows=shift_rows, shift_columns=shift_columns, rolls_before_padding=True
    )


def _look_at_timm(block: Any) -> str | None:
    attention = block.attn
    return reason_against(_timm_geometry(block), attention.num_heads, (attention.qkv,), (attention,))


def _look_at_timm_v2(block: Any) -> str | None:
    attention = block.attn
    bypassed = (attention, attention.qkv)
    reason = reason_against(_timm_geometry(block), attention.num_heads, (attention.qkv,), bypassed)
    return reason or scale_reason(attention.logit_scale)


def _timm(cls: type) -> type:
    class Swin(cls):  # type: ignore[misc]
        def _attn(self, x: Tensor) -> Tensor:
            attention = self.attn
            values = window_attention(
                attention.qkv(x),
                attention.relative_position_bias_table,
                _timm_geometry(self),
                scale_h=plain_scale(self, x),
                qkv_bias_c=attention.qkv.bias,
                dropout=attention.attn_drop.p if attention.training else 0.0,
            )
            result: Tensor = attention.proj_drop(attention.proj(values))
            return result

    return Swin


def _timm_v2(cls: type) -> type:
    class SwinV2(cls):  # type: ignore[misc]
        def _attn(self, x: Tensor) -> Tensor:
            attention = self.attn
            bias = None
            if attention.q_bias is not None:
                bias = torch.cat((attention.q_bias, attention.k_bias, attention.v_bias))
            values = window_attention(
                functional.linear(x, attention.qkv.weight, bias),
                cosine_table(attention.cpb_mlp, attention.relative_coords_table, attention.num_heads),
                _timm_geometry(self),
                scale_h=cosine_scale(attention.logit_scale),
                qkv_bias_c=bias,
                cosine=True,
                dropout=attention.attn_drop.p if attention.training else 0.0,
            )
            result: Tensor = attention.proj_drop(attention.proj(values))
            return result

    return SwinV2


# --- torchvision ------------------------------------------------------------------------------


def _torchvision_geometry(attention: Any, height: int, width: int) -> Geometry:
    """Return the window geometry of a map; an axis with a single window is not shifted."""
    rows, columns = attention.window_size
    shift_rows, shift_columns = attention.shift_size
    return Geometry(
        rows=rows,
        columns=columns,
        shift_rows=shift_rows if height > rows else 0,
        shift_columns=shift_columns if width > columns else 0,
    )


def _look_at_torchvision(attention: Any) -> str | None:
    rows, columns = attention.window_size
    geometry = _torchvision_geometry(attention, 2 * rows, 2 * columns)
    reason = reason_against(geometry, attention.num_heads, (attention.qkv,), (attention.qkv, attention.proj))
    return reason or (scale_reason(attention.logit_scale) if hasattr(attention, "logit_scale") else None)


def _torchvision(cls: type) -> type:
    class Swin(cls):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            _, height, width, _ = x.shape
            values = window_attention(
                functional.linear(x, self.qkv.weight, self.qkv.bias),
                self.relative_position_bias_table,
                _torchvision_geometry(self, height, width),
                scale_h=plain_scale(self, x),
                qkv_bias_c=self.qkv.bias,
                dropout=self.attention_dropout if self.training else 0.0,
            )
            values = functional.linear(values, self.proj.weight, self.proj.bias)
            return functional.dropout(values, self.dropout, self.training)

    return Swin


def _torchvision_v2(cls: type) -> type:
    class SwinV2(cls):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            _, height, width, channels = x.shape
            bias = self.qkv.bias
            if bias is not None:
                bias = torch.cat((bias[:channels], torch.zeros_like(bias[:channels]), bias[2 * channels :]))
            values = window_attention(
                functional.linear(x, self.qkv.weight, bias),
                cosine_table(self.cpb_mlp, self.relative_coords_table, self.num_heads),
                _torchvision_geometry(self, height, width),
                scale_h=cosine_scale(self.logit_scale),
                qkv_bias_c=bias,
                cosine=True,
                dropout=self.attention_dropout if self.training else 0.0,
            )
            values = functional.linear(values, self.proj.weight, self.proj.bias)
            return functional.dropout(values, self.dropout, self.training)

    return SwinV2


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """A supported class of attention modules.

    It has the refusal check, the subclass that calls the kernel, and, where the scale is constant, a function that
    returns number of heads, scale and a weight.
    """

    look: Callable[[Any], str | None]
    make: Callable[[type], type]
    scale: Callable[[Any], tuple[int, float, Tensor]] | None = None


_KINDS: dict[str, _Kind] = {
    "timm.models.swin_transformer.SwinTransformerBlock": _Kind(
        look=_look_at_timm, make=_timm, scale=lambda m: (m.attn.num_heads, m.attn.scale, m.attn.qkv.weight)
    ),
    "timm.models.swin_transformer_v2.SwinTransformerV2Block": _Kind(look=_look_at_timm_v2, make=_timm_v2),
    "torchvision.models.swin_transformer.ShiftedWindowAttention": _Kind(
        look=_look_at_torchvision,
        make=_torchvision,
        scale=lambda m: (m.num_heads, (m.qkv.in_features // m.num_heads) ** -0.5, m.qkv.weight),
    ),
    "torchvision.models.swin_transformer.ShiftedWindowAttentionV2": _Kind(
        look=_look_at_torchvision, make=_torchvision_v2
    ),
    "transformers.models.swin.modeling_swin.SwinLayer": _Kind(
        look=transformers_layers.look,
        make=transformers_layers.swin,
        scale=lambda m: (m.attention.num_attention_heads, m.attention.scaling, m.attention.q_proj.weight),
    ),
    "transformers.models.swinv2.modeling_swinv2.Swinv2Layer": _Kind(
        look=transformers_layers.look_v2, make=transformers_layers.swin_v2
    ),
}
