"""Tensors shared between processes: equal bits, and no other file is opened."""

import errno
import multiprocessing
import os
from pathlib import Path

import msgspec
import pytest
import torch

from formats.errors import InputError
from qserve import LLM
from qserve.config import EngineConfig
from qserve.engine.control import commands, shared_tensors
from qserve.engine.control.commands import SharedTensor
from qserve.engine.control.shared_tensors import PREFIX, open_tensors
from qserve.engine.engine import Engine
from qserve.server.admin.weights import SharedWeights
from qserve.training import send, send_weights
from tests.qserve.engine.control.driven import GREEDY, PROMPTS, Clock, Driven
from tests.qserve.engine.control.new_weights import changed, stored

GUARD = 120  # seconds, against hanging
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def examples(device: str) -> dict[str, torch.Tensor]:
    """Tensors of every kind that a checkpoint has."""
    generator = torch.Generator().manual_seed(5)
    whole = torch.randn(6, 10, generator=generator)
    made = {
        "float": whole,
        "transposed": whole.t(),
        "part": whole[1:4, 2:9],
        "half": whole.half(),
        "bfloat16": whole.bfloat16(),
        "float8": whole.to(torch.float8_e4m3fn),
        "codes": torch.arange(33, dtype=torch.int32),
        "bytes": torch.arange(7, dtype=torch.uint8),
        "number": torch.tensor(1.5),
        "empty": torch.zeros(0, 4),
    }
    return {name: tensor.to(device) for name, tensor in made.items()}


def share(pipe, device: str) -> None:
    """A trainer's process."""
    with shared_tensors.shared_tensors(examples(device)) as shared:
        pipe.send_bytes(msgspec.json.encode(shared))
        pipe.recv_bytes()
        pipe.send_bytes(b"")
        pipe.recv_bytes()


def files() -> set[str]:
    return {each.name for each in shared_tensors._folder().iterdir() if PREFIX in each.name}


@pytest.mark.parametrize("device", DEVICES)
def test_another_process_reads_the_same_bits(device):
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    trainer = context.Process(target=share, args=(theirs, device), daemon=True)
    trainer.start()
    theirs.close()  # so that its end is noticed
    try:
        assert ours.poll(GUARD)
        shared = msgspec.json.decode(ours.recv_bytes(), type=list[SharedTensor])
        found, wanted = dict(open_tensors(shared)), examples(device)
        assert list(found) == list(wanted)
        for name, tensor in wanted.items():
            assert found[name].device.type == device and found[name].dtype == tensor.dtype, name
            assert torch.equal(found[name].float(), tensor.float()), name
        del found, tensor
        ours.send_bytes(b"")
        assert ours.poll(GUARD)
        ours.send_bytes(b"")
        trainer.join(GUARD)
        assert trainer.exitcode == 0
    finally:
        trainer.kill()
    assert not {each.path for each in shared} - {""} or not files()


def test_files_are_removed_at_exit_and_open_tensors_stay_valid():
    before = files()
    with pytest.raises(ZeroDivisionError), shared_tensors.shared_tensors(examples("cpu")) as shared:
        found = dict(open_tensors(shared))
        assert len(files() - before) == 1
        raise ZeroDivisionError
    assert files() == before
    assert torch.equal(found["codes"], torch.arange(33, dtype=torch.int32))
    with pytest.raises(InputError, match="its file cannot be read.*keep it until"):
        list(open_tensors(shared))
    with shared_tensors.shared_tensors({}) as shared:
        assert shared == [] and files() == before


