"""Greedy tokens of vision-language models equal those of transformers in any batch and chunks."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from formats.errors import InputError
from qserve.engine import media_limits
from qserve.multimodal.media import MediaItem
from qserve.params.request_options import RequestOptions
from qserve.params.sampling_params import SamplingParams
from tests.qserve.multimodal.conftest import Vision
from tests.qserve.speculation.conftest import replayed
from tests.tiny_vision import ALL_FAMILIES, picture

__all__ = ["replayed"]

# tiles; positions of three axes and deepstack; a mask in both directions
DEFAULT = ("smolvlm", "qwen3_vl", "gemma3")
# one case by default: the rest of their tests is exhaustive
FEW = (
    "qwen2_vl",
    "gemma4",
    "gemma4_shared",
    "gemma4_unified",
    "glm4v",
    "internvl",
    "llava_next",
    "llava_onevision",
)
FEW += ("lfm2_vl", "llama4", "cohere2_vision", "kimi_k25", "lighton_ocr", "glm_ocr", "exaone4_5")
FEW += ("aya_vision", "paligemma", "paligemma2", "idefics2", "phi4_multimodal")
FEW += ("vip_llava", "deepseek_vl", "janus", "paddleocr_vl", "deepseek_ocr", "deepseek_ocr_2")
FEW += ("step3p7", "muse_glimmer", "minicpm_v", "hunyuan_ocr", "ernie_vl", "unlimited_ocr")
FEW += ("minimax_m3", "nemotron_omni", "cosmos3", "lfm3_vl")
FEW += ("hyperclova", "qianfan_ocr", "minicpm_ocr", "got_ocr", "video_llama_3")
FAMILIES = [
    pytest.param(name, marks=() if name in DEFAULT else pytest.mark.exhaustive)
    for name in ALL_FAMILIES
]
# sizes of the smallest images; transformers fails at one embedding of Mistral 3, and at an empty
# quarter of Idefics2
SMALLEST = {"mistral3": (20, 3), "lighton_ocr": (20, 17), "idefics2": (3, 2)}
# Enough tokens for a copy of the state of models with recurrent layers.
LONG = " pages of a table" * 20


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, vision):
    return vision(request.param)


def requests_of(model):
    """Text alone, one image, two images, an image at the end, odd sizes."""
    mark = model.mark
    return [
        ("what is a page table", ()),
        (f"look: {mark} what is it", (picture(40, 30, 1),)),
        (f"{mark} beside {mark} differs", (picture(64, 64, 2), picture(70, 9, 3))),
        (f"one more {mark}", (picture(*SMALLEST.get(model.folder.name, (1, 1)), 4),)),
    ]


@pytest.mark.parametrize("family", FEW)
def test_tokens_of_each_family(vision, family):
    """Text, and an image that chunks of 7 tokens cut."""
    model = vision(family)
    requests = requests_of(model)[:2]
    found, _ = model.run(model.engine(max_num_batched_tokens=7), *requests)
    assert found == [model.expected(*request) for request in requests]


@pytest.mark.exhaustive
def test_tokens_with_none_one_and_two_images(model):
    engine = model.engine()
    for request in requests_of(model):
        (found,), _ = model.run(engine, request)
        assert found == model.expected(*request)
    texts = [model.expected("look: what", ()), *(model.expected(*r) for r in requests_of(model))]
    assert len(set(map(tuple, texts))) == len(texts), "the tiny model does not see the images"


@pytest.mark.exhaustive
def test_tokens_with_pages_on_the_host(model):
    if model.engine().runner.has_states:
        pytest.skip("refused: states are not on the host")
    requests = requests_of(model)
    pages = max(-(-(len(model.prompt(*each)[0]) + 8) // 4) for each in requests)
    engine = model.engine(num_gpu_blocks_override=pages + 2, kv_offload_gb=0.01)
    for _ in range(2):
        found, events = model.run(engine, *requests)
        assert found == [model.expected(*request) for request in requests]
    assert max(event.facts.num_cached for event in events) > 0


@pytest.mark.parametrize("budget", [4, 7, 23])
def test_tokens_of_a_batch_in_chunks_that_cut_images(model, budget):
    """Budgets from less than one image on: each border falls into some image."""
    engine = model.engine(budget % 2, max_num_batched_tokens=budget)  # also one step ahead
    requests = requests_of(model)
    found, _ = model.run(engine, *requests)
    assert found == [model.expected(*request) for request in requests]


def test_tokens_after_preemptions(model):
    requests = requests_of(model)
    pages = [-(-len(model.prompt(*request)[0]) // 4) for request in requests]
    # The prompts fit, but not their outputs.
    engine = model.engine(
        num_gpu_blocks_override=sum(pages) + 1, max_num_batched_tokens=64, admission="fits"
    )
    found, events = model.run(engine, *requests, *requests[1:3])
    assert found == [model.expected(*request) for request in (*requests, *requests[1:3])]
    assert sum(event.facts.num_preemptions for event in events)


def test_second_turn_finds_the_pages_of_the_first(model):
    engine = model.engine()
    _, (text, images), *_ = requests_of(model)
    text += LONG
    model.run(engine, (text, images))
    encoded = engine.runner.encoder.tower.encode
    engine.runner.encoder.tower.encode = lambda items: (
        encoded(items) if not items else pytest.fail("an image is encoded whose rows are cached")
    )
    has_mutual_prompt = model.processor.config.family.has_mutual_prompt  # see test_mutual_prompts
    longer = text if has_mutual_prompt else text + " and then"
    (found,), (event,) = model.run(engine, (longer, images))
    assert found == model.expected(longer, images)
    ids, media = model.prompt(text, images)
    assert media[-1].end - 4 - has_mutual_prompt < event.facts.num_cached <= len(ids)


def test_tokens_of_steps_in_graphs(model, replayed, monkeypatch):
    """Without CUDA a graph runs eagerly, on the buffers that it would read."""
    engine = model.engine(1, max_num_batched_tokens=32)
    runner = engine.runner
    runner.capture_graphs(4, engine.max_model_len)
    used, replay = [], runner.graphs.replay
    monkeypatch.setattr(runner.graphs, "replay", lambda key: used.append(key) or replay(key))
    requests = requests_of(model)
    for _ in range(2):
        found, _ = model.run(engine, *requests)
        assert found == [model.expected(*request) for request in requests]
    # Rows of Gemma see each other, in plain torch.
    is_mutual = model.processor.config.is_mutual
    assert any(key.has_media for key in used) == (not is_mutual)
    assert any(key.has_media and key.num_tokens == 32 for key in used) == (not is_mutual)
    assert any(not key.has_media for key in used)


def test_prompt_whose_last_uncomputed_token_is_of_an_image(model):
    """One row is left: the step looks like a decode, but its row is an embedding."""
    mark = model.mark
    request = (f"{mark}", (picture(33, 20, 5),))
    ids, media = model.prompt(*request)
    engine = model.engine(max_num_batched_tokens=max(4, len(ids) - 1))
    (found,), _ = model.run(engine, request)
    assert found == model.expected(*request)


@pytest.mark.exhaustive
def test_pages_of_two_images_with_equal_tokens_are_not_shared(model, monkeypatch):
    engine = model.engine()
    mark = model.mark
    text = f"{mark} tell" + (LONG if engine.runner.has_states else "")
    cat, dog = (picture(40, 30, 6),), (picture(40, 30, 7),)
    assert model.prompt(text, cat)[0] == model.prompt(text, dog)[0]
    assert model.expected(text, cat) != model.expected(text, dog)
    model.run(engine, (text, cat))
    (found,), (event,) = model.run(engine, (text, dog))
    assert found == model.expected(text, dog)
    first = model.prompt(text, dog)[1][0].offset
    assert event.facts.num_cached <= first
    num_cached = model.run(engine, (text, cat))[1][0].facts.num_cached
    assert num_cached > first, "the image of the first request is found again"
    # with keys of tokens alone the second image gets the answer about the first
    monkeypatch.setattr(MediaItem, "key", lambda item, start: b"")
    engine = model.engine()
    model.run(engine, (text, cat))
    (found,), _ = model.run(engine, (text, dog))
    assert found != model.expected(text, dog)


def test_rows_of_chunks_cover_each_embedding_once(model):
    """The rows that a step replaces are those of image tokens."""
    engine = model.engine(max_num_batched_tokens=6)
    seen = []
    launch = engine.workers.launch

    def watched(step):
        if step.media is not None:
            seen.append(step.token_ids_T[step.media.rows_M])
            assert sum(stop - start for _, start, stop in step.media.of_items) == len(seen[-1])
        return launch(step)

    engine.workers.launch = watched
    _, request, *_ = requests_of(model)
    model.run(engine, request)
    ids, media = model.prompt(*request)
    tokens = [token for step in seen for token in step.tolist()]
    assert set(tokens) == {model.processor.config.fill_id()}
    assert len(tokens) == sum(item.num_embeds for item in media)


@pytest.mark.exhaustive
def test_image_of_a_single_embedding(vision):
    """transformers' own call fails at it for Mistral 3; two such images it encodes."""
    model = vision("mistral3")
    tower = model.engine().runner.encoder.tower
    items = [model.prompt(model.mark, (picture(3, 3, seed),))[1][0] for seed in (1, 2)]
    assert [item.num_embeds for item in items] == [1, 1]
    together = tower.encode(items)
    alone = [tower.encode([item])[0] for item in items]
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(alone, together, strict=True))
    assert alone[0].shape == (1, 64) and not torch.allclose(*alone, atol=1e-3)


