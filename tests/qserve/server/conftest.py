"""A server whose engine is a script: it says a text, slowly or not, and can fail on the way."""

import asyncio
import itertools
import json
import threading
import time

import httpx
import pytest
import uvicorn

from qserve.config import ServerConfig
from qserve.engine.control.commands import EngineState
from qserve.engine.ipc.client import RefusedError
from qserve.engine.token_event import RequestFacts, TokenEvent, TokenLogprobs
from qserve.params.request_options import RequestOptions
from qserve.server.app import build_app
from qserve.server.http import listener
from qserve.server.http.http_protocol import Connections
from qserve.server.web_server import uvicorn_config
from qserve.text.tokenizer import Tokenizer

END = 2  # the bundled tokenizer's end token


def logprobs(token: int, count: int) -> TokenLogprobs:
    """The script's log probabilities: a token comes second, after the token before it."""
    tops = ((token - 1, -0.5), (token, -1.25), (token + 1, float("-inf")))[:count]
    return TokenLogprobs(-1.25, tuple(t for t, _ in tops), tuple(p for _, p in tops))


def of_prompt(prompt: list[int], params) -> tuple[TokenLogprobs | None, ...] | None:
    """Return the log probabilities of a prompt, if they were requested."""
    if params.prompt_logprobs is None:
        return None
    rest = [logprobs(token, params.prompt_logprobs)._replace(rank=2) for token in prompt[1:]]
    return (None, *rest)


class ScriptedClient:
    """A fake EngineClient that answers `text`, or the words of the prompt's script."""

    max_model_len = 256
    vocab_size = 8192

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.is_alive = True
        self.is_restarting = False
        self.clients: list[str] = []
        self.request_options: list[RequestOptions] = []
        self.num_resets = 0
        self.num_cached = 0  # of each request's prompt
        self.text = "Hello there, general reader."
        self.endless = False
        self.delay = 0.0  # seconds before each token
        self.gate: threading.Semaphore | None = None  # each token waits for it
        self.fails_at: int | None = None  # the token before which the request fails
        self.fails_as_asked = False  # the failure lies in what the request asks for
        self.fails_for_now = False  # the request may succeed later
        self.dies_at: int | None = None  # the same, and the engine with it
        self.others_live = False  # if it dies: another engine of the server runs
        self.breaks_at: int | None = None  # the same, by an exception of the client's own
        self.refuses = False
        self.requests: list[tuple] = []
        self.running: set[str] = set()
        self.aborted: list[str] = []
        self.state = EngineState(fingerprint="qs_scripted")

    def reset_prefix_cache(self):
        self.num_resets += 1

    async def generate(
        self, request_id, prompt_token_ids, params, watch, client, *, group, options
    ):
        self.clients.append(client)
        self.request_options.append(options)
        if self.refuses:
            raise RefusedError(f"request {request_id}", "can never run")
        self.requests.append((request_id, prompt_token_ids, params))
        self.running.add(request_id)
        tokens = self.tokenizer.encode(self.text)
        scored = of_prompt(prompt_token_ids, params)
        if params.max_tokens == 0:
            reason = "length"
            event = TokenEvent(
                request_id=request_id, token_ids=(), finish_reason=reason, prompt_logprobs=scored
            )
            watch(event)
            yield event
            self.running.discard(request_id)
            return
        script = itertools.cycle(tokens) if self.endless else iter([*tokens, END])
        reason = None
        try:
            for count, token in enumerate(script, start=1):
                await asyncio.sleep(self.delay)
                if self.gate is not None:
                    await asyncio.to_thread(self.gate.acquire)
                if count - 1 == self.breaks_at:
                    raise RuntimeError("secret detail at 0xdeadbeef")
                if count - 1 in (self.fails_at, self.dies_at):
                    self.is_alive = count - 1 != self.dies_at or self.others_live
                    reason = "error"
                    event = TokenEvent(
                        request_id=request_id,
                        token_ids=(),
                        finish_reason="error",
                        error="secret detail at 0xdeadbeef",
                        is_asked_for=self.fails_as_asked,
                        is_temporary=self.fails_for_now,
                        has_lost_engine=count - 1 == self.dies_at,
                    )
                    watch(event)
                    yield event
                    return
                is_end = token == END and not params.ignore_eos
                is_stop = token in params.stop_token_ids
                if is_end or is_stop:
                    reason = "stop"
                elif count == params.max_tokens:
                    reason = "length"
                event = TokenEvent(
                    request_id=request_id,
                    token_ids=(token,),
                    finish_reason=reason,
                    stop_token=token if is_stop else None,
                    ended_by_token=is_end or is_stop,
                    facts=RequestFacts(num_cached=self.num_cached),
                    prompt_logprobs=scored if count == 1 else None,
                    logprobs=() if params.logprobs is None else (logprobs(token, params.logprobs),),
                )
                watch(event)
                yield event
                if reason:
                    return
        finally:
            self.running.discard(request_id)
            if reason is None:
                self.aborted.append(request_id)


