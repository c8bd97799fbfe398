"""Successful responses: records, encoded by msgspec, with an entity tag."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec
from fastapi import Header, Request
from fastapi.responses import Response

from steptune.service.api.problems import RefusalError
from steptune.tuner.records import Record

IfMatch = Annotated[
    str | None,
    Header(
        max_length=200,
        description="ETag of the state that the client read; the answer is 412 if the state has changed.",
    ),
]
_encode = msgspec.json.Encoder().encode
_QUALITY = re.compile(r"[01](\.\d{0,3})?", re.ASCII)
_TAG = re.compile(r'(?:W/)?"([^"]*)"')


def answer(
    request: Request,
    message: Record,
    *,
    status: int = 200,
    version: int | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Answer with a record as JSON, or with 304 without a body if the client already has this state.

    Args:
        version: Version of the row, where `If-Match` is compared with it.
    """
    return tagged(request, _encode(message), "application/json", status=status, version=version, headers=headers)


def tagged(
    request: Request,
    body: bytes,
    media_type: str,
    *,
    status: int = 200,
    version: int | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Answer with a body and its entity tag, made from a digest of the body and, if there is one, the row's version."""
    digest = hashlib.sha256(body).hexdigest()[:16]
    tag = digest if version is None else f"{version}.{digest}"
    all_headers = {**(headers or {}), "ETag": f'"{tag}"', "Cache-Control": "private, no-cache"}
    if is_known(request, tag):
        return Response(status_code=304, headers=all_headers)
    return Response(body, status, all_headers, media_type)


def is_known(request: Request, tag: str) -> bool:
    """Say whether the client already has the state with this tag."""
    return request.method == "GET" and tag in _tags(request.headers.get("if-none-match", ""))


def check_version(wanted: str | None, version: int) -> int | None:
    """Refuse to change a row that was changed after the client had read it.

    Args:
        wanted: The header `If-Match`.

    Returns:
        The version at which the change must be made; None where any version will do.

    Raises:
        RefusalError: 412, where the header is given and does not match.
    """
    if wanted is None or wanted.strip() == "*":
        return None
    if str(version) not in {tag.partition(".")[0] for tag in _tags(wanted)}:
        raise RefusalError(
            412,
            "changed-meanwhile",
            f"the resource is at version {version} now, not {wanted[:100]}: read it again, then repeat the change",
        )
    return version


def preferred(accept: str, offered: Sequence[str]) -> str | None:
    """Return the offered media type that an `Accept` header prefers, or the first of several that it prefers equally;
    None if the header accepts none of them.
    """
    best, best_quality = None, 0.0
    wanted = [_media_range(part) for part in accept.split(",")]
    for media_type in offered:
        patterns = (media_type, f"{media_type.partition('/')[0]}/*", "*/*")  # the most specific one counts
        matching = next((q for pattern in patterns for name, q in wanted if name == pattern), 0.0)
        if matching > best_quality:
            best, best_quality = media_type, matching
    return best


def _media_range(part: str) -> tuple[str, float]:
    name, *parameters = (piece.strip().lower() for piece in part.split(";"))
    quality = next((parameter[2:] for parameter in parameters if parameter.startswith("q=")), "1")
    return name, float(quality) if _QUALITY.fullmatch(quality) else 0.0


def _tags(header: str) -> set[str]:
    return set(_TAG.findall(header))
