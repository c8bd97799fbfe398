"""Steptune's own formats: the whole record as JSON or YAML, which `load_recommendation` reads back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import yaml

from steptune._version import __version__
from steptune.tuner.errors import RecommendationError
from steptune.tuner.export.base import Exporter
from steptune.tuner.records import SCHEMA_VERSION, Recommendation

_LINE_WIDTH = 110


class NativeJson(Exporter):
    """Native record as JSON. Infinite numbers and NaN are written as `Infinity` and `NaN`, as Python's json does: JSON
    has no notation for them, and null would not be read back as the same value.
    """

    name = "json"
    summary = "the whole recommendation, as JSON"
    version: ClassVar[str] = f"steptune {__version__}"
    usage = 'In a training script: job = steptune.apply("steptune.json", workload)'

    def file_name(self, recommendation: Recommendation) -> str:
        return "steptune.json"

    def how_to_use(self, recommendation: Recommendation) -> str:
        if recommendation.in_script is None:
            return self.usage
        return 'At the top of the script: import steptune; steptune.enable("steptune.json")'

    def export(self, recommendation: Recommendation) -> str:
        return json.dumps(msgspec.to_builtins(recommendation), indent=2, ensure_ascii=False) + "\n"


class NativeYaml(Exporter):
    name = "yaml"
    summary = "the whole recommendation, as YAML"
    version: ClassVar[str] = f"steptune {__version__}"
    usage = 'In a training script: job = steptune.apply("steptune.yaml", workload)'
    comment = "#"

    def file_name(self, recommendation: Recommendation) -> str:
        return "steptune.yaml"

    def export(self, recommendation: Recommendation) -> str:
        return self.header(recommendation) + as_yaml(recommendation)


_LINE_BREAKS = frozenset("\x85\u2028\u2029")


def as_yaml(recommendation: Recommendation) -> str:
    """Return the record alone as YAML, with the innermost collections on one line each."""
    # YAML reads these as line breaks where they stand for themselves: then all is escaped.
    text = msgspec.json.encode(recommendation).decode()
    return yaml.safe_dump(
        msgspec.to_builtins(recommendation),
        sort_keys=False,
        allow_unicode=not _LINE_BREAKS.intersection(text),
        width=_LINE_WIDTH,
        default_flow_style=None,
    )


def load_recommendation(source: str | Path) -> Recommendation:
    """Read a recommendation that was exported as JSON or YAML.

    Args:
        source: Path of a file, or the text itself (several lines, or JSON).

    Raises:
        RecommendationError: There is no such file, it is neither JSON nor YAML, another version wrote it, or a field is
            unknown, missing or wrong; names the file or field.
    """
    if isinstance(source, str) and ("\n" in source or source.lstrip().startswith("{")):
        return _decode(source, "the recommendation's text")
    return _decode(_read(Path(source)), str(source))


def _read(path: Path) -> str:
    try:
        return path.expanduser().read_text(encoding="utf-8")
    except FileNotFoundError:
        raise RecommendationError(
            f"{path} does not exist: give the path of a recommendation that was exported as json or yaml"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise RecommendationError(
            f"{path} cannot be read ({error}): give the path of a recommendation that was exported as json or yaml"
        ) from None


def _decode(text: str, origin: str) -> Recommendation:
    fields = _parse(text, origin)
    if not isinstance(fields, dict) or "schema_version" not in fields:
        raise RecommendationError(
            f"{origin} holds no recommendation (a mapping with a schema_version, study_id, choices, ...): "
            "export one as json or yaml"
        )
    _check_schema(fields["schema_version"], fields.get("steptune_version"), origin)
    try:
        return msgspec.convert(fields, Recommendation)
    except msgspec.ValidationError as error:
        raise RecommendationError(
            f"{origin} is not a recommendation: {error}. Export it again, and do not edit the file"
        ) from None


def _parse(text: str, origin: str) -> Any:
    is_json = text.lstrip().startswith("{")
    try:
        return json.loads(text) if is_json else yaml.safe_load(text)
    except (json.JSONDecodeError, yaml.YAMLError, RecursionError) as error:
        kind = "JSON" if is_json else "YAML"
        reason = " ".join(str(error).split())
        raise RecommendationError(
            f"{origin} is not valid {kind}: {reason}. Export it again, and do not edit the file"
        ) from None


def _check_schema(found: Any, written_by: Any, origin: str) -> None:
    if found == SCHEMA_VERSION and not isinstance(found, bool):
        return
    this = f"this version, {__version__}, reads {SCHEMA_VERSION}"
    if isinstance(found, int) and found > SCHEMA_VERSION:
        writer = f"Steptune {written_by}" if written_by else "a newer Steptune"
        raise RecommendationError(
            f"{origin} has schema_version {found}, written by {writer}; {this}: upgrade steptune, or export it "
            "again with this version"
        )
    raise RecommendationError(f"{origin} has schema_version {found!r}; {this}: export it again with this version")
