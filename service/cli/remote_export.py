"""The recommendation of a study of a service, as files."""

from __future__ import annotations

from pathlib import Path, PurePath

from service.cli.console import output, print_json, say
from service.client import Client
from service.connections import storage_errors
from service.messages import ExportFormat
from tuner.errors import ChoiceError


def export_remote(client: Client, study_id: str, format_: str | None, folder: Path, *, as_json: bool) -> None:
    """Writes all formats, or one, into a folder; `-` is standard output.

    Raises:
        NotFound: There is no such study, or it has no recommendation yet.
        ChoiceError: The service has no such format.
        StoreError: The folder cannot be written.
    """
    chosen = _chosen(client.export_formats(study_id), format_)
    if str(folder) == "-":
        for known in chosen:
            output.file.write(client.export(study_id, known.name))
        return
    paths = [_write(client, study_id, known, folder) for known in chosen]
    if as_json:
        exports = [
            {"format": k.name, "path": str(path), "usage": k.usage, "not_expressible": k.not_expressible}
            for k, path in zip(chosen, paths, strict=True)
        ]
        print_json({"report": None, "exports": exports})
        return
    for known, path in zip(chosen, paths, strict=True):
        output.print(f"{path}  {known.usage}", soft_wrap=True, markup=False)
        for sentence in known.not_expressible:
            say(f"  not expressed: {sentence}", style="yellow")


def _chosen(formats: tuple[ExportFormat, ...], name: str | None) -> list[ExportFormat]:
    chosen = [known for known in formats if name in (None, known.name)]
    if not chosen:
        raise ChoiceError(f"--format {name}: the service has {', '.join(known.name for known in formats)}")
    return chosen


def _write(client: Client, study_id: str, known: ExportFormat, folder: Path) -> Path:
    path = folder / PurePath(known.file_name).name  # a name, whatever the service says
    text = client.export(study_id, known.name)
    with storage_errors(str(path)):
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return path
