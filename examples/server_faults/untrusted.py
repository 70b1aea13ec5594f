"""Attacks by clients' grammars and adapters. Each returns the answers."""

import asyncio
import json
import random
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path

from bodies import COMPLETIONS
from http_client import Reply, ask, request_bytes

LOAD = "/v1/load_lora_adapter"
TOO_COMPLEX = "(a{1000}){%d}"
# A wide ambiguous grammar: each mask takes half a second.
AMBIGUOUS = 'start: a\na: a a | /[a-z]+/ | " "'
LARGE = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(500)}}


async def refused_regexes(port: int) -> list[Reply]:
    """Regular expressions that are refused, each after seconds and 170 MiB without limits."""
    return await asyncio.gather(*(_grammars(port, regex=TOO_COMPLEX % n) for n in SIZES[:7]))


async def one_refused_regex_again(port: int) -> list[Reply]:
    return [await _grammars(port, regex=TOO_COMPLEX % 900) for _ in range(20)]


async def clients_that_leave(port: int) -> list[Reply]:
    """Forty requests with slow grammars, whose clients leave."""
    for size in SIZES:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        form = {"structured_outputs": {"regex": TOO_COMPLEX % size}}
        writer.write(request_bytes(COMPLETIONS, {"prompt": "a", "max_tokens": 4, **form}))
        await writer.drain()
        await asyncio.sleep(0.02)
        writer.transport.abort()
    return [await _grammars(port, regex="[ab]+")]


async def slow_masks(port: int) -> list[Reply]:
    return await asyncio.gather(*(_grammars(port, grammar=AMBIGUOUS) for _ in range(8)))


async def many_large_schemas(port: int) -> list[Reply]:
    """Distinct accepted grammars of some MiB each."""
    schemas = ({**LARGE, "title": str(number)} for number in range(40))
    return await asyncio.gather(*(_grammars(port, json=schema) for schema in schemas))


async def many_states(port: int) -> list[Reply]:
    """Outputs whose automaton grows with each token."""
    form = {"structured_outputs": {"regex": r"(.|\n)*a(.|\n){300}z"}}
    body = {"prompt": "a", "n": 64, "max_tokens": 100, "temperature": 2, **form}
    return [await ask(port, COMPLETIONS, body)]


SIZES = range(900, 940)
GRAMMAR_ATTACKS: dict[str, Callable[[int], Awaitable[list[Reply]]]] = {
    "7 regexes that are refused": refused_regexes,
    "1 refused regex, 20 times": one_refused_regex_again,
    "40 slow regexes of clients that left": clients_that_leave,
    "8 grammars with slow masks": slow_masks,
    "40 schemas of 500 properties": many_large_schemas,
    "64 outputs of a regex with many states": many_states,
}


async def _grammars(port: int, **form: object) -> Reply:
    body = {"prompt": "a", "max_tokens": 4, "structured_outputs": form}
    return await ask(port, COMPLETIONS, body)


# Fields of an adapter_config.json by the attack's name; values are JSON.
ADAPTERS: dict[str, dict[str, object]] = {
    "lora_alpha 1e308": {"lora_alpha": "1e308"},
    "lora_alpha of 400 digits": {"lora_alpha": "9" * 400},
    "lora_alpha 1e400": {"lora_alpha": "1e400"},
    "alpha_pattern 1e308": {"alpha_pattern": '{"q_proj": 1e308}'},
    "100,000 keys": {"alpha_pattern": json.dumps({f"k{i}": 1 for i in range(100_000)})},
    "4,000 expressions": {"alpha_pattern": json.dumps({f"(.*a|.*{i})+b*": 1 for i in range(4000)})},
    "200 expressions": {"alpha_pattern": json.dumps({f"(.*a|.*{i})+b*": 1 for i in range(200)})},
    "rank 2": {"r": "2"},
}


def write_adapters(folder: Path) -> None:
    """Folder of adapters that fit no model, each with one wrong number."""
    for name, stated in ADAPTERS.items():
        place = folder / name.replace(" ", "-")
        place.mkdir()
        fields = {"peft_type": '"LORA"', "r": "1", "target_modules": '["q_proj"]', **stated}
        text = ", ".join(f'"{key}": {value}' for key, value in fields.items())
        (place / "adapter_config.json").write_text(f"{{{text}}}")
        name = "base_model.model.model.layers.0.self_attn.q_proj.lora_%s.weight"
        header = {
            name % "A": {"dtype": "F32", "shape": [1, 8], "data_offsets": [0, 32]},
            name % "B": {"dtype": "F32", "shape": [8, 1], "data_offsets": [32, 64]},
        }
        data = json.dumps(header).encode()
        random_bytes = random.Random(0).randbytes(64)
        content = struct.pack("<Q", len(data)) + data + random_bytes
        (place / "adapter_model.safetensors").write_bytes(content)


async def load_all(port: int) -> list[Reply]:
    """Load each of them, all together; half of the clients leave."""

    async def load(name: str, leaves: bool) -> Reply:
        body = {"lora_name": name, "lora_path": name.replace(" ", "-")}
        if not leaves:
            return await ask(port, LOAD, body)
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request_bytes(LOAD, body))
        await asyncio.sleep(0.05)
        writer.transport.abort()
        return Reply(status=0)

    works = (load(name, leaves) for name in ADAPTERS for leaves in (True, False))
    return await asyncio.gather(*works)
