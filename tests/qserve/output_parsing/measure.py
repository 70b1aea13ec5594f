"""Measure the parsers and grammars of tool calls: random splits, and the validity of forced calls.

    python -m tests.qserve.output_parsing.measure splits --count 100000
    python -m tests.qserve.output_parsing.measure schemas --count 500 --tokenizer FOLDER

`splits` cuts random outputs at random positions and compares what is read with the whole text.
`schemas` draws random tokens that the grammar of a call allows, and validates what is read with
jsonschema. Neither is a test: both take minutes.
"""

import argparse
import json
import random
import time
from collections import Counter

import jsonschema

from qserve.output_parsing.grammars.call_grammar import CallGrammar
from qserve.output_parsing.grammars.format_grammar import lark
from qserve.output_parsing.grammars.text_grammar import Inexpressible
from qserve.output_parsing.output_parser import Message, OutputParser, ParseSettings
from qserve.output_parsing.pieces import merged
from qserve.output_parsing.tool_formats import TOOL_PARSERS
from qserve.structured.backend import library
from qserve.structured.grammar import grammar_text, json_rule
from qserve.structured.params import StructuredOutputsParams
from qserve.text.tokenizer import Tokenizer
from tests.qserve.output_parsing.written_calls import AT_START, HARD, ONE_CALL, TOOLS, WRITE

WORDS = ["see ", "<", "</", "[", "{", "\n", " ", "</think>", "é", "```", '"', "<tool_call", "🗼"]
KINDS = ("plain", "enum", "pattern", "nested", "list", "union", "reference", "format")
MAX_TOKENS = 400
CLOSING = ('"', "'", "}", "]", "\n", "<", ")", ",", "|")


def random_output(name: str, dice: random.Random) -> str:
    calls = dice.choices(HARD, k=1 if name in ONE_CALL else dice.randint(1, 4))
    text = WRITE[name](calls)
    if dice.random() < 0.3:
        text = text[: dice.randrange(len(text))]  # cut off
    if dice.random() < 0.3:
        at = dice.randrange(len(text) + 1)
        text = text[:at] + dice.choice(WORDS) + text[at:]  # broken
    before = "" if name in AT_START | ONE_CALL else "".join(dice.choices(WORDS, k=3))
    return before + text + "".join(dice.choices(WORDS, k=dice.randint(0, 3)))


def pieces_of(settings: ParseSettings, parts: list[str], is_cut: bool) -> list:
    parser = OutputParser(settings)
    found = [piece for part in parts for piece in parser.push(part)]
    return merged(found + parser.finish(is_cut=is_cut))


def measure_splits(count: int) -> None:
    dice, seen, differences = random.Random(0), 0, 0
    start = time.perf_counter()
    while seen < count:
        for name in TOOL_PARSERS:
            reasoning = dice.choice((None, "qwen3", "kimi_k2", "hunyuan", "granite"))
            prompt_end = dice.choice(("", "<think>\n"))
            settings = ParseSettings(
                tool_parser=name, tools=TOOLS, reasoning_parser=reasoning, prompt_end=prompt_end
            )
            text, is_cut = random_output(name, dice), dice.random() < 0.3
            whole = pieces_of(settings, [text], is_cut)
            for _ in range(4):
                edges = sorted(dice.choices(range(len(text) + 1), k=dice.randint(1, 40)))
                parts = [text[a:b] for a, b in zip([0, *edges], [*edges, len(text)], strict=True)]
                if pieces_of(settings, parts, is_cut) != whole:
                    differences += 1
                    print(f"{name} {reasoning}: {text!r} differs in {parts!r}")
                seen += 1
    seconds = time.perf_counter() - start
    print(f"{seen} splits, {differences} differences, {seconds:.0f} s")


def random_schema(kind: str, dice: random.Random, depth: int = 0) -> dict:
    """A schema of an argument."""
    if kind == "plain":
        return {"type": dice.choice(("string", "integer", "number", "boolean", "null"))}
    if kind == "enum":
        values = ["red", "dark blue", 'a "b"', 7, True, None]
        return {"enum": dice.sample(values, dice.randint(1, 4))}
    if kind == "pattern":
        found = {"pattern": dice.choice(("^[a-z]{1,8}$", "^[A-Z]{2}-[0-9]{1,4}$", "[0-9]$"))}
        limits = {"minLength": dice.randint(0, 3), "maxLength": dice.randint(4, 12)}
        return {"type": "string", **dice.choice((found, limits))}
    if kind == "format":
        names = ("date", "time", "date-time", "email", "uuid", "ipv4", "duration")
        return {"type": "string", "format": dice.choice(names)}
    if kind == "list":
        items = random_schema(dice.choice(("plain", "enum", "pattern")), dice, depth + 1)
        return {"type": "array", "items": items, "minItems": dice.randint(0, 2), "maxItems": 3}
    if kind == "nested" and depth < 2:
        names = dice.sample(("a", "b", "key_c", "d2"), dice.randint(1, 3))
        properties = {
            name: random_schema(dice.choice(KINDS[:6]), dice, depth + 1) for name in names
        }
        return {
            "type": "object",
            "properties": properties,
            "required": dice.sample(names, dice.randint(0, len(names))),
            "additionalProperties": False,
        }
    if kind == "union":
        options = [random_schema("plain", dice, depth + 1), {"type": "null"}]
        more = {"type": ["string", "integer"]}
        return dice.choice(({"anyOf": options}, more, {"type": ["boolean", "null"]}))
    if kind == "reference" and depth == 0:
        return {"$ref": f"#/$defs/{dice.choice(('color', 'point'))}"}
    return {"type": "integer", "minimum": dice.randint(-9, 0), "maximum": dice.randint(1, 99)}