class Server:
    """The app and its scripted engine, with plain methods to talk to it."""

    def __init__(self, tokenizer: Tokenizer, config: ServerConfig, **options) -> None:
        self.client = ScriptedClient(tokenizer)
        self.tokenizer = tokenizer
        self.app = build_app(self.client, tokenizer, config, max_num_seqs=8, **options)

    def request(self, method: str, path: str, **options) -> httpx.Response:
        if "content" in options:
            headers = httpx.Headers(options.get("headers"))
            headers.setdefault("Content-Type", "application/json")
            options["headers"] = headers

        async def call() -> httpx.Response:
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return await client.request(method, path, **options)

        return asyncio.run(call())

    def get(self, path: str, **options) -> httpx.Response:
        return self.request("GET", path, **options)

    def post(self, path: str, body: object, **options) -> httpx.Response:
        return self.request("POST", path, json=body, **options)

    def complete(self, **fields) -> httpx.Response:
        return self.post("/v1/completions", {"prompt": "Once", "temperature": 0, **fields})

    def chat(self, **fields) -> httpx.Response:
        messages = [{"role": "user", "content": "Hi"}]
        return self.post("/v1/chat/completions", {"messages": messages, **fields})


@pytest.fixture(scope="session")
def tokenizer(docs_5m) -> Tokenizer:
    return Tokenizer(docs_5m)


@pytest.fixture(autouse=True)
def template_facts_are_read_anew(tokenizer):
    """All tests share the tokenizer, and some replace its template."""
    for name in ("template_settings", "reads_tools", "renders_later_system", "needs_parts"):
        tokenizer.__dict__.pop(name, None)


@pytest.fixture
def server(tokenizer) -> Server:
    return Server(tokenizer, ServerConfig(served_model_name=["tiny"]))


@pytest.fixture
def make_server(tokenizer):
    def make(config: ServerConfig, **options) -> Server:
        return Server(tokenizer, config, **options)

    return make


@pytest.fixture
def chunks():
    """The events of a stream, checked for their form; the last must be [DONE]."""

    def parse(response: httpx.Response) -> list[dict]:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["cache-control"] == "no-cache"
        *events, rest = response.text.split("\n\n")
        assert rest == "" and all(event.startswith("data: ") for event in events)
        assert events[-1] == "data: [DONE]"
        return [json.loads(event.removeprefix("data: ")) for event in events[:-1]]

    return parse


@pytest.fixture
def error():
    """The error of a reply, checked for the envelope."""

    def parse(response: httpx.Response, status: int) -> dict:
        assert response.status_code == status, response.text
        assert len(response.content) < 4096
        (name, body), *others = response.json().items()
        assert name == "error" and not others
        assert set(body) == {"message", "type", "param", "code"}
        assert isinstance(body["message"], str) and body["message"]
        assert isinstance(body["type"], str) and body["code"] == status
        assert body["param"] is None or isinstance(body["param"], str)
        return body

    return parse


@pytest.fixture
def run_live():
    """run_live(server, limit=1000) -> the port on which it runs until the test ends."""
    running = []

    def run(server: Server, limit: int = 1000) -> int:
        server.connections = Connections(limit=limit)
        config = uvicorn_config(server.app, server.connections, loop="asyncio")  # as in serve
        web = uvicorn.Server(config)
        sockets = [listener.bind(ServerConfig(host="127.0.0.1", port=0))]
        sockets[0].listen()
        thread = threading.Thread(target=web.run, args=(sockets,), daemon=True)
        thread.start()
        running.append((web, thread))
        while not web.started:
            time.sleep(0.01)
        return web.servers[0].sockets[0].getsockname()[1]

    yield run
    for web, thread in running:
        web.should_exit = web.force_exit = True
        thread.join(10)


@pytest.fixture
def live(server, run_live):
    """The server on a real port; gives the port."""
    return run_live(server)
