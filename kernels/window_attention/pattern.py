"""The attention of published Swin models by the kernel: timm's, torchvision's and transformers', Swin and Swin V2.

A module that is changed becomes one of a subclass of its own class: parameters, their names, what goes in and what
comes out stay. Between norm and residual the subclass projects the whole map, calls the kernel and projects the
result, where the library rolls, pads, cuts, attends, merges and rolls back.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from steptune.kernels.window_attention import Geometry, unsupported, window_attention

WHAT = "Swin's shifted-window attention, of timm, torchvision or transformers"
OPERATORS = (
    "window_attention_forward",
    "window_attention_backward",
    "steptune::window_attention",
    "FusedWindowAttention",
)
_SCALE = "_steptune_scale"
LARGEST_SCALE = 40.0
"""Published code masks by adding -100, which is out of reach for scores of cosines up to this scale."""


def refusal(module: torch.nn.Module) -> str | None:
    """Say why the kernel cannot compute a module: empty where it can, None where the module is no Swin attention."""
    found = _KINDS.get(_name_of(type(module)))
    if found is None:
        return None
    reason = found.look(module)
    return "" if reason is None else reason


def replace(module: torch.nn.Module) -> None:
    """Let a module that `refusal` accepts call the kernel, in place."""
    cls = type(module)
    kind = _KINDS[_name_of(cls)]
    if kind.scale is not None:
        heads, scale, weight = kind.scale(module)
        module.__dict__[_SCALE] = torch.full((heads,), scale, device=weight.device)
    module.__class__ = _subclass(kind.make, cls)  # type: ignore[arg-type]


@cache
def _subclass(make: Callable[[type], type], cls: type) -> type:
    made = make(cls)
    made.__name__, made.__qualname__, made.__module__ = cls.__name__, cls.__qualname__, __name__
    return made


def _name_of(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _reason(
    geometry: Geometry, heads: int, projections: tuple[Any, ...], bypassed: tuple[torch.nn.Module, ...]
) -> str | None:
    """Check what all kinds have: plain projections to qkv, and modules that nobody watches the calls of."""
    if any(type(p) is not torch.nn.Linear for p in projections):
        return "the projection to queries, keys and values is no plain Linear module"
    if any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in bypassed):
        return "hooks watch the calls of a module that the kernel goes around"
    channels = sum(p.out_features for p in projections) // 3
    return unsupported(geometry, channels, heads, projections[0].weight.dtype)


def _scale_reason(logit_scale: Tensor) -> str | None:
    scale = float(_cosine_scale(logit_scale.detach()).max())
    if scale > LARGEST_SCALE:
        return f"the scale of its cosines is {scale:.3g}, and masked scores would count in the published attention"
    return None


def _cosine_scale(logit_scale: Tensor) -> Tensor:
    return torch.clamp(logit_scale.float(), max=math.log(100.0)).exp().flatten()


def _cosine_table(mlp: torch.nn.Module, coordinates: Tensor, heads: int) -> Tensor:
    return 16 * torch.sigmoid(mlp(coordinates).view(-1, heads))


def _plain_scale(module: Any, like: Tensor) -> Tensor:
    """Give the scale of each head, where the tokens are."""
    kept: Tensor = module.__dict__[_SCALE]
    return kept if kept.device == like.device else kept.to(like.device)


# --- timm -------------------------------------------------------------------------------------


def _timm_geometry(block: Any) -> Geometry:
    rows, columns = block.window_size
    shift_rows, shift_columns = block.shift_size
    return Geometry(
        rows=rows, columns=columns, shift_rows=shift_rows, shift_columns=shift_columns, rolls_before_padding=True
    )


def _look_at_timm(block: Any) -> str | None:
    attention = block.attn
    return _reason(_timm_geometry(block), attention.num_heads, (attention.qkv,), (attention,))


def _look_at_timm_v2(block: Any) -> str | None:
    attention = block.attn
    bypassed = (attention, attention.qkv)
    reason = _reason(_timm_geometry(block), attention.num_heads, (attention.qkv,), bypassed)
    return reason or _scale_reason(attention.logit_scale)


def _timm(cls: type) -> type:
    class Swin(cls):  # type: ignore[misc]
        def _attn(self, x: Tensor) -> Tensor:
            attention = self.attn
            values = window_attention(
                attention.qkv(x),
                attention.relative_position_bias_table,
                _timm_geometry(self),
                scale_h=_plain_scale(self, x),
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
                _cosine_table(attention.cpb_mlp, attention.relative_coords_table, attention.num_heads),
                _timm_geometry(self),
                scale_h=_cosine_scale(attention.logit_scale),
                qkv_bias_c=bias,
                cosine=True,
                dropout=attention.attn_drop.p if attention.training else 0.0,
            )
            result: Tensor = attention.proj_drop(attention.proj(values))
            return result

    return SwinV2


# --- torchvision ------------------------------------------------------------------------------


def _torchvision_geometry(attention: Any, height: int, width: int) -> Geometry:
    """Give the windows of a map; an axis of one window is not shifted."""
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
    reason = _reason(geometry, attention.num_heads, (attention.qkv,), (attention.qkv, attention.proj))
    return reason or (_scale_reason(attention.logit_scale) if hasattr(attention, "logit_scale") else None)


def _torchvision(cls: type) -> type:
    class Swin(cls):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            _, height, width, _ = x.shape
            values = window_attention(
                functional.linear(x, self.qkv.weight, self.qkv.bias),
                self.relative_position_bias_table,
                _torchvision_geometry(self, height, width),
                scale_h=_plain_scale(self, x),
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
                _cosine_table(self.cpb_mlp, self.relative_coords_table, self.num_heads),
                _torchvision_geometry(self, height, width),
                scale_h=_cosine_scale(self.logit_scale),
                qkv_bias_c=bias,
                cosine=True,
                dropout=self.attention_dropout if self.training else 0.0,
            )
            values = functional.linear(values, self.proj.weight, self.proj.bias)
            return functional.dropout(values, self.dropout, self.training)

    return SwinV2


# --- transformers -----------------------------------------------------------------------------


def _transformers_geometry(layer: Any) -> Geometry:
    size, shift = int(layer.window_size), int(layer.shift_size)
    return Geometry(rows=size, columns=size, shift_rows=shift, shift_columns=shift)


def _look_at_transformers(layer: Any) -> str | None:
    attention = layer.attention
    names = ("q_proj", "k_proj", "v_proj", "o_proj", "relative_position_bias")
    if not all(hasattr(attention, name) for name in names) or not hasattr(layer, "mlp"):
        return "requires transformers 5.20 or newer: Swin is laid out otherwise here"
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    bypassed = (attention, *projections, attention.relative_position_bias)
    return _reason(_transformers_geometry(layer), attention.num_attention_heads, projections, bypassed)


def _transformers(cls: type) -> type:
    class Swin(cls):  # type: ignore[misc]
        def forward(
            self, hidden_states: Tensor, input_dimensions: tuple[int, int], always_partition: bool = False, **more: Any
        ) -> Any:
            if more.get("output_attentions"):  # which the kernel never has in memory
                return super().forward(hidden_states, input_dimensions, always_partition, **more)
            if not always_partition:
                self.set_shift_and_window_size(input_dimensions)
            attention = self.attention
            if self.window_size != attention.relative_position_bias.window_size[0]:
                return super().forward(hidden_states, input_dimensions, always_partition, **more)
            batch, _, channels = hidden_states.shape
            projections = (attention.q_proj, attention.k_proj, attention.v_proj)
            has_bias = projections[0].bias is not None
            bias = torch.cat([p.bias for p in projections]) if has_bias else None
            tokens = self.layernorm_before(hidden_states).view(batch, *input_dimensions, channels)
            values = window_attention(
                functional.linear(tokens, torch.cat([p.weight for p in projections]), bias),
                attention.relative_position_bias.relative_position_bias_table,
                _transformers_geometry(self),
                scale_h=_plain_scale(self, hidden_states),
                qkv_bias_c=bias,
                dropout=attention.attention_dropout if self.training else 0.0,
            )
            attended = self.dropout(attention.o_proj(values)).view(batch, -1, channels)
            hidden_states = hidden_states + self.drop_path(attended)
            result = self.dropout(self.mlp(self.layernorm_after(hidden_states))) + hidden_states
            return result, None

    return Swin


def _look_at_transformers_v2(layer: Any) -> str | None:
    attention = layer.attention.self
    projections = (attention.query, attention.key, attention.value)
    bypassed = (layer.attention, attention, *projections, attention.dropout)
    reason = _reason(_transformers_geometry(layer), attention.num_attention_heads, projections, bypassed)
    return reason or _scale_reason(attention.logit_scale)


def _transformers_v2(cls: type) -> type:
    class SwinV2(cls):  # type: ignore[misc]
        def forward(
            self, hidden_states: Tensor, input_dimensions: tuple[int, int], output_attentions: bool | None = False
        ) -> Any:
            if output_attentions:  # which the kernel never has in memory
                return super().forward(hidden_states, input_dimensions, output_attentions)
            attention = self.attention.self
            batch, _, channels = hidden_states.shape
            projections = (attention.query, attention.key, attention.value)
            bias = None
            if attention.query.bias is not None:
                bias = torch.cat((attention.query.bias, attention.query.bias.new_zeros(channels), attention.value.bias))
            values = window_attention(
                functional.linear(
                    hidden_states.view(batch, *input_dimensions, channels),
                    torch.cat([p.weight for p in projections]),
                    bias,
                ),
                _cosine_table(
                    attention.continuous_position_bias_mlp,
                    attention.relative_coords_table,
                    attention.num_attention_heads,
                ),
                _transformers_geometry(self),
                scale_h=_cosine_scale(attention.logit_scale),
                qkv_bias_c=bias,
                cosine=True,
                dropout=attention.dropout.p if attention.training else 0.0,
            )
            attended = self.attention.output(values.view(batch, -1, channels), hidden_states)
            hidden_states = hidden_states + self.drop_path(self.layernorm_before(attended))
            result = self.output(self.intermediate(hidden_states))
            return (hidden_states + self.drop_path(self.layernorm_after(result)),)

    return SwinV2


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """A class of modules: why the kernel cannot compute one, the subclass that calls the kernel, and heads, scale and
    a weight of one whose scale is constant.
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
        look=_look_at_transformers,
        make=_transformers,
        scale=lambda m: (m.attention.num_attention_heads, m.attention.scaling, m.attention.q_proj.weight),
    ),
    "transformers.models.swinv2.modeling_swinv2.Swinv2Layer": _Kind(
        look=_look_at_transformers_v2, make=_transformers_v2
    ),
}
