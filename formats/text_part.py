"""The text model inside a checkpoint that also sees pictures: its config.json and its names.

Such a checkpoint has the text model's config under `text_config`, and its tensors below a prefix.
Every reader here takes the text model alone, as if the rest were not there.
"""

from collections.abc import Collection, Mapping
from typing import Any

from formats.families import FAMILIES

TEXT_CONFIG = "text_config"
_HEAD = "lm_head."
# architectures that hold a text model
WRAPPERS = (
    "Gemma3ForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
)
# beginnings of names in the file -> in the text model; the first that fits
_PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": _HEAD,
    "model.language_model.": "model.",
}
# beginnings of names of the other parts
_OTHER_PARTS = tuple(
    f"{parent}{part}."
    for parent in ("", "model.")
    for part in ("vision_tower", "multi_modal_projector", "vision_model", "visual")
)
# what the text model takes from the whole where it does not state it
_SHARED = (
    *("dtype", "torch_dtype", "bos_token_id", "eos_token_id", "pad_token_id"),
    *("quantization_config", "transformers_version"),
)
# transformers' numbers, which published files of this kind leave out
_DEFAULTS = {
    "gemma3_text": {
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
    }
}


def has_text_part(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of a model with other parts, whose text model is known."""
    names, text = config.get("architectures"), config.get(TEXT_CONFIG)
    is_wrapper = isinstance(names, list) and len(names) == 1 and names[0] in WRAPPERS
    return is_wrapper and isinstance(text, dict) and bool(_architecture(text))


def text_config(config: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    """config.json as the text model alone would have it; any other one as it is.

    `names`: of the text model's tensors. They tell whether there is a head: the whole and its text
    model may state different things of a tie.
    """
    if not has_text_part(config):
        return config
    text = config[TEXT_CONFIG]
    shared = {key: config[key] for key in _SHARED if key in config}
    defaults = _DEFAULTS.get(text["model_type"], {})
    has_head = any(name.startswith(_HEAD) for name in names)
    return {
        **shared,
        **defaults,
        **text,
        "architectures": [_architecture(text)],
        "tie_word_embeddings": not has_head,
    }


def text_name(name: str) -> str | None:
    """A tensor's name in the text model; None: it is of another part."""
    if name.startswith(_OTHER_PARTS):
        return None
    for prefix, own in _PREFIXES.items():
        if name.startswith(prefix):
            return own + name.removeprefix(prefix)
    return name


def _architecture(text: Mapping[str, Any]) -> str:
    for family in FAMILIES.values():
        if family.model_type == text.get("model_type"):
            return family.architecture
    return ""
