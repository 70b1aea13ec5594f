"""`qserve chat` and `qserve complete`: use any OpenAI-compatible server from the terminal."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from qserve.command_line.tool_config import ChatConfig, ClientConfig
from qserve.commands.client_http import ServerClient, ServerError

KEYS = ("QSERVE_API_KEY", "OPENAI_API_KEY")  # environment variables, if --api-key is not given
PROMPT = "> "
DIM, PLAIN = "\033[2m", "\033[0m"  # terminal style of reasoning


def chat(config: ChatConfig) -> int:
    """Chat until the input ends, or answer one message with --quick. Returns the exit code."""
    opening = [] if config.system_prompt is None else _message("system", config.system_prompt)
    messages = list(opening)

    def answer(text: str, client: ServerClient, fields: dict[str, Any]) -> None:
        messages.extend(_message("user", text))
        said: list[str] = []
        try:
            events = client.stream("/chat/completions", fields | {"messages": messages})
            _show(events, _chat_text, said, config.stats)
        except (ServerError, KeyboardInterrupt):
            del messages[-1:]  # drop a message without an answer
            raise
        messages.extend(_message("assistant", "".join(said)))

    return _talk(config, answer)


def complete(config: ClientConfig) -> int:
    """Complete each text of the input, or one text with --quick. Returns the exit code."""

    def answer(text: str, client: ServerClient, fields: dict[str, Any]) -> None:
        events = client.stream("/completions", fields | {"prompt": text})
        _show(events, _completion_text, [], config.stats)

    return _talk(config, answer)


def _talk(config: ClientConfig, answer: Callable[[str, ServerClient, dict[str, Any]], None]) -> int:
    key = config.api_key or next(filter(None, map(os.environ.get, KEYS)), None)
    client = ServerClient(config.url, key)
    code = 0
    try:
        model = config.model_name or client.get("/models")["data"][0]["id"]
        fields = {"model": model} | {
            name: getattr(config, name)
            for name in ("max_tokens", "temperature", "top_p", "seed")
            if getattr(config, name) is not None
        }
        if config.quick is not None:
            answer(config.quick, client, fields)
            return 0
        is_terminal = sys.stdin.isatty()
        if is_terminal:
            print(f"{model} at {config.url}; end with Ctrl-D", file=sys.stderr)
        for text in _inputs(is_terminal):
            try:
                answer(text, client, fields)
            except ServerError as error:
                print(f"error: {error}", file=sys.stderr)
                code = 1
            except KeyboardInterrupt:  # stops the answer, not the chat
                if not is_terminal:
                    raise
                print()
    except ServerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except (KeyError, IndexError, TypeError):
        print(f"error: {config.url} does not list a model", file=sys.stderr)
        return 1
    return code


def _inputs(is_terminal: bool) -> Iterator[str]:
    while True:
        try:
            text = input(PROMPT if is_terminal else "")
        except EOFError:
            return
        if text.strip():
            yield text


def _show(
    events: Iterator[dict], text_of: Callable[[dict], str], said: list[str], stats: bool
) -> None:
    """Print text as it arrives, and the speed if `stats`. Reasoning is shown on terminals only."""
    started, first, last, count = time.perf_counter(), None, 0.0, 0
    is_terminal, is_thinking = sys.stdout.isatty(), False
    for event in events:
        for choice in event.get("choices") or ():
            text, thought = text_of(choice), _reasoning(choice)
            if is_terminal and thought:  # a model may reason for minutes before it answers
                print(DIM + thought + PLAIN, end="", flush=True)
                is_thinking = True
            if is_thinking and text:
                print()
                is_thinking = False
            if text or thought:
                last, count = time.perf_counter(), count + 1
                first = first or last
                said.append(text)
                print(text, end="", flush=True)
    print()
    if stats and first is not None:
        line = f"first token {first - started:.3f} s"
        if count > 1 and last > first:
            line += f", then {(count - 1) / (last - first):.1f} tokens/s"
        print(line, file=sys.stderr)


def _message(role: str, content: str) -> list[dict[str, str]]:
    return [{"role": role, "content": content}]


def _reasoning(choice: dict) -> str:
    """Return the reasoning text of a choice; servers use different names for it."""
    delta = choice.get("delta") or {}
    return delta.get("reasoning_content") or delta.get("reasoning") or ""


def _chat_text(choice: dict) -> str:
    return (choice.get("delta") or {}).get("content") or ""


def _completion_text(choice: dict) -> str:
    return choice.get("text") or ""
