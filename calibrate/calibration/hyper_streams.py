"""Streams of hidden states of models with hyper-connections (DeepSeek-V4), stored as channels.

The channels of a token are its N streams of D channels, then its token id, which the experts of
some layers need. All code that handles a layer's inputs and outputs handles them unchanged, as it
does the channels of carried.py.

Legend: B windows, S tokens of a window, D hidden size, N streams, X: N D plus channels of tokens.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional

from calibrate.calibration.token_channels import DIGITS, as_channels, from_channels
from calibrate.float_model import FloatModel
from formats.architecture.family import Family
from formats.checkpoint import CheckpointReader


class HyperStreams:
    """Channels of streams and tokens, and the weighted sum of streams that the last norm reads."""

    def __init__(
        self,
        reader: FloatModel | CheckpointReader,
        family: Family,
        config: Mapping[str, Any],
        device: torch.device | str,
    ) -> None:
        """`reader` reads tensors outside of layers. `config` includes transformers' defaults."""
        self.hidden_size, self._count = config["hidden_size"], config["hc_mult"]
        self._norm_eps, self._eps = family.norm_eps(config), config["hc_eps"]
        self._merging = {
            key: reader.get(name).to(device, torch.float32)
            for key, (name, _) in family.merge_tensors.items()
        }
        self._first = self._count * self.hidden_size  # channel of tokens
        self.width = self._first - self.hidden_size + DIGITS

    def start(
        self, ids_S: torch.Tensor, rows_SD: torch.Tensor, is_image_S: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the first layer's input of a window: copies of the embeddings, and token ids."""
        return torch.cat([rows_SD.repeat(1, self._count), as_channels(ids_S).to(rows_SD)], -1)

    def inputs(self, hidden_BSX: torch.Tensor, layer: int) -> torch.Tensor:
        """Return the streams that a layer reads, [B, S, N, D]."""
        return hidden_BSX[..., : self._first].unflatten(-1, (self._count, -1))

    def arguments(self, hidden_BSX: torch.Tensor, layer: int) -> dict[str, Any]:
        """Return the arguments of a layer besides the streams."""
        return {"input_ids": from_channels(hidden_BSX[..., self._first :])}

    def joined(
        self,
        output_BSND: torch.Tensor,
        hidden_BSX: torch.Tensor,
        layer: int,
        arguments: Mapping[str, Any],
    ) -> torch.Tensor:
        """Return a layer's outputs with the channels of tokens."""
        return torch.cat([output_BSND.flatten(-2), hidden_BSX[..., self._first :]], -1)

    def merged(self, hidden_SX: torch.Tensor) -> torch.Tensor:
        """Return the states [S, D] that the last norm reads: a weighted sum of the streams."""
        flat_SX = hidden_SX[..., : self._first]
        wide_SX = flat_SX.float()
        root_S1 = (wide_SX.square().mean(-1, keepdim=True) + self._norm_eps).rsqrt()
        mixes_SN = functional.linear(wide_SX * root_S1, self._merging["fn"])
        weights_SN = mixes_SN * self._merging["scale"] + self._merging["base"]
        weights_SN = weights_SN.sigmoid() + self._eps
        streams_SND = flat_SX.unflatten(-1, (self._count, -1))
        return (weights_SN[..., None] * streams_SND).sum(-2).to(hidden_SX.dtype)
