"""Attention of the transformers library's Swin and Swin V2, computed by the kernel: a layer's class becomes a subclass
with a forward pass that calls it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from steptune.kernels.window_attention import Geometry, window_attention
from steptune.kernels.window_attention.layers import (
    cosine_scale,
    cosine_table,
    plain_scale,
    reason_against,
    scale_reason,
)


def _geometry(layer: Any) -> Geometry:
    size, shift = int(layer.window_size), int(layer.shift_size)
    return Geometry(rows=size, columns=size, shift_rows=shift, shift_columns=shift)


def look(layer: Any) -> str | None:
    attention = layer.attention
    names = ("q_proj", "k_proj", "v_proj", "o_proj", "relative_position_bias")
    if not all(hasattr(attention, name) for name in names) or not hasattr(layer, "mlp"):
        return "requires transformers 5.20 or newer: the installed version structures Swin differently"
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    bypassed = (attention, *projections, attention.relative_position_bias)
    return reason_against(_geometry(layer), attention.num_attention_heads, projections, bypassed)


def swin(cls: type) -> type:
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
                _geometry(self),
                scale_h=plain_scale(self, hidden_states),
                qkv_bias_c=bias,
                dropout=attention.attention_dropout if self.training else 0.0,
            )
            attended = self.dropout(attention.o_proj(values)).view(batch, -1, channels)
            hidden_states = hidden_states + self.drop_path(attended)
            result = self.dropout(self.mlp(self.layernorm_after(hidden_states))) + hidden_states
            return result, None

    return Swin


def look_v2(layer: Any) -> str | None:
    attention = layer.attention.self
    projections = (attention.query, attention.key, attention.value)
    bypassed = (layer.attention, attention, *projections, attention.dropout)
    reason = reason_against(_geometry(layer), attention.num_attention_heads, projections, bypassed)
    return reason or scale_reason(attention.logit_scale)


def swin_v2(cls: type) -> type:
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
                cosine_table(
                    attention.continuous_position_bias_mlp,
                    attention.relative_coords_table,
                    attention.num_attention_heads,
                ),
                _geometry(self),
                scale_h=cosine_scale(attention.logit_scale),
                qkv_bias_c=bias,
                cosine=True,
                dropout=attention.dropout.p if attention.training else 0.0,
            )
            attended = self.attention.output(values.view(batch, -1, channels), hidden_states)
            hidden_states = hidden_states + self.drop_path(self.layernorm_before(attended))
            result = self.output(self.intermediate(hidden_states))
            return (hidden_states + self.drop_path(self.layernorm_after(result)),)

    return SwinV2
