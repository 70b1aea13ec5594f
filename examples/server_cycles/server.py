"""A server process, requests to it, and the memory of its engine."""

import http.client
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

SECONDS = 180.0  # limit for one request


class Wrong(Exception):
    """The server did something that it must not do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Reply to one completion, or its error."""

    status: int
    tokens: list[int]
    finish: str | None = None
    error: str = ""
    retry_after: str | None = None


class Server:
    """A server process that starts on creation; `close` ends it."""

    key = "operator"

    def __init__(self, models: list[str], flags: list[str]) -> None:
        self._log = tempfile.NamedTemporaryFile("w+", suffix=".log")  # noqa: SIM115 (until close)
        command = [sys.executable, "-u", "-m", "qserve", "serve", *models, "--port", "0"]
        self._process = subprocess.Popen(
            [*command, "--api-key", self.key, *flags],
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        for line in self._process.stdout:
            self.url = line.split()[-1] if line.strip() else ""
            if self.url.startswith("http://"):
                break
        else:
            raise SystemExit(f"the server did not start:\n{Path(self._log.name).read_text()}")
        self._host = self.url.removeprefix("http://")

    def _send(self, path: str, body: dict | None, method: str) -> tuple[int, str | None, str]:
        """Status, Retry-After and body of a reply."""
        connection = http.client.HTTPConnection(self._host, timeout=SECONDS)
        headers = {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"}
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            reply = connection.getresponse()
            return reply.status, reply.getheader("Retry-After"), reply.read().decode()
        finally:
            connection.close()

    def json(self, path: str, body: dict | None = None, method: str = "POST") -> dict:
        """Content of a reply. Raises Wrong unless its status is 200."""
        status, _, text = self._send(path, body, method)
        if status != 200:
            raise Wrong(f"{path} answered {status}: {text}")
        return json.loads(text) if text else {}

    def status(self, path: str) -> int:
        """Status of a GET."""
        return self._send(path, None, "GET")[0]

    def complete(self, given: list[int], count: int, *, stream: bool = False) -> Answer:
        """Greedy tokens after the given ones. Raises OSError if the reply is incomplete."""
        body = {"prompt": given, "max_tokens": count, "temperature": 0, "ignore_eos": True}
        body |= {"logprobs": 0, "return_tokens_as_token_ids": True, "stream": stream}
        status, retry_after, text = self._send("/v1/completions", body, "POST")
        if status != 200:
            message = json.loads(text)["error"]["message"]
            return Answer(
                status=status, tokens=[], error=f"{status}: {message}", retry_after=retry_after
            )
        if not stream:
            return _answer([json.loads(text)])
        *events, done = (line[6:] for line in text.splitlines() if line.startswith("data: "))
        if done != "[DONE]":
            raise OSError(f"a stream ended with {done[:200]}")
        return _answer([json.loads(event) for event in events])

    def engine_pid(self) -> int:
        """Process of the engine."""
        pid = self._process.pid
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            if b"qserve.engine.ipc.process" in Path(f"/proc/{child}/cmdline").read_bytes():
                return int(child)
        raise Wrong("the server has no engine process")

    def memory_mib(self) -> tuple[float, float]:
        """Resident memory of the engine; memory of the GPU that any process holds."""
        pages = int(Path(f"/proc/{self.engine_pid()}/statm").read_text().split()[1])
        host, device = pages * os.sysconf("SC_PAGESIZE") / 2**20, 0.0
        if torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            device = (total - free) / 2**20
        return host, device

    def close(self) -> None:
        """End the process."""
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._log.close()


def _answer(parts: list[dict]) -> Answer:
    tokens, finish, error = [], None, ""
    for part in parts:
        if "error" in part:
            error = f"in a stream: {part['error']['message']}"
        for choice in part.get("choices", ()):
            finish = choice["finish_reason"] or finish
            tokens += ((choice.get("logprobs") or {}).get("tokens")) or ()
    ids = [int(token.removeprefix("token_id:")) for token in tokens]
    return Answer(status=200, tokens=ids, finish=finish, error=error)
