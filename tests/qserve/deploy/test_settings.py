"""Flags of replicas, the pages of their metrics, and a server without its listener."""

import asyncio
import json

import pytest

from formats.errors import InputError
from qserve.cli import main
from qserve.config import EngineConfig, ServerConfig
from qserve.deploy.hosted_app import HostedApp
from qserve.deploy.routed_request import RoutedRequest
from qserve.deploy.settings import DeploySettings

REFUSED = {
    "replicas alone": ({"replicas": 2}, "--replicas: requires --backend"),
    "most alone": ({"max_replicas": 2}, "--max-replicas: requires --backend"),
    "models alone": ({"multiplexed_model": ["a=b"]}, "requires --backend"),
    "most below least": (
        {"backend": "ray", "replicas": 3, "max_replicas": 2},
        "expected at least --replicas",
    ),
    "no folder": ({"backend": "ray", "multiplexed_model": ["a"]}, "expected NAME=FOLDER"),
    "a name twice": ({"backend": "ray", "multiplexed_model": ["a=b", "a=c"]}, "each name once"),
    "no replica": ({"backend": "ray", "replicas": 0}, "expected 1 or more"),
    "a backend": ({"backend": "slurm"}, "expected one of ray"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_invalid_settings_are_refused(case):
    settings, error = REFUSED[case]
    with pytest.raises(InputError, match=error):
        DeploySettings(**settings)


def test_missing_ray_error_names_extra(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    assert main(["serve", str(tmp_path), "--backend", "ray"]) == 1
    assert "pip install 'qserve-kit[ray]'" in capsys.readouterr().err


def request(path, body=None, method="POST"):
    data = b"" if body is None else json.dumps(body).encode()
    return RoutedRequest(
        method=method,
        path=path,
        query=b"",
        headers=[(b"content-type", b"application/json")],
        client=("10.0.0.1", 1),
        body=data,
    )


@pytest.mark.exhaustive
def test_hosted_server_answers_streams_and_aborts(docs_5m):
    """One engine for all of it: a start takes seconds."""

    async def whole(hosted, asked):
        answer = hosted.answer(asked)
        head = await anext(answer)
        return head, b"".join([piece async for piece in answer])

    async def run():
        hosted = await HostedApp.start(
            EngineConfig(model=str(docs_5m), device="cpu", max_num_seqs=4),
            ServerConfig(served_model_name=["docs"]),
        )
        try:
            assert hosted.is_alive
            body = {"prompt": "A trait is", "max_tokens": 3, "temperature": 0, "ignore_eos": True}
            (status, headers), plain = await whole(hosted, request("/v1/completions", body))
            assert status == 200 and (b"content-type", b"application/json") in headers
            reply = json.loads(plain)
            assert reply["usage"]["completion_tokens"] == 3
            (status, headers), stream = await whole(
                hosted, request("/v1/completions", body | {"stream": True})
            )
            assert status == 200 and stream.endswith(b"data: [DONE]\n\n")
            # Tokens of which none was read in time come in one chunk.
            chunks = [json.loads(line[6:]) for line in stream.split(b"\n\n")[:-2]]
            texts = [chunk["choices"][0]["text"] for chunk in chunks]
            assert 1 <= len(texts) <= 3 and "".join(texts) == reply["choices"][0]["text"]
            assert chunks[-1]["choices"][0]["finish_reason"] == "length"
            (status, _), error = await whole(hosted, request("/v1/completions", {"prompt": 3.5}))
            assert status == 400 and json.loads(error)["error"]["code"] == 400

            long = {**body, "max_tokens": 1500, "stream": True}
            answer = hosted.answer(request("/v1/completions", long))
            await anext(answer)
            assert b"data: " in await anext(answer) and hosted.num_open == 1
            await answer.aclose()
            assert hosted.num_open == 0
            _, page = await whole(hosted, request("/metrics", method="GET"))
            assert b'request_success_total{finished_reason="abort",model_name="docs"} 1.0' in page
        finally:
            await hosted.close()
        assert not hosted.is_alive

    asyncio.run(run())
