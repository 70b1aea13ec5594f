"""Chats with images of calibration data: paths, URLs, base64, and what is refused."""

import base64
import io

import pytest

from formats.errors import InputError
from qserve.multimodal.calibration import CalibrationChats
from qserve.text.tokenizer import Tokenizer
from tests.tiny_vision import picture

PICTURE = picture(50, 40, 1)
TEXT = {"type": "text", "text": "What?"}


def encoded(kind="PNG") -> str:
    file = io.BytesIO()
    PICTURE.save(file, kind)
    return base64.b64encode(file.getvalue()).decode()


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "some pictures").mkdir()
    PICTURE.save(tmp_path / "some pictures" / "a.png")
    return tmp_path


def user(*parts):
    return [{"role": "user", "content": list(parts)}, {"role": "assistant", "content": "Blocks."}]


def parts_of(folder):
    path = "some pictures/a.png"
    yield {"type": "image_url", "image_url": {"url": path}}
    yield {"type": "image_url", "image_url": path}
    yield {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded()}"}}
    yield {"type": "input_image", "image_url": encoded()}
    yield {"type": "image", "image": encoded("BMP")}
    yield {"type": "image", "path": str(folder / path)}


@pytest.mark.parametrize("family", ["qwen3_vl", "smolvlm", "gemma3"])
def test_tokens_are_those_of_a_chat(vision, folder, family):
    model = vision(family)
    chats, tokenizer = CalibrationChats(model.folder), Tokenizer(model.folder)
    plain = user({"type": "image"}, TEXT)
    ids = tokenizer.encode_chat(plain, add_generation_prompt=False)
    wanted, items = model.prompt(ids, [PICTURE])
    for part in parts_of(folder):
        chat = chats.read(user(part, TEXT), folder)
        assert chat.ids == wanted and [image.size for image in chat.images] == [(50, 40)]
        assert sum(chat.is_image) == sum(item.num_embeds for item in items)
        first = items[0].embed_positions()[0]
        assert chat.is_image.index(True) == first


def test_order_of_images(vision, folder):
    chats = CalibrationChats(vision("smolvlm").folder)
    picture(9, 20).save(folder / "b.png")
    first, second = ({"type": "image", "path": name} for name in ("b.png", "some pictures/a.png"))
    chat = chats.read(user(second, TEXT, first, second), folder)
    assert [image.size for image in chat.images] == [(50, 40), (9, 20), (50, 40)]


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"type": "image_url"}, "part of type image_url without a path, a data: URL or base64"),
        ({"type": "image", "image": 5}, "part of type image without a path"),
        ({"type": "image", "path": "no.png"}, "image no.png: is no file below .*, no data: URL"),
        ({"type": "image", "path": "x\0y"}, "is no file below"),
        ({"type": "image", "path": "text.txt"}, "image text.txt: expected one of PNG, JPEG"),
        ({"type": "image_url", "image_url": "http://a.example/a.png"}, "is not fetched"),
        ({"type": "image_url", "image_url": "data:text/html;base64,aaaa"}, "type of an image"),
        ({"type": "video"}, "has 1 placeholders for 0 videos"),
    ],
)
def test_wrong_images_are_named(vision, folder, part, words):
    (folder / "text.txt").write_text("no image")
    with pytest.raises(InputError, match=words):
        CalibrationChats(vision("qwen3_vl").folder).read(user(part), folder)
