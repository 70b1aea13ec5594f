"""Convert the metadata of a GGUF file to the keys of config.json. Needs no torch."""

from collections.abc import Mapping
from typing import Any

from formats.architecture.family import MAX_LAYERS, Family
from formats.architecture.sizes import MAX_EXPERTS
from formats.errors import DOWNLOAD_AGAIN, CheckpointError
from formats.gguf.architectures.parts import SIGMOID
from formats.gguf.container import GgufFile
from formats.gguf.metadata import MAX_SIZE, Metadata
from formats.gguf.rope import rope_keys

# config.json key -> metadata key below the architecture
SIZES = {
    "hidden_size": "embedding_length",
    "max_position_embeddings": "context_length",
}
TOKENS = {
    "bos_token_id": "tokenizer.ggml.bos_token_id",
    "eos_token_id": "tokenizer.ggml.eos_token_id",
    "pad_token_id": "tokenizer.ggml.padding_token_id",
}
# Number of layers of the largest models, whose scores are divided by sqrt(hidden size / heads).
# Those of other Gemma models are divided by sqrt(head_dim).
WIDE_GEMMA_LAYERS = {"gemma2": 46, "gemma3": 62}


def make_config(metadata: Metadata) -> dict[str, Any]:
    """Return config.json. Raises CheckpointError, naming the key that is missing or wrong."""
    row, gguf = metadata.architecture, metadata.gguf
    family = find_family(metadata)
    heads = num_heads(metadata)
    layers = num_layers(metadata)
    embedding = gguf.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(
            f"{metadata.subject}: token_embd.weight", "is missing or not a matrix", DOWNLOAD_AGAIN
        )
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "dtype": activation_dtype(gguf, family),
        "vocab_size": embedding.shape[0],
        "num_hidden_layers": layers,
        "num_key_value_heads": num_kv_heads(metadata),
        family.inner_key: _feed_forward(metadata),
        "head_dim": head_dim(metadata),
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        **{key: metadata.size(name) for key, name in SIZES.items()},
        "num_attention_heads": heads,
        **row.fixed,
    }
    if family.norm_eps_key:
        config[family.norm_eps_key] = _norm_eps(metadata)
    _check_constants(metadata)
    _check_experts(metadata)
    for key, name in row.keys.items():
        value = metadata.get(name)
        if value is not None:
            config[key] = value if isinstance(value, bool) else metadata.number(name)
    config |= _biases(metadata)
    if not has_experts(metadata):
        for key in ("num_local_experts", "num_experts_per_tok"):
            config.pop(key, None)
    config |= _windows(metadata, layers)
    config |= latent_keys(metadata)
    if row.rope_config is not None:
        config |= row.rope_config(metadata)
    elif family.rotates(config):
        config |= rope_keys(metadata, config)
    if row.more_config is not None:
        config |= row.more_config(metadata, config)
    if row.name in WIDE_GEMMA_LAYERS:
        wide = layers == WIDE_GEMMA_LAYERS[row.name]
        width = config["hidden_size"] // heads if wide else config["head_dim"]
        config["query_pre_attn_scalar"] = width
    for key, name in TOKENS.items():
        value = gguf.metadata.get(name)
        # set None explicitly: config classes would default to ids of other vocabularies
        is_token = type(value) is int and value < embedding.shape[0]
        config[key] = value if is_token else row.fixed.get(key)
    if row.value_width:
        config[row.value_width] = metadata.size("attention.value_length", config["head_dim"])
    if not row.states_head_dim:
        del config["head_dim"]
    own = {key: config[name] for name, key in family.config_keys.items() if name in config}
    return {**config, **own}


def _biases(metadata: Metadata) -> dict[str, bool]:
    """Return config.json's keys for biases, True if a layer or the file has them."""
    found = {}
    for key, name in metadata.architecture.bias_keys.items():
        ends = (f".{name}", f".{name.replace('attn_q.', 'attn_qkv.')}")
        tensors = metadata.gguf.tensors
        found[key] = any(each == name or each.endswith(ends) for each in tensors)
    return found


