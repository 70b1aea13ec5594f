"""Invalid requests of every kind: valid and nearly valid bodies, broken JSON, raw bytes.

Each must get an answer: 200 or 4xx (503 where the server is busy) in the envelope and below 4 KB.
Only incomplete requests may get no answer: the server waits for the rest.
"""

import asyncio
import collections
import json
import random
from dataclasses import dataclass, field

from completeness import is_complete
from http_client import Reply, exchange, request_bytes

NUM_AT_ONCE = 32
ANSWER_SECONDS = 60.0  # against hanging
PART_SECONDS = 0.5  # after which the client of half a request leaves
PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize")
ODD = (
    *(None, True, False, 0, 1, -1, 2**31, 2**63, 10**30, 0.5, -0.0, 1e308, "", "a", "5", "\x00"),
    *("\ud800", "<|im_end|>", "x" * 5000, [], {}, [[]], [None], ["a"], [1], {"a": 1}, [1.5]),
)
FIELDS = (
    *("model", "user", "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty"),
    *("frequency_penalty", "repetition_penalty", "logit_bias", "seed", "max_tokens"),
    *("max_completion_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "stream"),
    *("include_stop_str_in_output", "skip_special_tokens", "stream_options", "logprobs", "echo"),
    *("top_logprobs", "tools", "response_format", "chat_template_kwargs", "continue_final_message"),
    *("add_generation_prompt", "add_special_tokens", "best_of", "suffix", "nobody_knows_this"),
    *("truncate_prompt_tokens", "tokens", "text", "return_token_strs", "store", "metadata"),
    *("request_id", "return_token_ids", "return_tokens_as_token_ids", "prompt_logprobs"),
    *("cache_salt", "priority", "truncation_side", "max_output_tokens", "input", "instructions"),
)
GOOD = {
    "n": (1, 2, 3),
    "temperature": (0, 0.7, 2),
    "top_p": (0.1, 1),
    "top_k": (0, 5),
    "seed": (1, 2**62),
    "stop": ("a", ["b", "c"]),
    "logprobs": (0, 2),
    "stream": (True, False),
    "logit_bias": ({"5": 3},),
    "stop_token_ids": ([5, 6],),
    "min_tokens": (1,),
    "ignore_eos": (True,),
    "echo": (True,),
}


@dataclass(slots=True)
class Found:
    """Number of answers by status, and the unexpected answers."""

    statuses: collections.Counter = field(default_factory=collections.Counter)
    wrong: list[str] = field(default_factory=list)
    num_partial: int = 0  # requests that were not whole and got no answer
    longest: int = 0  # bytes of an answer that is no success

    @property
    def text(self) -> str:
        counts = " ".join(f"{count}x{status}" for status, count in sorted(self.statuses.items()))
        return (
            f"{counts}; {self.num_partial} not whole, rightly without an answer;"
            f" longest error {self.longest} bytes; {len(self.wrong)} wrong"
        )


async def run(port: int, count: int, seed: int) -> Found:
    """Send `count` requests, a few concurrently."""
    found, numbers = Found(), iter(range(count))

    async def worker() -> None:
        for number in numbers:
            rng = random.Random(f"{seed} {number}")
            kind, data = _request(rng)
            whole = is_complete(data)
            reply = await exchange(port, data, ANSWER_SECONDS if whole else PART_SECONDS)
            _judge(found, f"{kind} {seed} {number}", whole, reply)

    await asyncio.gather(*(worker() for _ in range(NUM_AT_ONCE)))
    return found


def _judge(found: Found, name: str, whole: bool, reply: Reply) -> None:
    if not whole and reply.status <= 0:
        found.num_partial += 1
        return
    found.statuses[reply.status] += 1
    if reply.status == 200:
        return
    found.longest = max(found.longest, len(reply.body))
    good = 400 <= reply.status < 500 or reply.status == 503
    try:
        envelope = set(json.loads(reply.body)["error"]) == {"message", "type", "param", "code"}
    except (ValueError, KeyError, TypeError):
        envelope = False
    if not (good and envelope and len(reply.body) < 4096):
        found.wrong.append(f"{name}: {reply.status} {reply.body[:200]!r}")


def _request(rng: random.Random) -> tuple[str, bytes]:
    kind = rng.choices(("valid", "nearly", "broken", "raw"), (2, 5, 2, 1))[0]
    path = rng.choice(PATHS)
    if kind == "raw":
        return kind, _raw(rng, request_bytes(path, _body(rng, path, wrong=False)))
    body = json.dumps(_body(rng, path, wrong=kind != "valid")).encode()
    if kind == "broken":
        body = _break(rng, body)
    return kind, request_bytes(path, body)


def _body(rng: random.Random, path: str, wrong: bool) -> dict:
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    body: dict = {limit: rng.choice((1, 2, 5))}
    content = rng.choice(("Hi", [{"type": "text", "text": "Hi"}], "<|im_start|>system\n"))
    messages = [{"role": rng.choice(("user", "system")), "content": content}]
    match path:
        case "/v1/completions":
            prompts = ("Once", [5, 6], ["a", "b"], [[5], [6]], "世界 \u202e")
            body["prompt"] = rng.choice(prompts)
        case "/v1/chat/completions":
            body["messages"] = messages
        case "/v1/responses":
            body["input"] = rng.choice(("Hi", messages))
        case "/tokenize":
            body |= rng.choice(({"prompt": "世界"}, {"messages": messages}))
        case "/detokenize":
            body["tokens"] = [5, 6, rng.randrange(9000)]
    for name in rng.sample(list(GOOD), rng.randrange(4)):
        body[name] = rng.choice(GOOD[name])
    if wrong:
        for _ in range(rng.randrange(1, 4)):
            body[rng.choice((*FIELDS, "prompt", "messages"))] = rng.choice(ODD)
    return body


def _break(rng: random.Random, body: bytes) -> bytes:
    data = bytearray(body)
    for _ in range(rng.randrange(1, 5)):
        at = rng.randrange(len(data))
        match rng.randrange(4):
            case 0:
                data[at] = rng.randrange(256)
            case 1:
                del data[at : at + rng.randrange(20)]
            case 2:
                data[at:at] = rng.choice((b"[", b"{", b'"', b"\\", b"\xff", b"NaN", b"1e999", b","))
            case 3:
                data += data[at:]
        if not data:
            return b""
    return bytes(data[:100_000])


def _raw(rng: random.Random, data: bytes) -> bytes:
    match rng.randrange(6):
        case 0:
            return rng.randbytes(rng.randrange(1, 200)) + b"\r\n\r\n"
        case 1:
            return data.replace(b"Content-Length", b"Transfer-Encoding: chunked\r\nContent-Length")
        case 2:
            return data.replace(b"Host: x", b"X: " + b"y" * rng.choice((10, 20_000, 70_000)))
        case 3:
            return data[: rng.randrange(1, len(data))]
        case 4:
            return _break(rng, data)
        case _:
            return data.replace(b"HTTP/1.1", rng.choice((b"HTTP/9.9", b"", b"HTTP/1.0", b"\x00")))
