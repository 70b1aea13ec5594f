"""How an adapter lies in memory, the same on the host and in a slot of the device.

Row j of all As and column j of all Bs stand together, a piece, so an adapter of rank r is r pieces
and one copy. Knows names and sizes of the model, no decoder. Legend as in qkernels/lora/weights.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b

import torch

from formats.family import Projection
from formats.lora import LoraAdapter, adapted_projections
from qkernels.lora.weights import TABLE_COLUMNS
from qserve.model.model_config import ModelConfig

ALIGNMENT = 16  # numbers: addresses are multiples of 32 bytes, as kernels want them


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the matrices of one projection stand in a piece."""

    layer: int
    projection: Projection
    modules: tuple[str, ...]  # its linears, by their names in the checkpoint
    sizes: tuple[int, ...]  # outputs of each
    inputs: int
    a: int  # first number of the As, S K of them
    b: int  # first number of the Bs, as many as outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedAdapter:
    """An adapter as it goes into a slot."""

    pieces: torch.Tensor  # [r, piece]
    ranks: torch.Tensor  # int32 [places, TABLE_COLUMNS]
    scales: torch.Tensor  # float32 [places, TABLE_COLUMNS]
    digest: str  # of all of them: equal ones compute the same

    @property
    def rank(self) -> int:
        return self.pieces.shape[0]


class AdapterLayout:
    """The places of a model's linears."""

    def __init__(self, config: ModelConfig) -> None:
        self.places = tuple(_places(config))
        last = self.places[-1]
        self.piece = _aligned(last.b + sum(last.sizes))  # numbers of one rank
        self.shapes = {
            module: (size, place.inputs)
            for place in self.places
            for module, size in zip(place.modules, place.sizes, strict=True)
        }

    def pack(self, adapter: LoraAdapter, dtype: torch.dtype, *, pinned: bool) -> PackedAdapter:
        """A copy on the host; `pinned` where a GPU will fetch it."""
        pieces = torch.zeros(adapter.rank, self.piece, dtype=dtype, pin_memory=pinned)
        tables = (len(self.places), TABLE_COLUMNS)
        ranks = torch.zeros(tables, dtype=torch.int32, pin_memory=pinned)
        scales = torch.zeros(tables, dtype=torch.float32, pin_memory=pinned)
        for number, place in enumerate(self.places):
            column = place.b
            for s, (module, size) in enumerate(zip(place.modules, place.sizes, strict=True)):
                pair = adapter.pairs.get(module)
                if pair is not None:
                    start = place.a + s * place.inputs
                    pieces[: pair.rank, start : start + place.inputs] = pair.a_rK
                    pieces[: pair.rank, column : column + size] = pair.b_Nr.T
                    ranks[number, s], scales[number, s] = pair.rank, pair.scale
                column += size
        digest = blake2b(f"{pieces.dtype} {list(pieces.shape)}".encode(), digest_size=16)
        for tensor in (pieces, ranks, scales):
            digest.update(tensor.view(torch.uint8).numpy())
        return PackedAdapter(pieces=pieces, ranks=ranks, scales=scales, digest=digest.hexdigest())


def _places(config: ModelConfig) -> Iterator[Place]:
    sizes, at = config.sizes, 0
    for layer, prefix, projection in adapted_projections(config.family, config.values):
        linears = projection.linears
        outputs = tuple(sum(sizes[name] for name in linear.outputs) for linear in linears)
        inputs = sizes[projection.inputs]
        b = _aligned(at + len(linears) * inputs)
        yield Place(
            layer=layer,
            projection=projection,
            modules=tuple(f"{prefix}.{linear.name}" for linear in linears),
            sizes=outputs,
            inputs=inputs,
            a=at,
            b=b,
        )
        at = _aligned(b + sum(outputs))


def _aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT
