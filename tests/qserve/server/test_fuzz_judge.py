"""The fuzzer's judge: it knows a request that is not whole from one that is owed an answer."""

import importlib.util
from pathlib import Path

import pytest

PATH = Path(__file__).resolve().parents[3] / "examples" / "server_faults" / "completeness.py"


@pytest.fixture(scope="module")
def is_complete():
    spec = importlib.util.spec_from_file_location("completeness", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.is_complete


POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"


@pytest.mark.parametrize(
    ("data", "complete"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", True),
        (b"GET / HTTP/1.1\r\nHost: x\r\n", False),
        (b"GET / HTTP/1.1\nHost: x\n\n", True),
        (b"\x00\x01 no request at all\r\n\r\n", True),
        (b"GET / HTTP/1.1\r\nX: " + b"y" * 70_000, True),
        (POST + b"Content-Length: 3\r\n\r\n{}", False),
        (POST + b"content-length:2\r\n\r\n{}", True),
        (POST + b"Content-Length: 2\r\n\r\n{}GET / HTT", True),
        (POST + b"Content-Length: 99\r\nContent-Length: 2\r\n\r\n{}", True),
        (POST + b"Content-Length: ninety\r\n\r\n{}", True),
        (POST + b"Transfer-Encoding: chunked\r\nContent-Length: 99\r\n\r\n{}", True),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n", False),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n", True),
        (POST + b"X-Content-Length: 99\r\n\r\n", True),
    ],
)
def test_complete_requests_are_recognized(is_complete, data, complete):
    assert is_complete(data) is complete
