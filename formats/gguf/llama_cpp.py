"""Verdict on whether llama.cpp loads a GGUF file, from the file's header.

Sources in llama.cpp: ggml/src/gguf.cpp, ggml/src/ggml-cpu/binary-ops.cpp, src/llama-model.cpp,
src/llama-vocab.cpp. Files with unknown types or rows that are not whole blocks do not get here,
because the reader refuses them (container.py). Needs no torch.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

from formats.compatibility.loads_in import Verdict
from formats.gguf.architectures.table import ARCHITECTURES
from formats.gguf.container import ALIGNMENT, DEFAULT_ALIGNMENT, GgufFile, read_gguf
from formats.gguf.folder import read_index
from formats.gguf.pre_tokenizers import PRE_TOKENIZERS

LLAMA_CPP = "llama.cpp"
VOCABULARY = "tokenizer.ggml.model"
PRE = "tokenizer.ggml.pre"
BYTE_LEVEL = "gpt2"  # the tokenizer model that needs a known pre-tokenizer
# types that llama.cpp stores but cannot multiply
NOT_COMPUTED = ("F64", "I8", "I16", "I32", "I64")
VECTOR_TYPES = ("F32", "F16")  # types of norms and biases that work with float32 activations
# metadata keys below the architecture that llama.cpp requires for all architectures read here
REQUIRED = ("block_count", "context_length", "embedding_length", "attention.head_count")


def llama_cpp_verdict(gguf: GgufFile) -> Verdict:
    """Return llama.cpp's verdict on a file: yes, or no with the first reason."""
    reason = next((reason for rule in REFUSALS for reason in rule(gguf)), "")
    if reason:
        return Verdict(LLAMA_CPP, "no", reason)
    return Verdict(LLAMA_CPP, "yes", "and programs built on it")


def verdict_of_folder(folder: Path) -> Verdict:
    """Return llama.cpp's verdict on the file that a folder was made from."""
    return llama_cpp_verdict(read_gguf(read_index(folder).path))


def _architecture(gguf: GgufFile) -> Iterator[str]:
    name = gguf.metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        yield f"has no known architecture {name!r}; known: {', '.join(ARCHITECTURES)}"


def _metadata(gguf: GgufFile) -> Iterator[str]:
    architecture = gguf.metadata["general.architecture"]
    for key in REQUIRED:
        if f"{architecture}.{key}" not in gguf.metadata:
            yield f"requires the metadata {architecture}.{key}, which is missing"


def _tokenizer(gguf: GgufFile) -> Iterator[str]:
    model = gguf.metadata.get(VOCABULARY)
    if model is None:
        yield f"requires the metadata {VOCABULARY}, which is missing: the file has no tokenizer"
    name = gguf.metadata.get(PRE, "")
    if model == BYTE_LEVEL and name not in PRE_TOKENIZERS:
        yield f"knows no pre-tokenizer {name!r} ({PRE})"


def _types(gguf: GgufFile) -> Iterator[str]:
    for tensor in gguf.tensors.values():
        kind = tensor.type.name
        if kind in NOT_COMPUTED:
            yield f"computes nothing with type {kind}: {tensor.name}"
        if len(tensor.shape) == 1 and kind not in VECTOR_TYPES:
            yield f"takes vectors in {' or '.join(VECTOR_TYPES)}, not {kind}: {tensor.name}"


def _offsets(gguf: GgufFile) -> Iterator[str]:
    alignment = gguf.metadata.get(ALIGNMENT, DEFAULT_ALIGNMENT)
    for file in gguf.files:
        tensors = [tensor for tensor in gguf.tensors.values() if tensor.file == file]
        for first, second in zip(tensors, tensors[1:], strict=False):
            end = first.offset + first.num_bytes
            expected = end + -end % alignment
            if second.offset != expected:
                yield (
                    f"needs tensors in file order without gaps: {second.name} is at byte"
                    f" {second.offset}, expected {expected}"
                )


REFUSALS: tuple[Callable[[GgufFile], Iterator[str]], ...] = (
    _architecture,
    _metadata,
    _tokenizer,
    _types,
    _offsets,
)
