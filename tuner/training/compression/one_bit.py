"""Gradient compression to signs, with the mean magnitude of every block: a thirtieth of the bytes.

What a sign times the mean leaves out is large, and is added to the next gradient (error feedback), both where gradients
are sent and where they are averaged. The first two steps are averaged as they are.

Source: Seide et al., "1-Bit Stochastic Gradient Descent" (Interspeech 2014); Tang et al., "1-bit Adam" (2021), arXiv
2102.02888
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from steptune.tuner.training.compression.two_stages import TwoStages

if TYPE_CHECKING:
    import torch


class OneBit(TwoStages):
    method = "one_bit"
    block = 2048
    feeds_back = True

    def encode(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        bits = (blocks >= 0).view(blocks.shape[0], -1, 8) << _shifts(blocks)
        return bits.sum(2).to(_uint8()), blocks.abs().mean(1)

    def decode(self, payload: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        bits = (payload[:, :, None] >> _shifts(payload)) & 1
        return (bits.view(payload.shape[0], -1).float() * 2 - 1) * scales[:, None]


def _shifts(like: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.arange(8, device=like.device, dtype=_uint8())


def _uint8() -> torch.dtype:
    import torch

    return torch.uint8
