"""Config block of DeepSeek-V4's published weights, as groups of compressed-tensors.

config.json states an "fp8" block with `scale_fmt: ue8m0`; `expert_dtype: fp4` next to it, or in it,
means that routed experts are in MXFP4. float_blocks.py presents the tensors. Needs no torch.
"""

from collections.abc import Mapping
from typing import Any

from formats.errors import config_error

KEY = "quantization_config"
METHOD = "compressed-tensors"
EXPERTS = r"re:.*\.ffn\.experts\.\d+\.w\d$"
_FP4 = "fp4"


def as_groups(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config block of published weights as groups; {} for other blocks.

    Raises CheckpointError for experts of an unknown type.
    """
    block = config.get(KEY)
    if not isinstance(block, Mapping) or block.get("quant_method") != "fp8":
        return {}
    experts = block.get("expert_dtype", config.get("expert_dtype"))
    if experts is None and block.get("scale_fmt") is None:
        return {}
    if experts not in (None, "fp8", _FP4):
        raise config_error("expert_dtype", "fp8 or fp4", experts)
    size = block.get("weight_block_size")
    if not isinstance(size, list) or len(size) != 2 or not all(type(n) is int for n in size):
        raise config_error(f"{KEY}.weight_block_size", "such as [128, 128]", size)
    groups = {"blocks": _float8(size)}
    if experts == _FP4:
        groups = {"experts": _MXFP4, **groups}
    modules = block.get("modules_to_not_convert") or block.get("ignored_layers") or []
    if not isinstance(modules, list):
        raise config_error(f"{KEY}.modules_to_not_convert", "a list of modules", modules)
    floats = [f"re:.*\\.{name}" for name in ("compressor", "ffn.gate", "indexer.weights_proj")]
    return {
        KEY: {
            "quant_method": METHOD,
            "format": "mixed-precision",
            "quantization_status": "compressed",
            "config_groups": groups,
            "ignore": ["head", "lm_head", *floats, *modules],
        }
    }


def _float8(size: list[int]) -> dict[str, Any]:
    return {
        "targets": ["Linear"],
        "format": "float-quantized",
        "weights": {
            **{"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False},
            **{"strategy": "block", "block_structure": size},
        },
        "input_activations": {
            **{"num_bits": 8, "type": "float", "symmetric": True, "dynamic": True},
            **{"strategy": "group", "group_size": size[1]},
        },
    }


_MXFP4: dict[str, Any] = {
    "targets": [EXPERTS],
    "format": "mxfp4-pack-quantized",
    "weights": {
        **{"num_bits": 4, "type": "float", "symmetric": True, "dynamic": False},
        **{"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
    },
    "input_activations": None,
}
