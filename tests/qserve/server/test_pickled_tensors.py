"""Messages of SGLang's trainers, made by torch's own pickler: the same tensors, nothing run."""

import base64
import contextlib
import io
import os
import pickle
import random
import sys
import types
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pytest
import torch
from torch.multiprocessing import reductions

from formats.errors import InputError
from qserve.config import EngineConfig
from qserve.engine.control import commands
from qserve.engine.control.shared_tensors import open_tensors
from qserve.engine.engine import Engine
from qserve.server.admin.pickle_reader import Made, PickleError, read_pickle
from qserve.server.admin.pickled_tensors import FLATTENED, tensors_of
from tests.qserve.engine.control.driven import GREEDY, PROMPTS, Clock, Driven
from tests.qserve.engine.control.new_weights import changed, written

BUCKET = "sglang.srt.weight_sync.tensor_bucket"
UPDATER = "sglang.srt.model_executor.model_runner"


@dataclass
class FlattenedTensorMetadata:
    name: str
    shape: torch.Size
    dtype: torch.dtype
    start_idx: int
    end_idx: int
    numel: int


@dataclass
class LocalSerializedTensor:
    values: list[bytes]


@pytest.fixture(autouse=True)
def sglang(monkeypatch):
    """The two classes of SGLang that its messages name, and files for tensors on a CPU."""
    for path, kind in ((BUCKET, FlattenedTensorMetadata), (UPDATER, LocalSerializedTensor)):
        parts = path.split(".")
        for depth in range(1, len(parts) + 1):
            name = ".".join(parts[:depth])
            if name not in sys.modules:
                monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        monkeypatch.setattr(sys.modules[path], kind.__name__, kind, raising=False)
        monkeypatch.setattr(kind, "__module__", path)
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    yield
    torch.multiprocessing.set_sharing_strategy(before)


def pickled(content: object) -> bytes:
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump(content)
    return buffer.getvalue()


def message(content: object) -> str:
    return base64.b64encode(pickled(content)).decode()


def flattened(tensors: dict[str, torch.Tensor]) -> dict:
    """A bucket, as its documentation describes it: bytes of all tensors, and where each begins."""
    metadata, start = [], 0
    for name, tensor in tensors.items():
        size = tensor.nbytes
        metadata.append(
            FlattenedTensorMetadata(name, tensor.shape, tensor.dtype, start, start + size, size)
        )
        start += size
    whole = torch.cat([tensor.flatten().view(torch.uint8) for tensor in tensors.values()])
    return {"flattened_tensor": whole, "metadata": metadata}


def examples() -> dict[str, torch.Tensor]:
    whole = torch.randn(6, 10, generator=torch.Generator().manual_seed(5))
    return {
        "float": whole,
        "rows": whole[2:5],
        "bfloat16": whole.bfloat16(),
        "parameter": torch.nn.Parameter(whole.half()),
        "float8": whole.to(torch.float8_e4m3fn),
        "bytes": torch.arange(8, dtype=torch.uint8),
        "empty": torch.zeros(0, 4),
    }


@pytest.mark.parametrize("kind", ["pairs", "local", FLATTENED])
def test_tensors_round_trip(kind):
    tensors = examples()
    if kind == FLATTENED:
        del tensors["rows"]
        content: object = flattened(tensors)
    elif kind == "local":
        content = [
            (name, LocalSerializedTensor(values=[pickled(each), b"of another rank"]))
            for name, each in tensors.items()
        ]
    else:
        content = list(tensors.items())
    shared = tensors_of(message(content), FLATTENED if kind == FLATTENED else None)
    found = dict(open_tensors(shared))
    assert list(found) == list(tensors)
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, name
        assert torch.equal(found[name].float(), tensor.float()), name


class OnGpu:
    """Pickles as torch pickles a tensor on a GPU."""

    def __init__(self, dtype, shape, stride, offset, device) -> None:
        self.values = (torch.Tensor, torch.Size(shape), stride, offset)
        self.values += (torch.storage.TypedStorage, dtype, device, b"\0handle", 4096, 512, False)
        self.values += (b"counter", 3, b"event", True)

    def __reduce__(self):
        return reductions.rebuild_cuda_tensor, self.values


@pytest.mark.parametrize("device", [1, "GPU-7"])
def test_gpu_handles_are_described(device):
    given = OnGpu(torch.bfloat16, (4, 6), (1, 4), 8, device)
    (found,) = tensors_of(message([("a", given)]), None)
    memory = commands.CudaMemory(
        device=str(device),
        handle=b"\0handle",
        storage_bytes=4096,
        storage_offset=512,
        tensor_offset=8,
        stride=[1, 4],
        counter=b"counter",
        counter_offset=3,
        event=b"event",
        has_event=True,
    )
    assert found == commands.SharedTensor(name="a", dtype="bfloat16", shape=[4, 6], cuda=memory)
    whole = OnGpu(torch.uint8, (64,), (1,), 16, device)
    parts = [FlattenedTensorMetadata("b", torch.Size((2, 3)), torch.float32, 24, 48, 24)]
    content = {"flattened_tensor": whole, "metadata": parts}
    (found,) = tensors_of(message(content), FLATTENED)
    assert (found.name, found.dtype, found.shape) == ("b", "float32", [2, 3])
    assert (found.cuda.tensor_offset, found.cuda.stride) == (10, [3, 1])


