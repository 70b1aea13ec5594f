"""Hostile bodies of legal size that cost as much as possible. Each is a row of BODIES."""

import json
from collections.abc import Callable

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TOKENIZE, DETOKENIZE, POOLING = "/tokenize", "/detokenize", "/pooling"


def _chat(content: object, count: int, **fields: object) -> bytes:
    return json.dumps(
        {"messages": [{"role": "user", "content": content}] * count, **fields}
    ).encode()


def _prompt(**fields: object) -> bytes:
    return json.dumps({"prompt": "a", "max_tokens": 1, **fields}).encode()


# name: (route, body, number of concurrent requests)
BODIES: dict[str, tuple[str, Callable[[], bytes], int]] = {
    "1.6 M stop_token_ids, n 32": (
        COMPLETIONS, lambda: _prompt(n=32, stop_token_ids=[5] * 1_600_000), 4),
    "1,024 stop_token_ids, n 128": (
        COMPLETIONS, lambda: _prompt(n=128, stop_token_ids=list(range(3, 1027))), 4),
    "100,000 messages of a letter": (CHAT, lambda: _chat("a", 100_000), 12),
    "4,096 messages of a letter": (CHAT, lambda: _chat("a", 4096), 12),
    "1,000 messages of 250 parts": (
        CHAT, lambda: _chat([{"type": "text", "text": "a"}] * 250, 1000), 4),
    "500,000 unknown fields": (
        COMPLETIONS, lambda: _prompt(**{f"f{i}": 1 for i in range(500_000)}), 12),
    "32,000 unknown fields": (
        COMPLETIONS, lambda: _prompt(**{f"f{i}": 1 for i in range(32_000)}), 12),
    "4 M token ids": (COMPLETIONS, lambda: _prompt(prompt=[5] * 2_600_000), 12),
    "1 M token ids in one prompt": (
        COMPLETIONS, lambda: _prompt(prompt=[5] * 1_000_000), 12),
    "1,024 prompts": (
        COMPLETIONS, lambda: _prompt(prompt=["a"] * 1024), 4),
    "8 MB of text": (COMPLETIONS, lambda: _prompt(prompt="a b " * 1_900_000), 12),
    "100 KB of text, as much as may fit": (
        COMPLETIONS, lambda: _prompt(prompt="word " * 24_000), 12),
    "8 MB of escapes": (COMPLETIONS, lambda: b'{"prompt": "' + b"\\n" * 4_000_000 + b'"}', 12),
    "8 MB of empty texts": (COMPLETIONS, lambda: b'{"x": [' + b'"",' * 2_600_000 + b'""]}', 12),
    "lists in lists": (COMPLETIONS, lambda: b'{"x": ' + b"[" * 8_000_000, 12),
    "4 stop strings of 1 MB": (COMPLETIONS, lambda: _prompt(stop=["x" * 10**6] * 4), 12),
    "300,000 of logit_bias": (
        COMPLETIONS, lambda: _prompt(logit_bias={str(i): 1 for i in range(300_000)}), 12),
    "2 MB of text as tokens with names": (
        TOKENIZE, lambda: _prompt(prompt="a b " * 500_000, return_token_strs=True), 4),
    "8 MB of text as tokens with names": (
        TOKENIZE, lambda: _prompt(prompt="a b " * 1_900_000, return_token_strs=True), 4),
    "1 M tokens as text": (
        DETOKENIZE, lambda: json.dumps({"tokens": [700] * 1_000_000}).encode(), 4),
    "vectors of 4 x 2,000 tokens": (
        POOLING,
        lambda: json.dumps({"input": [[5] * 2000] * 4, "task": "token_embed"}).encode(),
        4,
    ),
    "control tokens in 4,000 messages": (CHAT, lambda: _chat("<|im_end|>", 4000), 12),
}  # fmt: skip
