"""The rotation of queries and keys by position: a table that layers share."""

import torch


class Rotary(torch.nn.Module):
    """`cos_sin`: float32 [positions, D], cosines of D/2 frequencies and then their sines."""

    def __init__(self, cos_sin: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("cos_sin", cos_sin)
