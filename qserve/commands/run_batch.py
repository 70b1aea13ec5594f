"""`qserve run-batch`: run a file of requests in OpenAI's batch format, without a server.

The server's ASGI app runs in this process, without a port; the engine runs in its own process.
"""

import asyncio
import dataclasses
import json
import logging
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from formats.errors import InputError
from qserve.command_line.tool_config import BatchConfig
from qserve.commands.batch_answers import BatchAnswers, digest
from qserve.commands.batch_file import BatchRequest, InvalidLine, read_batch
from qserve.config import EngineConfig, ServerConfig
from qserve.engine.ipc.start_engines import start_engines
from qserve.engine.ipc.waiting import ENGINE
from qserve.hub.local import local_config
from qserve.lora.request import parse_modules
from qserve.processes import logs
from qserve.server.app import build_app
from qserve.server.http.errors import INTERNAL
from qserve.server.prepare.media import MediaAccess
from qserve.text.tokenizer import Tokenizer

MANY = 2**31 - 1  # no limit, because all requests are one user's

logger = logging.getLogger(__name__)


def run_batch(engine_config: EngineConfig, config: BatchConfig, *, engine: str = ENGINE) -> int:
    """Answer all lines. Returns 1 if any line was invalid or failed, else 0.

    Raises InputError for unusable files, and if the engine or the disk fails; then the same call
    resumes after the answers already written.
    """
    content, lines = read_batch(Path(config.input))
    target = Path(config.output)
    if target.exists() and target.samefile(config.input):
        raise InputError(str(target), "is also the input", "choose another output file")
    wrong = [line for line in lines if isinstance(line, InvalidLine)]
    requests = [line for line in lines if isinstance(line, BatchRequest)]
    if wrong:
        first = f"line {wrong[0].line}: {wrong[0].message}"
        print(f"{len(wrong)} of {len(lines)} lines cannot be run; {first}", file=sys.stderr)
    server = ServerConfig(served_model_name=config.served_model_name)
    names = list(server.model_names(engine_config.model))
    config = dataclasses.replace(config, served_model_name=names)
    engine_config = local_config(engine_config)
    models = engine_config.model, engine_config.lora_modules, config.served_model_name
    answers = BatchAnswers(target, digest(content, *models))
    try:
        if answers.answered:
            text = f"already answered: {len(answers.answered)} of {len(lines)} lines"
            print(f"{answers.partial}: {text}", file=sys.stderr)
        left = [request for request in requests if request.custom_id not in answers.answered]
        if left:
            asyncio.run(_run(engine_config, config, left, answers, engine))
        for line in wrong:
            if line.line not in answers.answered:
                answers.write(_line(line.custom_id, None, line.error))
        answers.publish()
    finally:
        answers.close()
    num_failed = answers.num_failed
    print(f"Wrote {target}: {len(lines)} answers, {num_failed} of them errors")
    return 1 if num_failed else 0


async def _run(
    engine_config: EngineConfig,
    config: BatchConfig,
    requests: Sequence[BatchRequest],
    answers: BatchAnswers,
    engine: str,
) -> None:
    server = ServerConfig(
        served_model_name=config.served_model_name,
        max_num_queued_reqs=MANY,
        max_num_queued_tokens=MANY,
        max_body_bytes=2**30,
        api_key_env="",
    )
    tokenizer = await asyncio.to_thread(Tokenizer, engine_config.model, engine_config.tokenizer)
    client = await start_engines(
        engine_config, engine=engine, arguments=logs.arguments("warning", "text")
    )
    num_done, num_seqs = 0, engine_config.max_num_seqs * engine_config.num_engines
    try:
        app = build_app(
            client,
            tokenizer,
            server,
            max_num_seqs=num_seqs,
            loras=parse_modules(engine_config.lora_modules),
            media=MediaAccess.of(client, server),
        )
        # Twice as many requests as the engine runs: the next ones are tokenized meanwhile.
        places = asyncio.Semaphore(2 * num_seqs)

        async def answer(request: BatchRequest) -> None:
            nonlocal num_done
            async with places:
                status, reply = await _post(app, request.url, request.body)
                if status >= 500 and not client.is_alive:
                    raise InputError(
                        engine_config.model,
                        f"the engine stopped after {num_done} of {len(requests)} lines",
                        "run the same command again: it resumes with the answers written",
                    )
            answers.write(_answer(request.custom_id, status, reply))
            num_done += 1
            if sys.stderr.isatty():
                print(f"\r{num_done} of {len(requests)}", end="", file=sys.stderr)

        try:
            async with asyncio.TaskGroup() as group:
                for request in requests:
                    group.create_task(answer(request))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
    finally:
        await client.close()


def _answer(custom_id: str, status: int, reply: dict[str, Any]) -> dict[str, Any]:
    """Return the output line of a request that was run."""
    response = {"status_code": status, "request_id": reply.get("id", ""), "body": reply}
    error = None
    if status != 200:
        error = {"code": str(status), "message": reply["error"]["message"]}
    return _line(custom_id, response, error)


def _line(
    custom_id: str | None, response: dict[str, Any] | None, error: dict[str, Any] | None
) -> dict[str, Any]:
    name = f"batch_req_{uuid.uuid4().hex}"
    return {"id": name, "custom_id": custom_id, "response": response, "error": error}


async def _post(app: Any, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Send a JSON body to an ASGI app, and return the status and JSON of its answer."""
    content, never = json.dumps(body).encode(), asyncio.Event()
    messages = [{"type": "http.request", "body": content, "more_body": False}]
    status, parts = 0, []

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await never.wait()  # this client never disconnects

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
    try:
        await app(scope, receive, send)
    except Exception:  # Starlette answers 500 and then raises the error again
        logger.exception("A request failed")
        if status < 500:
            return 500, {"error": {"message": INTERNAL}}
    return status, json.loads(b"".join(parts))
