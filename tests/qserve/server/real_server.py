"""Client of a real server process: requests, waits, streams, refusals, child processes."""

import json
import re
import time
from pathlib import Path

import httpx

GUARD = 60.0  # seconds, against hanging
HI = [{"role": "user", "content": "What is a trait?"}]


class Api:
    """Requests to the server."""

    def __init__(self, url: str, key: str) -> None:
        headers = {"Authorization": f"Bearer {key}"}
        limits = httpx.Limits(max_connections=100)
        self.http = httpx.Client(base_url=url, headers=headers, timeout=GUARD, limits=limits)
        self.port = httpx.URL(url).port

    def complete(self, **fields) -> httpx.Response:
        body = {"prompt": "A trait is", "temperature": 0, "max_tokens": 5, **fields}
        return self.http.post("/v1/completions", json=body)

    def chat(self, **fields) -> httpx.Response:
        body = {"messages": HI, "temperature": 0, "max_tokens": 5, **fields}
        return self.http.post("/v1/chat/completions", json=body)

    def text(self, **fields) -> str:
        return self.complete(**fields).json()["choices"][0]["text"]

    def raw(self, content: bytes, kind: str = "application/json") -> httpx.Response:
        headers = {"content-type": kind}
        return self.http.post("/v1/completions", content=content, headers=headers)

    def metric(self, name: str) -> float:
        page = self.http.get("/metrics").text
        return float(re.search(rf"^qserve:{name}(?:\{{.*\}})? ([\d.e+-]+)$", page, re.M)[1])

    def until_idle(self) -> None:
        until(lambda: self.metric("num_requests_running") == 0)
        until(lambda: self.metric("num_requests_admitted") == 0)


def until(holds) -> None:
    deadline = time.monotonic() + GUARD
    while not holds():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def events(reply: httpx.Response) -> list[dict]:
    assert reply.status_code == 200, reply.text
    *blocks, done, rest = reply.text.split("\n\n")
    assert done == "data: [DONE]" and rest == ""
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


def refused(reply: httpx.Response, status: int = 400) -> dict:
    assert reply.status_code == status, reply.text
    assert len(reply.content) < 4096
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["code"] == status
    return error


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def engine_of(pid: int) -> int:
    (found,) = (
        child
        for child in children(pid)
        if b"qserve.engine.ipc.process" in Path(f"/proc/{child}/cmdline").read_bytes()
    )
    return found
