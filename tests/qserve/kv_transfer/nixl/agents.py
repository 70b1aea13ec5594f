"""InProcessAgent: NIXL's part of the connector, for engines of one process."""

import ctypes

import torch

from qserve.kv_transfer.nixl.agent import Buffer, Region
from qserve.kv_transfer.peer.memory import TransferError


class InProcessAgent:
    """Copies memory where NixlAgent lets NIXL read it. Only registered memory can be read."""

    all: dict[str, "InProcessAgent"] = {}

    def __init__(self, name, backend):
        self.name, self.known, self.registered, self.reads = name, set(), {}, []
        self.all[name] = self

    @property
    def metadata(self):
        return self.name.encode()

    def allocate(self, num_bytes, device):
        bytes_X = torch.full((num_bytes,), 0xA5, dtype=torch.uint8)
        region = Region(address=bytes_X.data_ptr(), kind="DRAM", device=0)
        self.registered[region.address] = num_bytes
        return Buffer(
            bytes_X=bytes_X, region=region, close=lambda: self.registered.pop(region.address)
        )

    def release(self, buffer):
        buffer.close()

    def add(self, metadata):
        if metadata.decode() not in self.all:
            raise TransferError("no such agent")
        self.known.add(metadata.decode())
        return metadata.decode()

    def remove(self, name):
        self.known.discard(name)

    def read(self, name, source, target, parts):
        other = self.all.get(name)
        if name not in self.known or other is None:
            raise TransferError("is not connected")
        self.reads.append(parts)
        for part in parts:
            assert 0 <= part.source <= other.registered[source.address] - part.size
            assert 0 <= part.target <= len(target.bytes_X) - part.size
            to = target.region.address + part.target
            ctypes.memmove(to, source.address + part.source, part.size)

    def close(self):
        assert not self.registered, "memory is registered when the agent ends"
        del self.all[self.name]
