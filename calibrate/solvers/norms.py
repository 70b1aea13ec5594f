"""TrainableNorms: trainable norm weights of a layer."""

import torch
from torch import nn

from calibrate.layer_map import LayerMap
from calibrate.solvers.solving import LayerState


class TrainableNorms(nn.Module):
    """The norm weights of a layer as trainable parameters. They are not quantized."""

    def __init__(self, layer_map: LayerMap, state: LayerState) -> None:
        super().__init__()
        offsets = {f"{n.name}.weight": n.offset for n in layer_map.family.norms}
        self.stored = {name: state[name] for name in offsets if name in state}
        # Unit of a change: the magnitude of the factor that the norm multiplies by
        self.units = {
            name: (weight.float() + (offsets[name] or layer_map.norm_offset)).abs()
            for name, weight in self.stored.items()
        }
        self.moves = nn.ParameterDict(
            {name.replace(".", "/"): torch.zeros_like(self.units[name]) for name in self.stored}
        )

    def weights(self) -> LayerState:
        return {
            name: weight.float() + self.moves[name.replace(".", "/")] * self.units[name]
            for name, weight in self.stored.items()
        }

    def finished(self) -> LayerState:
        """Return the norm weights in their stored dtypes."""
        with torch.no_grad():
            return {n: w.to(self.stored[n].dtype) for n, w in self.weights().items()}

    def use_stored(self) -> None:
        """Round the weights to their stored dtypes, and make these the new starting values."""
        self.stored = self.finished()
        for move in self.moves.values():
            move.data.zero_()
