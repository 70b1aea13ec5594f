"""Architectures that have no row in formats/families.py and run through transformers.

The transformers class must be a causal language model whose attention uses transformers' attention
interface. This module imports transformers only inside functions.
"""

import inspect
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from formats.architecture.family import Family, architecture_of
from formats.architecture.refused import REFUSED
from formats.errors import COPY_CONFIG, InputError, one_line
from formats.families import FAMILIES
from formats.quant_config import BLOCK

BUILDER = "transformers"  # value of Family.builder for these models
SUBJECT = "config.json architectures"
_REMEDY = "use a model of a family that `qserve families` lists"
CHUNK_SIZE = "attention_chunk_size"  # key of config.json; attention calls do not show this setting


AUTO, TRANSFORMERS = "auto", "transformers"  # values of EngineConfig.model_impl


def is_chosen(config: Mapping[str, Any], implementation: str) -> bool:
    """Return True if the model runs through transformers. Raises InputError if it cannot.

    With the implementation "auto" this is so for causal language models that have no row here and
    are not refused by name.
    """
    name = architecture_of(config)
    known = name in REFUSED or (name in FAMILIES and FAMILIES[name].served)
    is_tried = implementation == AUTO and name is not None and not known and _is_causal(name)
    if is_tried or implementation == TRANSFORMERS:
        model_class(config)
        return True
    return False


def model_class(config: Mapping[str, Any]) -> type:
    """Return a model's transformers class. Raises InputError if this project cannot use it."""
    import transformers

    name = architecture_of(config)
    if name is None or not _is_causal(name):
        raise InputError(
            SUBJECT,
            f"{config.get('architectures')!r:.200} is not a causal language model of transformers"
            f" {transformers.__version__}",
            _REMEDY,
        )
    try:
        cls = getattr(transformers, name)
    except Exception as error:  # from imports that the class needs
        raise InputError(
            SUBJECT,
            f"{name} cannot be imported from transformers: {one_line(error)}",
            "install the package that is missing",
        ) from None
    problem = ""
    if not getattr(cls, "_supports_attention_backend", False):
        problem = "does not call attention through transformers' attention interface"
    elif getattr(cls, "_is_stateful", False):
        problem = "has recurrent states"
    elif "position_ids" not in inspect.signature(cls.forward).parameters:
        problem = "takes no position_ids"
    if config.get(CHUNK_SIZE) is not None:
        problem = f"{CHUNK_SIZE}: attention in chunks"
    if problem:
        raise InputError(
            SUBJECT,
            f"{name} is not in `qserve families`, and its transformers model {problem}",
            _REMEDY,
        )
    return cls


def _is_causal(name: str) -> bool:
    """Return True if transformers has a causal language model of this name."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


def config_of(cls: type, raw: Mapping[str, Any]) -> Any:
    """Return transformers' config object, without its quantization block. Raises InputError."""
    plain = {key: value for key, value in raw.items() if key not in (BLOCK, "auto_map")}
    try:
        return cls.config_class.from_dict(json.loads(json.dumps(plain)))
    except Exception as error:  # config classes do not document their exceptions
        raise InputError(
            "config.json",
            f"transformers rejects it: {one_line(error)}",
            COPY_CONFIG,
        ) from None


def family_for(raw: Mapping[str, Any]) -> Family:
    """Return a Family for a model that transformers runs. Only its names are used."""
    return replace(
        FAMILIES["LlamaForCausalLM"],
        architecture=architecture_of(raw) or "",
        title="through transformers",
        model_type=str(raw.get("model_type")),
        builder=BUILDER,
        rules=None,
    )
