"""Logs: one line an event on stderr, `time level logger message key=value ...`, with the ids of this process."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Mapping
from typing import Any

from laminar.shell.settings import Common

_ATTRIBUTE = "laminar_fields"
_QUIETER = ("uvicorn", "uvicorn.error", "asyncio")


def fields(**values: object) -> dict[str, Any]:
    """Key=values of one log line: `log.info("relay lost", extra=fields(slot=slot, epoch=epoch))`."""
    return {_ATTRIBUTE: values}


def configure_logging(common: Common, level: str | None = None) -> None:
    """Sends every logger to stderr, one line an event, with slot, life and job. Call once, at start.

    The level is `level`, else LAMINAR_LOG_LEVEL, else INFO. A traceback follows its line.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter({"slot": common.slot, "life": common.life, "job": common.job}))
    logging.basicConfig(level=level or os.environ.get("LAMINAR_LOG_LEVEL", "INFO"), handlers=[handler], force=True)
    for name in _QUIETER:
        logging.getLogger(name).setLevel(logging.WARNING)


class LineFormatter(logging.Formatter):
    """Formats a record as one line; newlines in the message are escaped, tracebacks follow on their own lines."""

    def __init__(self, ids: Mapping[str, object]) -> None:
        super().__init__()
        self._ids = dict(ids)

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        message = record.getMessage().replace("\n", "\\n")
        values: dict[str, object] = {**self._ids, **getattr(record, _ATTRIBUTE, {})}
        line = f"{seconds}.{int(record.msecs):03d}Z {record.levelname} {record.name} {message}"
        line += "".join(f" {key}={_quoted(value)}" for key, value in values.items())
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def _quoted(value: object) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    if text and not any(char.isspace() or char in '"=' for char in text):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
