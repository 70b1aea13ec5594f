"""The process that prepares bodies: templates that do not end, and its limits."""

import asyncio
import json
import shutil
import signal
import time
from pathlib import Path

import pytest

from qserve.config import ServerConfig
from qserve.processes.child_process import start_child
from qserve.server.http.errors import ApiError
from qserve.server.prepare import worker as module
from qserve.server.prepare.preparation import LARGE_BYTES, Preparation, prepare
from qserve.server.prepare.worker import WorkerClient
from qserve.server.prepare.worker_messages import (
    FromWorker,
    LoadTokenizer,
    Prepared,
    Setup,
    decode,
    encode,
)
from qserve.server.requests.job import Arrival
from qserve.server.requests.served_model import ServedModel
from qserve.text.tokenizer import TextError, Tokenizer

LOOPS = """
{%- for message in messages %}{{ message.content }}
{%- if message.content == "loop" %}
{%- for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}
{%- endfor %}{% endfor %}{% endif %}
{%- if message.content == "memory" %}{% set text = "ab" * 10 ** 12 %}{% endif %}
{%- if message.content == "calls" %}{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}{% endif %}
{%- endfor %}"""


@pytest.fixture
def hostile(docs_5m, tmp_path) -> Path:
    """The bundled model's tokenizer with a template that obeys its messages."""
    for path in Path(docs_5m).iterdir():
        if path.suffix in (".json", ".jinja", ".txt"):
            shutil.copy(path, tmp_path / path.name)
    (tmp_path / "chat_template.jinja").write_text(LOOPS)
    return tmp_path


def messages(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize(
    ("text", "words"), [("memory", "too much memory"), ("calls", "too many nested calls")]
)
def test_endless_template_is_refused(hostile, text, words):
    tokenizer = Tokenizer(hostile)
    with pytest.raises(TextError, match=f"template needs {words}"):
        tokenizer.render_chat(messages(text))
    assert tokenizer.render_chat(messages("hello")) == "hello"


def facts() -> Setup:
    return Setup(
        names=("m",),
        defaults={},
        max_model_len=256,
        vocab_size=8192,
        chat_special_tokens=False,
        auto_tool_parser=None,
        reasoning_parser=None,
        structured_output_strict=False,
    )


@pytest.mark.exhaustive
def test_dead_or_hanging_worker_fails_at_most_one_body(docs_5m, monkeypatch):
    asked = ("tokenize", b'{"prompt": "a b"}', Arrival(time=0.0), {})

    async def scenario():
        setup = asyncio.get_running_loop().create_future()
        setup.set_result(facts())
        client = WorkerClient(LoadTokenizer(folder=str(docs_5m)), setup)
        try:
            answer = await client.prepare(*asked)
            process = client._current.result().process
            process.kill()
            await process.wait()
            assert await client.prepare(*asked) == answer  # as if nothing had happened
            process = client._current.result().process
            process.send_signal(signal.SIGSTOP)
            monkeypatch.setattr(module, "PREPARE_SECONDS", 0.25)
            with pytest.raises(ApiError, match="took more than 0.25 s") as late:
                await client.prepare(*asked)
            assert late.value.status == 400
        finally:
            await client.close()

    asyncio.run(scenario())


def test_close_while_starting_waits_for_the_process(docs_5m, monkeypatch):
    started = []

    async def start(*arguments):
        started.append(await start_child(*arguments))
        return started[-1]

    async def scenario():
        monkeypatch.setattr(module, "start_child", start)
        setup = asyncio.get_running_loop().create_future()  # never set: no engine has loaded
        client = WorkerClient(LoadTokenizer(folder=str(docs_5m)), setup)
        while not started:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0)
        await client.close()
        assert started[0][0].returncode == -signal.SIGKILL

    asyncio.run(scenario())


@pytest.mark.exhaustive
def test_looping_template_ends_only_its_process(hostile, monkeypatch):
    monkeypatch.setattr(module, "CPU_SECONDS", 0.5)
    load = LoadTokenizer(folder=str(hostile))

    async def scenario():
        setup = asyncio.get_running_loop().create_future()
        client = WorkerClient(load, setup)
        try:
            with pytest.raises(TimeoutError):  # the engine is still loading its model
                await asyncio.wait_for(client.ready(), 0.5)
            setup.set_result(facts())
            await client.ready()
            pids = [client._current.result().process.pid]
            for text in ("hello", "loop", "hello", "memory", "hello"):
                body = json.dumps({"messages": messages(text)}).encode()
                try:
                    job = await client.prepare("chat", body, Arrival(time=time.perf_counter()), {})
                    assert text == "hello" and len(job.prompts[0]) > 0
                except ApiError as error:
                    assert error.status == 400
                    words = {"loop": "does not terminate", "memory": "memory"}[text]
                    assert words in error.message
                pids.append((await client._current).process.pid)
            # a new process after the loop alone
            assert pids[0] == pids[1] != pids[2] and len(set(pids[2:])) == 1
            asked = ("tokenize", b'{"prompt": "a b"}', Arrival(time=0.0), {})
            answer = await client.prepare(*asked)
            assert json.loads(answer)["count"] > 0
            monkeypatch.setattr(module, "MAX_GROWTH", -1)  # any size is too much
            assert (
                await client.prepare("tokenize", b'{"prompt": "a b"}', Arrival(time=0.0), {})
                == answer
            )
            assert (await client._current).process.pid != pids[-1]
        finally:
            await client.close()

    asyncio.run(scenario())


UINT256 = {"type": "integer", "minimum": -(2**255), "maximum": 2**256 - 1}
FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {"n": UINT256}}}
REQUIRED = {"tool_choice": "required"}


@pytest.mark.parametrize(
    ("route", "fields"),
    [
        ("chat", {"tools": [{"type": "function", "function": FUNCTION}]} | REQUIRED),
        ("responses", {"tools": [{"type": "function"} | FUNCTION]} | REQUIRED),
        ("responses", {"max_tool_calls": 10**30}),
        ("messages", {"max_tokens": 10**30}),
    ],
)
def test_integers_beyond_64_bits_round_trip(tokenizer, route, fields):
    """Limits of 256-bit integers in a tool's schema, which MessagePack cannot hold."""
    model = ServedModel(
        names=("m",), tokenizer=tokenizer, defaults={}, max_model_len=256, vocab_size=8192
    )
    asked = {"input" if route == "responses" else "messages": messages("Hi")}
    body = json.dumps(asked | {"model": "m"} | fields).encode()
    made = Prepared(job=prepare(model, route, body, Arrival(time=0.0)))
    assert decode(encode(made)[4:], FromWorker) == made


def test_chats_are_rendered_in_killable_process(make_server, error):
    """And large bodies in another, so that they do not delay chats."""

    class Watched:
        def __init__(self) -> None:
            self.routes: list[str] = []

        async def prepare(self, route, body, arrival, adapters):
            self.routes.append(route)
            raise ApiError(400, "The body took more than 10 s to tokenize.", "Shorten it.")

    worker, renderer = Watched(), Watched()
    server = make_server(ServerConfig(), preparation=Preparation(worker, renderer))
    error(server.chat(), 400)
    error(server.post("/v1/responses", {"input": "Hi"}), 400)
    error(server.post("/tokenize", {"prompt": "Hi"}), 400)
    assert renderer.routes == ["chat", "responses", "tokenize"]
    assert server.complete(max_tokens=2).status_code == 200
    assert server.post("/detokenize", {"tokens": [5]}).status_code == 200
    error(server.chat(user="x" * LARGE_BYTES), 400)
    assert worker.routes == ["chat"] and len(renderer.routes) == 3
