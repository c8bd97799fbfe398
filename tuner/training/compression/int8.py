"""Gradient compression to 8 bits with a scale for every block: a quarter of the bytes.

A number is rounded to a multiple of 1/127 of the largest magnitude in its block. Each number is rounded twice, so that
the error stays below 1/127 of that magnitude, and nothing is kept for the next step. On a CUDA device encoding and the
mean are one pass each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from steptune.tuner.training.compression.two_stages import TwoStages

if TYPE_CHECKING:
    import torch


class Int8(TwoStages):
    method = "int8"
    block = 256
    feeds_back = False

    def encode(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        from steptune.kernels import int8_blocks
        from steptune.kernels.triton_device import unavailable

        return (int8_blocks.encode_reference if unavailable(blocks.device) else int8_blocks.encode)(blocks)

    def mean_of(self, payload: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        from steptune.kernels import int8_blocks
        from steptune.kernels.triton_device import unavailable

        return (int8_blocks.mean_reference if unavailable(payload.device) else int8_blocks.mean_of)(payload, scales)

    def decode(self, payload: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return payload.float() * scales[:, None]
