"""Convert the quantization block of params.json to one of config.json.

Float8 files have a block of Mistral's own, files of llm-compressor a compressed-tensors block. The
modules that are not quantized follow from the tensors, because such blocks name them with Mistral's
names, with transformers', or not at all.
"""

import copy
from collections.abc import Collection, Mapping
from typing import Any

from formats.errors import CheckpointError
from formats.mistral.names import NameMap
from formats.mistral.params import PARAMS

FLOAT8 = "fp8_e4m3"
# qscheme_act -> activation_scheme of transformers
ACTIVATIONS = {None: "static", "TENSOR": "static", "NO_SCALES": "dynamic", "DYNAMIC": "dynamic"}
PARTS = ("model.vision_tower", "model.multi_modal_projector")  # never quantized
COMPRESSED = "compressed-tensors"


def block_of(
    params: Mapping[str, Any], names: NameMap, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Any] | None:
    """Return the quantization block; None: the model is in floats. Raises CheckpointError.

    `shapes`: shapes of the tensors by their names in transformers' class.
    """
    stated = params.get("quantization_config") or params.get("quantization")
    if not stated:
        return None
    if not isinstance(stated, dict):
        raise _unknown(stated)
    floats = _float_modules(shapes)
    for name in shapes:
        part, _, field = name.rpartition(".")
        if part.startswith(PARTS) and field not in ("weight", "bias"):
            raise CheckpointError(
                f"tensor {name!r}", "quantized vision parts are not supported", "use a float copy"
            )
    if stated.get("qformat_weight") == FLOAT8:
        scheme = stated.get("qscheme_act")
        if scheme not in ACTIVATIONS:
            raise _unknown(stated)
        return {
            "quant_method": "fp8",
            "activation_scheme": ACTIVATIONS[scheme],
            "modules_to_not_convert": [*floats, *(PARTS if names.has_tower else ())],
        }
    method = str(stated.get("quant_method", "")).lower().replace("_", "-")
    if method != COMPRESSED or not isinstance(stated.get("config_groups"), dict):
        raise _unknown(stated)
    block = copy.deepcopy(stated)
    block["quant_method"] = COMPRESSED
    block["ignore"] = [*floats, *(f"re:{part}.*" for part in PARTS if names.has_tower)]
    for group in block["config_groups"].values():
        targets = group.get("targets") if isinstance(group, dict) else None
        if isinstance(targets, list) and all(isinstance(each, str) for each in targets):
            group["targets"] = [names.pattern(each) for each in targets]
    return block


def _float_modules(shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Return the modules of the text model that have a matrix without scales."""
    modules: dict[str, set[str]] = {}
    for name in shapes:
        module, _, field = name.rpartition(".")
        modules.setdefault(module, set()).add(field)
    return [
        module
        for module, fields in modules.items()
        if not module.startswith(PARTS) and _is_float(fields, shapes.get(f"{module}.weight", ()))
    ]


def _is_float(fields: Collection[str], shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 and not {"weight_scale_inv", "weight_scale"} & set(fields)


def _unknown(stated: Any) -> CheckpointError:
    return CheckpointError(
        f"{PARAMS} quantization",
        f"expected qformat_weight {FLOAT8} or a compressed-tensors block, found {stated!r:.100}",
        "use a float copy of the model",
    )
