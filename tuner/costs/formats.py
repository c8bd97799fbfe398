"""Dtypes in which ranks exchange gradients and weights, and bytes that each gradient compression sends."""

from __future__ import annotations

from typing import NamedTuple

from steptune.tuner.network.exchange import Exchange
from steptune.tuner.records import ModelFacts
from steptune.tuner.training.wide_reduction import is_needed

FP32_BYTES, SIXTEEN_BIT_BYTES = 4.0, 2.0
SENT_BYTES = {"fp16": 2.0, "bf16": 2.0, "int8": 1 + 4 / 256, "one_bit": 1 / 8 + 4 / 2048}
"""Bytes sent per gradient element, block scales included; `int8` and `one_bit` are sent twice: to the averaging rank
and back.
"""
CHOSEN_BYTES = 8.0
"""Bytes sent per element that `dgc` selects: its value and its index."""
WIDENED_BYTES = 20.0
"""Bytes read and written per 16-bit element that DDP averages in FP32: to widen, divide and narrow it."""


class Formats(NamedTuple):
    """Bytes per element of gradients and weights in each stage of the exchange.

    Attributes:
        gradient: A gradient in DDP's buckets.
        reduced: A gradient as it is averaged without compression.
        gathered: A parameter as FSDP gathers it.
        updated: A parameter as the optimizer updates it.
    """

    gradient: float
    reduced: float
    gathered: float
    updated: float


def formats_of(model: ModelFacts, num_ranks: int, exchange: Exchange) -> Formats:
    """Return the bytes per element in each stage of an exchange, by its precision level."""
    own = model.parameter_bytes / max(1, model.num_parameters) or FP32_BYTES
    half = min(own, SIXTEEN_BIT_BYTES)
    match exchange.level:
        case "O3":
            return Formats(gradient=half, reduced=half, gathered=half, updated=half)
        case "O2":
            widened = exchange.is_sharded or is_needed(num_ranks, str(exchange.dtype))
            reduced = FP32_BYTES if widened else half
            return Formats(gradient=half, reduced=reduced, gathered=half, updated=FP32_BYTES)
    return Formats(gradient=own, reduced=own, gathered=own, updated=own)


def widening_bytes(formats: Formats, exchange: Exchange) -> float:
    """Return the bytes read and written per element to average DDP's gradients in a wider dtype than their own."""
    if exchange.compression is not None or exchange.is_sharded or formats.reduced <= formats.gradient:
        return 0.0
    return WIDENED_BYTES


def num_fsdp_units(model: ModelFacts, exchange: Exchange) -> int:
    """Return the number of FSDP units: the model's blocks, its modules above a size, or the whole model. At O2,
    normalisation layers have another dtype than their block, so they are separate units unless FSDP ignores them.
    """
    norms = sum(count for name, count in model.module_types.items() if "Norm" in name)
    apart = norms if exchange.level == "O2" and not exchange.ignored else 0
    if exchange.wrap == "block":
        return max(1, model.num_blocks) + apart
    if exchange.wrap == "size":
        return max(1, model.num_parameters // max(1, exchange.min_num_params)) + apart
    return 1 + apart
