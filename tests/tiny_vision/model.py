"""Tiny random vision-language models with a tokenizer, an image processor and a chat template."""

import json
import shutil
from collections import ChainMap
from pathlib import Path

import torch

from tests.tiny_vision import flat, gemma, grids, rows, squares, tiles, views

# config.json in transformers' form, of a folder whose own is in the form of published files
TRANSFORMERS_CONFIG = "transformers_config.json"
ROOT = Path(__file__).resolve().parent.parent.parent
DOCS_5M = ROOT / "examples" / "models" / "docs-5m"
TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
    # Larger than usual: the outputs of a random model then differ from token to token.
    "initializer_range": 0.2,
}
# Content is a text or a list of parts; an image is written as its placeholder, a video as Qwen's.
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}PLACEHOLDER"
    "{% elif p.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ p.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# family -> what is written
VISION_FAMILIES = {
    **tiles.FAMILIES,
    **squares.FAMILIES,
    **gemma.FAMILIES,
    **rows.FAMILIES,
    **flat.FAMILIES,
    **grids.FAMILIES,
}
# and those whose files transformers does not load as they are
ALL_FAMILIES = ChainMap(VISION_FAMILIES, views.FAMILIES)


def write_tiny_vision(folder: Path, family: str, num_words: int = 0) -> Path:
    """Write a tiny random vision-language model, in float32.

    `num_words`: size of a vocabulary of words; 0: docs-5m's vocabulary.
    """
    import transformers

    row = ALL_FAMILIES[family]
    folder.mkdir(parents=True, exist_ok=True)
    ids = write_tiny_tokenizer(folder, row["tokens"], row["placeholder"], num_words)
    vocab_size = 64 * -(-(max(ids.values()) + 1) // 64)
    usual = {key: value for key, value in TEXT.items() if key not in row.get("without", ())}

    def with_ids(values):
        return {key: ids.get(str(value), value) for key, value in values.items()}

    text = {**usual, "vocab_size": vocab_size, **with_ids(row.get("text", {}))}
    if row["text_type"]:
        text = {"text_config": {**text, "model_type": row["text_type"]}}
        text["image_token_id"] = ids[row.get("image", row["placeholder"])]
    config = getattr(transformers, row["config"])(
        **text,
        vision_config=with_ids(row["vision"]),
        tie_word_embeddings=False,
        **with_ids(row["whole"]),
    )
    torch.manual_seed(7)
    model = auto_class(family).from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if name.endswith(("mm_input_projection_weight", "latents", "feature_extensor")):
            torch.nn.init.normal_(parameter, 0.0, 0.2)  # they begin as zeros or as ones
        elif name.endswith(row.get("small", ())):
            torch.nn.init.normal_(parameter, 0.0, 0.002)
        elif "norm" in name or "bias" in name:
            # The text norms of Gemma multiply by 1 + weight.
            is_one = "norm" in name and "bias" not in name and family not in gemma.FROM_ZERO
            torch.nn.init.normal_(parameter, float(is_one), 0.2)
    for name, buffer in model.named_buffers():
        if name.endswith(("std_bias", "std_scale")):
            torch.nn.init.normal_(buffer, float(name.endswith("scale")), 0.2)
    model.save_pretrained(folder)
    if "names" in row:
        rename_tensors(folder, row["names"])
    if "published" in row:
        stated = folder / "config.json"
        shutil.copy(stated, folder / TRANSFORMERS_CONFIG)
        stated.write_text(json.dumps(row["published"](json.loads(stated.read_text()))))
    processor = {"image_processor_type": row["image_processor"], **row["processor"]}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    if "video" in row:
        (folder / "video_preprocessor_config.json").write_text(json.dumps(row["video"]))
    return folder


def auto_class(family: str):
    """Return transformers' class that makes the model of a family."""
    import transformers

    return getattr(transformers, ALL_FAMILIES[family].get("model", "AutoModelForImageTextToText"))


def loaded(folder: Path, family: str):
    """Return transformers' model of a folder, in float32."""
    import transformers

    row = ALL_FAMILIES[family]
    others = {"attn_implementation": row["attention"]} if "attention" in row else {}
    if "published" in row:
        given = getattr(transformers, row["config"]).from_json_file(folder / TRANSFORMERS_CONFIG)
        others["config"] = given
    model = auto_class(family).from_pretrained(folder, dtype=torch.float32, **others)
    text = model.config.get_text_config()
    if getattr(text, "attn_logit_softcapping", None) is not None:
        # Some versions of transformers choose sdpa, which ignores the limit of scores.
        model.set_attn_implementation("eager")
    return model


def rename_tensors(folder: Path, names: dict[str, str]) -> None:
    """Replace parts of the names of a folder's tensors."""
    from safetensors.torch import load_file, save_file

    state = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        for before, after in names.items():
            name = name.replace(before, after)
        state[name] = tensor
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def write_tiny_tokenizer(
    folder: Path, tokens: list[str], placeholder: str, num_words: int = 0
) -> dict[str, int]:
    """Write docs-5m's tokenizer, or one of words, with more special tokens. Returns their ids."""
    tokenizer = json.loads((DOCS_5M / "tokenizer.json").read_text())
    if num_words:
        added = {each["content"]: each["id"] for each in tokenizer["added_tokens"]}
        words = {f"w{number}": number for number in range(len(added), num_words)}
        tokenizer["model"] = {"type": "WordLevel", "vocab": {**added, **words}, "unk_token": "w9"}
        tokenizer |= {"pre_tokenizer": {"type": "Whitespace"}, "decoder": None}
    first = 1 + max(each["id"] for each in tokenizer["added_tokens"])
    first = max(first, len(tokenizer["model"]["vocab"]))
    ids = {token: first + number for number, token in enumerate(tokens)}
    like = tokenizer["added_tokens"][0]
    tokenizer["added_tokens"] += [
        {**like, "id": number, "content": token} for token, number in ids.items()
    ]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((DOCS_5M / "tokenizer_config.json").read_text())
    config["chat_template"] = CHAT_TEMPLATE.replace("PLACEHOLDER", placeholder)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return ids