def _check_constants(metadata: Metadata) -> None:
    """Raise CheckpointError if a value in the file differs from the row's constant."""
    for key, expected in metadata.architecture.constants.items():
        found = metadata.get(key)
        is_off = expected is None and not found
        if found is not None and found != expected and not is_off:
            raise metadata.wrong(key, f"expected {expected!r}, found {found!r:.60}")


def _check_experts(metadata: Metadata) -> None:
    """Raise CheckpointError if the number of experts or of active experts is out of range."""
    if not has_experts(metadata):
        return
    count, used = metadata.size("expert_count"), metadata.get("expert_used_count")
    if count > MAX_EXPERTS:
        raise metadata.wrong("expert_count", f"expected 1 to {MAX_EXPERTS}, found {count}")
    if used is not None and metadata.size("expert_used_count") > count:
        raise metadata.wrong("expert_used_count", f"expected 1 to {count}, found {used}")


def find_family(metadata: Metadata) -> Family:
    """Return the row of the file's model family."""
    window = metadata.get("attention.sliding_window")
    family = metadata.architecture.family_of(
        has_experts=has_experts(metadata),
        has_window=bool(window),
        by_sigmoid=metadata.get("expert_gating_func") == SIGMOID,
        has_shared=bool(metadata.get("expert_shared_feed_forward_length")),
        has_norms=bool(metadata.get(metadata.architecture.with_norms[0] or "-")),
    )
    keys = metadata.architecture.keys
    stated = {
        **{key: metadata.get(name) for key, name in keys.items()},
        "q_lora_rank": _query_rank(metadata),
        "num_local_experts": metadata.get("expert_count") or 0,
        "mlp_layer_types": has_experts(metadata),
        **_biases(metadata),
        **(metadata.architecture.stated(metadata) if metadata.architecture.stated else {}),
    }
    return family.variant(stated)


def has_experts(metadata: Metadata) -> bool:
    """Return True if the file states experts."""
    return bool(metadata.get("expert_count"))


def num_layers(metadata: Metadata) -> int:
    """Return the number of layers, without layers that only draft."""
    count = metadata.size("block_count")
    drafts = metadata.get("nextn_predict_layers") or 0
    count = count - drafts if type(drafts) is int else count
    if not 0 < count <= MAX_LAYERS:
        raise metadata.wrong("block_count", f"expected 1 to {MAX_LAYERS} layers, found {count}")
    return count