def test_tokens_of_a_wide_image_of_lfm2(vision):
    """One tile with more columns than rows."""
    model = vision("lfm2_vl")
    request = (f"{model.mark} what", (picture(60, 30, 2),))
    ids, (item,) = model.prompt(*request)
    _, height, width = item.features[0].shape
    assert width > height and len(ids) < 20
    assert model.run(model.engine(), request)[0] == [model.expected(*request)]


def test_the_mtp_layer_of_glm_ocr_is_not_read(vision, tmp_path):
    source = vision("glm_ocr")
    folder = shutil.copytree(source.folder, tmp_path / "glm_ocr")
    stated = json.loads((folder / "config.json").read_text())
    stated["text_config"]["num_nextn_predict_layers"] = 1
    (folder / "config.json").write_text(json.dumps(stated))
    state = load_file(folder / "model.safetensors")
    layer = "model.language_model.layers.3."
    state |= {
        f"{layer}{name}.weight": torch.ones(64, 64) for name in ("eh_proj", "self_attn.q_proj")
    }
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    model, request = Vision(folder, source.model), requests_of(source)[1]
    (found,), _ = model.run(model.engine(), request)
    assert found == source.expected(*request)


def test_images_without_a_whole_embedding_are_refused(vision):
    model = vision("lighton_ocr")
    with pytest.raises(InputError, match="image: is 40 x 8 pixels after scaling.*send an image of"):
        model.prompt(model.mark, (picture(40, 3),))


