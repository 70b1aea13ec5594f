"""llama.cpp's verdict on a GGUF file is computed from its header."""

from dataclasses import replace

import pytest

from formats.gguf.block_types import BY_NAME
from formats.gguf.container import read_gguf
from formats.gguf.llama_cpp import LLAMA_CPP, llama_cpp_verdict
from formats.gguf.writing.export import export_gguf
from formats.inspection.inspect import inspect_checkpoint

NORM = "blk.0.attn_norm.weight"
Q = "blk.0.attn_q.weight"


@pytest.fixture(scope="module")
def file(docs_5m, tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    export_gguf(docs_5m, path)
    return path


def test_written_file_gets_llama_cpp_yes(file, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    verdict = inspect_checkpoint(file).loads_in[-1]
    assert (verdict.program, verdict.answer) == (LLAMA_CPP, "yes")


def test_folder_has_no_llama_cpp_verdict(docs_5m):
    assert LLAMA_CPP not in {each.program for each in inspect_checkpoint(docs_5m).loads_in}


def without(key):
    return lambda gguf: replace(gguf, metadata={k: v for k, v in gguf.metadata.items() if k != key})


def stating(key, value):
    return lambda gguf: replace(gguf, metadata={**gguf.metadata, key: value})


def typed(name, kind):
    def change(gguf):
        tensor = replace(gguf.tensors[name], type=BY_NAME[kind])
        return replace(gguf, tensors={**gguf.tensors, name: tensor})

    return change


def moved(name, distance):
    def change(gguf):
        tensor = gguf.tensors[name]
        moved = replace(tensor, offset=tensor.offset + distance)
        return replace(gguf, tensors={**gguf.tensors, name: moved})

    return change


def swapped(gguf):
    """The list of tensors is in another order than their data."""
    return replace(gguf, tensors=dict(reversed(gguf.tensors.items())))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (stating("general.architecture", "llama9"), "no known architecture 'llama9'"),
        (without("llama.context_length"), "llama.context_length, which is missing"),
        (without("llama.attention.head_count"), "llama.attention.head_count, which is missing"),
        (without("tokenizer.ggml.model"), "the file has no tokenizer"),
        (stating("tokenizer.ggml.pre", "gpt-99"), "no pre-tokenizer 'gpt-99'"),
        (typed(NORM, "BF16"), f"vectors in F32 or F16, not BF16: {NORM}"),
        (typed(Q, "F64"), f"nothing with type F64: {Q}"),
        (typed(Q, "I32"), f"nothing with type I32: {Q}"),
        (moved(NORM, 32), f"without gaps: {NORM}"),
        (swapped, "without gaps"),
    ],
)
def test_file_refused_by_llama_cpp_gets_no(file, change, words):
    verdict = llama_cpp_verdict(change(read_gguf(file)))
    assert verdict.answer == "no" and words in verdict.reason
