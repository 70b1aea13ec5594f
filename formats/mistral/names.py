"""Names of Mistral's tensors in transformers' classes, and the order of their rows.

Mistral rotates neighboring channels of a head together. transformers rotates a channel of the first
half with one of the second half. So rows of queries and keys get another order. For a head of 6:

    stored     0 1 2 3 4 5
    presented  0 2 4 1 3 5

Queries and keys of latent attention keep their order, because transformers' class also rotates
neighbors.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from formats.errors import CheckpointError

_LINEARS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_ATTENTION = {
    **{f"w{letter}": f"{letter}_proj" for letter in "qkvo"},
    "wq_a": "q_a_proj",
    "wq_b": "q_b_proj",
    "wkv_a_with_mqa": "kv_a_proj_with_mqa",
    "wkv_b": "kv_b_proj",
    "q_a_norm": "q_a_layernorm",
    "kv_a_norm": "kv_a_layernorm",
}
_NORMS = {"attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_OUTSIDE = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}
_VISION = {
    "vision_language_adapter.w_in": "multi_modal_projector.linear_1",
    "vision_language_adapter.w_out": "multi_modal_projector.linear_2",
    "pre_mm_projector_norm": "multi_modal_projector.norm",
    "patch_merger.merging_layer": "multi_modal_projector.patch_merger.merging_layer",
    "vision_encoder.ln_pre": "vision_tower.ln_pre",
    "vision_encoder.patch_conv": "vision_tower.patch_conv",
}
# names of scales in float8 files -> in transformers' files
_FIELDS = {"qscale_weight": "weight_scale_inv", "qscale_act": "activation_scale"}
# fields whose rows are those of the matrix, or of blocks of it
_OF_ROWS = ("weight", "bias", "weight_packed", "weight_scale", "weight_zero_point")
_LAYER = re.compile(r"layers\.(\d{1,9})\.(.+)")
_TOWER_LAYER = re.compile(r"vision_encoder\.transformer\.layers\.(\d{1,9})\.(.+)")
_EXPERT = re.compile(r"(feed_forward\.)?experts\.(\d{1,9})\.(w[123])")
# modules that a pattern of a quantization block may name
_WORDS = {
    **_ATTENTION,
    **_LINEARS,
    "tok_embeddings": "embed_tokens",
    "output": "lm_head",
    "vision_encoder": "vision_tower",
    "vision_language_adapter": "multi_modal_projector",
    "patch_merger": "multi_modal_projector.patch_merger",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """Heads of a projection whose rows are presented in another order."""

    count: int
    width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NameMap:
    """Names of one model."""

    is_mixture: bool  # experts as in Mixtral
    has_tower: bool
    queries: Heads
    keys: Heads
    tower: Heads | None

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "NameMap":
        """Return the names for a config.json that params.py has made."""
        text, vision = config.get("text_config", config), config.get("vision_config")
        width = text.get("head_dim", 0)  # latent attention states none and has no such projections
        tower = vision and Heads(count=vision["num_attention_heads"], width=vision["head_dim"])
        return cls(
            is_mixture=text["model_type"] == "mixtral",
            has_tower=bool(vision),
            queries=Heads(count=text["num_attention_heads"], width=width),
            keys=Heads(count=text["num_key_value_heads"], width=width),
            tower=tower or None,
        )

    def tensor(self, name: str) -> str:
        """Return a tensor's name. Raises CheckpointError for an unknown one."""
        module, _, field = name.rpartition(".")
        own = self.module(module)
        if own is None:
            raise CheckpointError(
                f"tensor {name!r}",
                "is in no model of this format that is supported",
                "use the model's Hugging Face files",
            )
        return f"{own}.{_FIELDS.get(field, field)}"

    def module(self, name: str) -> str | None:
        """Return a module's name; None: it is unknown."""
        own = self._of_tower(name)
        if own is not None:
            return f"model.{own}"
        own = _OUTSIDE.get(name) or self._of_layer(name)
        if own is None:
            return None
        is_below = self.has_tower and own.startswith("model.")
        return f"model.language_{own}" if is_below else own

    def pattern(self, text: str) -> str:
        """Return a pattern of module names with transformers' words."""
        own = self.module(text)
        words = "|".join(sorted(map(re.escape, _WORDS), key=len, reverse=True))
        found = re.sub(rf"(?<![\w.])({words})(?!\w)", lambda match: _WORDS[match[1]], text)
        found = re.sub(rf"(?<=[.*])({words})(?!\w)", lambda match: _WORDS[match[1]], found)
        return found if own is None else own

    def heads_of(self, name: str, shape: tuple[int, ...]) -> Heads | None:
        """Return the heads of a stored tensor whose rows are reordered; None: they are not.

        Raises CheckpointError if the rows are in blocks that do not consist of whole heads.
        """
        module, _, field = name.rpartition(".")
        leaf = module.rpartition(".")[2]
        heads = {"wq": self.queries, "wk": self.keys}.get(leaf)
        if heads is not None and module.startswith("vision_encoder."):
            heads = self.tower
        if heads is None or field not in _OF_ROWS or not shape or shape[0] == 1:
            return None
        rows = heads.count * heads.width
        if shape[0] == rows:
            return heads
        if rows % shape[0] == 0 and rows // shape[0] % heads.width == 0:
            return None  # a number for each block, and rows move only within a block
        raise CheckpointError(
            f"tensor {name!r}",
            f"expected {rows} rows, or blocks of whole heads of {heads.width}, found {shape[0]}",
            "copy params.json from the published model",
        )

    def _of_tower(self, name: str) -> str | None:
        if name in _VISION:
            return _VISION[name]
        match = _TOWER_LAYER.fullmatch(name)
        if match is None:
            return None
        parent, _, leaf = match[2].rpartition(".")
        layer = f"vision_tower.transformer.layers.{match[1]}"
        if parent == "attention" and leaf in ("wq", "wk", "wv", "wo"):
            return f"{layer}.attention.{_ATTENTION[leaf]}"
        if parent == "feed_forward" and leaf in _LINEARS:
            return f"{layer}.feed_forward.{_LINEARS[leaf]}"
        return f"{layer}.{leaf}" if not parent and leaf in _NORMS else None

    def _of_layer(self, name: str) -> str | None:
        match = _LAYER.fullmatch(name)
        if match is None:
            return None
        layer, rest = f"model.layers.{match[1]}", match[2]
        module = "block_sparse_moe" if self.is_mixture else "mlp"
        if rest in _NORMS:
            return f"{layer}.{_NORMS[rest]}"
        if rest == "attention":  # scales of the KV cache
            return f"{layer}.self_attn"
        if rest in ("gate", "feed_forward.gate"):
            return f"{layer}.{module}.gate"
        expert = _EXPERT.fullmatch(rest)
        if expert is not None:
            leaf = expert[3] if self.is_mixture else _LINEARS[expert[3]]
            return f"{layer}.{module}.experts.{expert[2]}.{leaf}"
        parent, _, leaf = rest.partition(".")
        if parent == "attention" and leaf in _ATTENTION:
            return f"{layer}.self_attn.{_ATTENTION[leaf]}"
        if parent in ("feed_forward", "shared_experts") and leaf in _LINEARS:
            below = "mlp" if parent == "feed_forward" else "mlp.shared_experts"
            return f"{layer}.{below}.{_LINEARS[leaf]}"
        return None