def test_images_are_encoded_one_by_one_in_fixed_order(vision, monkeypatch):
    """In one call otherwise: images of a size, whose embeddings may then have other bits."""
    model = vision("qwen3_vl")
    tower, counts = model.engine().runner.encoder.tower, []
    encode = tower.encode_grid

    def counted(patches_BNP, *grid):
        counts.append(len(patches_BNP))
        return encode(patches_BNP, *grid)

    monkeypatch.setattr(tower, "encode_grid", counted)
    images = tuple(picture(40, 30, seed) for seed in (1, 2, 3))
    _, items = model.prompt(model.mark * 3, images)
    together = tower.encode(items)
    tower.encodes_alone = True
    alone = tower.encode(items)
    assert counts == [3, 1, 1, 1]
    assert model.engine(batch_invariant=True).runner.encoder.tower.encodes_alone
    for item, found, other in zip(items, alone, together, strict=True):
        assert torch.equal(tower.encode([item])[0], found)
        torch.testing.assert_close(found, other, atol=1e-5, rtol=1e-5)


def test_features_of_another_shape_are_refused(model):
    engine = model.engine()
    ids, media = model.prompt(*requests_of(model)[1])
    first = media[0]
    other = replace(first, length=first.length + 1, grid=(), num_outer=0, is_embed=b"")
    if other.end > len(ids):
        other = replace(first, is_embed=b"")
    for wrong, words in (
        (replace(first, features=()), "expected the features .*, found none"),
        (other, r"expected (pixel_values|\d+ embeddings) .*, found"),
    ):
        with pytest.raises(InputError, match=rf"media item 0: {words}"):
            engine.add_request("r", ids, SamplingParams(), options=RequestOptions(media=(wrong,)))
    assert not engine.has_work()


def counted(tower, monkeypatch):
    """Numbers of items of the tower's calls from now on."""
    counts, encode = [], tower.encode
    monkeypatch.setattr(tower, "encode", lambda items: counts.append(len(items)) or encode(items))
    return counts


def test_a_step_with_a_latency_target_encodes_few_images(vision, monkeypatch):
    """Decodes wait for the tower: without a target all three images are encoded in one step."""
    monkeypatch.setattr(media_limits, "PACED_ROWS", 8)
    model = vision("qwen3_vl")
    images = tuple(picture(64, 64, seed) for seed in (1, 2, 3))
    request = f"{model.mark} {model.mark} {model.mark} what", images
    for settings, most in (({}, 3), ({"target_itl_ms": 50.0}, 2)):
        engine = model.engine(**settings)
        counts = counted(engine.runner.encoder.tower, monkeypatch)
        assert model.run(engine, request)[0] == [model.expected(*request)]
        assert max(counts) == most
        assert sum(counts) == 3