def head_dim(metadata: Metadata) -> int:
    """Return the width of a head; 1 without attention."""
    if not metadata.architecture.has_attention:
        return 1
    if metadata.architecture.is_latent:
        return metadata.size("rope.dimension_count")
    heads = num_heads(metadata)
    width = metadata.size("attention.key_length", metadata.size("embedding_length") // heads or 1)
    same = metadata.size("attention.value_length", width) == width
    if not same and not metadata.architecture.value_width:
        raise metadata.wrong("attention.value_length", f"differs from the keys' length {width}")
    return width


def num_heads(metadata: Metadata) -> int:
    """Return the number of heads; if it is a list by layer, the first; 1 without attention."""
    if not metadata.architecture.has_attention:
        return 1
    return _first_size(metadata, "attention.head_count")


def num_kv_heads(metadata: Metadata) -> int:
    """Return the number of KV heads.

    Files with latent attention state one KV head, for the latents; here it is the number of heads.
    """
    heads = num_heads(metadata)
    is_latent = metadata.architecture.is_latent
    return heads if is_latent else _first_size(metadata, "attention.head_count_kv", heads)


def latent_keys(metadata: Metadata) -> dict[str, Any]:
    """Return the keys of latent attention; {} without latent attention.

    Files that state one head of latents have separate keys for the widths of heads.
    """
    if not metadata.architecture.is_latent:
        return {}
    rope = metadata.size("rope.dimension_count")
    default = metadata.size("embedding_length") // num_heads(metadata) or 1
    keys, values = (
        metadata.size(
            f"attention.{name}_length_mla", metadata.size(f"attention.{name}_length", default)
        )
        for name in ("key", "value")
    )
    if keys <= rope:
        raise metadata.wrong("attention.key_length", f"expected more than {rope}, found {keys}")
    return {
        "q_lora_rank": _query_rank(metadata),
        "qk_nope_head_dim": keys - rope,
        "qk_rope_head_dim": rope,
        "v_head_dim": values,
        "head_dim": rope,
        **(_by_gating(metadata) if has_experts(metadata) else {}),
    }


def _by_gating(metadata: Metadata) -> dict[str, Any]:
    """Return config.json's keys for the selection of experts."""
    if metadata.get("expert_gating_func") == SIGMOID:
        normalized = metadata.get("expert_weights_norm")
        return {
            "topk_method": "noaux_tc",
            "norm_topk_prob": True if normalized is None else bool(normalized),
        }
    is_grouped = metadata.size("expert_group_count", 1) > 1
    return {
        "topk_method": "group_limited_greedy" if is_grouped else "greedy",
        "norm_topk_prob": bool(metadata.get("expert_weights_norm")),
    }


def _query_rank(metadata: Metadata) -> int | None:
    """Return the width of the queries' latents; None: queries have no latents."""
    rank = metadata.get("attention.q_lora_rank")
    return rank if type(rank) is int and rank > 0 else None


def activation_dtype(gguf: GgufFile, family: Family) -> str:
    """Return the dtype to run in.

    It is bfloat16 if the file contains bfloat16 or the family does not run in float16, else
    float16.
    """
    types = {tensor.type.name for tensor in gguf.tensors.values() if len(tensor.shape) > 1}
    return "bfloat16" if "BF16" in types or not family.float16 else "float16"


def _feed_forward(metadata: Metadata) -> int:
    """Return the width of the dense feed-forward, or of the experts if there is no dense one."""
    if metadata.architecture.inner_key:
        return metadata.size(metadata.architecture.inner_key)
    own = "feed_forward_length"
    expert = "expert_feed_forward_length"
    return _first_size(metadata, expert if metadata.get(own) in (None, 0) else own)


def _first_size(metadata: Metadata, key: str, default: int | None = None) -> int:
    """Return a size; if it is a list by layer and the architecture allows that, the first."""
    values = metadata.get(key)
    others = set(values) - {0} if isinstance(values, list) else set()
    if len(others) == 1:
        return others.pop()  # 0 is the value for layers with another kind of block
    if values == 0 and default is not None:
        return default
    if not metadata.architecture.sizes_by_layer or not isinstance(values, list):
        return metadata.size(key, default)
    first = values[0]
    if not all(type(value) is int and 0 < value < MAX_SIZE for value in values):
        raise metadata.wrong(key, f"expected positive whole numbers, found {values!r:.60}")
    return first


def _norm_eps(metadata: Metadata) -> float:
    for key in ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"):
        value = metadata.number(key)
        if value is not None:
            return value
    raise metadata.wrong("attention.layer_norm_rms_epsilon", "is missing")


def _windows(metadata: Metadata, layers: int) -> Mapping[str, Any]:
    """Return the keys of sliding windows."""
    row, key = metadata.architecture, "attention.sliding_window"
    window = metadata.get(key)
    if not row.window:
        return {}
    if not window:
        if row.window == "all" or row.with_window:
            return {}
        return {"sliding_window": None, "layer_types": ["full_attention"] * layers}
    window = metadata.size(key)
    if row.window == "all":
        return {"sliding_window": window}
    pattern = metadata.get(f"{key}_pattern")
    if isinstance(pattern, bool):
        slides = [pattern] * layers
    elif isinstance(pattern, list):
        slides = [bool(each) for each in pattern][:layers]
    else:
        every = metadata.size(f"{key}_pattern", row.pattern)
        slides = [(i + 1) % every != 0 for i in range(layers)]
    if len(slides) != layers:
        raise metadata.wrong(f"{key}_pattern", f"expected {layers} values, found {len(slides)}")
    kinds = {True: "sliding_attention", False: "full_attention"}
    return {"sliding_window": window, "layer_types": [kinds[each] for each in slides]}
