"""Random grammars, adapters and model folders.

    python examples/server_faults/fuzz_untrusted.py MODEL

Each must be accepted, or refused with one InputError; anything else is a fault, and the exit code
is 1. Prints the counts, the longest wait, and the memory of this process and its children.
"""

import argparse
import collections
import contextlib
import json
import os
import random
import shutil
import struct
import sys
import tempfile
import time
from pathlib import Path

from formats.errors import InputError
from formats.inspection.inspect import inspect_checkpoint
from formats.peft.lora import read_adapter
from qserve.config import EngineConfig
from qserve.engine.engine import Engine
from qserve.model.model_config import ModelConfig
from qserve.params.sampling_params import SamplingParams
from qserve.structured.compiler import GrammarCompiler
from qserve.structured.heap import return_free_memory
from qserve.structured.params import StructuredOutputsParams

ATOMS = (
    *("a", "b", ".", r"\d", r"\w", r"\W", "[a-z]", "[^a]", "é", r"\p{L}", "(", ")", "[", "|", "^"),
    *("$", "\\", "(?i)", "(?=a)", r"\b", "{2}", "{0,40}", "{900}", "*", "+", "?", "\n", "\ud83d"),
)
NUMBERS = (0, 1, -1, 2**31, 2**64, 10**400, 1e308, -1e39, 0.5, True, None, "8", [], {})
KEYS = ("r", "lora_alpha", "rank_pattern", "alpha_pattern", "target_modules", "use_rslora")
KEYS += ("layers_to_transform", "exclude_modules", "init_lora_weights", "bias", "new_key")
WALKED = 6  # tokens of an output under each grammar that is accepted


def regex(rng: random.Random) -> str:
    return "".join(rng.choice(ATOMS) for _ in range(rng.randint(1, 14)))


def schema(rng: random.Random, depth: int = 0) -> object:
    kind = rng.choice(("object", "array", "string", "integer", "number", "enum", "any", "odd"))
    if depth > 4 or kind in ("odd", "any"):
        return rng.choice(({}, True, False, {"$ref": "#"}, {"type": "no"}, {"not": {}}))
    size = rng.choice((0, 1, 3, 40, 5000, 10**9, -1))
    if kind == "object":
        names = [f"p{i}" for i in range(rng.randint(0, 5))]
        properties = {name: schema(rng, depth + 1) for name in names}
        return {"type": kind, "properties": properties, "maxProperties": size}
    if kind == "array":
        return {"type": kind, "items": schema(rng, depth + 1), "minItems": size}
    if kind == "string":
        return {"type": kind, rng.choice(("minLength", "maxLength")): size, "pattern": regex(rng)}
    if kind == "enum":
        return {"enum": [rng.choice(NUMBERS[:4]) for _ in range(rng.randint(0, 9))]}
    return {"type": kind, rng.choice(("minimum", "maximum", "multipleOf")): rng.choice(NUMBERS[:9])}


def lark(rng: random.Random) -> str:
    rules = [f"r{i}" for i in range(rng.randint(1, 8))]

    def part() -> str:
        atom = rng.choice(
            (*rules, '"a"', '"b"', "/[a-z]+/", f"/{regex(rng)}/", "TEXT", "(", "%json {}")
        )
        return atom + rng.choice(("", "", "*", "+", "?", "{1,90}", "~3"))

    lines = [f"{name}: {' '.join(part() for _ in range(rng.randint(0, 6)))}" for name in rules]
    return "\n".join([f"start: {rules[0]}", *lines, "TEXT: /x/"])


def grammar(rng: random.Random) -> dict[str, object]:
    kind = rng.choice(("regex", "json", "grammar", "choice"))
    if kind == "choice":
        return {kind: tuple(regex(rng) for _ in range(rng.randint(1, 50)))}
    return {kind: {"regex": regex, "json": schema, "grammar": lark}[kind](rng)}


def adapter(rng: random.Random, folder: Path, shapes: dict[str, tuple[int, int]]) -> None:
    """An adapter that fits the model, with some numbers, names and bytes changed."""
    module = rng.choice(list(shapes))
    (outputs, inputs), rank = shapes[module], rng.choice((1, 4))
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": [module]}
    for _ in range(rng.randint(0, 3)):
        value = rng.choice((*NUMBERS, regex(rng), {regex(rng): rng.choice(NUMBERS)}))
        config[rng.choice(KEYS)] = value
    text = json.dumps(config)
    if rng.random() < 0.1:
        text = text[: rng.randrange(len(text))]
    (folder / "adapter_config.json").write_text(text)
    header, at = {}, 0
    for name, shape in (("A", [rank, inputs]), ("B", [outputs, rank])):
        size = 4 * shape[0] * shape[1]
        shape = [rng.choice(NUMBERS[:7]), 1] if rng.random() < 0.05 else shape
        entry = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + size]}
        header[f"base_model.model.{module}.lora_{name}.weight"] = entry
        at += size
    data = json.dumps(header).encode()
    # Mostly zeros, which are numbers of any dtype; at times noise, which holds NaN.
    numbers = bytes(at) if rng.random() < 0.8 else rng.randbytes(at)
    content = struct.pack("<Q", len(data)) + data + numbers
    (folder / "adapter_model.safetensors").write_bytes(content[: rng.choice((-1, len(content)))])


