"""Parts of configs that several families share."""

TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "initializer_range": 0.2,
}
PIXELS = {"image_mean": [0.5, 0.4, 0.5], "image_std": [0.5, 0.5, 0.6]}
SIGLIP = {**TOWER, "model_type": "siglip_vision_model", "image_size": 32, "patch_size": 8}
