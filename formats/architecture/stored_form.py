"""Files of older families in the usual form: keys of config.json, names, order of dims.

GPT-2's config.json has keys of its own (`n_embd`), its weights are [inputs, outputs], its names may
lack a prefix, and its masks are stored. The reader adds the usual keys, drops the masks, and
presents weights as [outputs, inputs]; the writer stores them as they were.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from formats.architecture.expert_stacks import split_experts
from formats.architecture.family import MAX_LAYERS, Family
from formats.architecture.rows.uneven import laguna_heads, mimo_heads
from formats.architecture.sizes import is_size
from formats.errors import CheckpointError
from formats.families import FAMILIES
from formats.files.tensor_entry import TensorEntry

# model_type -> that of the family with the same layers
_SAME_LAYERS = {
    **{"kimi_k2": "deepseek_v3", "internlm3": "llama", "iquestcoder": "llama"},
    **{"minimax_text_01": "minimax", "minimax_m1": "minimax"},
}
# architecture of code in a model's folder -> that of transformers for the same files
_SAME_FILES = {
    "MPTForCausalLM": "MptForCausalLM",
    "InternLM3ForCausalLM": "LlamaForCausalLM",
    "IQuestCoderForCausalLM": "LlamaForCausalLM",
    "MiniMaxText01ForCausalLM": "MiniMaxForCausalLM",
    "MiniMaxM1ForCausalLM": "MiniMaxForCausalLM",
}
BLOOM_LENGTH = 2048  # of training; ALiBi has no limit


@dataclass(frozen=True, slots=True, kw_only=True)
class TransposedEntry(TensorEntry):
    """Matrix of a file with its dims exchanged: `shape` is not the file's."""

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Return rows `start` to `stop`: columns of the file, all of which is read."""
        return self.read()[start:stop]

    def read(self) -> torch.Tensor:
        """Read the whole matrix. Raises CheckpointError."""
        rows, columns = self.shape
        stored = self.read_bytes(0, self.num_bytes).view(self.dtype).reshape(columns, rows)
        return stored.T.contiguous()


def usual_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return config.json with the usual keys next to the family's own.

    Values that transformers derives are filled in, too. Other families' configs are unchanged.
    """
    config = _usual_type(config)
    family = _family(config)
    if family is None:
        return config
    own = family.config_keys
    found = {usual: config[key] for usual, key in own.items() if key in config}
    config = {**config, **found} if found else config
    derive = _DERIVED_KEYS.get(family.model_type)
    return config if derive is None else {**config, **derive(config)}


def replaced_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of config.json that `usual_config` replaces, with what the file states."""
    return {key: config[key] for key in _same(config)}


def usual_entries(
    config: Mapping[str, Any], entries: dict[str, TensorEntry]
) -> dict[str, TensorEntry]:
    """Return the tensors with the names and the order of dims of the family's row.

    Raises CheckpointError for a stack of quantized experts that is not read.
    """
    family = _family(config)
    if family is None:
        return entries
    masks = tuple(f".{name}" for name in family.masks)
    if masks:
        entries = {n: entry for n, entry in entries.items() if not n.endswith(masks)}
    prefix = family.left_out_prefix
    if prefix and not any(name.startswith(prefix) for name in entries):
        ends = f"{family.head.partition('.')[0]}."
        entries = {n if n.startswith(ends) else prefix + n: e for n, e in entries.items()}
    entries = split_experts(config, entries)
    exchanged = transposed_names(config, entries)
    return {n: _exchanged(e) if n in exchanged else e for n, e in entries.items()}


def transposed_names(
    config: Mapping[str, Any], entries: Mapping[str, TensorEntry]
) -> frozenset[str]:
    """Return the weights that the family stores as [inputs, outputs]."""
    family = _family(config)
    if family is None or not family.transposed:
        return frozenset()
    layer = re.escape(family.layer).replace(re.escape("{i}"), r"\d{1,9}")
    names = "|".join(re.escape(linear.name) for linear in family.linears)
    stored = re.compile(rf"{layer}\.(?:{names})\.weight")
    return frozenset(n for n, e in entries.items() if stored.fullmatch(n) and len(e.shape) == 2)


def _exchanged(entry: Any) -> Any:
    if not isinstance(entry, TensorEntry):
        return entry.transposed()  # of a tensor in memory (HeldTensors)
    values = {field.name: getattr(entry, field.name) for field in fields(TensorEntry)}
    return TransposedEntry(**{**values, "shape": entry.shape[::-1]})


def _family(config: Mapping[str, Any]) -> Family | None:
    names = config.get("architectures")
    is_one = isinstance(names, list) and len(names) == 1 and isinstance(names[0], str)
    return FAMILIES.get(names[0]) if is_one else None


def _inner(key: str) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Return what fills in the width of a feed-forward: 4 times the hidden size."""

    def derive(config: Mapping[str, Any]) -> dict[str, Any]:
        hidden = config.get("hidden_size")
        return {key: 4 * hidden} if config.get(key) is None and is_size(hidden) else {}

    return derive


