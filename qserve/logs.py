"""How log lines look, in every process of a server. Knows no loggers by name."""

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
    """Writes lines above the progress bars that are shown, not behind them."""

    def emit(self, record: logging.LogRecord) -> None:
        bars = getattr(sys.modules.get("tqdm"), "tqdm", None)  # not loaded: none are shown
        with contextlib.nullcontext() if bars is None else bars.external_write_mode(self.stream):
            super().emit(record)


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

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
    """Write lines from `level` on to stderr, as `text` or as JSON, and nothing else anywhere."""
    handler = LineHandler()
    handler.setFormatter(JsonFormatter() if form == "json" else logging.Formatter(text))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def arguments(level: str, form: str) -> list[str]:
    """The command-line arguments with which a child process writes lines of the same kind."""
    return [f"--log-level={level}", f"--log-format={form}"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Let a child process take `arguments`."""
    parser.add_argument("--log-level", choices=LEVELS, default="info")
    parser.add_argument("--log-format", choices=FORMATS, default="text")
