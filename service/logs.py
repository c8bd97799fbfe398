"""Logs as one JSON object per line, never with query strings, headers or bodies, which may hold secrets."""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime
from typing import Any

import msgspec

from steptune.service.access.secrets import without_secrets

LOGGER = "steptune"


class JsonFormatter(logging.Formatter):
    """Formatter that writes one JSON object per line; the fields in `extra={"fields": …}` become its members."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return without_secrets(msgspec.json.encode(line, enc_hook=str).decode())


def configure_logs(level: str) -> None:
    """Send our log and uvicorn's to standard error as JSON. Uvicorn's access log, which has query strings, is off."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    for name in (LOGGER, "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(level.upper())
        logger.propagate = False
    logging.getLogger("uvicorn.access").disabled = True
