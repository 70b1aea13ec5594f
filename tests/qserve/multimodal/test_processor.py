"""MediaProcessor: tokens as transformers' processors make them, digests, odd and wrong images."""

import shutil

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from transformers import AutoImageProcessor, AutoTokenizer

from formats.errors import CheckpointError, InputError
from qserve.multimodal.image_processors.kind import Cut
from qserve.multimodal.image_processors.own_processor import normalizer_of
from qserve.multimodal.layouts.table import layout_of
from qserve.multimodal.processor import MediaProcessor, image_digest
from qserve.text.tokenizer import Tokenizer
from tests.tiny_vision import picture

SIZES = [(1, 1), (3, 1), (40, 30), (30, 40), (200, 1), (64, 64), (65, 33)]


@pytest.fixture(scope="module")
def smolvlm(vision):
    return vision("smolvlm")


def test_tokens_are_those_of_the_models_own_processor(smolvlm):
    from transformers import Idefics3Processor

    own = Idefics3Processor(
        AutoImageProcessor.from_pretrained(smolvlm.folder, backend="pil"),
        AutoTokenizer.from_pretrained(smolvlm.folder),
        image_seq_len=4,
    )
    for number, size in enumerate(SIZES):
        text = f"first <image>, then\n<image>{'.' * number}"
        images = [picture(*size), picture(50, 20)]
        ids, items = smolvlm.prompt(text, images)
        assert ids == own(text=text, images=images)["input_ids"][0], size
        tokens = [ids[position] for item in items for position in item.embed_positions()]
        assert set(tokens) == {smolvlm.processor.config.image_token_id}
        assert len(tokens) == ids.count(smolvlm.processor.config.image_token_id)


@pytest.mark.parametrize("is_split", [True, False])
def test_tokens_of_idefics2_are_those_of_its_own_processor(vision, tmp_path, is_split):
    """Images next to each other share a token; a word after an image has a space before it."""
    folder = shutil.copytree(vision("idefics2").folder, tmp_path / "idefics2")
    options = folder / "preprocessor_config.json"
    options.write_text(options.read_text().replace("true", str(is_split).lower()))
    tokenizer = Tokenizer(folder)
    processor = MediaProcessor(folder, tokenizer.encode)
    own = transformers.Idefics2Processor(
        AutoImageProcessor.from_pretrained(folder, backend="pil"),
        AutoTokenizer.from_pretrained(folder),
        image_seq_len=3,
    )
    images = [picture(40, 30), picture(9, 31)]
    for text in ("a <image><image> b", "<image>word\n<image>", "<image>\n\nb <image>(c)"):
        found, items = processor.prepare(text, images, list(map(image_digest, images)))
        wanted = own(text=text, images=[images])
        assert found == wanted["input_ids"][0], text
        masks = np.concatenate(wanted["pixel_attention_mask"])
        assert len(items) == len(masks) == 2 * (1 + 4 * is_split)
        for item, mask_HW in zip(items, masks, strict=True):  # only there transformers pads
            _, height, width = item.features[0].shape
            assert (height, width) == (mask_HW.any(1).sum(), mask_HW.any(0).sum())
    chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what"}]}]
    words = tokenizer.encode("<image> what<|im_end|>", False)
    assert any(
        tokenizer.encode_chat(chat)[at:][: len(words)] == words
        for at in range(len(tokenizer.encode_chat(chat)))
    )


def test_tokens_of_gemma_join_newlines_around_an_image(vision):
    model = vision("gemma3")
    encode, mark = model.processor._encode, "<start_of_image>"
    whole = f"\n\n{mark}{'<image_soft_token>' * 4}<end_of_image>\n\n"
    for text in (f"a\n{mark}", f"a{mark} b", f"{mark}\n\n{mark}", f"\n\n{mark}\n"):
        ids, items = model.prompt(text, [picture(9, 9)] * text.count(mark))
        assert ids == encode(text.replace(mark, whole), True), text
        for item in items:
            soft = ids[item.offset : item.end]
            assert soft == [model.processor.config.image_token_id] * 4


