"""Ready workloads, named `zoo:NAME?argument=value`: each is one entry of `ZOO`. Nothing here imports torch."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from steptune.tuner.errors import WorkloadNotFoundError
from steptune.tuner.records import Scalar
from steptune.tuner.wording import no_such
from steptune.tuner.workloads.arguments import parameters_in_source
from steptune.tuner.workloads.reference import WorkloadReference, parse_reference
from steptune.tuner.workloads.workload import Workload


@dataclass(frozen=True, kw_only=True)
class ZooEntry:
    """A ready workload and the arguments of its class.

    Attributes:
        workload: Its class, as `module:Class` below `steptune.tuner.workloads`.
        fields: Arguments of the class that differ from its defaults; a reference's arguments replace them.
        summary: One-line description.
        needs: Optional packages.
    """

    name: str
    workload: str
    summary: str
    fields: Mapping[str, Scalar] = field(default_factory=dict)
    needs: tuple[str, ...] = ()

    def check(self, arguments: Mapping[str, Scalar]) -> None:
        """Refuse arguments that the entry does not take, without importing it.

        Raises:
            WorkloadRejectedError: An argument is missing, unknown, or of another type.
        """
        parameters_in_source(*self._class).check(f"zoo:{self.name}", arguments, self.fields)

    def __call__(self, **arguments: Any) -> Workload:
        self.check(arguments)
        module, name = self._class
        workload: Workload = getattr(importlib.import_module(module), name)(**{**self.fields, **arguments})
        return workload

    @property
    def _class(self) -> tuple[str, str]:
        module, _, name = self.workload.partition(":")
        return f"steptune.tuner.workloads.{module}", name


def _of_config(model_type: str, **fields: Scalar) -> dict[str, Any]:
    """Return the workload and the arguments for a model of transformers."""
    return {
        "workload": "adapters.transformers:TransformersWorkload",
        "fields": {"model_type": model_type, **fields},
        "needs": ("transformers",),
    }


_IMAGENET_CLASSES = 1000

ZOO: tuple[ZooEntry, ...] = (
    ZooEntry(
        name="synthetic",
        workload="zoo.synthetic:Synthetic",
        summary="synthetic steps of known cost that take milliseconds, for trying out Steptune",
    ),
    ZooEntry(
        name="transformers",
        workload="adapters.transformers:TransformersWorkload",
        summary="any transformers config on random tokens or images: ?model_type=gpt2&batch=8&n_layer=12",
        needs=("transformers",),
    ),
    ZooEntry(
        name="timm",
        workload="adapters.timm:TimmWorkload",
        summary="any timm model on random images: ?name=resnet18&batch=32",
        needs=("timm", "torchvision"),
    ),
    ZooEntry(
        name="gpt2",
        **_of_config("gpt2", batch=4, sequence=1024),
        summary="GPT-2, 124 M parameters, random tokens",
    ),
    ZooEntry(
        name="gpt2_large",
        **_of_config("gpt2", batch=4, sequence=1024, n_embd=1280, n_layer=36, n_head=20),
        summary="GPT-2 large, 774 M parameters, random tokens",
    ),
    ZooEntry(
        name="gpt2_xl",
        **_of_config("gpt2", batch=2, sequence=1024, n_embd=1600, n_layer=48, n_head=25),
        summary="GPT-2 XL, 1.56 B parameters, random tokens",
    ),
    ZooEntry(
        name="bert",
        **_of_config("bert", batch=32, sequence=512),
        summary="BERT base on random tokens, 15 % of them masked",
    ),
    ZooEntry(
        name="bert_large",
        **_of_config(
            "bert",
            batch=16,
            sequence=512,
            hidden_size=1024,
            num_hidden_layers=24,
            num_attention_heads=16,
            intermediate_size=4096,
        ),
        summary="BERT large on random tokens, 15 % of them masked",
    ),
    ZooEntry(
        name="vit_large",
        **_of_config(
            "vit",
            batch=128,
            hidden_size=1024,
            num_hidden_layers=24,
            num_attention_heads=16,
            intermediate_size=4096,
            num_labels=_IMAGENET_CLASSES,
        ),
        summary="ViT-L/16 at 224 pixels, random images",
    ),
    ZooEntry(
        name="vit_huge",
        **_of_config(
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
    ),
    ZooEntry(
        name="swin_tiny",
        **_of_config(
            "swin", batch=128, embed_dim=96, depths="2,2,6,2", num_heads="3,6,12,24", num_labels=_IMAGENET_CLASSES
        ),
        summary="Swin-T at 224 pixels, random images",
    ),
    ZooEntry(
        name="swin_base",
        **_of_config(
            "swin", batch=128, embed_dim=128, depths="2,2,18,2", num_heads="4,8,16,32", num_labels=_IMAGENET_CLASSES
        ),
        summary="Swin-B at 224 pixels, random images",
    ),
    ZooEntry(
        name="swin_v2",
        **_of_config(
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
    ),
    ZooEntry(
        name="resnet50",
        **_of_config("resnet", batch=256, image_size=224, lr=1e-3, num_labels=_IMAGENET_CLASSES),
        summary="ResNet-50 (stride in the 3 x 3 convolutions) at 224 pixels, random images",
    ),
    ZooEntry(
        name="vgg16",
        workload="zoo.vgg:VggClassifier",
        summary="VGG-16 at 224 pixels, random images: most parameters in one layer",
    ),
    ZooEntry(
        name="detector",
        workload="zoo.detector:Detector",
        summary="a small detector with YOLOv7's loss, in which SimOTA assigns anchors to boxes in every step",
    ),
    ZooEntry(
        name="monocular_3d",
        workload="zoo.monocular_3d:Monocular3D",
        summary="a small monocular 3-D detector with FCOS3D's targets",
    ),
    ZooEntry(
        name="mixture_of_experts",
        workload="zoo.mixture_of_experts:MixtureOfExperts",
        summary="a transformer with mixture-of-experts layers: ?top_k=2 (GShard) or 1 (Switch)",
    ),
    ZooEntry(
        name="lstm",
        workload="zoo.lstm:LstmLanguageModel",
        summary="an LSTM language model with tied embeddings, random tokens",
    ),
)


def zoo_entry(name: str) -> ZooEntry:
    """Return the entry with this name.

    Raises:
        WorkloadNotFoundError: No entry has this name; the message lists the names that exist.
    """
    for entry in ZOO:
        if entry.name == name:
            return entry
    raise WorkloadNotFoundError(no_such("zoo workload", name, (entry.name for entry in ZOO)))


def known_reference(text: str) -> WorkloadReference:
    """Parse a reference, and check all that needs no import: the file and its class, or the entry and its arguments.

    Raises:
        WorkloadNotFoundError: The file, class or zoo entry does not exist.
        WorkloadRejectedError: The file is not valid Python, or an argument of the entry is missing or wrong.
    """
    reference = parse_reference(text)
    if reference.kind == "zoo":
        zoo_entry(reference.name).check(reference.arguments)
    return reference
