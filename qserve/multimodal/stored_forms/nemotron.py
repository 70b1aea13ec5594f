"""Nemotron Nano Omni: config.json and the names of the tower's tensors. Loads no torch itself."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from formats.architecture.sizes import is_size
from formats.architecture.text_part import LLM_CONFIG, TEXT_CONFIG

if TYPE_CHECKING:
    import torch

NEMOTRON_OMNI = ("NemotronH_Nano_Omni_Reasoning_V3", "NemotronH_Omni_Reasoning_V3")
_TEXT_KEYS = ("hidden_size", "vocab_size", "num_attention_heads")
# keys of transformers' RadioConfig; published files state few of them
_VISION_KEYS = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "mlp_ratio", "hidden_act"),
    *("layer_norm_eps", "use_swiglu_ffn", "qkv_bias", "layerscale_value", "num_channels"),
    *("patch_size", "max_img_size", "num_cls_tokens", "num_registers"),
)
# parts of names in the files -> in transformers' model
_PARTS = {
    ".radio_model.model.patch_generator.video_embedder.": ".embeddings.video_patch_projection.",
    ".radio_model.model.patch_generator.embedder.": ".embeddings.patch_projection.",
    ".radio_model.model.patch_generator.pos_embed": ".embeddings.position_embedding",
    ".radio_model.model.patch_generator.cls_token.token": ".embeddings.cls_register_token",
    ".radio_model.model.blocks.": ".encoder.layer.",
    ".radio_model.summary_idxs": ".summary_idxs",
    ".attn.proj.": ".attention.o_proj.",
}
_FUSED = ".attn.qkv."
_NORMALIZER = ".input_conditioner."  # mean and deviation, which the image processor applies


def as_nemotron_omni(values: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return config.json's values with transformers' keys; None: another size of the tower.

    The text part is replaced by a Llama of the same width.
    """
    stated, text = values["vision_config"], values.get(TEXT_CONFIG, values.get(LLM_CONFIG))
    version = stated.get("version", "-h")
    is_known = (
        isinstance(text, dict)
        and all(is_size(text.get(key)) for key in _TEXT_KEYS)
        and isinstance(version, str)
        and ("hidden_size" in stated or version.endswith("-h"))
    )
    if not is_known:
        return None
    width = values.get("vision_hidden_size", values.get("vit_hidden_size", 1280))
    frames = values.get("video_temporal_patch_size", 2)
    return {
        "architectures": values["architectures"],
        "model_type": "nemotron_h_omni",
        "vision_config": {
            "model_type": "radio",
            **{key: stated[key] for key in _VISION_KEYS if key in stated},
            "video_temporal_patch_size": frames,
        },
        TEXT_CONFIG: {
            "model_type": "llama",
            **{key: text[key] for key in _TEXT_KEYS},
            "num_nextn_predict_layers": text.get("num_nextn_predict_layers") or 0,
        },
        "audio_config": None,
        "downsample_ratio": values.get("downsample_ratio", 0.5),
        "projector_hidden_size": values.get("projector_hidden_size", 4096),
        "vision_hidden_size": width,
        "video_temporal_patch_size": frames,
        "image_token_id": values.get("image_token_id", values.get("img_context_token_id")),
    }


def nemotron_tensors(
    name: str, tensor: "torch.Tensor", values: Mapping[str, Any]
) -> "Iterator[tuple[str, torch.Tensor]]":
    """Yield the names and tensors of transformers' model.

    Published files have no factors of a layer's branches: they are 1.
    """
    if _NORMALIZER in name:
        return
    for stored, own in _PARTS.items():
        name = name.replace(stored, own)
    module, fused, field = name.partition(_FUSED)
    if fused:
        for letter, rows in zip("qkv", tensor.chunk(3), strict=True):
            yield f"{module}.attention.{letter}_proj.{field}", rows
        return
    yield name, tensor
    for number in (1, 2):
        if name.endswith(f".norm{number}.weight"):
            factor = f"layer_scale{number}.lambda1"
            yield name.replace(f"norm{number}.weight", factor), tensor.new_ones(tensor.shape)
