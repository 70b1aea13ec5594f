"""Kinds of damage to a quantized folder: one row each, applied to any golden folder."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save

CONFIG, WEIGHTS = "config.json", "model.safetensors"
BLOCK = "quantization_config"
MODULE = "model.layers.0.self_attn.q_proj"
# names of the largest tensor of a linear, and of its scales, in all formats
CODES = ("qweight", "weight_packed", "weight", "W_q", "_weight_qdata")
SCALES = (
    *("scales", "weight_scale", "weight_scale_inv", "weight.absmax", "SCB", "scale"),
    *("_weight_scale", "_weight_scale_and_zero"),
)

BITS = ("bits", "num_bits", "nbits")
GROUPS = ("group_size",)


@dataclass(kw_only=True)
class Folder:
    """Content of a golden folder, to be damaged and written."""

    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    metadata: dict[str, str]
    others: dict[str, bytes] = field(default_factory=dict)
    edits: list[Callable[[bytes], bytes]] = field(default_factory=list)  # of the written weights
    module: str = MODULE  # the damaged linear, or stack of linears

    @classmethod
    def read(cls, path: Path) -> "Folder":
        with safe_open(path / WEIGHTS, "pt") as file:
            metadata = file.metadata() or {}
        tensors = load_file(path / WEIGHTS)
        others = {
            each.name: each.read_bytes()
            for each in path.iterdir()
            if each.name not in (CONFIG, WEIGHTS)
        }
        config = json.loads((path / CONFIG).read_text())
        return cls(config=config, tensors=tensors, metadata=metadata, others=others)

    def write(self, path: Path) -> Path:
        path.mkdir(exist_ok=True)
        for name, data in self.others.items():
            (path / name).write_bytes(data)
        (path / CONFIG).write_text(json.dumps(self.config))
        data = save(self.tensors, self.metadata)
        for edit in self.edits:
            data = edit(data)
        (path / WEIGHTS).write_bytes(data)
        return path

    def named(self, fields: tuple[str, ...]) -> str:
        """Full name of the damaged linear's first tensor with one of the names."""
        full = [f"{self.module}.{name}" for name in fields]
        return next(name for name in full if name in self.tensors)

    @property
    def codes(self) -> str:
        return self.named(CODES)

    @property
    def scales(self) -> str:
        return self.named(SCALES)


def drop_scales(folder: Folder) -> None:
    del folder.tensors[folder.scales]


def drop_codes(folder: Folder) -> None:
    del folder.tensors[folder.codes]


def set_scale(value: float) -> Callable[[Folder], None]:
    def change(folder: Folder) -> None:
        scales = folder.tensors[folder.scales].clone()
        if scales.is_floating_point():
            scales.view(-1)[0] = value
            if math.isfinite(scales.view(-1)[0]):  # float8 has no infinity
                raise NotApplicable
        else:  # exponents in a byte, whose 255 is NaN; double quantization
            if not (math.isnan(value) and folder.scales.endswith("weight_scale")):
                raise NotApplicable
            scales.view(-1)[0] = 255
        folder.tensors[folder.scales] = scales

    return change


def damage_kv_scale(
    change: Callable[[torch.Tensor], torch.Tensor | None],
) -> Callable[[Folder], None]:
    """Change the first layer's scale of an 8-bit KV cache; None removes it."""

    def damage(folder: Folder) -> None:
        name = next((name for name in folder.tensors if name.endswith(".k_scale")), None)
        if name is None:
            raise NotApplicable
        after = change(folder.tensors.pop(name).clone())
        if after is not None:
            folder.tensors[name] = after

    return damage


def change_tensor(
    which: str, change: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[Folder], None]:
    def damage(folder: Folder) -> None:
        name = getattr(folder, which)
        before = folder.tensors[name]
        after = change(before).contiguous().clone()
        if after.shape == before.shape and after.dtype == before.dtype:
            raise NotApplicable
        folder.tensors[name] = after

    return damage


