"""The rotation of queries and keys by position: a table that layers share."""

import torch


class Rotary(torch.nn.Module):
    """`cos_sin`: float32 [positions, D], cosines of D/2 frequencies and then their sines.

    D may be less than a head's channels, and 0 for layers that rotate nothing.
    """

    def __init__(self, cos_sin: torch.Tensor, interleaved: bool = False) -> None:
        super().__init__()
        self.interleaved = interleaved
        self.register_buffer("cos_sin", cos_sin)
