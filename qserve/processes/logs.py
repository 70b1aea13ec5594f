"""Format of log lines, in every process of a server."""

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

    A line that cannot be written, as on a full disk, is dropped.
    """

    def emit(self, record: logging.LogRecord) -> None:
        bars = getattr(sys.modules.get("tqdm"), "tqdm", None)  # not loaded: none are shown
        apart = contextlib.nullcontext() if bars is None else bars.external_write_mode(self.stream)
        with contextlib.suppress(OSError), apart:
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Report a failure to write a line, unless there is no room for the report either."""
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
    """Log from `level` on to stderr only, as `text` or JSON."""
    handler = LineHandler()
    handler.setFormatter(JsonFormatter() if form == "json" else logging.Formatter(text))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def arguments(level: str, form: str) -> list[str]:
    """Command-line arguments that give a child process the same log format."""
    return [f"--log-level={level}", f"--log-format={form}"]


def name_argument(name: str) -> list[str]:
    """Command-line argument that begins the lines of a child process with this name."""
    return [f"--log-name={name}"]


def named(name: str) -> str:
    """Format of text lines of a process with this name."""
    return f"%(levelname)s {name} %(name)s: %(message)s" if name else TEXT


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `arguments` and `name_argument` to a child process's parser."""
    parser.add_argument("--log-name", default="")
    parser.add_argument("--log-level", choices=LEVELS, default="info")
    parser.add_argument("--log-format", choices=FORMATS, default="text")
