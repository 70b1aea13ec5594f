"""Rotation of queries and keys by position: a table shared by layers."""

import torch


class Rotary(torch.nn.Module):
    """`cos_sin`: float32 [positions, D], cosines of D/2 frequencies and then their sines.

    D may be smaller than a head's width, and is 0 for layers without rotation.
    """

    def __init__(self, cos_sin: torch.Tensor, interleaved: bool = False) -> None:
        super().__init__()
        self.interleaved = interleaved
        self.register_buffer("cos_sin", cos_sin)
