"""SlotMemory: the adapter slots on the device, connected to the decoder's linears.

Letters in names are those of qkernels/lora/weights.py.
"""

from collections.abc import Iterator

import torch

from formats.architecture.rows.latent_parts import queries_of
from qkernels.lora.weights import TABLE_COLUMNS, LoraWeights
from qserve.lora.layout import AdapterLayout, PackedAdapter, Place
from qserve.model.blocks.dense_and_experts import DenseAndExperts
from qserve.model.blocks.gemma.altup import SparseMlp
from qserve.model.blocks.latent.adapters import LatentAdapters
from qserve.model.blocks.linear import AdaptedLinear, AdaptedRows, RowParallel
from qserve.model.blocks.media_experts import MediaExperts
from qserve.model.blocks.mlp import Mlp
from qserve.model.blocks.moe import MoeMlp
from qserve.model.blocks.xielu_mlp import XieluMlp
from qserve.model.decoder import Decoder


class SlotMemory:
    """Memory of the adapter slots. Creating it adds adapters to the decoder's linears."""

    def __init__(
        self,
        decoder: Decoder,
        layout: AdapterLayout,
        *,
        num_slots: int,
        max_rank: int,
        fixed_order: bool = False,
    ) -> None:
        device = decoder.device
        self.rows = AdaptedRows()
        self.fixed_order = fixed_order
        self.layout = layout
        self.memory = torch.empty(
            num_slots, max_rank, layout.piece, dtype=decoder.dtype, device=device
        )
        tables = (num_slots, len(layout.places), TABLE_COLUMNS)
        self._ranks = torch.zeros(tables, dtype=torch.int32, device=device)
        self._scales = torch.zeros(tables, dtype=torch.float32, device=device)
        for number, place in enumerate(layout.places):
            row = decoder.config.family.of_layer(place.layer, decoder.config.values)
            if place.projection in row.latent[-1:]:
                attention = decoder.layers[decoder.layer_numbers.index(place.layer)].attention
                attention.adapters = LatentAdapters(
                    self._weights(number, place),
                    self.rows,
                    attention.shape.nope,
                    attention.shape.value,
                )
                continue
            owner, name = _linear_of(decoder, place)
            if isinstance(getattr(owner, name), RowParallel):
                # the linear's sum over ranks also adds up the adapters' partial sums
                owner, name = getattr(owner, name), "inner"
            linear = AdaptedLinear(
                getattr(owner, name),
                self._weights(number, place),
                self.rows,
                fixed_order=fixed_order,
            )
            setattr(owner, name, linear)

    @property
    def max_rank(self) -> int:
        return self.memory.shape[1]

    @property
    def num_bytes(self) -> int:
        return self.memory.nbytes + self._ranks.nbytes + self._scales.nbytes

    @property
    def weights(self) -> Iterator[LoraWeights]:
        """The adapter matrices of each linear."""
        return (self._weights(number, place) for number, place in enumerate(self.layout.places))

    @torch.inference_mode()
    def place(self, slot: int, adapter: PackedAdapter) -> None:
        """Copy an adapter to a slot, after all launched steps. Does not wait for the copy."""
        self.memory[slot, : adapter.rank].copy_(adapter.pieces, non_blocking=True)
        self._ranks[slot].copy_(adapter.ranks, non_blocking=True)
        self._scales[slot].copy_(adapter.scales, non_blocking=True)

    def _weights(self, number: int, place: Place) -> LoraWeights:
        """Return views of one linear's matrices in all slots."""
        L, R, piece = self.memory.shape
        S, K, N = len(place.sizes), place.inputs, sum(place.sizes)
        of_rank = (R * piece, piece)
        return LoraWeights(
            a_LRSK=self.memory.as_strided((L, R, S, K), (*of_rank, K, 1), place.a),
            b_LRN=self.memory.as_strided((L, R, N), (*of_rank, 1), place.b),
            ranks_LS=self._ranks[:, number],
            scales_LS=self._scales[:, number],
            sizes=place.sizes,
        )


def _linear_of(decoder: Decoder, place: Place) -> tuple[torch.nn.Module, str]:
    """Return the block that has a projection's linear, and the name of the linear's attribute."""
    config = decoder.config
    family = config.family.of_layer(place.layer, config.values)
    layer = decoder.layers[decoder.layer_numbers.index(place.layer)]
    if place.projection in (family.qkv, family.o):
        return layer.attention, "qkv_proj" if place.projection == family.qkv else "o_proj"
    if place.projection == family.head_gates:
        return layer.attention, "gates"
    if place.projection == queries_of(family):
        return layer.attention, "q_b_proj"
    inputs = family.layer_inputs
    if inputs is not None and place.projection in (inputs.gate, inputs.projection):
        return layer.layer_input, "gate" if place.projection == inputs.gate else "projection"
    mlp = layer.mlp.mlp if isinstance(layer.mlp, DenseAndExperts) else layer.mlp
    if isinstance(mlp, MoeMlp | MediaExperts):
        mlp, gate_up = mlp.shared.mlp, family.experts.shared.gate_up
    else:
        gate_up = family.gate_up
    assert isinstance(mlp, Mlp | XieluMlp | SparseMlp), f"{place.projection.name} is in no MLP"
    return mlp, "up_proj" if place.projection == gate_up else "down_proj"
