"""The log on standard error: plain lines for scripts; lines with time and level, or JSON, for services."""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections.abc import Mapping
from datetime import datetime

LEVELS, FORMATS = ("debug", "info", "warning", "error"), ("text", "json")

logger = logging.getLogger("nanoengine")


class Lines(logging.Formatter):
    """Formats records as lines of a `kind`: "plain", or one of FORMATS. A line of JSON has named arguments as fields."""

    def __init__(self, kind: str):
        layout = "nanoengine: %(message)s" if kind == "plain" else "%(asctime)s %(levelname)s %(name)s: %(message)s"
        super().__init__(layout)
        self.kind = kind

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        return datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds")

    def format(self, record: logging.LogRecord) -> str:
        if self.kind != "json":
            return super().format(record)
        fields: dict[str, object] = {"time": self.formatTime(record), "level": record.levelname.lower()}
        fields |= {"logger": record.name, "pid": record.process, "message": record.getMessage()}
        if isinstance(record.args, Mapping):
            fields |= record.args
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str)


def show_log(level: str | None = None, kind: str = "plain") -> None:
    """Show the log on standard error, unless the application has its own logging.

    Args:
        level: one of LEVELS, the lowest that this package shows. None: "info", unless it was set before.
        kind: see `Lines`. One of FORMATS shows warnings of other packages, and uncaught errors, in the same way.
    """
    root = logging.getLogger()
    if level or logger.level == logging.NOTSET:
        logger.setLevel((level or "info").upper())
    if logger.handlers or root.handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(Lines(kind))
    (logger if kind == "plain" else root).addHandler(handler)
    if kind != "plain":
        root.setLevel(max(logger.level, logging.WARNING))
        logging.captureWarnings(True)
        sys.excepthook = lambda *error: logger.critical("an error ends the process", exc_info=error)
        threading.excepthook = lambda args: logger.critical("an error ends a thread", exc_info=args.exc_value)
        sys.unraisablehook = lambda args: logger.error("an error was ignored", exc_info=args.exc_value)


def child_log_arguments() -> tuple[str, str]:
    """The arguments of `show_log` in a child process: lines of the same kind, of warnings at least."""
    handlers = [*logger.handlers, *logging.getLogger().handlers]
    kinds = (handler.formatter.kind for handler in handlers if isinstance(handler.formatter, Lines))
    return "warning" if logger.isEnabledFor(logging.WARNING) else "error", next(kinds, "plain")