def test_too_small_shared_memory_is_reported(monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    before = files()
    with (
        pytest.raises(InputError, match="has no room for 0.00 GiB.*--shm-size"),
        shared_tensors.shared_tensors({"a": torch.ones(4)}),
    ):
        pass
    assert files() == before


def test_reader_does_not_modify_trainer_tensors():
    with shared_tensors.shared_tensors({"a": torch.ones(4)}) as shared:
        ((_, first),) = open_tensors(shared)
        first.zero_()
        ((_, second),) = open_tensors(shared)
        assert second.tolist() == [1.0] * 4


def test_only_shared_tensor_files_are_opened(tmp_path):
    folder = shared_tensors._folder()
    with shared_tensors.shared_tensors({"a": torch.ones(4, 2)}) as (good,):
        link = folder / f"{PREFIX}link-{os.getpid()}"
        link.symlink_to(good.path)
        other = tmp_path / f"{PREFIX}x"
        other.write_bytes(bytes(64))
        try:
            for change, problem in (
                ({"path": "/etc/passwd"}, "is not in a file"),
                ({"path": str(other)}, "is not in a file"),
                ({"path": f"{folder}/{PREFIX}a/../../etc/passwd"}, "is not in a file"),
                ({"path": f"{folder}/{PREFIX}none"}, "cannot be read"),
                ({"path": str(link)}, "not in a regular file"),
                ({"path": ""}, "is not in a file"),
                ({"offset": 64}, "bytes 64 to 96 are not in its file of 64 bytes"),
                ({"offset": 2}, "not aligned"),
                ({"offset": -64}, "offset -64"),
                ({"shape": [9, 2]}, "bytes 0 to 72 are not in its file"),
                ({"shape": [-1, 2]}, "has the shape"),
                ({"shape": [2**39, 2**39]}, "are not in its file"),
                ({"dtype": "object"}, "has the unknown dtype 'object'"),
            ):
                with pytest.raises(InputError, match=problem):
                    list(open_tensors([msgspec.structs.replace(good, **change)]))
        finally:
            link.unlink()


def start(folder: Path) -> Driven:
    config = EngineConfig(
        model=str(folder), quantization="w4a16-auto", block_size=4, num_gpu_blocks_override=64
    )
    return Driven(Engine(config), Clock())


@pytest.fixture(scope="module")
def wanted(tiny_model) -> list[int]:
    """Tokens of a fresh engine with the new weights."""
    llm = LLM(tiny_model("qwen3"), quantization="w4a16-auto", num_gpu_blocks_override=64)
    llm.update_weights(changed(tiny_model("qwen3")))
    (output,) = llm.generate([PROMPTS["a"]], GREEDY, use_tqdm=False)
    return output.outputs[0].token_ids


def posts_to(driven: Driven, monkeypatch) -> list[SharedWeights]:
    """Let send_weights give its bodies to an engine as the server does."""
    bodies = []

    def post(url, data, api_key, timeout):
        body = msgspec.json.decode(data, type=SharedWeights)
        bodies.append(body)
        if not body.is_last:
            command = commands.ReceiveWeights(tensors=body.tensors, is_first=body.is_first)
        else:
            command = commands.UpdateWeights(
                tensors=body.tensors,
                is_first=body.is_first,
                version=str(body.weight_version),
                mode=body.mode,
                is_kept=False,
                digests=body.digests,
            )
        number = driven.tell(command)
        driven.run_out()
        (done,) = [each for each in driven.finished if each.number == number]
        if done.error is not None:
            raise done.error
        return {"weight_version": done.outcome.state.weight_version}

    monkeypatch.setattr(send, "post", post)
    return bodies


@pytest.mark.parametrize("part_bytes", [None, 20_000])
def test_engine_uses_shared_weights(part_bytes, tiny_model, wanted, monkeypatch):
    folder = tiny_model("qwen3")
    new, driven = changed(folder), start(folder)
    bodies = posts_to(driven, monkeypatch)
    sent = send_weights("", new.items(), api_key="", version=7, part_bytes=part_bytes)
    assert sent == "7" and driven.engine.operations.version == "7"
    assert [each.is_last for each in bodies] == [False] * (len(bodies) - 1) + [True]
    assert (len(bodies) == 1) == (part_bytes is None)
    assert sum(len(each.tensors) for each in bodies) == len(new) and not files()
    driven.add("a")
    driven.run_out()
    assert driven.tokens("a") == wanted
    assert set(driven.engine.operations.weight_digests().tensors) == set(new)


def test_update_restarts_after_refusal(tiny_model, wanted, monkeypatch):
    folder = tiny_model("qwen3")
    new, driven = changed(folder), start(folder)
    posts_to(driven, monkeypatch)
    twice = [*new.items(), next(iter(new.items()))]
    with pytest.raises(InputError, match="comes twice in the update"):
        send_weights("", twice, api_key="", part_bytes=1)
    name = "model.norm.weight"
    with pytest.raises(InputError, match=f"{name}: is missing"):
        send_weights("", {n: t for n, t in new.items() if n != name}, api_key="", part_bytes=1)
    assert driven.engine.operations.version == "0"

    def interrupted():
        yield from list(stored(folder).items())[:5]
        raise ZeroDivisionError

    for part_bytes in (None, 1):  # one that did not end is dropped by the next
        with pytest.raises(ZeroDivisionError):
            send_weights("", interrupted(), api_key="", part_bytes=1)
        old = stored(folder)
        send_weights("", old, api_key="", version=1, part_bytes=part_bytes)
    send_weights("", new, api_key="", version=2, digests=False)
    driven.add("a")
    driven.run_out()
    assert driven.tokens("a") == wanted
    with pytest.raises(InputError, match="were not computed with the last update"):
        driven.engine.operations.weight_digests()
