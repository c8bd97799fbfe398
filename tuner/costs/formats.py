"""Formats in which ranks exchange gradients and weights, and what a compression sends in place of a gradient."""

from __future__ import annotations

from typing import NamedTuple

from steptune.tuner.network.exchange import Exchange
from steptune.tuner.records import ModelFacts
from steptune.tuner.training.wide_reduction import is_needed

FP32_BYTES, SIXTEEN_BIT_BYTES = 4.0, 2.0
SENT_BYTES = {"fp16": 2.0, "bf16": 2.0, "int8": 1 + 4 / 256, "one_bit": 1 / 8 + 4 / 2048}
"""Bytes sent of an element, scales of blocks included; `int8` and `one_bit` twice, to whom averages, and back."""
CHOSEN_BYTES = 8.0
"""Value and place of an element of `dgc`."""
WIDENED_BYTES = 20.0
"""Bytes read and written to widen, to divide and to narrow an element of 16 bits that DDP averages in FP32."""


class Formats(NamedTuple):
    """Bytes of an element.

    Attributes:
        gradient: As DDP's buckets hold it.
        reduced: As it is averaged where nothing compresses it.
        gathered: Of a parameter, as FSDP gathers it.
        updated: Of what the optimizer updates.
    """

    gradient: float
    reduced: float
    gathered: float
    updated: float


def formats_of(model: ModelFacts, num_ranks: int, exchange: Exchange) -> Formats:
    """Dtypes of the exchange by the precision level."""
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
    """Bytes that are read and written for an element of DDP's gradients to average it in more bits than it has."""
    if exchange.compression is not None or exchange.is_sharded or formats.reduced <= formats.gradient:
        return 0.0
    return WIDENED_BYTES


def num_fsdp_units(model: ModelFacts, exchange: Exchange) -> int:
    """Blocks, modules of a size, or one; the root, which holds the rest, counts with them. At O2 normalisation layers
    have another format than their block: they are units of their own, unless they are left out.
    """
    norms = sum(count for name, count in model.module_types.items() if "Norm" in name)
    apart = norms if exchange.level == "O2" and not exchange.ignored else 0
    if exchange.wrap == "block":
        return max(1, model.num_blocks) + apart
    if exchange.wrap == "size":
        return max(1, model.num_parameters // max(1, exchange.min_num_params)) + apart
    return 1 + apart
