"""Rotary embedding of queries and keys: a table that layers share."""

import torch


class Rotary(torch.nn.Module):
    """A rotary table. `cos_sin`: float32 [positions, D], D/2 cosines, then D/2 sines.

    D may be smaller than the head size. D is 0 for layers without rotary embedding.
    """

    def __init__(self, cos_sin: torch.Tensor, interleaved: bool = False) -> None:
        super().__init__()
        self.interleaved = interleaved
        self.register_buffer("cos_sin", cos_sin)
