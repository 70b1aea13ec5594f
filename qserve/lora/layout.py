"""Memory layout of an adapter, the same on the host and in an adapter slot of the device.

Row j of all A matrices and column j of all B matrices are adjacent and form a piece. An adapter of
rank r is r pieces, copied in one operation. With tensor parallelism, a rank holds what its shards
of the linears need: all of A and a shard of B if the outputs are sharded, a shard of A and all of
B if the inputs are sharded. In the second case the layer's all-reduce also adds up the products
with A and B. Dimension letters as in qkernels/lora/weights.py.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import torch

from formats.architecture.projection import Projection
from formats.errors import CheckpointError, InputError
from formats.in_memory.slices import Rows, take_rows
from formats.peft.lora import LoraAdapter, adapted_projections, adapted_shapes
from formats.peft.routed_experts import StackedExperts, expert_shapes, layers_with_experts
from qkernels.lora.config import MAX_SLICES
from qkernels.lora.weights import TABLE_COLUMNS
from qserve.model.model_config import ModelConfig
from qserve.model.tp_plan import LinearPart

ALIGNMENT = 16  # elements: addresses are multiples of 32 bytes, as kernels require


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Location of one projection's matrices in a piece."""

    layer: int
    projection: Projection
    modules: tuple[str, ...]  # names of its linears in the checkpoint
    parts: tuple[LinearPart, ...]  # this rank's shard of each
    sizes: tuple[int, ...]  # number of outputs of each
    inputs: int
    a: int  # offset of the A matrices, S K elements
    b: int  # offset of the B matrices, one element per output
    # Number of routed experts that this rank holds; `modules` and `parts` are then those of expert
    # after expert, and so are the matrices. None: not of experts
    experts: int | None = None

    @property
    def end(self) -> int:
        """Offset of the end."""
        return self.b + (self.experts or 1) * sum(self.sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedAdapter:
    """An adapter in the layout of a slot."""

    pieces: torch.Tensor  # [r, piece]
    ranks: torch.Tensor  # int32 [places, TABLE_COLUMNS]
    scales: torch.Tensor  # float32 [places, TABLE_COLUMNS]

    @property
    def rank(self) -> int:
        return self.pieces.shape[0]


class AdapterLayout:
    """Location of each linear's matrices in a piece, for all layers of a model or for some."""

    def __init__(
        self,
        config: ModelConfig,
        parts: Mapping[str, LinearPart] | None = None,
        layers: Sequence[int] | None = None,
        experts: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        """Create the layout of a rank.

        `config`: of the whole model. `parts`: this rank's shard of each sharded linear.
        `layers`: the layers of this rank. None: all. `experts`: this rank's routed experts in each
        layer that has experts. None: they take no adapters.
        """
        layers = range(config.num_layers) if layers is None else layers
        places = list(_places(config, parts or {}, layers))
        self.family = config.family
        self.shapes = adapted_shapes(config.family, config.values)  # of the whole model's linears
        self.stacked: StackedExperts | None = None
        if experts is not None:
            of_experts = expert_shapes(config.family, config.values)
            if not of_experts:
                raise InputError(
                    "--lora-experts",
                    f"does not work with {config.family.architecture}, which has no routed experts"
                    " that take adapters",
                    "remove it",
                )
            self.shapes |= of_experts
            self.stacked = StackedExperts(config.family, config.values)
            at = _aligned(places[-1].end) if places else 0
            places += _expert_places(config, parts or {}, layers, experts, at)
        self.places = tuple(places)
        self.piece = _aligned(places[-1].end)  # elements of one piece

    def pack(self, adapter: LoraAdapter, dtype: torch.dtype, *, pinned: bool) -> PackedAdapter:
        """Copy an adapter to the host. `pinned`: in pinned memory, for a GPU.

        Raises CheckpointError.
        """
        pieces = torch.zeros(adapter.rank, self.piece, dtype=dtype, pin_memory=pinned)
        tables = (len(self.places), TABLE_COLUMNS)
        ranks = torch.zeros(tables, dtype=torch.int32, pin_memory=pinned)
        scales = torch.zeros(tables, dtype=torch.float32, pin_memory=pinned)
        for number, place in enumerate(self.places):
            column, S = place.b, len(place.sizes)
            for s in range(S):
                of_slice = [adapter.pairs.get(module) for module in place.modules[s::S]]
                found = [pair for pair in of_slice if pair is not None]
                if found:
                    ranks[number, s] = max(pair.rank for pair in found)
                    scales[number, s] = max((pair.scale for pair in found), key=abs)
            for at, (module, part) in enumerate(zip(place.modules, place.parts, strict=True)):
                pair, s = adapter.pairs.get(module), at % S
                if pair is not None:
                    start = place.a + at * place.inputs
                    a_rK, b_Nr = pair.a_rK, pair.b_Nr
                    if part.inputs is not None:
                        a_rK = take_rows(a_rK, part.inputs, 1)
                    if part.rows is not None:
                        b_Nr = take_rows(b_Nr, part.rows)
                    scale = scales[number, s].item()
                    if place.experts is not None and scale:  # experts have one scale
                        b_Nr = b_Nr.float() * (pair.scale / scale)
                    pieces[: pair.rank, start : start + place.inputs] = a_rK
                    pieces[: pair.rank, column : column + place.sizes[s]] = b_Nr.T
                column += place.sizes[s]
        if not pieces.isfinite().all():
            raise CheckpointError(
                adapter.folder, f"has values beyond the range of {dtype}", "use --dtype bfloat16"
            )
        return PackedAdapter(pieces=pieces, ranks=ranks, scales=scales)


def adapter_digest(adapter: LoraAdapter) -> str:
    """Digest of all weights of an adapter. Equal digests mean equal results."""
    digest = blake2b(digest_size=16)
    for module, pair in sorted(adapter.pairs.items()):
        digest.update(f"{module} {pair.rank} {pair.scale!r} {pair.a_rK.dtype} ".encode())
        for tensor in (pair.a_rK, pair.b_Nr):
            digest.update(tensor.contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


def _places(
    config: ModelConfig, parts: Mapping[str, LinearPart], layers: Sequence[int]
) -> Iterator[Place]:
    sizes, at, whole = config.sizes, 0, LinearPart()
    for layer, prefix, projection in adapted_projections(config.family, config.values):
        if layer not in layers:
            continue
        linears = projection.linears
        modules = tuple(f"{prefix}.{linear.name}" for linear in linears)
        if len(linears) > MAX_SLICES:
            raise InputError(
                "--enable-lora",
                f"does not work with {config.family.architecture}: {', '.join(modules)} run as one"
                f" matrix, and adapters support {MAX_SLICES} linears in one",
                "remove it, or serve another model",
            )
        ours = tuple(parts.get(module, whole) for module in modules)
        outputs = tuple(
            _count(part.rows, sum(sizes[name] for name in linear.outputs))
            for linear, part in zip(linears, ours, strict=True)
        )
        inputs = _count(ours[0].inputs, sizes[projection.inputs])
        b = _aligned(at + len(linears) * inputs)
        yield Place(
            layer=layer,
            projection=projection,
            modules=modules,
            parts=ours,
            sizes=outputs,
            inputs=inputs,
            a=at,
            b=b,
        )
        at = _aligned(b + sum(outputs))


def _expert_places(
    config: ModelConfig,
    parts: Mapping[str, LinearPart],
    layers: Sequence[int],
    experts: Mapping[int, Sequence[int]],
    at: int,
) -> Iterator[Place]:
    """Yield the places of routed experts: gate and up of a layer's experts, then down."""
    sizes, whole = config.sizes, LinearPart()
    for each in layers_with_experts(config.family, config.values):
        if each.layer not in layers:
            continue
        here = experts[each.layer]
        for place in range(2):
            projections = [each.experts[number][place] for number in here]
            linears = projections[0].linears
            modules = tuple(
                f"{each.prefix}.{linear.name}" for own in projections for linear in own.linears
            )
            ours = tuple(parts.get(module, whole) for module in modules)
            outputs = tuple(
                _count(part.rows, sum(sizes[name] for name in linear.outputs))
                for linear, part in zip(linears, ours, strict=False)
            )
            inputs = _count(ours[0].inputs, sizes[linears[0].inputs])
            b = _aligned(at + len(modules) * inputs)
            found = Place(
                layer=each.layer,
                projection=projections[0],
                modules=modules,
                parts=ours,
                sizes=outputs,
                inputs=inputs,
                a=at,
                b=b,
                experts=len(here),
            )
            yield found
            at = _aligned(found.end)


def _count(rows: Rows | None, total: int) -> int:
    if rows is None:
        return total
    if isinstance(rows, torch.Tensor):
        return len(rows)
    return sum(stop - start for start, stop in rows)


def _aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT
