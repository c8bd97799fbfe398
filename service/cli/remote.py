"""Shared parts of commands on a remote service: its address, and the user's token."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from steptune.service.client import Client
from steptune.service.connections import storage_errors
from steptune.tuner.errors import ChoiceError, StudyNotFoundError

Url = Annotated[
    str | None,
    typer.Option(
        "--url", envvar="STEPTUNE_URL", help="Address of the service; default STEPTUNE_URL.", show_default=False
    ),
]
Token = Annotated[
    str | None,
    typer.Option(
        "--token",
        envvar="STEPTUNE_TOKEN",
        help="Token for the service; default STEPTUNE_TOKEN. Command lines are visible to others: prefer --token-file.",
        show_default=False,
    ),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        envvar="STEPTUNE_TOKEN_FILE",
        help="File with the token; default STEPTUNE_TOKEN_FILE.",
        show_default=False,
    ),
]
RemoteStudy = Annotated[str, typer.Argument(help="Id of a study; `last` is your newest study.", metavar="STUDY")]


@contextmanager
def connected(url: str | None, token: str | None, token_file: Path | None) -> Iterator[Client]:
    """Open a client, and close it at the end.

    Raises:
        ChoiceError: No address, or two tokens.
        StoreError: The file of the token cannot be read.
    """
    if not url:
        raise ChoiceError("no service is named: add --url https://HOST:8700, or set STEPTUNE_URL")
    if token and token_file:
        raise ChoiceError(
            "both a token and a token file are given (--token, --token-file, or the environment): give one of them"
        )
    if token_file is not None:
        with storage_errors(str(token_file)):
            token = token_file.read_text(encoding="utf-8").strip()
    with Client(url, token or None) as client:
        yield client


def study_id_of(client: Client, study_id: str) -> str:
    """Return the id of a study; `last` stands for the newest."""
    if study_id != "last":
        return study_id
    newest = next(client.studies(), None)
    if newest is None:
        raise StudyNotFoundError(f"you have no study at {client.url} yet: start one with `steptune submit WORKLOAD`")
    return newest.study_id
