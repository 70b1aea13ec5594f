"""PageSender's host memory: it is unregistered only if CUDA's driver registered it.

A failed call of CUDA's runtime would leave an error that torch raises in a later, unrelated call.
"""

from types import SimpleNamespace

import pytest
import torch

from qkernels.collective import cuda_ipc
from qkernels.collective.peer_memory import PeerAccessError
from qserve.kv_transfer.peer import sender
from qserve.kv_transfer.peer.sender import PageSender


def nothing() -> None:
    pass


@pytest.mark.parametrize("refuses", [False, True])
def test_memory_is_unregistered_only_if_it_was_registered(refuses, monkeypatch, caplog):
    calls = []

    def call(name, *arguments):
        calls.append(name)
        if refuses and name == "cuMemHostRegister_v2":
            raise PeerAccessError(f"CUDA's {name}", "CUDA_ERROR_NOT_PERMITTED (800)")

    monkeypatch.setattr(cuda_ipc, "_call", call)
    own = object.__new__(PageSender)
    own._progress_S, own._regions = torch.zeros(4, dtype=torch.int64), []
    own._stream = SimpleNamespace(synchronize=nothing)
    own._index = own._memory = SimpleNamespace(close=nothing)
    own._is_registered = sender._register(own._progress_S)
    own.close()
    expected = ["cuMemHostRegister_v2"] + ([] if refuses else ["cuMemHostUnregister"])
    assert calls == expected
    assert ("CUDA_ERROR_NOT_PERMITTED" in caplog.text) == refuses
