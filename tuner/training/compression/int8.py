"""Gradients in 8 bits, with a scale for every block: a quarter of the bytes.

A number is rounded to a 127th of the largest in its block. Each is rounded twice, so that the error stays below 1/127
of that, and nothing is kept for the next step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from steptune.tuner.training.compression.two_stages import TwoStages

if TYPE_CHECKING:
    import torch

LARGEST = 127


class Int8(TwoStages):
    method = "int8"
    block = 256
    feeds_back = False

    def encode(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        scales = blocks.abs().amax(1) / LARGEST
        return (blocks / scales.clamp_min(torch.finfo(torch.float32).tiny)[:, None]).round().to(torch.int8), scales

    def decode(self, payload: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return payload.float() * scales[:, None]