class Runs:
    def __reduce__(self):
        return os.system, ("touch it-ran",)


def test_pickled_code_is_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="names posix.system, which is not accepted"):
        tensors_of(message([("a", Runs())]), None)
    with pytest.raises(InputError, match="expected a tensor, found Name"):
        tensors_of(message([("a", eval)]), None)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_records_round_trip(protocol):
    plain = [1, -7, 2**40, 1.5, True, None, "text", b"bytes", (), (1,), {"a": [2, {}]}, "x" * 300]
    plain += [b"y" * 300, list(range(2000)), plain[6], (1, 2, 3, 4)]
    data = pickle.dumps(plain, protocol)
    if protocol == 2:  # its bytes are made by a codec
        plain = [each for each in plain if not isinstance(each, bytes)]
        data = pickle.dumps(plain, protocol)
    assert read_pickle(data) == plain
    path = read_pickle(pickle.dumps(Path("a"), protocol))
    assert isinstance(path, Made) and path.by.name in ("PosixPath", "_reconstructor")


def test_damaged_bytes_raise_one_error():
    data = pickled(list(examples().items()))
    for end in range(0, len(data), 7):
        with pytest.raises(PickleError):
            read_pickle(data[:end])
    chance = random.Random(3)
    for _ in range(300):
        damaged = bytearray(data)
        damaged[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        with contextlib.suppress(InputError):
            tensors_of(base64.b64encode(damaged).decode(), None)


def test_values_of_a_wrong_type_are_refused():
    """The engine would end at a message that it cannot decode."""
    for place, value in ((7, "handle"), (8, "size"), (9, 1.5), (13, 7)):
        given = OnGpu(torch.bfloat16, (4, 6), (6, 1), 8, 0)
        given.values = (*given.values[:place], value, *given.values[place + 1 :])
        with pytest.raises(InputError, match="is not what SGLang's trainers send"):
            tensors_of(message([("a", given)]), None)


def test_lists_too_deep_to_print_are_refused():
    data = pickled([("a", OnGpu(torch.bfloat16, (4, 6), (6, 1), 8, "DEEP"))])
    deep = data.replace(b"\x8c\x04DEEP", b"]" * 3000 + b"a" * 2999)
    assert deep != data
    with pytest.raises(InputError, match="is not what SGLang's trainers send"):
        tensors_of(base64.b64encode(deep).decode(), None)


def test_invalid_messages_are_refused():
    whole = torch.arange(12, dtype=torch.uint8)
    odd = [FlattenedTensorMetadata("b", torch.Size((2,)), torch.float32, 3, 11, 8)]
    for data, load_format, problem in (
        ("&", None, "is not base64"),
        (base64.b64encode(b"text").decode(), None, "is not what SGLang's trainers send"),
        (message([("a", 3)]), None, "expected a tensor, found int"),
        (message([(3, torch.ones(2))]), None, "expected a tensor's name, found int"),
        (message([torch.ones(2)]), None, "is not what SGLang's trainers send"),
        (message([("a", torch.ones(4, 4).t())]), None, "is not contiguous.*send .contiguous"),
        (message([("a", torch.ones(2).cdouble())]), None, "torch.complex128, which is not accept"),
        (message({"metadata": []}), FLATTENED, "is not what"),
        (message({"flattened_tensor": whole, "metadata": odd}), FLATTENED, "begins at byte 3"),
        (message([]), "direct", "load_format: expected flattened_bucket or none"),
    ):
        with pytest.raises(InputError, match=problem):
            tensors_of(data, load_format)


def test_descriptors_are_refused_with_the_remedy():
    torch.multiprocessing.set_sharing_strategy("file_descriptor")
    with pytest.raises(InputError, match="set_sharing_strategy"):
        tensors_of(message([("a", torch.ones(2))]), None)


@pytest.mark.parametrize("quantization", [None, "w4a16-auto"])
def test_buckets_replace_the_weights(quantization, tiny_model, tmp_path):
    folder = tiny_model("qwen3")
    new = changed(folder)

    def engine(model) -> Driven:
        config = EngineConfig(model=str(model), quantization=quantization)
        return Driven(Engine(config), Clock())

    fresh = engine(written(new, folder, tmp_path / "new"))
    fresh.add(*PROMPTS)
    fresh.run_out()
    driven, names = engine(folder), list(new)
    for first in range(0, len(names), 7):
        bucket = {name: new[name] for name in names[first : first + 7]}
        shared = tensors_of(message(flattened(bucket)), FLATTENED)
        driven.tell(commands.ReceiveWeights(tensors=shared))
        assert driven.finished[-1].error is None
        assert driven.finished[-1].outcome.is_complete == (first + 7 >= len(names))
    driven.tell(commands.UpdateWeights(tensors=[], is_kept=False))
    driven.add(*PROMPTS)
    driven.run_out()
    for name in PROMPTS:
        assert driven.tokens(name) == fresh.tokens(name) and len(driven.tokens(name)) == 6
    assert GREEDY.max_tokens == 6
