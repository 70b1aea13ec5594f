"""Convert the rotary embeddings of a GGUF file to keys of config.json. Needs no torch.

GGUF stores frequency scaling as a tensor of divisors of the inverse frequencies. Divisors that
Llama 3's rule gives are converted back to its parameters; other divisors are listed in config.json,
as for LongRoPE.
"""

from typing import Any

from formats.gguf.architectures.divisors import ORIGINAL, scaling_of
from formats.gguf.architectures.parts import FREQUENCIES
from formats.gguf.metadata import Metadata

LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"


def rope_keys(metadata: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of rotary embeddings. Raises CheckpointError."""
    theta = metadata.number("rope.freq_base", 10000.0)
    own = metadata.architecture.rope_names
    keys: dict[str, Any] = {own.get("rope_theta", "rope_theta"): float(theta)}
    local = metadata.number("rope.freq_base_swa")
    if local is not None and "rope_local_base_freq" in config:
        keys["rope_local_base_freq"] = float(local)
    width = metadata.size("rope.dimension_count", config["head_dim"])
    if width > config["head_dim"]:
        raise metadata.wrong("rope.dimension_count", f"exceeds head_dim, {config['head_dim']}")
    # stated even if it is 1, because some config classes have another default
    is_part = config["model_type"] == "glm4_moe" or metadata.architecture.default_part != 1.0
    if width != config["head_dim"] or is_part:
        key = "partial_rotary_factor"
        keys[own.get(key, key)] = width / config["head_dim"]
    scaling = _scaling(metadata, config, float(theta), width)
    if scaling is None and config["model_type"] == "gpt_oss":
        scaling = {"rope_type": "default"}  # the class's own default is YaRN
    if scaling is not None:
        keys["rope_scaling"] = scaling
        if scaling["rope_type"] == "longrope":
            keys[ORIGINAL] = scaling[ORIGINAL]
    return keys


def _scaling(
    metadata: Metadata, config: dict[str, Any], theta: float, width: int
) -> dict[str, Any] | None:
    original = metadata.get("rope.scaling.original_context_length")
    length = config["max_position_embeddings"]
    if LONG in metadata.gguf.tensors or SHORT in metadata.gguf.tensors:
        long, short = (metadata.divisors(name, width) for name in (LONG, SHORT))
        scaling = {
            "rope_type": "longrope",
            "long_factor": long,
            "short_factor": short,
            ORIGINAL: metadata.size("rope.scaling.original_context_length", length),
        }
        factor = metadata.number("rope.scaling.attn_factor")
        return scaling if factor is None else {**scaling, "attention_factor": float(factor)}
    if FREQUENCIES in metadata.gguf.tensors:
        found = metadata.divisors(FREQUENCIES, width)
        return scaling_of(found, theta, width, length)
    kind = metadata.get("rope.scaling.type")
    factor = metadata.number("rope.scaling.factor", metadata.number("rope.scale_linear"))
    if kind in (None, "none", "longrope") and factor in (None, 0.0, 1.0):
        return None
    if kind in (None, "linear") and factor:
        return None if factor == 1.0 else {"rope_type": "linear", "factor": float(factor)}
    if kind != "yarn" or not factor:
        problem = f"{kind!r:.40} with factor {factor} is not supported"
        raise metadata.wrong("rope.scaling.type", problem)
    scaling = {"rope_type": "yarn", "factor": float(factor)}
    if original is not None:
        scaling[ORIGINAL] = metadata.size("rope.scaling.original_context_length")
    if config["model_type"] == "gpt_oss":
        scaling["truncate"] = False
    multiplier = metadata.number("rope.scaling.yarn_log_multiplier")
    if multiplier and metadata.architecture.is_latent:  # one tenth of DeepSeek's mscale_all_dim
        scaling |= dict.fromkeys(("mscale", "mscale_all_dim"), float(multiplier) * 10)
    for key, name in (
        ("attention_factor", "rope.scaling.yarn_attn_factor"),
        ("beta_fast", "rope.scaling.yarn_beta_fast"),
        ("beta_slow", "rope.scaling.yarn_beta_slow"),
    ):
        value = metadata.number(name)
        if value is not None:
            scaling[key] = float(value)
    return scaling
