"""CarriedChannels: extra channels of hidden states, for layers that read more than hidden states.

In Gemma 4 E2B and E4B every layer also reads a per-layer input of each token (LayerInputs), and the
last layers read keys and values of earlier layers. Gemma 3n's layers read several streams of hidden
states. These values are stored as channels after the D channels of the hidden states, in this
order: further streams, token ids, keys and values. So all code that handles a layer's inputs and
outputs, and also gradients, handles them unchanged.

Legend:
B: windows, S: tokens of a window
D: hidden size, X: D plus carried channels, N: streams
U: distinct tokens, L: layers, P: width of a layer's input
J: KV heads, H: head dim
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional

from calibrate.calibration.hyper_streams import HyperStreams
from calibrate.calibration.skips import KeptInputs
from calibrate.calibration.token_channels import BASE, DIGITS, as_channels, from_channels
from calibrate.float_model import FloatModel
from calibrate.layer_map import LayerMap
from formats.architecture.family import STREAMS
from formats.architecture.skip_connections import skip_connections
from formats.checkpoint import CheckpointReader
from formats.errors import CheckpointError

MIN_SQUARE = 1e-5  # lower bound of a stream's mean square


class CarriedChannels:
    """Carried channels of one model, and the per-layer inputs of all tokens seen so far."""

    def __init__(
        self,
        reader: FloatModel | CheckpointReader,
        layer_map: LayerMap,
        config: dict[str, Any],
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> None:
        """`reader` reads tensors outside of layers. `config` includes transformers' defaults."""
        row, self._kinds = layer_map.family, config["layer_types"]
        self._device, self._dtype, self._eps = device, dtype, row.norm_eps(config)
        self.hidden_size = config["hidden_size"]
        read = {
            layer: source
            for layer in range(layer_map.num_layers(config))
            if (source := row.kv_source(layer, config)) is not None
        }
        self._shared, self._sources = frozenset(read), sorted(set(read.values()))
        self._heads: dict[str, tuple[int, int]] = {}  # (J, H) of the layers that are read, by kind
        for layer in self._sources:
            prefix = "global_" if row.kind_of_layer(layer, config).full else ""
            heads = config["num_global_key_value_heads" if prefix else "num_key_value_heads"]
            self._heads[self._kinds[layer]] = (heads, config[f"{prefix}head_dim"])
        # matrices [D, D] that project into streams 1, 2, ..., and back from them
        self._into: list[torch.Tensor] = []
        self._back: list[torch.Tensor] = []
        if row.streams:
            self._into, self._back = (
                [reader.get(f"{name}.{i}.weight").to(device, dtype) for i in range(STREAMS - 1)]
                for name in row.streams
            )
        self._first = self.hidden_size * (1 + len(self._into))  # channel of tokens
        kept = sum(2 * J * H for J, H in self._heads.values())
        self.width = self._first - self.hidden_size + DIGITS + kept
        inputs = row.layer_inputs
        self._inputs_ULP: torch.Tensor | None = None
        if inputs is not None:
            self._table, self._layer_width = inputs.table, config[inputs.width_key]
            self._entries = reader.entries
            # rows of the table; tokens beyond it use the row of token 0
            self._num_rows = config.get("vocab_size_per_layer_input") or config["vocab_size"]
            self._projection = reader.get(f"{inputs.model_projection}.weight").to(device, dtype)
            self._norm_P = reader.get(inputs.model_norm).to(device, torch.float32)
            shape = 0, layer_map.num_layers(config), self._layer_width
            self._inputs_ULP = torch.empty(shape, dtype=dtype, device=device)
            self._place_V = torch.full((config["vocab_size"],), -1)

    def start(
        self, ids_S: torch.Tensor, rows_SD: torch.Tensor, is_image_S: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the first layer's input of a window: embeddings and carried channels, [S, X].

        `is_image_S`: mask of tokens whose embeddings come from a vision tower; None: no images.
        """
        if self._inputs_ULP is not None:
            stored_S, ids_S = ids_S, self._numbered(ids_S, is_image_S)
            self._add_tokens(ids_S, rows_SD, stored_S)
        digits_SN = as_channels(ids_S)
        streams = [
            _as_large_as(functional.linear(rows_SD, matrix.to(rows_SD)), rows_SD)
            for matrix in self._into
        ]
        made = torch.cat([rows_SD, *streams, digits_SN.to(rows_SD)], -1)
        zeros = rows_SD.new_zeros(len(ids_S), self.hidden_size + self.width - made.shape[-1])
        return torch.cat([made, zeros], -1)

    def inputs(self, hidden_BSX: torch.Tensor, layer: int) -> torch.Tensor:
        """Return a layer's hidden states: [B, S, D], or [N, B, S, D] with several streams."""
        if not self._into:
            return hidden_BSX[..., : self.hidden_size]
        return torch.stack(hidden_BSX[..., : self._first].split(self.hidden_size, -1))

    def merged(self, hidden_SX: torch.Tensor) -> torch.Tensor:
        """Return the states [S, D] that the last norm reads: the mean of all streams."""
        first_SD, *others = hidden_SX[..., : self._first].split(self.hidden_size, -1)
        if not others:
            return first_SD
        led = [
            _as_large_as(functional.linear(each_SD, matrix.to(each_SD)), first_SD)
            for each_SD, matrix in zip(others, self._back, strict=True)
        ]
        return torch.stack([first_SD, *led]).mean(0)

    def _numbered(self, ids_S: torch.Tensor, is_image_S: torch.Tensor | None) -> torch.Tensor:
        """Give each image token an unused id, because its per-layer input depends on the image."""
        count = 0 if is_image_S is None else int(is_image_S.sum())
        if not count:
            return ids_S
        first = len(self._place_V)
        assert first + count <= BASE**DIGITS
        self._place_V = torch.cat([self._place_V, torch.full((count,), -1)])
        numbers_S = ids_S.clone()
        numbers_S[is_image_S] = torch.arange(first, first + count, device=ids_S.device)
        return numbers_S

    def _add_tokens(
        self, ids_S: torch.Tensor, rows_SD: torch.Tensor, stored_S: torch.Tensor
    ) -> None:
        """Compute the per-layer inputs of tokens not seen before, as transformers does.

        `stored_S`: for each token, the token whose row of the table is used.
        """
        ids_S = ids_S.cpu()
        new = {int(token): at for at, token in enumerate(ids_S) if self._place_V[token] < 0}
        if not new:
            return
        entry = self._entries.get(self._table)
        if entry is None or not entry.dtype.is_floating_point:
            found = "none" if entry is None else f"{entry.dtype} {list(entry.shape)}"
            raise CheckpointError(
                self._table,
                f"expected a float matrix, found {found}",
                "start from the float model",
            )
        tokens = stored_S.cpu()[list(new.values())].tolist()
        rows = [token if token < self._num_rows else 0 for token in tokens]
        stored = torch.cat([entry.rows(row, row + 1) for row in rows])
        stored = stored.to(self._device, self._dtype)
        rows_UD = rows_SD[list(new.values())].to(self._device, self._dtype)
        made = functional.linear(rows_UD, self._projection) * self.hidden_size**-0.5
        made_ULP = made.unflatten(-1, (-1, self._layer_width))
        normed = functional.rms_norm(
            made_ULP.float(), (self._layer_width,), self._norm_P, self._eps
        )
        root = torch.tensor(self._layer_width**0.5, dtype=self._dtype)
        stored_ULP = stored.unflatten(-1, (-1, self._layer_width)) * root
        inputs_ULP = (normed.to(self._dtype) + stored_ULP) * 2**-0.5
        count = len(self._inputs_ULP)
        self._place_V[list(new)] = torch.arange(count, count + len(new))
        self._inputs_ULP = torch.cat([self._inputs_ULP, inputs_ULP])

    def arguments(self, hidden_BSX: torch.Tensor, layer: int) -> dict[str, Any]:
        """Return the arguments of a transformers layer besides the hidden states.

        If later layers read its keys and values, the layer stores them in `shared_kv_states`.
        """
        found: dict[str, Any] = {"shared_kv_states": {}}
        if self._inputs_ULP is not None:
            ids_BS = from_channels(hidden_BSX[..., self._first :])
            place_BS = self._place_V.to(ids_BS.device)[ids_BS]
            found["per_layer_input"] = self._inputs_ULP[place_BS, layer]
        if layer in self._shared:
            kind = self._kinds[layer]
            keys, values = (
                hidden_BSX[..., part].unflatten(-1, (-1, self._heads[kind][1])).transpose(1, 2)
                for part in self._parts(kind)
            )
            found["shared_kv_states"][kind] = (keys, values)
        return found

    def joined(
        self,
        output: torch.Tensor,
        hidden_BSX: torch.Tensor,
        layer: int,
        arguments: Mapping[str, Any],
    ) -> torch.Tensor:
        """Return a layer's outputs with carried channels, updated with its shared keys, values."""
        output_BSD = torch.cat(list(output), -1) if self._into else output
        carried = hidden_BSX[..., self._first :]
        if layer not in self._sources:
            return torch.cat([output_BSD, carried], -1)
        kind = self._kinds[layer]
        made = [x.transpose(1, 2).flatten(2) for x in arguments["shared_kv_states"][kind]]
        keys, _ = self._parts(kind)
        start = keys.start - self._first
        stop = start + sum(each.shape[-1] for each in made)
        parts = [output_BSD, carried[..., :start], *made, carried[..., stop:]]
        return torch.cat(parts, -1)

    def _parts(self, kind: str) -> tuple[slice, slice]:
        """Channels of the keys, and of the values, that layers of one attention type share."""
        start = self._first + DIGITS
        for each, (J, H) in self._heads.items():
            if each == kind:
                return slice(start, start + J * H), slice(start + J * H, start + 2 * J * H)
            start += 2 * J * H
        raise AssertionError(f"no layer of kind {kind} is shared")


def _as_large_as(x_SD: torch.Tensor, target_SD: torch.Tensor) -> torch.Tensor:
    """Scale each row of x to the root mean square of the target's row, as transformers does."""
    root = target_SD.square().mean(-1, keepdim=True).sqrt()
    return x_SD * root / x_SD.square().mean(-1, keepdim=True).clamp(min=MIN_SQUARE).sqrt()


def carried_of(
    reader: FloatModel | CheckpointReader,
    layer_map: LayerMap,
    config: dict[str, Any],
    device: torch.device | str,
    dtype: torch.dtype,
) -> CarriedChannels | HyperStreams | KeptInputs | None:
    """Return the carried channels of a model, or None if layers read only hidden states."""
    row = layer_map.family
    if row.merge_tensors:
        return HyperStreams(reader, row, config, device)
    if row.skips:
        return KeptInputs(skip_connections(config), config["hidden_size"])
    layers = range(layer_map.num_layers(config))
    shares = any(row.kv_source(layer, config) is not None for layer in layers)
    if row.layer_inputs is None and not shares:
        return None
    return CarriedChannels(reader, layer_map, config, device, dtype)
