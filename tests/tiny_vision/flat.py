"""Models whose config has the keys of the text model next to those of the other parts."""

from tests.tiny_vision.parts import PIXELS, TOWER

# At most 4 tiles of 32 pixels and the whole image: 4 embeddings each, and one for each row.
PHI_4_MULTIMODAL = {
    "config": "Phi4MultimodalConfig",
    "model": "AutoModelForCausalLM",
    # with another one the vision tower attends causally if no image has padding
    "attention": "eager",
    # without it embeddings would be a hundred times as large as those of tokens
    "small": ("img_projection_down.weight",),
    "tokens": ["<|image|>", "<|audio|>"],
    "placeholder": "<|image|>",
    "text_type": "",
    "text": {"partial_rotary_factor": 0.75, "initializer_range": 0.2},
    "without": ("head_dim",),
    "vision": {
        **{key: value for key, value in TOWER.items() if key != "initializer_range"},
        "num_hidden_layers": 3,
        "image_size": 32,
        "crop_size": 32,
        "patch_size": 8,
        "image_token_id": "<|image|>",
    },
    "whole": {
        "audio_config": {
            "num_blocks": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_attention_heads": 2,
            "ext_pw_out_channel": 16,
            "depthwise_separable_out_channel": 16,
            "nemo_conv_channels": 8,
            "audio_token_id": 1,
        },
    },
    "image_processor": "Phi4MultimodalImageProcessor",
    "processor": {
        **PIXELS,
        "size": {"height": 32, "width": 32},
        "patch_size": 8,
        "dynamic_hd": 4,
    },
}
FAMILIES = {"phi4_multimodal": PHI_4_MULTIMODAL}
