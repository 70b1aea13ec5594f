"""Quantized checkpoints made from a float one without a line of `formats`: for tests of readers.

Codes are packed by numpy's bit functions after the published layouts. Each maker also gives the
float weights that the file means, in a float checkpoint. Legend: N outputs, K inputs, G groups.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
Tensors = dict[str, torch.Tensor]


def stream(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes of each row as one stream of bits, lowest first, in int32 words."""
    flags = (codes.numpy().astype(np.uint8)[..., None] >> np.arange(bits, dtype=np.uint8)) & 1
    packed = np.packbits(flags.reshape(len(codes), -1), axis=1, bitorder="little")
    return torch.from_numpy(packed.view("<i4").copy())


def round_to_grid(
    weight: torch.Tensor,
    bits: int,
    symmetric: bool,
    g_idx: torch.Tensor,
    low: int = 0,
    scale_dtype: torch.dtype = torch.float16,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes [N, K], scales [N, G], zeros [N, G], what they mean [N, K])."""
    weight, top = weight.float(), 2**bits - 1
    groups = int(g_idx.max()) + 1
    scales, zeros = (torch.empty(len(weight), groups) for _ in range(2))
    for group in range(groups):
        part = weight[:, g_idx == group]
        if symmetric:
            scales[:, group] = part.abs().amax(1) / (2 ** (bits - 1) - 0.5)
            zeros[:, group] = 2 ** (bits - 1)
        else:
            lowest, highest = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
            scales[:, group] = (highest - lowest) / top
            zeros[:, group] = (-lowest / scales[:, group]).round().clamp(low, top)
    scales = scales.to(scale_dtype)
    step, zero = scales.float()[:, g_idx], zeros[:, g_idx]
    codes = (weight / step + zero).round().clamp(0, top)
    return codes, scales, zeros, (codes - zero) * step


class HandMade:
    """A copy of a float model: `quantize` some linears, then `write` both forms of it."""

    def __init__(self, source: Path) -> None:
        self.source = source
        self.config = json.loads((source / "config.json").read_text())
        self.float_state = load_file(source / "model.safetensors")
        self.state = dict(self.float_state)
        self.linears = [n.removesuffix(".weight") for n in self.state if "_proj" in n]

    def untie(self) -> None:
        """Give the model a head of its own."""
        head = self.state["model.embed_tokens.weight"].clone()
        self.state["lm_head.weight"] = self.float_state["lm_head.weight"] = head
        self.config["tie_word_embeddings"] = False

    def quantize(
        self, name: str, encode: Callable[..., Tensors], make: Callable[..., tuple], **how: object
    ) -> None:
        """Replace a linear by `encode` of what `make` gives, and by its meaning in float."""
        *parts, meaning = make(self.state.pop(f"{name}.weight"), **how)
        for field, tensor in encode(*parts, **how).items():
            self.state[f"{name}.{field}"] = tensor.contiguous()
        self.float_state[f"{name}.weight"] = meaning

    def write(self, folder: Path, block: dict, second_file: str = "") -> tuple[Path, Path]:
        """(the quantized folder, the float folder)."""
        folders = []
        for name, state, extra in (
            ("quantized", self.state, {} if second_file else {"quantization_config": block}),
            ("float", self.float_state, {}),
        ):
            target = folder / name
            target.mkdir(parents=True)
            for path in self.source.glob("token*"):
                shutil.copy(path, target)
            (target / "config.json").write_text(json.dumps({**self.config, **extra}))
            save_file(state, target / "model.safetensors", metadata={"format": "pt"})
            folders.append(target)
        if second_file:
            (folders[0] / second_file).write_text(json.dumps(block))
        return folders[0], folders[1]


def integer_grid(
    weight: torch.Tensor,
    *,
    bits: int,
    symmetric: bool,
    group: int = -1,
    g_idx: Callable[[int, int], torch.Tensor] | None = None,
    version: str = "v2",
    scale_dtype: torch.dtype = torch.float16,
    **how: object,
) -> tuple[torch.Tensor, ...]:
    """(codes, scales, zeros, g_idx, meaning). v1 cannot say a zero point of 0."""
    width = weight.shape[1]
    length = width if group == -1 else group
    index_K = g_idx(width, length) if g_idx else torch.arange(width) // length
    codes, scales, zeros, meaning = round_to_grid(
        weight, bits, symmetric, index_K, int(version == "v1"), scale_dtype
    )
    return codes, scales, zeros, index_K, meaning


def gptq(codes, scales, zeros, index_K, *, bits, version="v1", **how) -> Tensors:
    stored = (zeros - int(version == "v1")) % 2**bits
    return {
        "qweight": stream(codes, bits).t(),
        "qzeros": stream(stored.t(), bits),
        "scales": scales.t(),
        "g_idx": index_K.int(),
    }


def awq(codes, scales, zeros, index_K, *, with_zeros=True, **how) -> Tensors:
    def words(rows: torch.Tensor) -> torch.Tensor:
        return stream(rows.unflatten(1, (-1, 8))[..., AWQ_ORDER].flatten(1), 4)

    tensors = {"qweight": words(codes.t()), "qzeros": words(zeros.t()), "scales": scales.t()}
    return tensors if with_zeros else {k: v for k, v in tensors.items() if k != "qzeros"}


def packed(codes, scales, zeros, index_K, *, bits, symmetric, g_idx=None, **how) -> Tensors:
    """compressed-tensors pack-quantized."""
    tensors = {
        "weight_packed": stream(codes, bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor(codes.shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = stream(zeros.t(), bits).t()
    return tensors if g_idx is None else {**tensors, "weight_g_idx": index_K.int()}


def int8(codes, scales, zeros, index_K, *, input_scale=None, **how) -> Tensors:
    """compressed-tensors int-quantized."""
    tensors = {"weight": (codes - 128).to(torch.int8), "weight_scale": scales}
    return tensors if input_scale is None else {**tensors, "input_scale": torch.tensor(input_scale)}


def float_grid(weight: torch.Tensor, *, rows: int = 1, columns: int = -1, **how):
    """float8 with a scale for each block of rows x columns (-1: all of them)."""
    weight = weight.float()
    high = len(weight) if rows == -1 else rows
    wide = weight.shape[1] if columns == -1 else columns
    tiles = weight.unflatten(1, (-1, wide)).unflatten(0, (-1, high))
    scales = tiles.abs().amax((1, 3)) / 448
    spread = scales.repeat_interleave(high, 0).repeat_interleave(wide, 1)
    codes = (weight / spread).to(torch.float8_e4m3fn)
    return codes, scales, codes.float() * spread


def float8(codes, scales, *, input_scale=None, **how) -> Tensors:
    """compressed-tensors float-quantized."""
    tensors = {"weight": codes, "weight_scale": scales if scales.numel() > 1 else scales[0]}
    return tensors if input_scale is None else {**tensors, "input_scale": torch.tensor(input_scale)}