def _bigcode(config: Mapping[str, Any]) -> dict[str, Any]:
    heads = config.get("num_attention_heads")
    kv_heads = 1 if config.get("multi_query", True) else heads
    return {**_inner("n_inner")(config), **_known(num_key_value_heads=kv_heads)}


def _falcon(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return KV heads and norms: 40B has its own number, 7B one, both whatever the other says."""
    is_new, norms = config.get("new_decoder_architecture"), config.get("num_ln_in_parallel_attn")
    kv_heads = config.get("num_attention_heads")
    if is_new:
        kv_heads = config.get("num_kv_heads") or kv_heads
    elif config.get("multi_query", True):
        kv_heads = 1
    return {
        **_inner("ffn_hidden_size")(config),
        **_known(num_key_value_heads=kv_heads),
        "num_ln_in_parallel_attn": norms or (2 if is_new else 1),
    }


def _ernie_moe(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the layers without experts, which ERNIE states as a range and an interval."""
    count, every = config.get("num_hidden_layers"), config.get("moe_layer_interval", 1)
    first, last = config.get("moe_layer_start_index", 1), config.get("moe_layer_end_index", -1)
    if not is_size(count) or not is_size(every) or type(first) is not int or type(last) is not int:
        return {}
    last = count - 1 if last == -1 else last
    layers = range(min(count, MAX_LAYERS))
    return {
        "mlp_only_layers": [i for i in layers if (i + 1) % every or not first <= i <= last],
        **_known(n_shared_experts=config.get("moe_num_shared_experts", 2)),
    }


def _gemma4(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return transformers' defaults, and the heads of layers with full attention.

    They are stated as keys of their own, or by layer in `per_layer_config`.
    """
    count, types = config.get("num_hidden_layers"), config.get("layer_types")
    by_layer = config.get("per_layer_config")
    by_layer = by_layer if isinstance(by_layer, Mapping) else {}
    found: dict[str, Any] = {}
    if not isinstance(types, list) and is_size(count):
        kinds = ("sliding_attention",) * 5 + ("full_attention",)
        types = [kinds[layer % 6] for layer in range(min(count, MAX_LAYERS))]
        found["layer_types"] = [*types[:-1], "full_attention"]
    own = next((each for each in by_layer.values() if isinstance(each, Mapping)), {})
    keys_are_values = config.get("attention_k_eq_v", False)
    # transformers takes the stated number only where keys are the values
    heads = config.get("num_global_key_value_heads") if keys_are_values else None
    heads = own.get("num_key_value_heads") or heads or config.get("num_key_value_heads", 4)
    return {
        **found,
        "attention_k_eq_v": keys_are_values,
        "hidden_size_per_layer_input": config.get("hidden_size_per_layer_input", 256),
        **_known(
            vocab_size_per_layer_input=config.get("vocab_size_per_layer_input", 262144),
            global_head_dim=own.get("head_dim") or config.get("global_head_dim") or 512,
            num_global_key_value_heads=heads,
        ),
    }


def _gemma3n(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the width of all feed-forwards, which files list by layer, and transformers' defaults.

    Raises CheckpointError where layers differ.
    """
    found, inner = {}, config.get("intermediate_size")
    if isinstance(inner, list) and inner:
        if any(each != inner[0] for each in inner):
            raise CheckpointError(
                "config.json intermediate_size",
                f"expected the same width in each layer, found {inner!r:.80}",
                "use a model whose layers are alike",
            )
        found["intermediate_size"] = inner[0]
    return {
        **found,
        **_known(
            altup_num_inputs=config.get("altup_num_inputs", 4),
            laurel_rank=config.get("laurel_rank", 64),
            hidden_size_per_layer_input=config.get("hidden_size_per_layer_input", 256),
            vocab_size_per_layer_input=config.get("vocab_size_per_layer_input", 262144),
            global_head_dim=config.get("head_dim", 256),
            num_global_key_value_heads=config.get("num_key_value_heads", 2),
        ),
    }


def _llama4(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the layers without experts; config.json states those with, or an interval."""
    count, every = config.get("num_hidden_layers"), config.get("interleave_moe_layer_step", 1)
    stated = config.get("moe_layers")
    if not is_size(count) or not is_size(every):
        return {}
    layers = range(min(count, MAX_LAYERS))
    sparse = stated if isinstance(stated, list) else layers[every - 1 :: every]
    return {"mlp_only_layers": [i for i in layers if i not in sparse]}


def _hunyuan_moe(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the experts of a token as one number; published files list one for each layer.

    Raises CheckpointError where layers differ.
    """
    stated = config.get("moe_topk")
    if not isinstance(stated, list) or not stated:
        return {}
    if any(each != stated[0] for each in stated):
        raise CheckpointError(
            "config.json moe_topk",
            f"expected the same number of experts in each layer, found {stated!r:.80}",
            "use a model whose layers are alike",
        )
    return {"moe_topk": stated[0], "num_experts_per_tok": stated[0]}


def _bloom(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that transformers' code fixes, and the length."""
    stated = (config.get(key) for key in ("max_position_embeddings", "seq_length"))
    return {
        **_four_times(config),
        "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": next(filter(is_size, stated), BLOOM_LENGTH),
    }


def _mpt(config: Mapping[str, Any]) -> dict[str, Any]:
    return {**_four_times(config), "hidden_act": "gelu"}


def _four_times(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes of a feed-forward 4 times as wide as the hidden size, and of attention
    with as many KV heads as heads.
    """
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    inner = 4 * hidden if is_size(hidden) else None
    return _known(intermediate_size=inner, num_key_value_heads=heads)


def _usual_type(config: dict[str, Any]) -> dict[str, Any]:
    """Return config.json with the names of the family that has the same layers or files."""
    same = _same(config)
    return {**config, **same} if same else config


def _same(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of config.json that name a family that is read as another one."""
    model_type, names = config.get("model_type"), config.get("architectures")
    found: dict[str, Any] = {}
    if isinstance(model_type, str) and model_type in _SAME_LAYERS:
        found["model_type"] = _SAME_LAYERS[model_type]
    is_one = isinstance(names, list) and len(names) == 1 and isinstance(names[0], str)
    if is_one and names[0] in _SAME_FILES:
        found["architectures"] = [_SAME_FILES[names[0]]]
    return found


def _query_rank(default: int | None) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Return what fills in the width of queries' latents; null means that there are none."""
    return lambda config: {} if "q_lora_rank" in config else {"q_lora_rank": default}


def _glm_lite(config: Mapping[str, Any]) -> dict[str, Any]:
    return {**_query_rank(768)(config), **_expert_layers(config)}


def _selecting(rank: int, heads: int) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Return what fills in transformers' defaults of attention that selects keys."""

    def derive(config: Mapping[str, Any]) -> dict[str, Any]:
        first = config.get("first_k_dense_replace", 3)
        return {
            **_query_rank(rank)(config),
            **_expert_layers({**config, "first_k_dense_replace": first}),
            "index_topk": config.get("index_topk", 2048),
            "index_n_heads": config.get("index_n_heads", heads),
            "index_head_dim": config.get("index_head_dim", 128),
            **_indexer_types(config),
        }

    return derive


def _indexer_types(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return which layers of GLM-5 have an indexer, from the keys of its files."""
    count, pattern = config.get("num_hidden_layers"), config.get("index_topk_pattern")
    if config.get("indexer_types") is not None or config.get("model_type") != "glm_moe_dsa":
        return {}
    if isinstance(pattern, str):
        return {"indexer_types": ["full" if kind == "F" else "shared" for kind in pattern]}
    if isinstance(pattern, list):
        return {"indexer_types": pattern}
    every, first = config.get("index_topk_freq", 1), config.get("index_skip_topk_offset", 2)
    if not (is_size(count) and type(every) is int and type(first) is int):
        return {}
    kinds = ("full", "shared")
    layers = range(min(count, MAX_LAYERS))
    own = [max(layer - first + 1, 0) % max(every, 1) for layer in layers]
    return {"indexer_types": [kinds[bool(each)] for each in own]}


def _kimi_linear(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the kinds of layers and the sizes of mixers, from a part of config.json."""
    own, count = config.get("linear_attn_config"), config.get("num_hidden_layers")
    own = own if isinstance(own, Mapping) else {}
    found = _query_rank(None)(config)
    for usual, key, default in (
        ("linear_head_dim", "head_dim", 128),
        ("linear_num_heads", "num_heads", 32),
        ("linear_conv_kernel_dim", "short_conv_kernel_size", 4),
    ):
        found[usual] = own.get(key, config.get(usual, default))
    if not is_size(count):
        return found
    layers, full = range(min(count, MAX_LAYERS)), own.get("full_attn_layers")
    if config.get("layer_types") is None and isinstance(full, list):
        # numbered from 1
        kinds = ("linear_attention", "full_attention")
        found["layer_types"] = [kinds[layer + 1 in full] for layer in layers]
    if config.get("mlp_layer_types") is None:
        first = config.get("first_k_dense_replace", 1)
        dense = first if type(first) is int else 0
        found["mlp_layer_types"] = [("sparse", "dense")[layer < dense] for layer in layers]
    return found


def _minimax(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the kinds of layers, and the share of a head that rotates."""
    found: dict[str, Any] = {}
    count, kinds = config.get("num_hidden_layers"), config.get("attn_type_list")
    if config.get("layer_types") is None and isinstance(kinds, list):
        names = ("linear_attention", "full_attention")
        found["layer_types"] = [names[bool(kind)] for kind in kinds[:MAX_LAYERS]]
    elif config.get("layer_types") is None and is_size(count):
        names = ("full_attention", "linear_attention")
        found["layer_types"] = [names[layer % 2] for layer in range(min(count, MAX_LAYERS))]
    rotated, head_dim, rope = (
        config.get(key) for key in ("rotary_dim", "head_dim", "rope_parameters")
    )
    if is_size(rotated) and is_size(head_dim) and isinstance(rope, Mapping):
        found["rope_parameters"] = {**rope, "partial_rotary_factor": rotated / head_dim}
    return found


def _minicpm3(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the divisor of logits, and the widths that transformers fills in."""
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    found = _query_rank(768)(config)
    base = config.get("dim_model_base", 256) or hidden
    if is_size(hidden) and is_size(base):
        found["logits_divisor"] = hidden / base
    if config.get("v_head_dim") is None and is_size(hidden) and is_size(heads):
        found["v_head_dim"] = hidden // heads
    return found


def _afmoe(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what transformers fills in: the kinds of layers, and one layer without experts."""
    count, every = config.get("num_hidden_layers"), config.get("global_attn_every_n_layers", 4)
    found: dict[str, Any] = {"num_dense_layers": config.get("num_dense_layers", 1)}
    if config.get("layer_types") is None and is_size(count) and is_size(every):
        kinds = ("full_attention", "sliding_attention")
        layers = range(min(count, MAX_LAYERS))
        found["layer_types"] = [kinds[bool((layer + 1) % every)] for layer in layers]
    return found


def _expert_layers(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the layers with experts; published files state the number of those without."""
    count, first = config.get("num_hidden_layers"), config.get("first_k_dense_replace", 1)
    if config.get("mlp_layer_types") is not None or not is_size(count) or type(first) is not int:
        return {}
    layers = range(min(count, MAX_LAYERS))
    return {"mlp_layer_types": ["dense" if i < first else "sparse" for i in layers]}


def _lfm2(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the width of LFM2's feed-forward and the kinds of its layers.

    Published files state the width as `block_ff_dim`, to be adjusted, and layers by number.
    """
    found, count = _lfm2_moe(config), config.get("num_hidden_layers")
    if config.get("layer_types") is None and is_size(count):
        attends = config.get("full_attn_idxs")
        layers = range(min(count, MAX_LAYERS))
        found["layer_types"] = [
            "full_attention" if attends is None or i in attends else "conv" for i in layers
        ]
    width = config.get("block_ff_dim", config.get("intermediate_size", 12288))
    if not is_size(width):
        return found
    if config.get("block_auto_adjust_ff_dim", True):
        width = int(2 * width / 3)
        factor = config.get("block_ffn_dim_multiplier", 1.0)
        step = config.get("block_multiple_of", 256)
        if isinstance(factor, int | float) and is_size(step):
            width = -(-int(factor * width) // step) * step
    widths = {"block_ff_dim": width, "intermediate_size": width}
    return {**found, **widths, "block_auto_adjust_ff_dim": False}


def _lfm2_moe(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return whether the head is tied, which LFM2's files state by a key of their own."""
    key = "tie_embedding"
    return {"tie_word_embeddings": config[key]} if key in config else {}


_LAYER_TYPES = {"mamba": "linear_attention", "attention": "full_attention"}


def _granite_hybrid(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the kinds of layers by their present names, and the width of Mamba-2's heads."""
    found, kinds = _mamba(config), config.get("layer_types")
    if kinds is None:
        kinds = config.get("layers_block_type")
    if isinstance(kinds, list):
        found["layer_types"] = [_LAYER_TYPES.get(str(kind), kind) for kind in kinds]
    return found


_BLOCKS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}


def _nemotron_h(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the kinds of layers, which published files state as a string, and their number.

    Files without experts may state sizes of experts all the same.
    """
    found, kinds = _mamba(config), config.get("layers_block_type")
    found["head_dim"] = config.get("head_dim", 128)
    pattern = config.get("hybrid_override_pattern")
    if kinds is None and isinstance(pattern, str):
        kinds = [_BLOCKS.get(letter, letter) for letter in pattern[:MAX_LAYERS]]
    if not isinstance(kinds, list):
        return found
    kinds = [_LAYER_TYPES.get(str(kind), kind) for kind in kinds]
    if "moe" in kinds:
        found["mlp_layer_types"] = ["sparse" if kind == "moe" else "dense" for kind in kinds]
    return {**found, "layer_types": kinds, "num_hidden_layers": len(kinds)}


def _mamba(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the width of heads, which files may state as "auto", and the range of steps.

    transformers writes infinity as an object, which its config classes do not take.
    """
    found: dict[str, Any] = {}
    limits = config.get("time_step_limit")
    if isinstance(limits, list):
        found["time_step_limit"] = [
            float(each["__float__"]) if isinstance(each, dict) and "__float__" in each else each
            for each in limits
        ]
    heads, expand = config.get("mamba_n_heads", 128), config.get("mamba_expand", 2)
    hidden, is_auto = config.get("hidden_size"), config.get("mamba_d_head", "auto") == "auto"
    if is_auto and is_size(heads) and is_size(hidden) and is_size(expand):
        inner = config.get("mamba_d_ssm") or expand * hidden
        found |= _known(mamba_d_head=inner // heads) if is_size(inner) else {}
    return found


def _known(**values: Any) -> dict[str, Any]:
    """Return the values that are sizes: others are config.json's faults, reported elsewhere."""
    return {key: value for key, value in values.items() if is_size(value)}


_DERIVED_KEYS: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "gpt2": _inner("n_inner"),
    "gptj": _inner("n_inner"),
    "gpt_bigcode": _bigcode,
    "falcon": _falcon,
    "ernie4_5_moe": _ernie_moe,
    "deepseek_v2": _query_rank(1536),
    "deepseek_v3": _query_rank(1536),
    "deepseek_v32": _selecting(1536, 64),
    "glm_moe_dsa": _selecting(2048, 32),
    "kimi_linear": _kimi_linear,
    "minimax": _minimax,
    "glm4_moe_lite": _glm_lite,
    "exaone_moe": _expert_layers,
    "hy_v3": _expert_layers,
    "youtu": _query_rank(1536),
    "afmoe": _afmoe,
    "minicpm3": _minicpm3,
    "mistral4": _query_rank(1024),
    "lfm2": _lfm2,
    "lfm2_moe": _lfm2_moe,
    "granitemoehybrid": _granite_hybrid,
    "falcon_h1": _mamba,
    "bamba": _mamba,
    "nemotron_h": _nemotron_h,
    "hunyuan_v1_moe": _hunyuan_moe,
    "laguna": laguna_heads,
    "mimo_v2_flash": mimo_heads,
    "llama4_text": _llama4,
    "gemma3n_text": _gemma3n,
    "gemma4_text": _gemma4,
    "bloom": _bloom,
    "mpt": _mpt,
}
