"""ModelConfig for a model that transformers runs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from formats.errors import COPY_CONFIG, InputError
from formats.quant_config import QuantConfig
from qserve.model.context_length import ContextLength
from qserve.model.fallback.support import config_of, family_for, model_class

# Names of sizes in transformers' config classes; config.json may use other names
_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
_LENGTHS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")


def fallback_fields(
    raw: Mapping[str, Any], quant: QuantConfig | None, folder: Path
) -> dict[str, Any]:
    """Return the fields of ModelConfig. Raises InputError if transformers cannot run the model."""
    config = config_of(model_class(raw), raw)
    sizes = {name: _size(config, name, folder) for name in _SIZES}
    longest = next((n for key in _LENGTHS if (n := getattr(config, key, None))), None)
    if type(longest) is not int or longest < 1:
        raise InputError(
            f"{folder}/config.json", f"expected one of {', '.join(_LENGTHS)}", "add the length"
        )
    heads = sizes["num_attention_heads"]
    num_layers = sizes["num_hidden_layers"]
    stated = getattr(config, "dtype", None)
    return {
        "family": family_for(raw),
        "values": vars(config),
        "vocab_size": sizes["vocab_size"],
        "hidden_size": sizes["hidden_size"],
        "intermediate_size": getattr(config, "intermediate_size", None) or sizes["hidden_size"],
        "num_layers": num_layers,
        "num_heads": heads,
        # The sizes of a layer's pages are determined later, from its attention call.
        "num_kv_heads": _stated(config, "num_key_value_heads") or heads,
        "head_dim": _stated(config, "head_dim") or sizes["hidden_size"] // heads,
        "norm_eps": 0.0,
        "activation": "",
        "ropes": (None,) * num_layers,
        "context": ContextLength.of(raw, longest, ()),
        "tied_head": bool(getattr(config, "tie_word_embeddings", False)),
        "windows": (None,) * num_layers,
        "state_layers": (False,) * num_layers,
        "dtype": stated if isinstance(stated, torch.dtype) else torch.bfloat16,
        "quant": quant,
    }


def _size(config: Any, name: str, folder: Path) -> int:
    found = _stated(config, name)
    if type(found) is not int or found < 1:
        raise InputError(
            f"{folder}/config.json {name}",
            f"expected a size, found {found!r:.80}",
            COPY_CONFIG,
        )
    return found


def _stated(config: Any, name: str) -> Any:
    """Return a value of transformers' config, or None. Raises InputError if layers differ in it."""
    try:
        return getattr(config, name, None)
    except Exception as error:  # transformers has an exception of its own, in newer versions
        raise InputError(
            f"config.json {name}",
            "differs between layers, which is not supported for models that run through"
            " transformers",
            "use a model of a family that `qserve families` lists",
        ) from error
