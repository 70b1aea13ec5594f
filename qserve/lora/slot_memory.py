"""SlotMemory: the adapter slots on the device, connected to the decoder's linears.

Letters in names are those of qkernels/lora/weights.py.
"""

from collections.abc import Iterator

import torch

from formats.errors import InputError
from qkernels.lora.weights import TABLE_COLUMNS, LoraWeights
from qkernels.moe.adapted.weights import ExpertLora
from qkernels.moe.experts import ExpertsProblem
from qserve.lora.layout import AdapterLayout, PackedAdapter, Place
from qserve.model.blocks.latent.adapters import LatentAdapters
from qserve.model.blocks.linear import AdaptedLinear, AdaptedRows
from qserve.model.blocks.moe import ExpertSlots, MoeMlp
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
        self.experts: list[ExpertsProblem] = []  # experts with adapters, for the warm-up
        for number, place in enumerate(layout.places):
            if place.experts is None:
                self._adapt(decoder, place, self._weights(number, place))
            else:
                self._adapt_experts(decoder, place, self._expert_lora(number, place))

    def _adapt(self, decoder: Decoder, place: Place, weights: LoraWeights) -> None:
        """Add the adapters of one projection to the block that runs it.

        Raises InputError if it runs in no linear.
        """
        config = decoder.config
        layer = decoder.layers[decoder.layer_numbers.index(place.layer)]
        row = config.family.of_layer(place.layer, config.values)
        if place.projection in row.latent[-1:]:  # attention absorbs it
            attention = layer.attention
            shape = attention.shape
            attention.adapters = LatentAdapters(weights, self.rows, shape.nope, shape.value)
            return
        base = decoder.linears.get(place.modules[0])
        if base is None:
            raise InputError(
                "--enable-lora",
                f"does not work with {row.architecture}: adapters cannot be added to"
                f" {place.modules[0]}",
                "remove it, or serve another model",
            )
        adapted = AdaptedLinear(base, weights, self.rows, fixed_order=self.fixed_order)
        # The sum over ranks of a RowParallel, whose inner linear this may be, also adds up the
        # adapters' partial sums.
        owner, name = _owner_of(layer, base)
        setattr(owner, name, adapted)

    def _adapt_experts(self, decoder: Decoder, place: Place, lora: ExpertLora) -> None:
        """Add the adapters of one of the two products of a layer's experts."""
        layer = decoder.layers[decoder.layer_numbers.index(place.layer)]
        (block,) = (module for module in layer.modules() if isinstance(module, MoeMlp))
        if block.adapters is None:
            block.adapters = ExpertSlots(self.rows)
            self.experts.append(block.experts.problem)
        block.adapters.add(lora)

    @property
    def max_rank(self) -> int:
        return self.memory.shape[1]

    @property
    def num_bytes(self) -> int:
        return self.memory.nbytes + self._ranks.nbytes + self._scales.nbytes

    @property
    def weights(self) -> Iterator[LoraWeights]:
        """The adapter matrices of each linear that is not of experts."""
        for number, place in enumerate(self.layout.places):
            if place.experts is None:
                yield self._weights(number, place)

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

    def _expert_lora(self, number: int, place: Place) -> ExpertLora:
        """Return views of one product of experts in all slots."""
        L, R, piece = self.memory.shape
        E, S, K, N = place.experts, len(place.sizes), place.inputs, sum(place.sizes)
        slot = (R * piece, piece)
        return ExpertLora(
            a_LRESK=self.memory.as_strided((L, R, E, S, K), (*slot, S * K, K, 1), place.a),
            b_LREN=self.memory.as_strided((L, R, E, N), (*slot, N, 1), place.b),
            ranks_LS=self._ranks[:, number],
            scales_LS=self._scales[:, number],
            sizes=place.sizes,
        )


def _owner_of(layer: torch.nn.Module, linear: torch.nn.Module) -> tuple[torch.nn.Module, str]:
    """Return the module of a layer that has a linear, and the name of its attribute."""
    return next(
        (owner, name)
        for owner in layer.modules()
        for name, child in owner.named_children()
        if child is linear
    )