def damaged(rng: random.Random, model: Path, folder: Path) -> str:
    """Make `folder` a copy of a model with something changed; returns what."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for path in model.iterdir():
        os.link(path, folder / path.name)
    changes = [_change_json, _change_json, _change_header, _change_bytes]
    return ", ".join(rng.choice(changes)(rng, folder) for _ in range(rng.randint(1, 2)))


def _write(path: Path, data: bytes) -> None:
    path.unlink()  # or the model's own file would change
    path.write_bytes(data)


def _change_json(rng: random.Random, folder: Path) -> str:
    path = folder / rng.choice(("config.json", "config.json", "tokenizer_config.json"))
    try:
        values = json.loads(path.read_text())
    except ValueError:
        return "nothing"
    key = rng.choice([*values, "quantization_config", "rope_scaling", "head_dim", "text_config"])
    value = rng.choice((*NUMBERS, regex(rng), [regex(rng)], {regex(rng): 1}, [[]], "\0", -7))
    values[key] = value
    _write(path, json.dumps(values).encode())
    return f"{path.name} {key} = {value!r:.60}"


def _change_header(rng: random.Random, folder: Path) -> str:
    path = folder / "model.safetensors"
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    try:
        header = json.loads(data[8 : 8 + size])
    except ValueError:
        return "nothing"
    name = rng.choice(sorted(header))
    entry = header[name]
    change = rng.choice(("dtype", "shape", "data_offsets", "drop", "rename"))
    if change == "drop":
        del header[name]
    elif change == "rename":
        header[regex(rng)] = header.pop(name)
    else:
        other = rng.choice((*NUMBERS[:7], "F8_E4M3", "Q7", [rng.choice(NUMBERS)] * 2, [], [1]))
        entry[change] = other
    text = json.dumps(header).encode()
    _write(path, struct.pack("<Q", len(text)) + text + data[8 + size :])
    return f"{change} of {name}"


def _change_bytes(rng: random.Random, folder: Path) -> str:
    path = folder / rng.choice(sorted(each.name for each in folder.iterdir()))
    data = bytearray(path.read_bytes())
    at = rng.randrange(min(len(data), 4096))
    if rng.random() < 0.5:
        data = data[:at]
    else:
        data[at : at + 4] = rng.randbytes(4)
    _write(path, bytes(data))
    return f"{path.name} from byte {at}"


class Results:
    """Number of tries by result, and the time of the longest."""

    def __init__(self) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self.longest, self.wrong = 0.0, []

    def run(self, case: object, work: object) -> None:
        started = time.perf_counter()
        try:
            work()
            self.counts["accepted"] += 1
        except InputError:
            self.counts["refused"] += 1
        except Exception as error:
            self.counts["wrong"] += 1
            self.wrong.append(f"{type(error).__name__}: {str(error)[:200]} of {str(case)[:500]!r}")
        self.longest = max(self.longest, time.perf_counter() - started)


def fuzz_grammars(model: str, count: int, rng: random.Random) -> Results:
    config, found = ModelConfig.from_folder(model), Results()
    compiler = GrammarCompiler(model, config.vocab_size, config.eos_token_ids)

    def compile_one(fields: dict[str, object]) -> None:
        params = StructuredOutputsParams(**fields)
        constraint = compiler.constraint(compiler.submit(params).result(), "fuzz")
        for _ in range(WALKED):
            words = constraint.mask(config.eos_token_ids, True)
            words = words.view("uint8")
            bits = [t for t in range(config.vocab_size) if words[t >> 3] >> (t & 7) & 1]
            if constraint.error or not bits:
                break
            constraint.take(rng.choice(bits))

    for _ in range(count):
        fields = grammar(rng)
        found.run(fields, lambda fields=fields: compile_one(fields))
    compiler.close()
    return found


def fuzz_adapters(model: str, count: int, rng: random.Random) -> Results:
    from formats.peft.lora import adapted_shapes

    config, found = ModelConfig.from_folder(model), Results()
    shapes = adapted_shapes(config.family, config.values)
    with tempfile.TemporaryDirectory() as place:
        for _ in range(count):
            adapter(rng, Path(place), shapes)
            case = (Path(place) / "adapter_config.json").read_text()
            found.run(case, lambda: read_adapter(place, shapes, max_rank=16))
    return found


def fuzz_folders(model: str, count: int, rng: random.Random) -> Results:
    """Inspect each folder, and start an engine with it."""
    found, settings = Results(), {"device": "cpu", "max_model_len": 64}

    def start(folder: Path) -> None:
        with contextlib.suppress(InputError):
            inspect_checkpoint(folder)
        engine = Engine(EngineConfig(model=str(folder), num_gpu_blocks_override=8, **settings))
        engine.add_request("r", [5, 6, 7], SamplingParams(max_tokens=2))
        while engine.has_work():
            engine.step()

    with tempfile.TemporaryDirectory(dir=Path(model).parent) as place:
        folder = Path(place) / "model"
        for _ in range(count):
            case = damaged(rng, Path(model), folder)
            found.run(case, lambda: start(folder))
    return found


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) / 256


def main() -> int:
    parser = argparse.ArgumentParser(prog="fuzz_untrusted", description=__doc__)
    parser.add_argument("model", help="model folder")
    parser.add_argument("--grammars", type=int, default=5000)
    parser.add_argument("--adapters", type=int, default=5000)
    parser.add_argument("--folders", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    failed = False
    kinds = {"grammars": fuzz_grammars, "adapters": fuzz_adapters, "folders": fuzz_folders}
    for name, work in kinds.items():
        if not getattr(options, name):
            continue
        work(options.model, 20, random.Random(-1))  # load what is loaded once
        before, started = resident_mib(), time.perf_counter()
        found = work(options.model, getattr(options, name), random.Random(options.seed))
        return_free_memory()
        print(
            f"{getattr(options, name)} {name}: {dict(found.counts)}; longest {found.longest:.1f} s;"
            f" {time.perf_counter() - started:.0f} s; {resident_mib() - before:+.0f} MiB",
            flush=True,
        )
        for wrong in found.wrong[:10]:
            print(f"     {wrong}")
        failed |= bool(found.wrong)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
