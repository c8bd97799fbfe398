"""Ready workloads: `zoo:NAME?argument=value`. One entry of `ZOO` each; nothing here imports torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tuner.errors import WorkloadNotFound
from tuner.workloads.workload import Workload


@dataclass(frozen=True, kw_only=True)
class ZooEntry:
    """A ready workload.

    Attributes:
        make: Called with the reference's arguments.
        summary: One line for people.
        needs: Optional packages.
    """

    name: str
    make: Callable[..., Workload]
    summary: str
    needs: tuple[str, ...] = ()


def _synthetic(**arguments: Any) -> Workload:
    from tuner.workloads.zoo.synthetic import Synthetic

    return Synthetic(**arguments)


def _transformers(**arguments: Any) -> Workload:
    from tuner.workloads.adapters.transformers import TransformersWorkload

    return TransformersWorkload(**arguments)


def _timm(**arguments: Any) -> Workload:
    from tuner.workloads.adapters.timm import TimmWorkload

    return TimmWorkload(**arguments)


def _gpt2(size: str) -> Callable[..., Workload]:
    shapes = {"small": (768, 12, 12), "large": (1280, 36, 20)}
    width, depth, heads = shapes[size]

    def make(batch: int = 4, sequence: int = 1024, **arguments: Any) -> Workload:
        return _transformers(
            model_type="gpt2", batch=batch, sequence=sequence, n_embd=width, n_layer=depth, n_head=heads, **arguments
        )

    return make


def _vit_large(batch: int = 128, **arguments: Any) -> Workload:
    return _transformers(
        model_type="vit",
        batch=batch,
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        intermediate_size=4096,
        **arguments,
    )


ZOO: tuple[ZooEntry, ...] = (
    ZooEntry(
        name="synthetic", make=_synthetic, summary="milliseconds per step with a known cost, for trying things out"
    ),
    ZooEntry(
        name="transformers",
        make=_transformers,
        summary="any transformers config on random tokens or images: ?model_type=gpt2&batch=8&n_layer=12",
        needs=("transformers",),
    ),
    ZooEntry(
        name="timm",
        make=_timm,
        summary="any timm model on random images: ?name=resnet18&batch=32",
        needs=("timm", "torchvision"),
    ),
    ZooEntry(
        name="gpt2", make=_gpt2("small"), summary="GPT-2, 124 M parameters, random tokens", needs=("transformers",)
    ),
    ZooEntry(name="gpt2_large", make=_gpt2("large"), summary="GPT-2 large, 774 M parameters", needs=("transformers",)),
    ZooEntry(
        name="vit_large", make=_vit_large, summary="ViT-L/16 at 224 pixels, random images", needs=("transformers",)
    ),
)


def zoo_entry(name: str) -> Callable[..., Workload]:
    """The maker of an entry.

    Raises:
        WorkloadNotFound: There is none of this name; names those that exist.
    """
    for entry in ZOO:
        if entry.name == name:
            return entry.make
    raise WorkloadNotFound(f"the zoo has no {name!r}; it has {', '.join(entry.name for entry in ZOO)}")
