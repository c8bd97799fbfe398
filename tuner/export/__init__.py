"""The recommendation in other tools' formats: one target, one file, one entry in `EXPORTERS`."""

from __future__ import annotations

from tuner.errors import ChoiceError
from tuner.export.accelerate import AccelerateCode, AccelerateFsdp1Yaml, AccelerateYaml
from tuner.export.base import Exporter
from tuner.export.deepspeed import DeepSpeedJson
from tuner.export.lightning import LightningTrainer
from tuner.export.native import NativeJson, NativeYaml
from tuner.export.snippet import PythonSnippet
from tuner.export.torchrun import TorchrunScript
from tuner.export.torchtitan import TorchtitanConfig
from tuner.export.transformers_arguments import TransformersArguments
from tuner.records import Recommendation

EXPORTERS: tuple[Exporter, ...] = (
    NativeJson(),
    NativeYaml(),
    PythonSnippet(),
    TorchrunScript(),
    AccelerateYaml(),
    AccelerateFsdp1Yaml(),
    AccelerateCode(),
    TransformersArguments(),
    LightningTrainer(),
    DeepSpeedJson(),
    TorchtitanConfig(),
)

OWN = EXPORTERS[:3]
"""Those that need nothing but Steptune; a finished study leaves them beside its report."""

_BY_NAME = {exporter.name: exporter for exporter in EXPORTERS}


def exporters_for(recommendation: Recommendation) -> tuple[Exporter, ...]:
    """Those that can hold a recommendation."""
    return tuple(exporter for exporter in EXPORTERS if exporter.refusal(recommendation) is None)


def exporter_named(name: str) -> Exporter:
    """The exporter of this name.

    Raises:
        ChoiceError: There is none; names those that exist.
    """
    if name not in _BY_NAME:
        raise ChoiceError(f"there is no export format {name!r}: the formats are {', '.join(_BY_NAME)}")
    return _BY_NAME[name]


__all__ = ["EXPORTERS", "OWN", "Exporter", "exporter_named", "exporters_for"]