# family -> its processor, and options that config.json or the image processor's file has
PROCESSORS = {
    "internvl": ("InternVLProcessor", {"image_seq_length": 4}),
    "aya_vision": (
        "AyaVisionProcessor",
        {"patch_size": 8, "downsample_factor": 2, "img_size": 32},
    ),
    "llava_next": (
        "LlavaNextProcessor",
        {
            "patch_size": 8,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
    ),
    "llava_onevision": (
        "LlavaOnevisionProcessor",
        {
            "num_image_tokens": 16,
            "vision_feature_select_strategy": "full",
            "vision_aspect_ratio": "anyres_max_3",
        },
    ),
}
INTERN_TOKENS = {"start_image": "<img>", "end_image": "</img>", "context_image": "<IMG_CONTEXT>"}


@pytest.mark.parametrize("family", PROCESSORS)
def test_tokens_of_tiles_are_those_of_the_models_own_processor(vision, family, monkeypatch):
    """One image and several, of which LLaVA-OneVision's have no tiles; high and wide ones."""
    # a processor without a video processor, which needs torchvision
    monkeypatch.setattr(
        transformers.ProcessorMixin, "check_argument_for_proper_class", lambda *_: None
    )
    model, (name, options) = vision(family), PROCESSORS[family]
    tokenizer = AutoTokenizer.from_pretrained(model.folder)
    for kind, token in {**INTERN_TOKENS, "video": "<video>"}.items():
        setattr(tokenizer, f"{kind}_token", token)
        setattr(tokenizer, f"{kind}_token_id", tokenizer.convert_tokens_to_ids(token))
    images_of = AutoImageProcessor.from_pretrained(model.folder, backend="pil")
    own = getattr(transformers, name)(images_of, tokenizer, **options)
    lengths = set()
    for size in (*SIZES, (1, 200), (700, 130), (97, 31)):
        for images in ([picture(*size)], [picture(*size), picture(50, 20)]):
            text = " and ".join([model.mark] * len(images))
            ids, _ = model.prompt(text, images)
            assert ids == own(text=[text], images=[images])["input_ids"][0], size
            lengths.add(len(ids))
    assert len(lengths) > 4


def test_every_mode_of_an_image_is_taken(smolvlm):
    for mode in ("1", "L", "P", "RGBA", "CMYK", "I;16", "LA", "YCbCr"):
        image = picture(20, 20).convert("L" if mode == "I;16" else "RGB")
        image = image.convert("RGB").convert("L").convert(mode) if mode == "LA" else image
        image = image.convert("I").convert("I;16") if mode == "I;16" else image.convert(mode)
        ids, items = smolvlm.prompt("<image>", [image])
        assert items and items[0].features[0].dtype == "uint8", mode


@pytest.mark.parametrize("family", ["gemma3", "cohere2_vision"])
def test_images_without_pixels_are_refused(vision, family):
    """Some image processors would fill them with black."""
    processor = vision(family).processor
    for size in ((0, 5), (5, 0)):
        words = f"image: of {size[0]} x {size[1]} has no pixels"
        with pytest.raises(InputError, match=words):
            processor.prepare([processor._placeholder_id], [Image.new("RGB", size)], ["0" * 64])


def test_digests_follow_content_options_and_tile(smolvlm, tmp_path):
    image = picture(40, 30)
    _, items = smolvlm.prompt("<image>", [image])
    assert len({item.digest for item in items}) == len(items)
    again = smolvlm.prompt("text before <image>", [image.copy()])[1]
    assert [item.digest for item in again] == [item.digest for item in items]
    other = smolvlm.prompt("<image>", [picture(40, 30, 1)])[1]
    assert not {item.digest for item in other} & {item.digest for item in items}
    # two images whose bytes are equal, but not their sides
    wide, high = (Image.fromarray(np.zeros(shape, np.uint8)) for shape in ((2, 8), (8, 2)))
    assert image_digest(wide) != image_digest(high)
    folder = shutil.copytree(smolvlm.folder, tmp_path / "changed")
    options = folder / "preprocessor_config.json"
    options.write_text(options.read_text().replace("0.4", "0.3"))
    changed = MediaProcessor(folder, smolvlm.processor._encode)
    _, found = changed.prepare("<image>", [image], [image_digest(image)])
    assert not {item.digest for item in found} & {item.digest for item in items}


@pytest.mark.parametrize(("text", "count"), [("none", 1), ("<image>", 0), ("<image><image>", 1)])
def test_other_numbers_of_placeholders_and_images_are_refused(smolvlm, text, count):
    words = rf"prompt: has {text.count('<image>')} placeholders for {count} images"
    with pytest.raises(InputError, match=words):
        smolvlm.prompt(text, [picture(9, 9)] * count)


def test_folders_without_a_tower_or_an_image_processor_are_named(smolvlm, docs_5m, tmp_path):
    with pytest.raises(InputError, match="docs-5m: takes text only"):
        MediaProcessor(docs_5m, smolvlm.processor._encode)
    folder = shutil.copytree(smolvlm.folder, tmp_path / "bare")
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(CheckpointError, match="bare: has no image processor .*copy preproc"):
        MediaProcessor(folder, smolvlm.processor._encode)


def test_pixels_are_normalized_as_transformers_does(vision):
    """To the bit: the engine gets bytes and does the processor's last step."""
    for family in ("smolvlm", "qwen3_vl"):
        model = vision(family)
        processor = AutoImageProcessor.from_pretrained(model.folder, backend="pil")
        image = picture(40, 30, 3)
        given = [[image]] if family == "smolvlm" else [image]
        want = np.array(processor(images=given)["pixel_values"], np.float32)
        _, items = model.prompt(model.mark, [image])
        normalize = normalizer_of(processor, torch.device("cpu"))
        found = [
            normalize(torch.from_numpy(each.features[0].array().copy())).numpy() for each in items
        ]
        assert np.array_equal(np.concatenate(found).reshape(-1), want.reshape(-1))


# family -> its processor; those need torchvision
OTHER_PROCESSORS = {
    "lfm2_vl": "Lfm2VlProcessor",
    "llama4": "Llama4Processor",
    "cohere2_vision": "Cohere2VisionProcessor",
    "kimi_k25": "Kimi_K25Processor",
}
COHERE_TOKENS = {
    "boi": "<|START_OF_IMG|>",
    "eoi": "<|END_OF_IMG|>",
    "image": "<|IMG_PATCH|>",
    "img_line_break": "<|IMG_LINE_BREAK|>",
}


@pytest.mark.parametrize("family", OTHER_PROCESSORS)
def test_tokens_of_processors_that_need_torchvision(vision, family, monkeypatch):
    pytest.importorskip("torchvision")
    monkeypatch.setattr(
        transformers.ProcessorMixin, "check_argument_for_proper_class", lambda *_: None
    )
    model, options = vision(family), {}
    tokenizer = AutoTokenizer.from_pretrained(model.folder)
    images_of = AutoImageProcessor.from_pretrained(model.folder)
    if family == "llama4":
        options = {"patch_size": 8}
    if family == "cohere2_vision":
        images_of.patch_size = 2  # side of the square of embeddings
        for kind, token in COHERE_TOKENS.items():
            setattr(tokenizer, f"{kind}_token", token)
            setattr(tokenizer, f"{kind}_token_id", tokenizer.convert_tokens_to_ids(token))
    own = getattr(transformers, OTHER_PROCESSORS[family])(images_of, tokenizer, **options)
    lengths = set()
    for size in (*SIZES, (1, 200), (700, 130), (97, 31)):
        for images in ([picture(*size)], [picture(*size), picture(50, 20)]):
            if family == "lfm2_vl" and len(images) > 1 and max(size) > 20 * min(size):
                continue  # transformers cannot stack such an image and another
            text = " and ".join([model.mark] * len(images))
            ids, _ = model.prompt(text, images)
            assert ids == own(text=[text], images=images)["input_ids"][0], size
            lengths.add(len(ids))
    assert len(lengths) > 4


START, END = "<|image_start|>", "<|image_end|>"
COHERE_END, BREAK = "<|END_OF_IMG|>", "<|IMG_LINE_BREAK|>"
X, Y = "<|tile_x_separator|>", "<|tile_y_separator|>"
# family -> pieces of 2 rows and 3 columns of tiles and the whole image (0: tile), and of a lone
# image, as in transformers' processors
PIECES = {
    "lfm2_vl": (
        [
            *(START, "<|img_row_1_col_1|>", 0, "<|img_row_1_col_2|>", 0, "<|img_row_1_col_3|>", 0),
            *("<|img_row_2_col_1|>", 0, "<|img_row_2_col_2|>", 0, "<|img_row_2_col_3|>", 0),
            *("<|img_thumbnail|>", 0, END),
        ],
        [START, 0, END],
    ),
    "llama4": (
        [START, *(0, X, 0, X, 0, Y), *(0, X, 0, X, 0, Y), "<|image|>", 0, END],
        [START, "<|image|>", 0, END],
    ),
    "cohere2_vision": (
        ["<|START_OF_IMG|>", *[0, BREAK] * 7, COHERE_END],
        ["<|START_OF_IMG|>", 0, BREAK, COHERE_END],
    ),
}


@pytest.mark.parametrize("family", PIECES)
def test_tokens_around_tiles(vision, family):
    config = vision(family).processor.config
    for (rows, columns), wanted in zip(((2, 3), (1, 1)), PIECES[family], strict=True):
        count = rows * columns + (rows * columns > 1)
        tiles = tuple(np.full((3, 32, 32), number, np.uint8) for number in range(count))
        cut = Cut(tiles, (rows, columns), True)
        pieces = list(layout_of(config).pieces(cut, config.values))
        assert [each if isinstance(each, str) else 0 for each in pieces] == wanted
        runs = [each for each in pieces if not isinstance(each, str)]
        assert [each.features[0].array().flat[0] for each in runs] == list(range(count))
        assert {each.length for each in runs} == {4}
