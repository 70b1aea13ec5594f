"""GGUF files: blocks as gguf-py decodes them, models as their source."""

import base64
import hashlib
import json
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
    """Return the cache folder of GGUF files, below a new home folder."""
    home = tmp_path / "home"
    monkeypatch.setenv("HOME", str(home))
    return home / ".cache" / "qserve" / "gguf"


@pytest.mark.parametrize("name", GOLDEN)
def test_blocks_equal_gguf_py_bitwise(name):
    kind, golden = BY_NAME[name], GOLDEN[name]
    data = torch.frombuffer(bytearray(base64.b64decode(golden["blocks"])), dtype=torch.uint8)
    found = decode_rows(data, kind, 256)
    assert found.dtype == torch.float32 and found.shape == (2, 256)
    assert found[0, :4].tolist() == golden["first"]
    assert hashlib.sha256(found.numpy().tobytes()).hexdigest() == golden["sha256"]


def test_every_readable_block_type_has_golden_value():
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


def test_float_file_equals_source(written, docs_5m):
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


def test_tokenizer_and_template_equal_source(written, docs_5m):
    found, want = Tokenizer(written(F16)), Tokenizer(docs_5m)
    for text in ("Ownership in Rust's model", "1234 été 🦕\n\n  x", "", "<s>a</s>"):
        assert found.encode(text) == want.encode(text)
        assert found.decode(found.encode(text)) == want.decode(want.encode(text))
    messages = [{"role": "user", "content": "What is a borrow?"}]
    assert found.render_chat(messages) == want.render_chat(messages)


def test_commands_accept_gguf_file(written, tmp_path, capsys):
    path = written(F16)
    arguments = ["--device", "cpu", "--prompt", "Ownership", "--max-tokens", "4"]
    assert main(["generate", str(path), *arguments]) == 0
    assert main(["inspect", str(path)]) == 0
    assert "docs.gguf: LlamaForCausalLM" in capsys.readouterr().out
    target = tmp_path / "w4"
    flags = ["--recipe", "rtn", "--quality-windows", "0"]
    assert main(["quantize", str(path), "-o", str(target), *flags]) == 0
    assert inspect_checkpoint(target).scheme == "w4a16-sym"


def test_side_folder_is_cached_until_file_changes(written, cache):
    path = written(F16)
    first = CheckpointReader(path).folder
    assert CheckpointReader(path).folder == first and len([*cache.iterdir()]) == 1
    written(Q8_0)
    with pytest.raises(InputError, match="has changed since it was opened"):
        CheckpointReader(first)
    assert CheckpointReader(path).folder != first


def test_errors_name_gguf_file_not_cache_folder(written, docs_5m, tmp_path):
    path = written(Q4_0)
    with pytest.raises(InputError, match="docs.gguf is quantized already") as caught:
        LLM(str(path), device="cpu", quantization="w4a16")
    assert ".cache" not in str(caught.value)
    bare = {k: v for k, v in llama_metadata(docs_5m).items() if not k.startswith("tokenizer.")}
    path = write_gguf(tmp_path / "bare.gguf", bare, llama_tensors(docs_5m, F16))
    (problem,) = inspect_checkpoint(path).problems
    assert problem.subject == str(path) and problem.text.startswith("has no tokenizer")
    with pytest.raises(InputError, match="bare.gguf: has no tokenizer"):
        Tokenizer(path)


def test_split_files_load_together_and_missing_split_is_named(docs_5m, tmp_path):
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
