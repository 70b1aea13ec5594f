"""A headless Chromium, driven through its debugging pipe: pages, scripts in them, screenshots."""

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

GUARD = 60.0  # seconds, against hanging
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


# Descriptors 3 and 4 may be in use for something else until then.
START = """import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
os.dup2(ends[0], 3)
os.dup2(ends[1], 4)
os.execvp(sys.argv[3], sys.argv[3:])
"""


def find() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


class Chromium:
    """One page. It speaks JSON, each message ended by a zero byte, on descriptors 3 and 4."""

    def __init__(self, folder: Path, width: int = 1000, height: int = 700) -> None:
        ours_in, theirs_out = os.pipe()
        theirs_in, ours_out = os.pipe()
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
        flags += [f"--user-data-dir={folder}", f"--window-size={width},{height}", "about:blank"]
        self._process = subprocess.Popen(
            [sys.executable, "-ISc", START, str(theirs_in), str(theirs_out), find(), *flags],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for end in (theirs_in, theirs_out):
            os.close(end)
        self._in, self._out, self._rest, self._number = ours_in, ours_out, b"", 0
        self.problems: list[str] = []  # errors in the page's console
        (page,) = [
            each
            for each in self._call("Target.getTargets")["targetInfos"]
            if each["type"] == "page"
        ]
        self._session: str | None = None
        attached = self._call("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def open(self, url: str) -> None:
        self._call("Page.navigate", url=url)

    def run(self, script: str) -> object:
        """The value of an expression in the page."""
        found = self._call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, script: str) -> None:
        """Until an expression is true."""
        end = time.monotonic() + GUARD
        while not self.run(script):
            assert time.monotonic() < end, f"waited too long for {script}"
            time.sleep(0.02)

    def type(self, text: str) -> None:
        self._call("Input.insertText", text=text)

    def press_enter(self) -> None:
        key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r"}
        for kind in ("keyDown", "keyUp"):
            self._call("Input.dispatchKeyEvent", type=kind, **key)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot")["data"]))

    def set_dark(self) -> None:
        scheme = [{"name": "prefers-color-scheme", "value": "dark"}]
        self._call("Emulation.setEmulatedMedia", features=scheme)

    def set_size(self, width: int, height: int) -> None:
        self._call(
            "Emulation.setDeviceMetricsOverride",
            **{"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False},
        )

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for end in (self._in, self._out):
            os.close(end)

    def _call(self, method: str, **params) -> dict:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if getattr(self, "_session", None) is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            found = self._read()
            if found.get("id") == self._number:
                assert "error" not in found, found
                return found["result"]
            if found.get("method") == "Runtime.exceptionThrown":
                self.problems.append(str(found["params"]))
            elif found.get("method") == "Log.entryAdded":
                entry = found["params"]["entry"]
                if entry["level"] == "error":
                    self.problems.append(f"{entry['text']} {entry.get('url', '')}")

    def _read(self) -> dict:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._in], [], [], GUARD)
            assert ready, "Chromium is silent"
            piece = os.read(self._in, 2**16)
            assert piece, "Chromium has ended"
            self._rest += piece
        found, _, self._rest = self._rest.partition(b"\0")
        return json.loads(found)
