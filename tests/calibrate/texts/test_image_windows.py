"""Windows of chats with images: whole images, full windows, a hash that depends on pixels."""

import itertools
import json
from typing import NamedTuple

import pytest
import torch
from PIL import Image
from transformers import AutoTokenizer

from calibrate.texts.data import read_calibration
from calibrate.texts.evaluate import Excerpt
from calibrate.texts.image_windows import has_images, image_windows
from formats.errors import InputError

LENGTH = 12
FILL, TEXT, BOS = 7, 5, 1
PICTURE = Image.new("RGB", (3, 2), 9)


class Chat(NamedTuple):
    ids: list[int]
    is_image: list[bool]
    images: list


def chat(before, rows, after, picture=PICTURE):
    """A chat of `before` tokens, an image of `rows` and `after` tokens; the parts differ in ids."""
    ids = [BOS, *[2] * (before - 1), *[3] * rows, *[4] * after]
    return Chat(ids, [each == 3 for each in ids], [picture])


def windows(*pieces, count=9, length=LENGTH):
    fillers = itertools.repeat(Excerpt(text="f" * 5, begins=True))
    return image_windows(
        pieces,
        lambda text: [FILL if text[0] == "f" else TEXT] * len(text),
        fillers,
        before=[BOS],
        opening=[BOS],
        length=length,
        count=count,
        source="data",
    )


def test_chat_that_does_not_fit_starts_next_window():
    ids_WS, images_W, _ = windows(chat(2, 3, 3), chat(2, 3, 3), chat(1, 1, 1))
    assert ids_WS.tolist() == [
        [1, 2, 3, 3, 3, 4, 4, 4, BOS, FILL, FILL, FILL],
        [1, 2, 3, 3, 3, 4, 4, 4, 1, 3, 4, BOS],
    ]
    assert [len(window.images) for window in images_W] == [1, 2]
    assert all(torch.equal(w.is_image_S, ids == 3) for w, ids in zip(images_W, ids_WS, strict=True))


def test_texts_continue_in_next_window():
    ids_WS, images_W, _ = windows(
        chat(2, 3, 3), Excerpt(text="t" * 9, begins=True), chat(1, 2, 1), count=2
    )
    assert ids_WS.tolist() == [
        [1, 2, 3, 3, 3, 4, 4, 4, BOS, TEXT, TEXT, TEXT],
        [BOS, *[TEXT] * 6, 1, 3, 3, 4, BOS],
    ]
    assert [len(window.images) for window in images_W] == [1, 1]


def test_long_chat_is_cut_after_its_images():
    ids_WS, _, num_too_long = windows(chat(4, 4, 9), chat(9, 4, 1))
    assert ids_WS.tolist() == [[1, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4]] and num_too_long == 1
    with pytest.raises(InputError, match="none of its images fits into a window of 12 tokens"):
        windows(chat(9, 4, 1))


def test_bos_is_added_to_chats_without_it():
    plain = Chat([3, 4], [True, False], [PICTURE])
    ids_WS, (window, *_), _ = windows(plain, length=4)
    assert ids_WS.tolist() == [[BOS, 3, 4, BOS]]
    assert window.is_image_S.tolist() == [False, True, False, False]


@pytest.mark.parametrize("kind", ["image", "image_url", "input_image", "text"])
def test_chats_with_images_are_found(kind):
    turns = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": kind}]}]
    assert has_images(turns) == (kind != "text")
    assert not has_images("text") and not has_images([{"role": "user", "content": "image_url"}])


class Reader:
    def __init__(self, pixel=9):
        self.pixel, self.folders = pixel, []

    def read(self, messages, folder):
        self.folders.append(folder)
        return chat(3, 4, 5, Image.new("RGB", (3, 2), self.pixel))


def test_data_with_images(docs_5m, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(docs_5m)
    turns = [{"role": "user", "content": [{"type": "image", "path": "a.png"}]}]
    rows = [{"messages": turns}, {"text": "some plain words " * 40}] * 4
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))

    def read(reader, **options):
        arguments = {"samples": 6, "sequence_length": 32, "chats": reader, **options}
        return read_calibration(str(tmp_path / "data.jsonl"), tokenizer, **arguments)

    reader = Reader()
    data, again, other = read(reader), read(Reader()), read(Reader(pixel=8))
    assert set(reader.folders) == {tmp_path} and data.chats is reader
    assert data.ids_WS.shape == (6, 32) and len(data.images_W) == 6
    assert data.num_images == data.facts()["images"] >= 3
    assert torch.equal(data.ids_WS, other.ids_WS)
    assert data.sha256 == again.sha256 != other.sha256, "a pixel is another"
    assert len(read(reader, samples=500).images_W) < 500
    with pytest.raises(InputError, match="data.jsonl: has images, which are not supported here"):
        read(None)
