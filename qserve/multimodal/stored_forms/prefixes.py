"""Prefixes of the names of a vision tower's tensors: in checkpoints -> in transformers' model.

Loads no torch.
"""

IDEFICS = {
    "model.vision_model.": "vision_model.",
    "model.connector.": "connector.",
}
# Published checkpoints have a level in these names that transformers 5 does not write.
LLAVA = {
    "vision_tower.vision_model.": "vision_tower.",
    "vision_tower.": "vision_tower.",
    "multi_modal_projector.": "multi_modal_projector.",
}
LLAVA |= {f"model.{stored}": own for stored, own in LLAVA.items()}
GEMMA_4 = {
    f"{parent}{part}.": f"{part}."
    for parent in ("model.", "")
    for part in ("vision_tower", "embed_vision")
}
GEMMA_4_UNIFIED = {
    f"{parent}{stored}.": f"embed_vision.{own}"
    for parent in ("model.", "")
    for stored, own in (
        ("vision_embedder", ""),
        ("embed_vision.embedding_projection", "multimodal_embedder.embedding_projection."),
        ("embed_vision", ""),
    )
}
INTERNVL_CHAT = {"vision_model.": "vision_tower.", "mlp1.": "multi_modal_projector."}
LLAMA_4 = {"vision_model.": "vision_model.", "multi_modal_projector.": "multi_modal_projector."}
KIMI = {
    f"{parent}{stored}.": f"{own}."
    for parent in ("", "model.")
    for stored, own in (
        ("vision_tower", "vision_tower"),
        ("mm_projector", "mm_projector"),
        ("multi_modal_projector", "mm_projector"),
    )
}
LIGHT_ON = {
    f"{parent}{part}.": f"{part}."
    for parent in ("model.", "")
    for part in ("vision_encoder", "vision_projection")
}
MUSE = {
    f"{parent}{part}.": f"{part}."
    for parent in ("model.", "")
    # the norm has no tensors
    for part in ("vision_tower", "vision_adapter", "vision_projection", "perception_emb_norm")
}
STEP = {
    f"{parent}{stored}.": f"{own}."
    for parent in ("model.", "")
    for stored, own in (
        ("vision_model", "vision_model"),
        ("vit_large_projector", "multi_modal_projector"),
        ("multi_modal_projector", "multi_modal_projector"),
    )
}
NEMOTRON = {
    "vision_model.": "vision_model.",
    "multi_modal_projector.": "multi_modal_projector.",
    **{
        f"mlp1.{number}.": f"multi_modal_projector.{part}."
        for number, part in ((0, "layer_norm"), (1, "linear_1"), (3, "linear_2"))
    },
}
PHI_4 = {"model.embed_tokens_extend.image_embed.": "embed_tokens_extend.image_embed."}
VIDEO_LLAMA = {
    f"{parent}{part}.": f"{part}."
    for parent in ("model.", "")
    for part in ("vision_model", "projector")
}
# The second level is that of older versions of transformers.
DEEPSEEK = {
    f"{parent}{stored}.": f"{own}."
    for parent in ("model.", "")
    for stored, own in (
        ("vision_model.vision_model", "vision_model"),
        ("vision_model", "vision_model"),
        ("aligner", "aligner"),
    )
}
PADDLE = {
    f"{parent}{stored}.": f"{own}."
    for parent in ("model.", "")
    for stored, own in (("visual", "visual"), ("projector", "projector"), ("mlp_AR", "projector"))
}
LFM_3 = {f"model.{part}.": f"{part}." for part in ("vision_tower", "multi_modal_projector")}
HYPERCLOVA = {
    "model.vision_model.": "vision_model.",
    "model.vision_projector.": "projector.",
    "model.projector.": "projector.",
}
NEWLINE = {f"{parent}image_newline": "image_newline" for parent in ("", "model.")}
QWEN = {"visual.": "visual.", "model.visual.": "visual."}
OMNI = {f"{parent}visual.": "visual." for parent in ("thinker.", "thinker.model.", "", "model.")}
HUNYUAN = dict.fromkeys(("vit.", "model.vit.", "model.vision_tower."), "vision_tower.")
ERNIE = {
    f"{parent}{stored}.": f"{own}."
    for parent in ("model.", "")
    for stored, own in (
        ("vision_model", "vision_tower"),
        ("vision_tower", "vision_tower"),
        ("resampler_model", "resampler_model"),
    )
}
# The first names are those of published files, the last two those of transformers' modules.
MINIMAX_M3 = {
    "vision_tower.vision_model.embeddings.patch_embedding.": "vision_tower.embeddings.proj.",
    "vision_tower.vision_model.encoder.layers.": "vision_tower.layers.",
    "vision_tower.vision_model.pre_layrnorm.": "vision_tower.pre_layrnorm.",
    "multi_modal_projector.": "multi_modal_projector.",
    "patch_merge_mlp.linear_": "multi_modal_projector.merge_linear_",
    "model.vision_tower.": "vision_tower.",
    "model.multi_modal_projector.": "multi_modal_projector.",
}
MINICPM = {"model.vision_tower.": "vision_tower.", "model.merger.": "merger."}
# The first names are those of published files, the others those of transformers' modules.
DEEPSEEK_OCR = {
    "model.sam_model.": "vision_tower.sam_encoder.",
    "model.vision_model.": "vision_tower.vision_encoder.",
    "model.qwen2_model.model.model.": "vision_tower.vision_encoder.",
    "model.qwen2_model.query_768.": "vision_tower.query_768_resolution.",
    "model.qwen2_model.query_1024.": "vision_tower.query_1024_resolution.",
    "model.projector.layers.": "multi_modal_projector.",
    "model.view_seperator": "view_separator",
    "model.image_newline": "image_newline",
    "model.vision_tower.": "vision_tower.",
    "model.multi_modal_projector.": "multi_modal_projector.",
    "model.view_separator": "view_separator",
}
