"""Inkling: names of the text model in published files, and matrices of alternating rows.

Rows of gate and up alternate in one matrix: row 2 i belongs to gate, row 2 i + 1 to up.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from formats.files.tensor_entry import ComputedEntry, TensorEntry, header_of

WHOLE, TEXT = "InklingForConditionalGeneration", "InklingForCausalLM"
_PREFIX, _OWN = "model.llm.", "model.language_model."
# tensors outside of the layers
_ENDS = {
    "embed.weight": f"{_OWN}embed_tokens.weight",
    "embed_norm.weight": f"{_OWN}embed_tokens.embed_norm.weight",
    "norm.weight": f"{_OWN}norm.weight",
    "unembed.weight": "lm_head.weight",
}
# name below a layer -> transformers' name
_NAMES = {
    **{
        "attn_norm.weight": "input_layernorm.weight",
        "mlp_norm.weight": "post_attention_layernorm.weight",
    },
    **{
        f"attn.w{stored}.weight": f"self_attn.{own}_proj.weight"
        for stored, own in (
            ("q_du", "q"),
            ("k_dv", "k"),
            ("v_dv", "v"),
            ("r_du", "r"),
            ("o_ud", "o"),
        )
    },
    **{f"attn.{x}_norm.weight": f"self_attn.{x}_norm.weight" for x in "qk"},
    **{f"attn.{x}_sconv.weight": f"self_attn.{x}_sconv.conv1d.weight" for x in "kv"},
    **{f"{x}_sconv.weight": f"{x}_sconv.conv1d.weight" for x in ("attn", "mlp")},
    "attn.rel_logits_proj.proj": "self_attn.rel_logits_proj.proj",
    "mlp.gate.bias": "mlp.gate.e_score_correction_bias",
    "mlp.w2_md.weight": "mlp.down_proj.weight",
    "mlp.experts.w2_weight": "mlp.experts.down_proj",
    "mlp.shared_experts.shared_w2_weight": "mlp.shared_experts.down_proj",
}
# matrix of alternating rows -> names of gate and up; "{e}" is the number of an expert
_ALTERNATING = {
    "mlp.w13_dn.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.experts.w13_weight": (
        "mlp.experts.{e}.gate_proj.weight",
        "mlp.experts.{e}.up_proj.weight",
    ),
    "mlp.shared_experts.shared_w13_weight": (
        "mlp.shared_experts.{e}.gate_proj.weight",
        "mlp.shared_experts.{e}.up_proj.weight",
    ),
}
# names by transformers before 5.23
_OLDER = {
    f"{model}embed_norm.weight": f"{model}embed_tokens.embed_norm.weight"
    for model in ("model.", _OWN)
}
_LAYER = re.compile(r"(layers\.\d{1,9}\.)(.+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class EveryOtherRow(ComputedEntry):
    """Every other row of a matrix, whose position in the file is `offset`."""

    start: int  # 0 or 1: the first row

    def read(self) -> torch.Tensor:
        """Read the whole matrix, and return its rows. Raises CheckpointError."""
        whole = self.read_bytes(0, 2 * self.num_bytes).view(self.dtype)
        rows, columns = self.shape
        return whole.reshape(2 * rows, columns)[self.start :: 2].contiguous()


def inkling_entries(entries: dict[str, Any]) -> dict[str, Any]:
    """Return the text model's tensors under transformers' names; others are unchanged."""
    found = {}
    for name, entry in entries.items():
        local = name.removeprefix(_PREFIX)
        match = _LAYER.fullmatch(local)
        if name in _OLDER:
            found[_OLDER[name]] = _named(entry, _OLDER[name])
        elif local == name or (match is None and local not in _ENDS):
            found[name] = entry
        elif match is None:
            found[_ENDS[local]] = _named(entry, _ENDS[local])
        else:
            prefix = f"{_OWN}{match[1]}"
            if match[2] in _ALTERNATING and len(entry.shape) in (2, 3):
                found.update(_divided(prefix, _ALTERNATING[match[2]], entry))
            else:
                own = prefix + _NAMES.get(match[2], match[2])
                found[own] = _named(entry, own)
    return found


def _named(entry: Any, name: str) -> Any:
    return replace(entry, name=name)


def _divided(
    prefix: str, names: tuple[str, str], entry: TensorEntry
) -> Iterator[tuple[str, TensorEntry]]:
    """Yield gate and up of a matrix, or of each expert of a stack of matrices."""
    *experts, rows, columns = entry.shape
    count = experts[0] if experts else 1
    size = entry.num_bytes // max(count, 1)
    for number in range(count):
        for start, name in enumerate(names):
            own = prefix + name.format(e=number)
            stated = {
                "name": own,
                "shape": (rows // 2, columns),
                "num_bytes": size // 2,
                "offset": entry.offset + number * size,
            }
            yield own, EveryOtherRow(**{**header_of(entry), **stated}, start=start)
