"""Logs: one line per event on standard error, without media, prompts or secrets.

Messages contain texts of other processes and of callers, such as reasons and errors. The formatters make every message
printable and short, so that nobody else can write a line of this log. Records carry their request id: ``request_id`` is set where a request enters a process and inherited by its tasks.
"""

import json
import logging
import sys
from collections import Counter
from collections.abc import Hashable
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

from triptych.domain.reasons import printable
from triptych.ports import Clock
from triptych.runtime import tracing
from triptych.runtime.clock import monotonic

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""Id of the current request; empty outside of one."""

FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
FIELDS = "fields"
"""Key of ``extra`` for a record's own fields in the JSON format."""

_HTTP_CLIENT = "httpx"
"""Logger that writes every call as INFO. The scaler of Kubernetes makes one every second."""

_WARN_EVERY_S = 10.0
_MAX_MESSAGE_CHARS = 4096
_MAX_TRACEBACK_LINES = 200


def configure(level: str, log_format: str = "text") -> None:
    """Set up the process's logging; arguments as in the settings."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter(FORMAT))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.getLogger(_HTTP_CLIENT).setLevel(logging.NOTSET if level == "DEBUG" else logging.WARNING)


class BoundedWarnings:
    """Warnings that a peer can cause at any rate: of each kind at most one in ``_WARN_EVERY_S``, with the number left out."""

    def __init__(self, logger: logging.Logger, clock: Clock = monotonic) -> None:
        self._logger = logger
        self._clock = clock
        self._silent_until_s: dict[Hashable, float] = {}
        self._unlogged = Counter[Hashable]()

    def warn(self, message: str, *, kind: Hashable = None) -> None:
        """``kind`` is one of a bounded set, as each is remembered."""
        now_s = self._clock()
        if now_s < self._silent_until_s.get(kind, float("-inf")):
            self._unlogged[kind] += 1
            return
        unlogged = self._unlogged.pop(kind, 0)
        self._logger.warning("%s%s", message, f" (and {unlogged} more before it)" if unlogged else "")
        self._silent_until_s[kind] = now_s + _WARN_EVERY_S


def _short(text: str) -> str:
    """``text`` on one line; the characters that are left out are counted."""
    rest = len(text) - _MAX_MESSAGE_CHARS
    return printable(f"{text[:_MAX_MESSAGE_CHARS]}... and {rest} characters" if rest > 0 else text)


def _traceback(text: str, indent: str = "") -> str:
    """The end of a traceback, each line printable and short."""
    return "\n".join(indent + _short(line) for line in text.splitlines()[-_MAX_TRACEBACK_LINES:])


class TextFormatter(logging.Formatter):
    """Text for people, with the request id in brackets after the message."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name is logging's
        record.message = _short(record.message)
        line = super().formatMessage(record)
        current = request_id.get()
        return f"{line} [{current}]" if current else line

    def formatException(self, ei: Any) -> str:  # noqa: N802 - the name is logging's
        return _traceback(super().formatException(ei), indent="  ")  # no line of it looks like one of the log


class JsonFormatter(logging.Formatter):
    """Formatter of one JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": _short(record.getMessage()),
        }
        if current := request_id.get():
            line["request_id"] = current
        if (span := tracing.current()) is not None:
            line["trace_id"] = span.trace_id
        line.update(getattr(record, FIELDS, {}))
        if record.exc_info:
            line["exception"] = _traceback(self.formatException(record.exc_info))
        return json.dumps(line, ensure_ascii=False, default=str)
