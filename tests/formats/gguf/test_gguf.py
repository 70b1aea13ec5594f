"""GGUF files: blocks as gguf-py decodes them, models as their source, damaged files refused."""

import base64
import hashlib
import json
import random
import struct
from pathlib import Path

import pytest
import torch

from formats.checkpoint import CheckpointReader
from formats.convert import convert_checkpoint
from formats.errors import InputError
from formats.gguf.block_types import BLOCK_TYPES, BY_NAME
from formats.gguf.blocks import decode_rows
from formats.inspection.inspect import inspect_checkpoint
from qserve.cli import main
from qserve.llm import LLM
from qserve.text.tokenizer import Tokenizer
from tests.formats.gguf.written import (
    F16,
    F32,
    Q4_0,
    Q8_0,
    llama_metadata,
    llama_tensors,
    write_gguf,
)

# two rows of random blocks of each type, and what gguf-py makes of them
GOLDEN = json.loads((Path(__file__).parent / "blocks.json").read_text())["types"]
IDS = list(range(5, 45))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    """The folders that stand for GGUF files are made below this home."""
    home = tmp_path / "home"
    monkeypatch.setenv("HOME", str(home))
    return home / ".cache" / "qserve" / "gguf"


@pytest.mark.parametrize("name", GOLDEN)
def test_blocks_are_gguf_pys_bit_for_bit(name):
    kind, golden = BY_NAME[name], GOLDEN[name]
    data = torch.frombuffer(bytearray(base64.b64decode(golden["blocks"])), dtype=torch.uint8)
    found = decode_rows(data, kind, 256)
    assert found.dtype == torch.float32 and found.shape == (2, 256)
    assert found[0, :4].tolist() == golden["first"]
    assert hashlib.sha256(found.numpy().tobytes()).hexdigest() == golden["sha256"]


def test_every_type_of_blocks_that_is_read_has_a_golden_value():
    read = {row.name for row in BLOCK_TYPES.values() if row.decoded and not row.float_dtype}
    assert read == GOLDEN.keys()


@pytest.fixture
def written(docs_5m, tmp_path):
    """written(type) -> the bundled model as a GGUF file."""

    def write(kind: int, name: str = "docs.gguf") -> Path:
        return write_gguf(tmp_path / name, llama_metadata(docs_5m), llama_tensors(docs_5m, kind))

    return write


def logits(model: Path) -> torch.Tensor:
    return LLM(str(model), device="cpu", max_model_len=128).logits(IDS)


def test_float_file_is_its_source(written, docs_5m):
    """Queries and keys are stored in another order of rows."""
    file, source = CheckpointReader(written(F32)), CheckpointReader(docs_5m)
    assert file.entries.keys() == source.entries.keys()
    for name in source.entries:
        assert torch.equal(file.get(name).float(), source.get(name).float()), name
    assert torch.equal(logits(written(F32)), logits(docs_5m))


@pytest.mark.parametrize(
    ("kind", "scheme", "most"), [(Q8_0, "w8a16-sym-g32", 0.02), (Q4_0, "w4a16-sym-g32", 0.4)]
)
def test_codes_run_packed_and_convert_to_gptq(written, docs_5m, tmp_path, kind, scheme, most):
    path = written(kind)
    inspection = inspect_checkpoint(path)
    assert not [each for each in inspection.problems if each.severity == "error"]
    assert inspection.scheme == scheme
    found, want = logits(path), logits(docs_5m)
    assert 0 < float((found - want).norm() / want.norm()) < most
    convert_checkpoint(path, tmp_path / "gptq", "gptq")
    assert torch.equal(logits(tmp_path / "gptq"), found)


def test_tokenizer_and_template_are_the_sources(written, docs_5m):
    found, want = Tokenizer(written(F16)), Tokenizer(docs_5m)
    for text in ("Ownership in Rust's model", "1234 été 🦕\n\n  x", "", "<s>a</s>"):
        assert found.encode(text) == want.encode(text)
        assert found.decode(found.encode(text)) == want.decode(want.encode(text))
    messages = [{"role": "user", "content": "What is a borrow?"}]
    assert found.render_chat(messages) == want.render_chat(messages)


def test_commands_take_a_file(written, tmp_path, capsys):
    path = written(F16)
    arguments = ["--device", "cpu", "--prompt", "Ownership", "--max-tokens", "4"]
    assert main(["generate", str(path), *arguments]) == 0
    assert main(["inspect", str(path)]) == 0
    assert "docs.gguf: LlamaForCausalLM" in capsys.readouterr().out
    target = tmp_path / "w4"
    flags = ["--recipe", "rtn", "--quality-windows", "0"]
    assert main(["quantize", str(path), "-o", str(target), *flags]) == 0
    assert inspect_checkpoint(target).scheme == "w4a16-sym"


