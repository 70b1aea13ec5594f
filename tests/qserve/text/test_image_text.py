"""ImageText: `<image>` in prompts of models whose tokenizer has no such token."""

import json

import pytest

from qserve.text.image_text import ImageText, image_text_of

IMAGE = ImageText(alias="<image>", own="<IMG_CONTEXT>")


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ([{"type": "image"}, {"type": "text", "text": "what"}], "<image>\nwhat"),
        (
            [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "image"}],
            "a\n<image>\n<image>",
        ),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a\nb"),
        ([], ""),
    ],
)
def test_text_parts_are_joined_by_newlines(parts, text):
    message = {"role": "user", "content": parts, "name": "x"}
    assert IMAGE.as_text(message) == {"role": "user", "content": text, "name": "x"}
    assert message["content"] == parts, "the argument is unchanged"


@pytest.mark.parametrize(
    "content", ["a text", None, ["a list of texts"], [{"type": "video"}], [{"type": "text"}]]
)
def test_other_content_is_unchanged(content):
    assert IMAGE.as_text({"role": "user", "content": content})["content"] == content


@pytest.mark.parametrize(
    ("architecture", "own"),
    [
        ("InternVLChatModel", "<IMG_CONTEXT>"),
        ("AyaVisionForConditionalGeneration", "<|IMG_PATCH|>"),
        ("InternVLForConditionalGeneration", None),
        ("LlamaForCausalLM", None),
    ],
)
def test_placeholder_texts_by_architecture(tmp_path, architecture, own):
    assert image_text_of(tmp_path) is None, "a folder with a tokenizer alone"
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    found = image_text_of(tmp_path)
    assert found == (own and ImageText(alias="<image>", own=own))
