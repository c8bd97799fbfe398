"""Bytes that the ranks exchange in a step, and their division into buckets or units.

Gradients are taken to become ready evenly during the backward pass, byte for byte, because only a model's totals are
known. DDP's buckets have the sizes that its settings give, but at least that of a mean tensor; the rest is the last
bucket, which is ready when the backward pass ends. FSDP's units are equally large, and frozen parameters are spread
evenly over them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from steptune.tuner.costs.formats import Formats, formats_of, num_fsdp_units
from steptune.tuner.records import Choice, ModelFacts
from steptune.tuner.strategies.situations import exchange_of

MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Volumes:
    """Amounts of data that ranks exchange in a step.

    Attributes:
        num_elements: Number of elements in all parameters.
        num_trained: Number of elements in parameters that have a gradient.
        formats: Bytes of an element.
        num_tensors: Number of tensors that hold the elements.
        num_units: Number of FSDP's units.
    """

    num_elements: int
    num_trained: int
    formats: Formats
    num_tensors: int
    num_units: int

    @property
    def all_gradients_bytes(self) -> float:
        return self.num_trained * self.formats.gradient


def volumes_of(model: ModelFacts, choices: Mapping[str, Choice], num_ranks: int) -> Volumes:
    """Return the data volumes that ranks exchange for a model, given a choice for every strategy."""
    exchange = exchange_of(choices)
    formats = formats_of(model, num_ranks, exchange)
    return Volumes(
        num_elements=model.num_parameters,
        num_trained=max(1, model.num_trained),
        formats=formats,
        num_tensors=max(1, model.num_parameter_tensors),
        num_units=num_fsdp_units(model, exchange),
    )


def buckets(volumes: Volumes, choice: Mapping[str, object]) -> list[float]:
    """Return the number of elements in each DDP bucket, in the order in which the buckets become ready."""
    mean_tensor = volumes.num_elements / volumes.num_tensors
    sizes = [int(str(choice[name])) * MIB / volumes.formats.gradient for name in ("first_bucket_mb", "bucket_cap_mb")]
    first, others = (max(size, mean_tensor) for size in sizes)
    found: list[float] = []
    left = float(volumes.num_trained)
    while left > 0:
        found.append(min(left, others if found else first))
        left -= found[-1]
    return found
