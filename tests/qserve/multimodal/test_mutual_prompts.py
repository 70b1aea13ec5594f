"""Prompts with images whose tokens all see each other (PaliGemma): tokens, pages, refusals."""

import json
import shutil
from dataclasses import replace

import pytest
from transformers import AutoImageProcessor, AutoTokenizer, PaliGemmaProcessor

from formats.errors import InputError
from qserve.engine.step.media_rows import MediaRows
from qserve.multimodal.calibration import CalibrationChats
from qserve.multimodal.layouts.mutual_prompt import as_one_item, framed_prompt
from qserve.params.request_options import RequestOptions
from qserve.params.sampling_params import SamplingParams
from qserve.text.tokenizer import Tokenizer
from tests.tiny_vision import picture

FAMILIES = ("paligemma", "paligemma2")
TEXT = "look: <image> what is it"


@pytest.mark.parametrize("text", ["<image>caption en", TEXT, "<image><image>a\n\nb", "a <image>"])
def test_tokens_are_those_of_the_models_own_processor(vision, text):
    model = vision("paligemma")
    tokenizer = AutoTokenizer.from_pretrained(model.folder)
    tokenizer.bos_token = tokenizer.convert_ids_to_tokens(0)
    images_of = AutoImageProcessor.from_pretrained(model.folder, backend="pil")
    images_of.image_seq_length = 16
    own = PaliGemmaProcessor(images_of, tokenizer)
    images = [picture(40 + n, 30, n) for n in range(text.count("<image>"))]
    ids, (item,) = model.prompt(text, images)
    assert ids == own(text=[text], images=[images])["input_ids"][0]
    assert (item.offset, item.length, item.num_embeds) == (0, len(ids), 16 * len(images))


def test_framed_prompts():
    """2: first token, 9: image, 7: newline. What is there already is not written again."""
    for ids in ([9, 4], [2, 9, 4], [9, 2, 4], [9, 2, 4, 7]):
        assert framed_prompt(ids, 9, 2, [7]) == [9, 2, 4, 7]
    assert framed_prompt([5, 9, 6, 9], 9, 2, [7]) == [5, 9, 6, 9, 2, 7]
    assert framed_prompt([2, 9, 4, 8], 9, 2, [8, 8]) == [9, 2, 4, 8, 8, 8]


def test_the_item_of_a_prompt_follows_its_tokens_and_images(vision):
    model = vision("paligemma")

    def digest(text, *images):
        return model.prompt(text, images)[1][0].digest

    cat, dog = picture(40, 30, 1), picture(40, 30, 2)
    both = [digest("<image><image>x", cat, dog), digest("<image><image>x", dog, cat)]
    ones = [digest("<image>x", cat), digest("<image>x", dog), digest("<image>y", cat)]
    assert len({*both, *ones}) == 5
    assert digest("<image>x", cat) == ones[0]


def _without_text(rows):
    """Only the tokens of images see ahead, as in Gemma 3."""
    ahead_T = rows.keys_ahead_T.copy()
    ahead_T[[row for row in range(len(ahead_T)) if row not in set(rows.rows_M.tolist())]] = 0
    return replace(rows, keys_ahead_T=ahead_T)


WRONG = {
    "images alone see ahead": _without_text,
    "none sees ahead": lambda rows: replace(rows, keys_ahead_T=None),
    "the window limits the prompt": lambda rows: replace(rows, unlimited_T=None),
}


def test_wrong_readings_give_other_tokens(vision, monkeypatch):
    model, request = vision("paligemma2"), (TEXT, (picture(40, 30, 1),))
    engine = model.engine(enable_prefix_caching=False)
    assert model.run(engine, request)[0] == [model.expected(*request)]
    build = MediaRows.build
    for name, wrong in WRONG.items():
        monkeypatch.setattr(MediaRows, "build", lambda *inputs, wrong=wrong: wrong(build(*inputs)))
        assert model.run(engine, request)[0] != [model.expected(*request)], name


@pytest.mark.parametrize("family", FAMILIES)
def test_pages_are_found_for_the_same_prompt_alone(vision, family):
    """The keys of an image depend on the text after it."""
    model, images = vision(family), (picture(40, 30, 1),)
    engine = model.engine()
    model.run(engine, (TEXT, images))
    for text, is_same in ((TEXT + " and then", False), (TEXT, True)):
        (found,), (event,) = model.run(engine, (text, images))
        assert found == model.expected(text, images)
        assert (event.facts.num_cached > 0) == is_same


def test_prompts_longer_than_a_step_are_refused(vision):
    model = vision("paligemma")
    engine = model.engine(max_num_batched_tokens=400)
    ids, media = model.prompt(TEXT + " word" * 200, (picture(40, 30, 1),))
    with pytest.raises(InputError, match=rf"at most 198 tokens, found {len(ids)}.*raise --max-num"):
        engine.add_request("r", ids, SamplingParams(), options=RequestOptions(media=media))
    assert not engine.has_work()
    engine.add_request("text", ids, SamplingParams())  # text alone is computed in chunks


def test_an_answer_is_no_part_of_the_prompt(vision, tmp_path):
    model = vision("paligemma")
    asked = {"role": "user", "content": [{"type": "image", "image": "one.png"}]}
    picture(40, 30, 1).save(tmp_path / "one.png")
    for told, length in (([], 0), ([{"role": "assistant", "content": "A page table."}], 6)):
        chat = CalibrationChats(model.folder).read([asked, *told], tmp_path)
        (item,) = chat.media
        assert item.offset == 0 and (len(chat.ids) - item.end > 0) == bool(length)


def test_models_without_a_template_take_chats(vision, tmp_path):
    folder = shutil.copytree(vision("paligemma").folder, tmp_path / "model")
    stated = json.loads((folder / "tokenizer_config.json").read_text())
    del stated["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(stated))
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    parts = [{"type": "image"}, {"type": "text", "text": "caption en"}]
    tokenizer = Tokenizer(folder)
    assert tokenizer.render_chat([{"role": "user", "content": parts}]) == "<image>caption en"
    assert tokenizer.render_chat([{"role": "user", "content": "hi"}]) == "hi"
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["LlavaForConditionalGeneration"]
    (folder / "config.json").write_text(json.dumps(config))
    assert not Tokenizer(folder).has_chat_template


def test_features_of_all_images_are_stacked(vision):
    model = vision("paligemma")
    images = (picture(40, 30, 1), picture(40, 30, 2))
    _, (both,) = model.prompt("<image><image>x", images)
    ones = [model.prompt("<image>x", (image,))[1][0] for image in images]
    assert both.features[0].data == b"".join(each.features[0].data for each in ones)
    assert as_one_item([1], [replace(ones[0], length=1, is_embed=b"")]).num_embeds == 1
