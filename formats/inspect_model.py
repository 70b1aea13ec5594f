"""Does a folder hold every tensor of its model, in its shape? Knows Llama-like names, no bytes."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from formats.checkpoint import CONFIG, TensorEntry
from formats.findings import Findings
from formats.inspect_config import DEFAULTS, NUMBERS, UNIFORM_MODEL_TYPES
from formats.inspect_files import Shards
from formats.inspect_kv import is_kv_scale
from formats.layouts import LAYOUTS, is_quantized
from formats.linear_summary import LinearSummary
from formats.rules import LAYER_NUMBER

MODEL_TENSORS = ("model.embed_tokens.weight", "model.norm.weight")
HEAD = "lm_head.weight"
_FIELDS = sorted({field for row in LAYOUTS.values() for field in row.fields}, key=len, reverse=True)
DERIVED = "rotary_emb.inv_freq"  # what every reader computes itself
_IN_LAYER = re.compile(r"model\.layers\.\d{1,9}\.")
_QUANTIZED_FIELD = re.compile(rf"\.({'|'.join(_FIELDS)})$")
# of a linear: [N, K], as config.json calls them; "q" and "kv" are head_dim times a number of heads
EXTENTS = {
    "self_attn.q_proj": ("q", "hidden_size"),
    "self_attn.k_proj": ("kv", "hidden_size"),
    "self_attn.v_proj": ("kv", "hidden_size"),
    "self_attn.o_proj": ("hidden_size", "q"),
    "mlp.gate_proj": ("intermediate_size", "hidden_size"),
    "mlp.up_proj": ("intermediate_size", "hidden_size"),
    "mlp.down_proj": ("hidden_size", "intermediate_size"),
}
# of what is never quantized, and of a float head
FLOAT_SHAPES = {
    "model.embed_tokens.weight": ("vocab_size", "hidden_size"),
    "model.norm.weight": ("hidden_size",),
    "lm_head.weight": ("vocab_size", "hidden_size"),
    "input_layernorm.weight": ("hidden_size",),
    "post_attention_layernorm.weight": ("hidden_size",),
    "self_attn.q_norm.weight": ("head_dim",),
    "self_attn.k_norm.weight": ("head_dim",),
    **{f"{name}.bias": (rows,) for name, (rows, _) in EXTENTS.items()},
}


class HasEntries(Protocol):
    """Shards, or a CheckpointReader."""

    entries: dict[str, TensorEntry]


def check_model(config: dict[str, Any], shards: Shards, findings: Findings) -> None:
    """Report tensors that are missing, or there twice, and layers that differ from the rest."""
    tied = bool(config.get("tie_word_embeddings", False))
    if tied and HEAD in shards:
        findings.warning(HEAD, "is stored, though it is tied to the embedding", "remove it")
    if config.get("model_type") not in UNIFORM_MODEL_TYPES or shards.damaged:
        return
    head_is_quantized = is_quantized("lm_head", shards.entries)
    for name in MODEL_TENSORS if tied or head_is_quantized else (*MODEL_TENSORS, HEAD):
        if name not in shards and name not in shards.lost:
            findings.error(name, "is missing", "the checkpoint is incomplete")
    # A linear may lack g_idx, and may be float in one layer and quantized in another.
    seen = {
        _QUANTIZED_FIELD.sub(".weight", name)
        for name in (*shards.entries, *shards.lost)
        if LAYER_NUMBER.search(name) and not is_kv_scale(name)
    }
    locals_seen = Counter(LAYER_NUMBER.sub(".layers.{i}.", name) for name in seen)
    layers = {int(LAYER_NUMBER.search(name)[1]) for name in seen}
    count = config.get("num_hidden_layers")
    if isinstance(count, int) and layers != set(range(min(count, 10**6))):
        findings.error(
            CONFIG,
            f"states {count} layers, the tensors are of {len(layers)}"
            + f" (0 to {max(layers)})" * bool(layers),
            "the checkpoint is incomplete",
        )
    places = _layer_tensors(config)
    for local in places if layers else ():
        if f"model.layers.{{i}}.{local}" not in locals_seen:
            findings.error(
                f"model.layers.{{i}}.{local}",
                "is missing in all layers",
                "the checkpoint is incomplete, or config.json is another model's",
            )
    for local, number in sorted(locals_seen.items()):
        if number < len(layers):
            lacking = [i for i in sorted(layers) if local.replace("{i}", str(i)) not in seen]
            there = [local.replace("{i}", str(i)) for i in layers.difference(lacking)]
            has_place = local.removeprefix("model.layers.{i}.") in places
            if not has_place and all(_is_zero_bias(name, shards, findings) for name in there):
                continue
            findings.error(
                local, f"is missing in layers {lacking[:8]}", "the checkpoint is incomplete"
            )


def check_places(
    config: Mapping[str, Any], method: str | None, shards: Shards, findings: Findings
) -> str:
    """Report tensors that a uniform family has no place for. Returns the first, or "".

    `method` None: the folder is float, or its configuration cannot be read.
    """
    if config.get("model_type") not in UNIFORM_MODEL_TYPES:
        return ""
    fields = _FIELDS if method is None else LAYOUTS[method].fields
    places = {f"{name}.{field}" for name in EXTENTS for field in fields}
    places.update(_layer_tensors(config))
    outside = {*MODEL_TENSORS, HEAD, *(f"lm_head.{field}" for field in fields)}
    unplaced = []
    for name in shards.entries:
        layer = _IN_LAYER.match(name)
        known = name[layer.end() :] in places if layer else name in outside
        if known or is_kv_scale(name) or name.endswith(DERIVED):
            continue
        if not _is_zero_bias(name, shards, findings):
            unplaced.append(name)
    if unplaced:
        findings.warning(
            unplaced[0],
            "has no place in the model"
            + f", nor have {len(unplaced) - 1} other tensors" * (len(unplaced) > 1)
            + ": some readers refuse the folder for it, others leave it out",
            "remove them, or mend config.json",
        )
    return next(iter(unplaced), "")


def _is_zero_bias(name: str, shards: Shards, findings: Findings) -> bool:
    """Whether it says nothing: old GPTQ files have biases of zero in models without biases."""
    bias = shards.load(name, findings) if name.endswith(".bias") else None
    return bias is not None and not bias.any()


def _layer_tensors(config: Mapping[str, Any]) -> list[str]:
    """What a layer of a uniform family has, by local name, a quantized weight as a float one."""
    family = config["model_type"]
    attention, feed_forward = list(EXTENTS)[:4], list(EXTENTS)[4:]
    biased = attention[:3] if family == "qwen2" else []
    if family in ("llama", "qwen3") and config.get("attention_bias"):
        biased += attention
    if family == "llama" and config.get("mlp_bias"):
        biased += feed_forward
    norms = ["input_layernorm.weight", "post_attention_layernorm.weight"]
    if family == "qwen3":
        norms += ["self_attn.q_norm.weight", "self_attn.k_norm.weight"]
    return [*(f"{name}.weight" for name in EXTENTS), *(f"{name}.bias" for name in biased), *norms]


def check_shapes(
    config: Mapping[str, Any],
    linears: Iterable[LinearSummary],
    shards: HasEntries,
    findings: Findings,
) -> None:
    """Report tensors whose shape is not the one that config.json states, as far as it does, and
    whole numbers where only floats make sense."""
    if config.get("model_type") not in UNIFORM_MODEL_TYPES:
        return
    extents, checked = _extents(config), set()
    for linear in linears:
        local = ".".join(linear.name.split(".")[-2:])
        if local in EXTENTS:
            found = (linear.out_features, linear.in_features)
            _check_shape(linear.name, EXTENTS[local], found, extents, findings)
            checked.add(f"{linear.name}.weight")
    for name, entry in shards.entries.items():
        local = LAYER_NUMBER.split(name)[-1]
        module = local.removesuffix(".weight")
        keys = FLOAT_SHAPES.get(local) or (EXTENTS.get(module, ()) if module != local else ())
        if name not in checked:
            _check_shape(name, keys, entry.shape, extents, findings)
        may_be_codes = is_quantized(name.rpartition(".")[0], shards.entries) and module != local
        if keys and not entry.dtype.is_floating_point and not may_be_codes:
            findings.error(name, f"expected floating point, found {entry.dtype}")


def _extents(config: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers that EXTENTS and FLOAT_SHAPES name; None where config.json does not say."""
    names = ("vocab_size", "hidden_size", "intermediate_size", "head_dim")
    stated = {k: v for k, v in config.items() if k not in NUMBERS or v is None or _is_size(v)}
    config = {**DEFAULTS.get(config["model_type"], {}), **stated}
    extents = {name: config.get(name) for name in names}
    heads = config.get("num_attention_heads")
    kv_heads = config.get("num_key_value_heads")
    kv_heads = heads if kv_heads is None else kv_heads
    hidden, head_dim = extents["hidden_size"], extents["head_dim"]
    if head_dim is None and isinstance(heads, int) and isinstance(hidden, int):
        head_dim = extents["head_dim"] = hidden // max(heads, 1)
    if isinstance(head_dim, int):
        extents["q"] = heads * head_dim if isinstance(heads, int) else None
        extents["kv"] = kv_heads * head_dim if isinstance(kv_heads, int) else None
    return extents


def _is_size(value: Any) -> bool:
    return type(value) is int and value > 0


def _check_shape(
    name: str,
    keys: tuple[str, ...],
    found: tuple[int, ...],
    extents: Mapping[str, Any],
    findings: Findings,
) -> None:
    """Report a shape that is not the extents of `keys`; an extent that is None fits any."""
    wanted = [extents.get(key) for key in keys]
    fits = len(found) == len(wanted) and all(
        expected == extent or not isinstance(expected, int)
        for expected, extent in zip(wanted, found, strict=True)
    )
    if keys and not fits:
        findings.error(name, f"config.json states {wanted}, found {list(found)}")
