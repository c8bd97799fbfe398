"""What the ranks exchange in a step, and in which pieces.

Gradients become ready evenly during the backward pass, byte for byte: of a model only sums are known. DDP's first
bucket and the others hold so many bytes (of at least a mean tensor); what is left over is the last bucket, which is
ready when the backward pass ends. FSDP's units are equally large, and what is frozen is spread evenly over them.

Number formats follow `precision`: at O2 weights and gradients of DDP have 16 bits, FSDP gathers 16 bits, and both
reduce FP32 (but two ranks of DDP bfloat16: `tuner.training.wide_reduction`); at O3 everything has 16 bits; else all is
as the model's parameters are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tuner.records import Choice, ModelFacts

MIB = 2**20
SIXTEEN_BITS, FP32 = 2, 4


@dataclass(frozen=True, kw_only=True)
class Volumes:
    """
    Attributes:
        num_elements: Of all parameters.
        num_trained: Of those, such as have a gradient.
        gradient_bytes: Of one gradient's element under DDP.
        gathered_bytes: Of one element that FSDP gathers.
        reduced_bytes: Of one element of a gradient as it is reduced, unless it is compressed, and of a parameter as the
            optimizer updates it.
        num_tensors: That the elements are in.
        num_blocks: Repeated blocks of the model.
    """

    num_elements: int
    num_trained: int
    gradient_bytes: float
    gathered_bytes: float
    reduced_bytes: float
    num_tensors: int
    num_blocks: int

    @property
    def all_gradients_bytes(self) -> float:
        return self.num_trained * self.gradient_bytes


def volumes_of(model: ModelFacts, precision: Choice) -> Volumes:
    """Of a model at a level of precision."""
    own = model.parameter_bytes / max(1, model.num_parameters)
    level = precision["level"]
    half = min(own, SIXTEEN_BITS)
    return Volumes(
        num_elements=model.num_parameters,
        num_trained=max(1, model.num_parameters - model.num_frozen),
        gradient_bytes=half if level in ("O2", "O3") else own,
        gathered_bytes=half if level in ("O2", "O3") else own,
        reduced_bytes={"O2": FP32, "O3": half}.get(str(level), own),
        num_tensors=max(1, model.num_parameter_tensors),
        num_blocks=model.num_blocks,
    )


def buckets(volumes: Volumes, choice: Mapping[str, object]) -> list[float]:
    """Elements of DDP's buckets, in the order in which they become ready."""
    mean_tensor = volumes.num_elements / volumes.num_tensors
    sizes = [int(str(choice[name])) * MIB / volumes.gradient_bytes for name in ("first_bucket_mb", "bucket_cap_mb")]
    first, others = (max(size, mean_tensor) for size in sizes)
    found: list[float] = []
    left = float(volumes.num_trained)
    while left > 0:
        found.append(min(left, others if found else first))
        left -= found[-1]
    return found


def num_units(volumes: Volumes, sharding: Choice) -> int:
    """Of FSDP: blocks, or modules of a size; the root, which holds the rest, counts with them."""
    if sharding["wrap"] == "block":
        return max(1, volumes.num_blocks)
    if sharding["wrap"] == "size":
        return max(1, int(volumes.num_elements / int(sharding["min_num_params"] or 1)))
    return 1