def flat(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.ndim == 2 and tensor.shape[1] == 1:
        raise NotApplicable  # bitsandbytes: the same bytes, which mean the same
    return tensor.reshape(-1)


def edit_bytes(edit: Callable[[bytes], bytes]) -> Callable[[Folder], None]:
    return lambda folder: folder.edits.append(edit)


def edit_header(name: str, key: str, value: Any) -> Callable[[Folder], None]:
    """Change one field of a tensor's entry in the header of the weights."""

    def edit(folder: Folder) -> None:
        full = getattr(folder, name)

        def rewrite(data: bytes) -> bytes:
            length = int.from_bytes(data[:8], "little")
            header = json.loads(data[8 : 8 + length])
            header[full][key] = value
            text = json.dumps(header).encode()
            return len(text).to_bytes(8, "little") + text + data[8 + length :]

        folder.edits.append(rewrite)

    return edit


def repeat_name(data: bytes) -> bytes:
    """State the first tensor of the header twice."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    name = next(key for key in header if key != "__metadata__")
    text = json.dumps(header)[:-1] + f", {json.dumps(name)}: {json.dumps(header[name])}}}"
    return len(text).to_bytes(8, "little") + text.encode() + data[8 + length :]


def index_a_missing_file(folder: Folder) -> None:
    shard = "model-00002-of-00002.safetensors"
    names = dict.fromkeys(folder.tensors, WEIGHTS) | {folder.codes: shard}
    folder.others["model.safetensors.index.json"] = json.dumps({"weight_map": names}).encode()


def index_names_a_missing_tensor(folder: Folder) -> None:
    names = dict.fromkeys(folder.tensors, WEIGHTS)
    del folder.tensors[folder.codes]
    folder.others["model.safetensors.index.json"] = json.dumps({"weight_map": names}).encode()


def set_method(value: Any) -> Callable[[Folder], None]:
    def change(folder: Folder) -> None:
        folder.config[BLOCK] = {**folder.config[BLOCK], "quant_method": value}

    return change


def set_everywhere(keys: tuple[str, ...], value: Any) -> Callable[[Folder], None]:
    """Change every number under one of the keys in the quantization block."""

    def changed(node: Any) -> Any:
        if isinstance(node, list):
            return [changed(each) for each in node]
        if not isinstance(node, dict):
            return node
        return {
            key: value if key in keys and type(each) is int else changed(each)
            for key, each in node.items()
        }

    def of_weights(node: Any) -> Any:
        """The block without what it says about inputs: float8 blocks allow inputs in any groups."""
        if isinstance(node, list):
            return [of_weights(each) for each in node]
        if not isinstance(node, dict):
            return node
        return {key: of_weights(each) for key, each in node.items() if key != "input_activations"}

    def change(folder: Folder) -> None:
        before = folder.config[BLOCK]
        folder.config[BLOCK] = changed(before)
        if of_weights(folder.config[BLOCK]) == of_weights(before):
            raise NotApplicable

    return change


def set_block(value: Any) -> Callable[[Folder], None]:
    def change(folder: Folder) -> None:
        folder.config[BLOCK] = value
        for name in ("quantize_config.json", "hf_quant_config.json"):
            folder.others.pop(name, None)

    return change


def set_size(key: str, value: Any) -> Callable[[Folder], None]:
    return lambda folder: folder.config.__setitem__(key, value)


class NotApplicable(Exception):
    """The format has nothing that this damage could hit."""


DAMAGES: dict[str, Callable[[Folder], None]] = {
    "scales missing": drop_scales,
    "codes missing": drop_codes,
    "NaN scale": set_scale(math.nan),
    "infinite scale": set_scale(math.inf),
    "scales of integers": change_tensor("scales", lambda t: t.to(torch.int64)),
    "codes of floats": change_tensor("codes", lambda t: t.to(torch.float32)),
    "codes a row short": change_tensor("codes", lambda t: t[:-1]),
    "codes a column short": change_tensor("codes", lambda t: t[..., :-1]),
    "codes flat": change_tensor("codes", flat),
    "codes empty": change_tensor("codes", lambda t: t[:0]),
    "scales doubled": change_tensor("scales", lambda t: torch.stack([t, t])),
    "scales empty": change_tensor("scales", lambda t: t.reshape(-1)[:0]),
    "file truncated": edit_bytes(lambda data: data[: len(data) // 2]),
    "file of 4 bytes": edit_bytes(lambda data: data[:4]),
    "negative size": edit_header("codes", "shape", [-64, -8]),
    "unknown dtype": edit_header("codes", "dtype", "I4096"),
    "name twice": edit_bytes(repeat_name),
    "index names a missing file": index_a_missing_file,
    "index names a missing tensor": index_names_a_missing_tensor,
    "unknown quant_method": set_method("sparkling"),
    "quant_method a list": set_method([]),
    "unknown bits": set_everywhere(BITS, 5),
    "negative bits": set_everywhere(BITS, -4),
    "bits that are no number": set_everywhere(BITS, "four"),
    "groups of other inputs": set_everywhere(GROUPS, 8),
    "groups of negative inputs": set_everywhere(GROUPS, -7),
    "no quantization block": set_block(None),
    "quantization block a number": set_block(7),
    "KV scale missing": damage_kv_scale(lambda t: None),
    "KV scale NaN": damage_kv_scale(lambda t: t * math.nan),
    "KV scale of zero": damage_kv_scale(lambda t: t * 0),
    "KV scale of no entries": damage_kv_scale(lambda t: t.reshape(-1)[:0]),
    "KV scales for other heads": damage_kv_scale(lambda t: t.reshape(-1)[:1].repeat(3)),
    "config of other sizes": set_size("hidden_size", 96),
    "config of negative sizes": set_size("hidden_size", -64),
}
