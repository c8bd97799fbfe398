"""Exports of a recommendation in other tools' formats: one file for each tool, and one entry in `EXPORTERS` for each
format.
"""

from __future__ import annotations

from steptune.tuner.errors import ChoiceError, RecommendationError
from steptune.tuner.export.accelerate import AccelerateCode, AccelerateFsdp1Yaml, AccelerateYaml
from steptune.tuner.export.base import Exporter
from steptune.tuner.export.deepspeed import DeepSpeedJson
from steptune.tuner.export.lightning import LightningTrainer
from steptune.tuner.export.native import NativeJson, NativeYaml
from steptune.tuner.export.snippet import PythonSnippet
from steptune.tuner.export.torchrun import TorchrunScript
from steptune.tuner.export.torchtitan import TorchtitanConfig
from steptune.tuner.export.transformers_arguments import TransformersArguments
from steptune.tuner.records import Recommendation
from steptune.tuner.wording import no_such
from steptune.tuner.workloads.reference import is_command

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
"""Exporters that need only Steptune; a finished study writes their files next to its report."""

_BY_NAME = {exporter.name: exporter for exporter in EXPORTERS}


def exporters_for(recommendation: Recommendation) -> tuple[Exporter, ...]:
    """Return the exporters whose format can hold a recommendation."""
    return tuple(exporter for exporter in EXPORTERS if why_not_exported(exporter, recommendation) is None)


def own_for(recommendation: Recommendation) -> tuple[Exporter, ...]:
    """Return Steptune's own exporters whose format can hold a recommendation."""
    return tuple(exporter for exporter in OWN if why_not_exported(exporter, recommendation) is None)


def why_not_exported(exporter: Exporter, recommendation: Recommendation) -> str | None:
    """Return the reason why a format cannot hold a recommendation; None where it can."""
    if is_command(recommendation.workload) and not isinstance(exporter, NativeJson):
        return "this format cannot change a training script: export as diff, or as json for steptune.enable"
    return exporter.refusal(recommendation)


def exported(exporter: Exporter, recommendation: Recommendation) -> str:
    """Return the text of a recommendation in a format.

    Raises:
        RecommendationError: The format cannot hold it.
    """
    if is_command(recommendation.workload) and (refusal := why_not_exported(exporter, recommendation)):
        raise RecommendationError(refusal)
    return exporter.export(recommendation)


def exporter_named(name: str) -> Exporter:
    """Return the exporter with this name.

    Raises:
        ChoiceError: No exporter has this name; lists the names that exist.
    """
    if name not in _BY_NAME:
        raise ChoiceError(no_such("export format", name, _BY_NAME))
    return _BY_NAME[name]


__all__ = ["EXPORTERS", "OWN", "Exporter", "exported", "exporter_named", "exporters_for", "own_for", "why_not_exported"]
