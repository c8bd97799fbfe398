"""Styles, scripts and plotly.js, served under names with a hash or version, so that browsers can cache them forever."""

from __future__ import annotations

import gzip
import hashlib

from fastapi import APIRouter, Request
from fastapi.responses import Response

from steptune.dashboards.site import PLOTLY, asset_file, asset_names, asset_text, packed_plotly
from steptune.service.api.problems import not_found
from steptune.service.pages.routing import accepts_gzip

router = APIRouter(include_in_schema=False)
FOR_GOOD = "public, max-age=31536000, immutable"
_TYPES = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


@router.get("/static/{file_name}")
def static_file(request: Request, file_name: str) -> Response:
    """Send a file that pages refer to. None of these files is secret."""
    if file_name == PLOTLY:
        packed = packed_plotly()
    else:
        name = next((name for name in asset_names() if asset_file(name) == file_name), None)
        if name is None:
            raise not_found("file", file_name)
        packed = gzip.compress(asset_text(name).encode(), mtime=0)
    headers = {
        "Cache-Control": FOR_GOOD,
        "ETag": f'"{hashlib.sha256(packed).hexdigest()[:16]}"',
        "Vary": "Accept-Encoding",
    }
    content_type = f"{_TYPES[file_name.rpartition('.')[2]]}; charset=utf-8"
    if accepts_gzip(request):
        return Response(packed, headers={**headers, "Content-Encoding": "gzip"}, media_type=content_type)
    return Response(gzip.decompress(packed), headers=headers, media_type=content_type)


@router.get("/favicon.ico")
def favicon() -> Response:
    """Send the favicon, which browsers request by themselves when they show a response that is not HTML."""
    return Response(
        asset_text("icon.svg"), headers={"Cache-Control": "public, max-age=86400"}, media_type="image/svg+xml"
    )
