"""Write folders of vision-language models of published sizes, for random weights."""

import json
import shutil
from pathlib import Path
from typing import Any

from formats.quant_config import BLOCK, QuantConfig
from formats.scheme import Scheme

TOKENIZER = Path(__file__).parent / "models" / "docs-5m"
TOKENS = {"vision_start_token_id": 900, "vision_end_token_id": 901, "video_token_id": 902}
IMAGE_TOKEN = 903
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "size": {"shortest_edge": 65536, "longest_edge": 16777216},
}
ROPES = {"rope_type": "default", "rope_theta": 5e6, "mrope_interleaved": True}
# text and vision parts of config.json
VISION_SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen3-vl-8b": (
        {
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
            "max_position_embeddings": 32768,
            "rope_parameters": {**ROPES, "mrope_section": [24, 20, 20]},
        },
        {
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "depth": 27,
            "num_heads": 16,
            "out_hidden_size": 4096,
            "deepstack_visual_indexes": [8, 16, 24],
        },
    ),
    "tiny": (
        {
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "vocab_size": 1024,
            "max_position_embeddings": 8192,
            "rope_parameters": {**ROPES, "mrope_section": [12, 10, 10]},
        },
        {
            "hidden_size": 64,
            "intermediate_size": 128,
            "depth": 3,
            "num_heads": 4,
            "out_hidden_size": 256,
            "deepstack_visual_indexes": [0, 1],
        },
    ),
}


def write_vision_folder(folder: Path, shape: str, scheme: str | None) -> None:
    """Write a Qwen3-VL folder without weights. `scheme` None: float weights."""
    text, vision = VISION_SHAPES[shape]
    config: dict[str, Any] = {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "image_token_id": IMAGE_TOKEN,
        **TOKENS,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "text_config": {"model_type": "qwen3_vl_text", "rms_norm_eps": 1e-6, **text},
        "vision_config": {
            "model_type": "qwen3_vl",
            "patch_size": 16,
            "temporal_patch_size": 2,
            "spatial_merge_size": 2,
            "num_position_embeddings": 2304,
            **vision,
        },
    }
    if scheme is not None:
        config[BLOCK] = QuantConfig(method="gptq", scheme=Scheme.parse(scheme), rules=()).to_dict()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    (folder / "video_preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, folder)