def test_folder_is_made_once_and_made_anew_for_a_changed_file(written, cache):
    path = written(F16)
    first = CheckpointReader(path).folder
    assert CheckpointReader(path).folder == first and len([*cache.iterdir()]) == 1
    written(Q8_0)
    with pytest.raises(InputError, match="has changed since it was opened"):
        CheckpointReader(first)
    assert CheckpointReader(path).folder != first


def damages() -> list:
    """Sixty ways to damage a file: (name, change of its bytes)."""
    rng = random.Random(3)
    found = [(f"cut at {at}", lambda data, at=at: data[:at]) for at in (0, 3, 4, 7, 12, 23, 24, 40)]
    for share in (0.05, 0.2, 0.4, 0.6, 0.8, 0.999):
        found.append((f"cut at {share}", lambda data, s=share: data[: int(len(data) * s)]))
    for at, what in ((4, "version"), (8, "tensors"), (16, "pairs"), (24, "first key's length")):
        for number in (0, 99, 2**31, 2**40, 2**63 - 1, 2**64 - 1):
            code = "<I" if at == 4 else "<Q"
            number = number & 0xFFFFFFFF if at == 4 else number

            def change(data, at=at, code=code, number=number):
                new = struct.pack(code, number)
                return data[:at] + new + data[at + len(new) :]

            if not (at == 16 and number == 0):
                found.append((f"{what} {number}", change))
    for number in range(60 - len(found)):
        place = rng.randrange(24, 900)  # keys and small values; later come the words

        def flip(data, place=place):
            return data[:place] + bytes([data[place] ^ 0xFF]) + data[place + 1 :]

        found.append((f"byte {place} ({number})", flip))
    return found


@pytest.mark.parametrize(("name", "change"), damages(), ids=lambda each: str(each)[:30])
def test_damaged_file_is_one_line(docs_5m, tmp_path, name, change):
    """Or a file that is read as something else: no traceback, no memory for what it states."""
    path = tmp_path / "bad.gguf"
    tensors = {"output_norm.weight": (torch.ones(256), F32)}
    write_gguf(path, llama_metadata(docs_5m), tensors)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(InputError) as caught:
        CheckpointReader(path)  # at best the embedding is missing
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"general.architecture": "mamba9"}, "general.architecture.*mamba9"),
        ({"llama.block_count": 10**9}, "block_count"),
        ({"llama.attention.head_count": 0}, "head_count"),
        ({"tokenizer.ggml.model": "unheard of"}, "tokenizer.ggml.model"),
        ({"tokenizer.ggml.tokens": ["a", "b"]}, "tokenizer.ggml"),
    ],
)
def test_metadata_that_lies_is_named(docs_5m, tmp_path, change, words):
    metadata = llama_metadata(docs_5m) | change
    path = write_gguf(tmp_path / "bad.gguf", metadata, llama_tensors(docs_5m, F16))
    with pytest.raises(InputError, match=words):
        LLM(str(path), device="cpu", max_model_len=64)


def test_type_that_is_not_read_is_named(docs_5m, tmp_path):
    tensors = llama_tensors(docs_5m, F16)
    path = write_gguf(tmp_path / "bad.gguf", llama_metadata(docs_5m), tensors)
    data = path.read_bytes()
    at = data.index(b"blk.0.ffn_up.weight") + len("blk.0.ffn_up.weight") + 4 + 16
    path.write_bytes(data[:at] + struct.pack("<I", 16) + data[at + 4 :])
    with pytest.raises(InputError, match=r"blk.0.ffn_up.weight: has type IQ2_XXS, .*Q4_K"):
        CheckpointReader(path)


def test_split_files_are_one_model_and_a_missing_one_is_named(docs_5m, tmp_path):
    metadata, tensors = llama_metadata(docs_5m), llama_tensors(docs_5m, F16)
    names = list(tensors)
    for number, part in enumerate((names[:9], names[9:])):
        write_gguf(
            tmp_path / f"m-{number + 1:05d}-of-00002.gguf",
            (metadata if not number else {}) | {"split.no": number, "split.count": 2},
            {name: tensors[name] for name in part},
        )
    first = tmp_path / "m-00001-of-00002.gguf"
    whole = write_gguf(tmp_path / "whole.gguf", metadata, tensors)
    assert torch.equal(logits(first), logits(whole))
    (tmp_path / "m-00002-of-00002.gguf").unlink()
    with pytest.raises(InputError, match=r"m-00002-of-00002.gguf: is missing"):
        CheckpointReader(first)
