"""Format of log lines, for all processes of a server."""

import argparse
import contextlib
import json
import logging
import sys
import time

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")
TEXT = "%(levelname)s %(name)s: %(message)s"


class LineHandler(logging.StreamHandler):
    """Write lines above visible progress bars instead of into them.

    A line that cannot be written, for example because the disk is full, is dropped.
    """

    def emit(self, record: logging.LogRecord) -> None:
        bars = getattr(sys.modules.get("tqdm"), "tqdm", None)  # None: no progress bars
        apart = contextlib.nullcontext() if bars is None else bars.external_write_mode(self.stream)
        with contextlib.suppress(OSError), apart:
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Report a failure to write a line, unless it is an OSError, such as a full disk."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


class JsonFormatter(logging.Formatter):
    """One JSON object per line."""

    converter = time.gmtime

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": f"{self.formatTime(record, '%Y-%m-%dT%H:%M:%S')}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


def configure(level: str, form: str, text: str = TEXT) -> None:
    """Log messages from `level` on to stderr only, in the format `text` or as JSON."""
    handler = LineHandler()
    handler.setFormatter(JsonFormatter() if form == "json" else logging.Formatter(text))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def arguments(level: str, form: str) -> list[str]:
    """Return command-line arguments that give a child process this log level and format."""
    return [f"--log-level={level}", f"--log-format={form}"]


def name_argument(name: str) -> list[str]:
    """Return the command-line argument that adds a name to a child process's log lines."""
    return [f"--log-name={name}"]


def named(name: str) -> str:
    """Return the format of text lines for a process with this name."""
    return f"%(levelname)s {name} %(name)s: %(message)s" if name else TEXT


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `arguments` and `name_argument` to a child process's parser."""
    parser.add_argument("--log-name", default="")
    parser.add_argument("--log-level", choices=LEVELS, default="info")
    parser.add_argument("--log-format", choices=FORMATS, default="text")
