"""`qserve run-batch`: requests of a file, answers into another, in OpenAI's batch format.

The server's app answers them in this process, without a port, beside an engine process.
"""

import asyncio
import json
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from formats.errors import InputError, one_line
from qserve import logs
from qserve.config import EngineConfig, ServerConfig
from qserve.engine.process import ENGINE
from qserve.engine.supervisor import EngineSupervisor
from qserve.lora.request import parse_modules
from qserve.server.app import build_app
from qserve.text import Tokenizer
from qserve.tool_config import BatchConfig

URLS = (
    *("/v1/completions", "/v1/chat/completions", "/v1/responses"),
    *("/v1/embeddings", "/v1/score", "/v1/rerank"),
)
MANY = 2**31 - 1  # no limit: one user's file is no crowd


def run_batch(engine_config: EngineConfig, config: BatchConfig, *, engine: str = ENGINE) -> int:
    """Answer all lines; 1 if some failed. Raises InputError for a file that cannot be read."""
    requests = list(read_requests(Path(config.input)))
    target = Path(config.output)
    if target.exists() and target.samefile(config.input):
        raise InputError(str(target), "is the input, too", "give another output")
    return asyncio.run(_run(engine_config, config, requests, target, engine))


def read_requests(path: Path) -> Iterator[dict[str, Any]]:
    """The requests of a file, checked line by line. Raises InputError."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeError) as error:
        raise InputError(str(path), f"cannot be read: {one_line(error)}") from error
    seen = set()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            request = json.loads(line)
            name, url, body = (request[key] for key in ("custom_id", "url", "body"))
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(
                where, "expected a JSON object with custom_id, method, url and body"
            ) from error
        if url not in URLS or request.get("method", "POST") != "POST":
            raise InputError(where, f"expected POST to one of {', '.join(URLS)}, found {url!r}")
        if not isinstance(body, dict) or body.get("stream"):
            raise InputError(where, "expected a body that is an object, without stream")
        if not isinstance(name, str) or name in seen:
            raise InputError(where, f"expected a custom_id of its own, found {name!r}")
        seen.add(name)
        yield request


async def _run(
    engine_config: EngineConfig,
    config: BatchConfig,
    requests: list[dict[str, Any]],
    target: Path,
    engine: str,
) -> int:
    server = ServerConfig(
        served_model_name=config.served_model_name,
        max_num_queued_reqs=MANY,
        max_num_queued_tokens=MANY,
        max_body_bytes=2**30,
        api_key_env="",
    )
    tokenizer = await asyncio.to_thread(Tokenizer, engine_config.model)
    client = await EngineSupervisor.start(
        engine_config, engine=engine, arguments=logs.arguments("warning", "text")
    )
    num_done = num_failed = 0
    try:
        app = build_app(
            client,
            tokenizer,
            server,
            max_num_seqs=engine_config.max_num_seqs,
            loras=parse_modules(engine_config.lora_modules),
        )
        # Enough that the engine always has as many as it can take, and texts wait for no one.
        places = asyncio.Semaphore(2 * engine_config.max_num_seqs)
        partial = target.with_name(f"{target.name}.partial")
        with partial.open("w") as file:

            async def answer(request: dict[str, Any]) -> None:
                nonlocal num_done, num_failed
                async with places:
                    status, reply = await _post(app, request["url"], request["body"])
                num_done, num_failed = num_done + 1, num_failed + (status != 200)
                file.write(json.dumps(_line(request["custom_id"], status, reply)) + "\n")
                if sys.stderr.isatty():
                    print(f"\r{num_done} of {len(requests)}", end="", file=sys.stderr)

            async with asyncio.TaskGroup() as group:
                for request in requests:
                    group.create_task(answer(request))
        partial.replace(target)
    finally:
        await client.close()
    print(f"Wrote {target}: {num_done} answers, {num_failed} of them errors")
    return 1 if num_failed else 0


def _line(custom_id: str, status: int, reply: dict[str, Any]) -> dict[str, Any]:
    response = {"status_code": status, "request_id": reply.get("id", ""), "body": reply}
    error = None
    if status != 200:
        error = {"code": str(status), "message": reply["error"]["message"]}
    return {
        "id": f"batch_req_{uuid.uuid4().hex}",
        "custom_id": custom_id,
        "response": response,
        "error": error,
    }


async def _post(app: Any, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """The answer of an ASGI app to a JSON body: its status and its JSON."""
    content, never = json.dumps(body).encode(), asyncio.Event()
    messages = [{"type": "http.request", "body": content, "more_body": False}]
    status, parts = 0, []

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await never.wait()  # the client stays until it has its answer

    async def send(message: dict[str, Any]) -> None:
        nonlocal status
        status = message.get("status", status)
        parts.append(message.get("body", b""))

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json")],
        "client": ("127.0.0.1", 0),
        "server": ("127.0.0.1", 0),
    }
    await app(scope, receive, send)
    return status, json.loads(b"".join(parts))