def random_tool(kind: str, dice: random.Random) -> dict:
    names = dice.sample(("city", "days", "unit", "note", "target_id"), dice.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: random_schema(kind, dice) for name in names},
        "required": dice.sample(names, dice.randint(0, len(names))),
        "additionalProperties": False,
        "$defs": {
            "color": {"enum": ["red", "green"]},
            "point": {
                "type": "object",
                "properties": {"x": {"type": "number"}, "y": {"type": "number"}},
                "required": ["x", "y"],
                "additionalProperties": False,
            },
        },
    }


def form_of(name: str, schema: dict) -> StructuredOutputsParams:
    def as_json(part: dict) -> str:
        return json_rule(StructuredOutputsParams(json=part, whitespace_pattern=" "), part)

    grammar = CallGrammar(
        tools={"f": schema}, is_single=True, as_json=as_json, marker_token=lambda text: None
    )
    calls = lark(grammar, TOOL_PARSERS[name])
    return StructuredOutputsParams(json_object=True, only_calls=True, calls=calls)


class Sampler:
    """Draws tokens that a grammar allows, those that close something more often."""

    def __init__(self, folder: str, dice: random.Random) -> None:
        tokenizer = Tokenizer(folder)
        text = tokenizer._tokenizer.backend_tokenizer.to_str()
        self._backend = library().LLTokenizer(text, eos_token=tokenizer.eos_token_id)
        self._eos, self._dice = tokenizer.eos_token_id, dice
        self._tokenizer = tokenizer
        size = self._backend.vocab_size
        texts = [tokenizer.token_text(token) for token in range(size)]
        self._closing = {token for token in range(size) if texts[token].startswith(CLOSING)}

    def text(self, form: StructuredOutputsParams) -> tuple[str, str]:
        """A random text, and "done", "cut" or "stuck"."""
        matcher = library().LLMatcher(self._backend, grammar_text(form), log_level=0)
        if matcher.is_error():
            return matcher.get_error(), "refused"
        tokens: list[int] = []
        while len(tokens) < MAX_TOKENS:
            mask = matcher.compute_bitmask()
            allowed = [
                8 * at + bit for at, byte in enumerate(mask) if byte for bit in range(8)
                if byte >> bit & 1
            ]  # fmt: skip
            if self._eos in allowed:
                return self._tokenizer.decode(tokens, skip_special_tokens=False), "done"
            closing = [token for token in allowed if token in self._closing]
            if closing and self._dice.random() < 0.5:
                allowed = closing
            if not allowed:
                return self._tokenizer.decode(tokens), "stuck"
            tokens.append(self._dice.choice(allowed))
            if not matcher.consume_token(tokens[-1]):
                return self._tokenizer.decode(tokens), "stuck"
        return self._tokenizer.decode(tokens), "cut"


def measure_schemas(count: int, folder: str, names: list[str], each: int) -> None:
    """`each`: number of formats in which every schema is tried, in turn."""
    dice = random.Random(1)
    sampler = Sampler(folder, dice)
    results: Counter = Counter()
    for number in range(count):
        kind = KINDS[number % len(KINDS)]
        schema = random_tool(kind, dice)
        for turn in range(min(each, len(names))):
            name = names[(number * each + turn) % len(names)]
            try:
                form = form_of(name, schema)
            except Inexpressible as error:
                results[name, "as JSON"] += 1
                results["reasons", str(error)] += 1
                continue
            for _ in range(3):
                text, end = sampler.text(form)
                if end != "cut":
                    break
            if end != "done":
                results[name, end] += 1
                if end != "cut":
                    print(f"{name} {kind} {end}: {text!r} {schema}")
                continue
            settings = ParseSettings(tool_parser=name, tools={"f": schema}, is_required=True)
            found = Message.of(OutputParser(settings).parse(text))
            try:
                ((called, arguments),) = found.calls
                assert called == "f" and not found.content
                jsonschema.validate(json.loads(arguments), schema)
                results[name, "valid"] += 1
            except Exception as error:
                results[name, "invalid"] += 1
                print(f"{name} {kind}: {text!r} {found} {schema} {error!s:.200}")
    for key, number in sorted(results.items()):
        print(*key, number)
    ends: Counter = Counter()
    for (_, end), number in results.items():
        ends[end] += number
    print(dict(ends))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("splits", "schemas"))
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--tokenizer", help="folder of a model")
    parser.add_argument("--each", type=int, default=99, help="formats for each schema")
    parser.add_argument("--formats", nargs="+", default=list(TOOL_PARSERS))
    asked = parser.parse_args()
    if asked.what == "splits":
        measure_splits(asked.count)
    else:
        measure_schemas(asked.count, asked.tokenizer, asked.formats, asked.each)


if __name__ == "__main__":
    main()
