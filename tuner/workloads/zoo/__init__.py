"""Ready workloads: `zoo:NAME?argument=value`. One entry of `ZOO` each; nothing here imports torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from steptune.tuner.errors import WorkloadNotFound
from steptune.tuner.workloads.workload import Workload


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
    from steptune.tuner.workloads.zoo.synthetic import Synthetic

    return Synthetic(**arguments)


def _transformers(**arguments: Any) -> Workload:
    from steptune.tuner.workloads.adapters.transformers import TransformersWorkload

    return TransformersWorkload(**arguments)


def _timm(**arguments: Any) -> Workload:
    from steptune.tuner.workloads.adapters.timm import TimmWorkload

    return TimmWorkload(**arguments)


def _of_config(model_type: str, **fields: Any) -> Callable[..., Workload]:
    """A transformers model of these fields, which a reference's arguments may replace."""

    def make(**arguments: Any) -> Workload:
        return _transformers(model_type=model_type, **{**fields, **arguments})

    return make


def _detector(**arguments: Any) -> Workload:
    from steptune.tuner.workloads.zoo.detector import Detector

    return Detector(**arguments)


def _monocular_3d(**arguments: Any) -> Workload:
    from steptune.tuner.workloads.zoo.monocular_3d import Monocular3D

    return Monocular3D(**arguments)


def _mixture_of_experts(**arguments: Any) -> Workload:
    from steptune.tuner.workloads.zoo.mixture_of_experts import MixtureOfExperts

    return MixtureOfExperts(**arguments)


def _vgg(**arguments: Any) -> Workload:
    from steptune.tuner.workloads.zoo.vgg import VggClassifier

    return VggClassifier(**arguments)


def _lstm(**arguments: Any) -> Workload:
    from steptune.tuner.workloads.zoo.lstm import LstmLanguageModel

    return LstmLanguageModel(**arguments)


_IMAGENET_CLASSES = 1000

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
        name="gpt2",
        make=_of_config("gpt2", batch=4, sequence=1024),
        summary="GPT-2, 124 M parameters, random tokens",
        needs=("transformers",),
    ),
    ZooEntry(
        name="gpt2_large",
        make=_of_config("gpt2", batch=4, sequence=1024, n_embd=1280, n_layer=36, n_head=20),
        summary="GPT-2 large, 774 M parameters, random tokens",
        needs=("transformers",),
    ),
    ZooEntry(
        name="gpt2_xl",
        make=_of_config("gpt2", batch=2, sequence=1024, n_embd=1600, n_layer=48, n_head=25),
        summary="GPT-2 XL, 1.56 B parameters, random tokens",
        needs=("transformers",),
    ),
    ZooEntry(
        name="bert",
        make=_of_config("bert", batch=32, sequence=512),
        summary="BERT base on random tokens, 15 % of them masked",
        needs=("transformers",),
    ),
    ZooEntry(
        name="bert_large",
        make=_of_config(
            "bert",
            batch=16,
            sequence=512,
            hidden_size=1024,
            num_hidden_layers=24,
            num_attention_heads=16,
            intermediate_size=4096,
        ),
        summary="BERT large on random tokens, 15 % of them masked",
        needs=("transformers",),
    ),
    ZooEntry(
        name="vit_large",
        make=_of_config(
            "vit",
            batch=128,
            hidden_size=1024,
            num_hidden_layers=24,
            num_attention_heads=16,
            intermediate_size=4096,
            num_labels=_IMAGENET_CLASSES,
        ),
        summary="ViT-L/16 at 224 pixels, random images",
        needs=("transformers",),
    ),
    ZooEntry(
        name="vit_huge",
        make=_of_config(
            "vit",
            batch=64,
            patch_size=14,
            hidden_size=1280,
            num_hidden_layers=32,
            num_attention_heads=16,
            intermediate_size=5120,
            num_labels=_IMAGENET_CLASSES,
        ),
        summary="ViT-H/14 at 224 pixels, random images",
        needs=("transformers",),
    ),
    ZooEntry(
        name="swin_tiny",
        make=_of_config(
            "swin", batch=128, embed_dim=96, depths="2,2,6,2", num_heads="3,6,12,24", num_labels=_IMAGENET_CLASSES
        ),
        summary="Swin-T at 224 pixels, random images",
        needs=("transformers",),
    ),
    ZooEntry(
        name="swin_base",
        make=_of_config(
            "swin", batch=128, embed_dim=128, depths="2,2,18,2", num_heads="4,8,16,32", num_labels=_IMAGENET_CLASSES
        ),
        summary="Swin-B at 224 pixels, random images",
        needs=("transformers",),
    ),
    ZooEntry(
        name="swin_v2",
        make=_of_config(
            "swinv2",
            batch=64,
            image_size=256,
            window_size=8,
            embed_dim=96,
            depths="2,2,6,2",
            num_heads="3,6,12,24",
            num_labels=_IMAGENET_CLASSES,
        ),
        summary="Swin V2-T at 256 pixels with windows of 8, random images",
        needs=("transformers",),
    ),
    ZooEntry(
        name="resnet50",
        make=_of_config("resnet", batch=256, image_size=224, lr=1e-3, num_labels=_IMAGENET_CLASSES),
        summary="ResNet-50 (stride in the 3 x 3 convolutions) at 224 pixels, random images",
        needs=("transformers",),
    ),
    ZooEntry(name="vgg16", make=_vgg, summary="VGG-16 at 224 pixels, random images: most parameters in one layer"),
    ZooEntry(
        name="detector",
        make=_detector,
        summary="a small detector with YOLOv7's loss: SimOTA assigns anchors to boxes in every step",
    ),
    ZooEntry(
        name="monocular_3d",
        make=_monocular_3d,
        summary="a small monocular 3-D detector with FCOS3D's targets",
    ),
    ZooEntry(
        name="mixture_of_experts",
        make=_mixture_of_experts,
        summary="a transformer whose tokens choose experts: ?top_k=2 (GShard) or 1 (Switch)",
    ),
    ZooEntry(name="lstm", make=_lstm, summary="an LSTM language model with tied embeddings, random tokens"),
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
