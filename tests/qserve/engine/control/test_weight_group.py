"""Weights that a trainer's process broadcasts in a group, as trainers of other engines do."""

import multiprocessing
import socket
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from formats.errors import InputError
from qserve import LLM
from qserve.config import EngineConfig
from qserve.engine.control.commands import (
    BroadcastWeights,
    JoinWeightGroup,
    LeaveWeightGroup,
    ReceiveWeights,
    UpdateWeights,
)
from qserve.engine.control.weight_group import WeightGroup
from qserve.engine.engine import Engine
from tests.qserve.engine.control.driven import GREEDY, PROMPTS, Clock, Driven
from tests.qserve.engine.control.new_weights import changed

GUARD = 120  # seconds, against hanging
WORLD = {"address": "127.0.0.1", "world_size": 2, "timeout": 30.0}
BACKENDS = [
    ("gloo", "cpu"),
    pytest.param("nccl", "cuda", marks=pytest.mark.gpu),
]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def torchs_own_group(backend: str, port: int) -> dist.ProcessGroup:
    """The trainer's group, made by torch's helper as trainers for SGLang make it."""
    from torch.distributed import distributed_c10d as c10d

    timeout = timedelta(seconds=30)
    store, *_ = next(c10d.rendezvous(f"tcp://127.0.0.1:{port}", 0, 2, timeout=timeout))
    store = dist.PrefixStore("updates", store)
    group, _ = c10d._new_process_group_helper(
        2, 0, [], backend, store, group_name="updates", timeout=timeout
    )
    c10d._world.pg_group_ranks[group] = {0: 0, 1: 1}
    return group


def train(folder, backend: str, device: str, port: int, parts: int) -> None:
    """A trainer's process, on the last GPU."""
    if device == "cuda":
        torch.cuda.set_device(torch.cuda.device_count() - 1)
    group = torchs_own_group(backend, port)
    for tensor in list(changed(folder).values()) * parts:
        dist.broadcast(tensor.to(device), src=0, group=group)


def start(folder, **settings) -> Driven:
    config = EngineConfig(model=str(folder), block_size=16, num_gpu_blocks_override=64, **settings)
    return Driven(Engine(config), Clock())


def tell(driven: Driven, command):
    """Return the outcome of a command. Raises its error."""
    number = driven.tell(command)
    driven.run_out()
    (done,) = [each for each in driven.finished if each.number == number]
    if done.error is not None:
        raise done.error
    return done.outcome


def part(tensors: dict[str, torch.Tensor]) -> ReceiveWeights:
    broadcast = BroadcastWeights(
        group="updates",
        names=list(tensors),
        dtypes=[str(each.dtype) for each in tensors.values()],
        shapes=[list(each.shape) for each in tensors.values()],
    )
    return ReceiveWeights(broadcast=broadcast)


@pytest.mark.parametrize(("backend", "device"), BACKENDS)
def test_engine_uses_broadcast_weights(backend, device, tiny_model):
    if backend == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("NCCL requires a GPU for each process")
    folder = tiny_model("qwen3")
    new = changed(folder)
    settings = {"quantization": "w4a16-auto", "device": device}
    llm = LLM(folder, num_gpu_blocks_override=64, **settings)
    llm.update_weights(new)
    (output,) = llm.generate([PROMPTS["a"]], GREEDY, use_tqdm=False)
    driven, port = start(folder, **settings), free_port()
    trainer = multiprocessing.get_context("spawn").Process(
        target=train, args=(folder, backend, device, port, 2), daemon=True
    )
    trainer.start()
    try:
        join = JoinWeightGroup(name="updates", port=port, rank=1, backend=backend, **WORLD)
        tell(driven, join)
        with pytest.raises(InputError, match="updates: exists already"):
            tell(driven, join)
        items = list(new.items())
        first = tell(driven, part(dict(items[:5])))
        assert (first.num_tensors, first.is_complete) == (5, False)
        with pytest.raises(InputError, match="comes twice in the update"):
            tell(driven, part(dict(items[4:6])))  # the parts are dropped, the group is in step
        tell(driven, part(dict(items[5:])))
        with pytest.raises(InputError, match="is missing"):
            tell(driven, UpdateWeights(tensors=[], is_kept=False))
        assert driven.engine.operations.version == "0"
        assert not tell(driven, part(dict(items[:5]))).is_complete
        last = tell(driven, part(dict(items[5:])))
        assert (last.num_tensors, last.is_complete) == (len(new), True)
        tell(driven, UpdateWeights(tensors=[], version="7", is_kept=False, digests=True))
        trainer.join(GUARD)
        assert trainer.exitcode == 0
        driven.add("a")
        driven.run_out()
        assert driven.tokens("a") == output.outputs[0].token_ids
        assert driven.engine.operations.version == "7"
        tell(driven, LeaveWeightGroup(name="updates"))
        with pytest.raises(InputError, match="does not exist.*init_weights_update_group"):
            tell(driven, part(new))
    finally:
        trainer.kill()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"backend": "mpi"}, "expected nccl or gloo, found 'mpi'"),
        ({"backend": "nccl"}, "does not work on a cpu .use gloo"),
        ({"rank": 2}, "expected 1 to 1, found 2"),
        ({"rank": -1}, "expected 1 to 1, found -1"),
        ({"world_size": 1, "rank": 0}, "found 0"),
        ({"timeout": 0.2}, "updates at 127.0.0.1:.* cannot be joined"),
    ],
)
def test_unreachable_weight_group_is_refused(change, problem):
    given = {"name": "updates", "port": free_port(), "rank": 1, "backend": "gloo", **WORLD}
    command = JoinWeightGroup(**{**given, **change})
    with pytest.raises(InputError, match=problem):
        WeightGroup(command, command.rank, torch.device("cpu"))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"dtypes": ["object"]}, "has the unknown dtype 'object'"),
        ({"shapes": [[2**39, 2**39]]}, "has the shape"),
        ({"shapes": [[-1]]}, "has the shape"),
        ({"names": ["a", "b"]}, "expected as many of each, found 2, 1, 1"),
    ],
)
def test_wrong_descriptions_are_refused_before_anything_is_received(change, problem):
    group = WeightGroup.__new__(WeightGroup)  # joins nothing: a receive would fail otherwise
    weights = {"group": "updates", "names": ["a"], "dtypes": ["int8"], "shapes": [[2]]}
    with pytest.raises(InputError, match=problem):
        list(group.receive(BroadcastWeights(**{**weights, **change})))
