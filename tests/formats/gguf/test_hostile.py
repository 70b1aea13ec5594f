"""Hostile GGUF files: one line names the file, and no memory goes to what it states."""

import random
import struct
import tracemalloc

import pytest
import torch

from formats.checkpoint import CheckpointReader
from formats.errors import InputError
from formats.gguf.container import read_gguf
from qserve.llm import LLM
from tests.formats.gguf.written import (
    ALIGNMENT,
    ARRAY,
    F16,
    F32,
    STRING,
    UINT32,
    llama_metadata,
    llama_tensors,
    string,
    value,
    write_gguf,
)

MAX_BYTES = 2**23  # a header of 100 bytes needs far less; the library's own modules are loaded


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """Folders of GGUF files are made below this home."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def is_one_line(path, words, read=read_gguf):
    """`read` raises one line with the file and `words`, and takes little memory."""
    tracemalloc.start()
    try:
        with pytest.raises(InputError, match=words) as caught:
            read(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)
    assert len(str(caught.value)) < 600 + len(str(path))
    assert peak < MAX_BYTES


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


@pytest.fixture(scope="module")
def undamaged(docs_5m, tmp_path_factory) -> bytes:
    """A file with a short vocabulary: reading one of 8192 words took longer than all the rest."""
    metadata = llama_metadata(docs_5m)
    short = {key: each[:400] if isinstance(each, list) else each for key, each in metadata.items()}
    tensors = {"output_norm.weight": (torch.ones(256), F32)}
    return write_gguf(tmp_path_factory.mktemp("gguf") / "a.gguf", short, tensors).read_bytes()


@pytest.mark.parametrize(("name", "change"), damages(), ids=lambda each: str(each)[:30])
def test_damaged_file_raises_one_line_error(undamaged, tmp_path, name, change):
    """Or a file that is read as something else: at best the embedding is missing."""
    path = tmp_path / "bad.gguf"
    path.write_bytes(change(undamaged))
    is_one_line(path, "bad.gguf", CheckpointReader)


def test_damage_list_has_sixty_cases():
    assert len(damages()) == 60


def pair(key: str | bytes, kind: int, data: bytes) -> bytes:
    """A pair of metadata."""
    key = key.encode() if isinstance(key, str) else key
    return struct.pack("<Q", len(key)) + key + struct.pack("<I", kind) + data


def listed(kind: int, count: int, data: bytes = b"") -> bytes:
    """An array that states `count` items."""
    return struct.pack("<IQ", kind, count) + data


def tensor(dims=(32,), kind=F32, offset=0, name: str | bytes = "a.weight", num_dims=None) -> bytes:
    """Description of a tensor."""
    name = name.encode() if isinstance(name, str) else name
    head = struct.pack("<Q", len(name)) + name
    head += struct.pack("<I", len(dims) if num_dims is None else num_dims)
    return head + struct.pack(f"<{len(dims)}QIQ", *dims, kind, offset)


def alignment(number: int) -> bytes:
    return string("general.alignment") + value(number)


# name -> pairs of metadata, descriptions of tensors, words of the error. Data are 128 bytes.
LIES = {
    # sizes of tensors
    "no dimensions": ([], [tensor(())], "has 0 dimensions"),
    "five dimensions": ([], [tensor((1, 1, 1, 1, 32))], "has 5 dimensions"),
    "many dimensions": ([], [tensor(num_dims=2**32 - 1)], "has 4294967295 dimensions"),
    "size 0": ([], [tensor((32, 0))], "is empty or too large"),
    "size of 2 ^ 64 - 1": ([], [tensor((2**64 - 1,))], "is empty or too large"),
    "product above 2 ^ 64": ([], [tensor((2**32, 2**32, 2**32))], "is empty or too large"),
    "product that wraps to 32": ([], [tensor((2**63, 2, 32))], "is empty or too large"),
    "more data than the file": ([], [tensor((2**30,))], "truncated: a.weight ends at byte"),
    "half a block": ([], [tensor((48,), 2)], "rows of 48 are not whole blocks of Q4_0"),
    "part of a block of 256": ([], [tensor((128, 2), 12)], "not whole blocks of Q4_K"),
    # types
    "unknown type": ([], [tensor(kind=99)], "unknown type 99"),
    "negative type": ([], [tensor(kind=2**32 - 1)], "unknown type 4294967295"),
    "type that is not read": ([], [tensor((256,), 16)], "has the unsupported type IQ2_XXS"),
    "removed type": ([], [tensor((32,), 4)], "unknown type 4"),
    # offsets
    "offset after the end": ([], [tensor(offset=4096)], "truncated"),
    "offset of 2 ^ 64 - 32": ([], [tensor(offset=2**64 - 32)], "truncated"),
    "offset between": ([], [tensor((8,), offset=8)], "no multiple of 32"),
    "two in one place": ([], [tensor(), tensor(name="b.weight")], "overlaps"),
    "one within another": (
        [],
        [tensor((32,)), tensor((8,), offset=64, name="b.weight")],
        "data of b.weight overlaps that of a.weight",
    ),
    # names
    "empty name": ([], [tensor(name="")], "is not a valid tensor name"),
    "name with a line break": ([], [tensor(name="a\nb")], "is not a valid tensor name"),
    "name twice": ([], [tensor((8,)), tensor((8,), offset=32)], "has the tensor 'a.weight' twice"),
    "long name": ([], [tensor(name="a" * 257)], "name has 257 bytes; at most 256"),
    "long key": ([pair("k" * 257, UINT32, bytes(4))], [], "a key has 257 bytes"),
    "key twice": ([pair("k", UINT32, bytes(4))] * 2, [], "has the key 'k' twice"),
    # values
    "unknown type of a value": ([pair("k", 13, bytes(8))], [], "has the unknown type 13"),
    "long text": ([pair("k", STRING, struct.pack("<Q", 2**24))], [], "has 16777216 bytes"),
    "text of 2 ^ 64 - 1": ([pair("k", STRING, b"\xff" * 8)], [], "has 18446744073709551615 bytes"),
    "many numbers": ([pair("k", ARRAY, listed(UINT32, 2**40))], [], "ends inside its header"),
    "numbers that wrap": ([pair("k", ARRAY, listed(12, 2**61))], [], "ends inside its header"),
    "many texts": ([pair("k", ARRAY, listed(STRING, 2**40))], [], "1099511627776 strings"),
    "more texts than bytes": ([pair("k", ARRAY, listed(STRING, 10**5))], [], "100000 strings"),
    "lists in a list": ([pair("k", ARRAY, listed(ARRAY, 2))], [], "is an array of arrays"),
    "list of an unknown type": ([pair("k", ARRAY, listed(77, 2))], [], "has the unknown type 77"),
    "alignment 0": ([alignment(0)], [tensor()], "alignment: expected a power of two, found 0"),
    "alignment 48": ([alignment(48)], [tensor()], "expected a power of two, found 48"),
    "alignment of 2 ^ 31": ([alignment(2**31)], [tensor()], "expected a power of two"),
    "alignment is a text": (
        [string("general.alignment") + value("32")],
        [tensor()],
        "expected a power of two",
    ),
    "part of a split": (
        [string("split.count") + value(70_000)],
        [tensor()],
        "is one of 70000 files of a split model",
    ),
}


@pytest.mark.parametrize(("pairs", "tensors", "words"), LIES.values(), ids=LIES)
def test_inconsistent_header_raises_one_line_error(tmp_path, pairs, tensors, words):
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(pairs))
    head += b"".join((*pairs, *tensors))
    path = tmp_path / "bad.gguf"
    path.write_bytes(head + bytes(-len(head) % ALIGNMENT) + bytes(128))
    is_one_line(path, words)


def test_consistent_header_is_read(tmp_path):
    """The file of which each of LIES is a variant."""
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, 1) + alignment(32) + tensor()
    path = tmp_path / "good.gguf"
    path.write_bytes(head + bytes(-len(head) % ALIGNMENT) + bytes(128))
    assert read_gguf(path).tensors["a.weight"].shape == (32,)


@pytest.mark.parametrize(
    ("number", "count", "total", "words"),
    [
        (1, 2, 2, "expected split.no 0 of 2, found 1 of 2"),
        (0, 3, 2, "expected split.no 0 of 2, found 0 of 3"),
        (0, 2, 9, "states 9 tensors in all files, found 2"),
    ],
)
def test_inconsistent_split_raises_one_line_error(tmp_path, number, count, total, words):
    paths = [tmp_path / f"m-0000{i}-of-00002.gguf" for i in (1, 2)]
    for i, path in enumerate(paths):
        metadata = {"split.no": i, "split.count": 2}
        if not i:
            metadata = {"split.no": number, "split.count": count, "split.tensors.count": total}
        write_gguf(path, metadata, {f"{i}.weight": (torch.ones(32), F32)})
    is_one_line(paths[0], words)


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
def test_inconsistent_metadata_is_refused_by_key(docs_5m, tmp_path, change, words):
    metadata = llama_metadata(docs_5m) | change
    path = write_gguf(tmp_path / "bad.gguf", metadata, llama_tensors(docs_5m, F16))
    with pytest.raises(InputError, match=words):
        LLM(str(path), device="cpu", max_model_len=64)


def test_unsupported_block_type_is_refused(docs_5m, tmp_path):
    tensors = llama_tensors(docs_5m, F16)
    path = write_gguf(tmp_path / "bad.gguf", llama_metadata(docs_5m), tensors)
    data = path.read_bytes()
    at = data.index(b"blk.0.ffn_up.weight") + len("blk.0.ffn_up.weight") + 4 + 16
    path.write_bytes(data[:at] + struct.pack("<I", 16) + data[at + 4 :])
    with pytest.raises(
        InputError, match=r"blk.0.ffn_up.weight: has the unsupported type IQ2_XXS; .*Q4_K"
    ):
        CheckpointReader(path)
