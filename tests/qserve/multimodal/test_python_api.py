"""LLM.generate and LLM.chat with images, and settings with which a model takes text alone."""

import asyncio
import base64
import dataclasses
import io
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from formats.errors import CheckpointError, InputError
from qserve import LLM, AsyncLLM, SamplingParams
from qserve.config import EngineConfig
from qserve.engine.sizes import read_model
from tests.qserve.multimodal.conftest import NUM_TOKENS
from tests.qserve.speculation.head_steps import write_head
from tests.tiny_vision import picture

HEAD = {
    "architectures": ["LlamaForCausalLMEagle"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "num_hidden_layers": 1,
    "rope_theta": 10000.0,
}
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def model(vision):
    return vision("smolvlm")


@pytest.fixture(scope="module")
def llm(model):
    return LLM(str(model.folder), device="cpu", dtype="float32")


def tokens(outputs):
    return [list(choice.token_ids) for output in outputs for choice in output.outputs]


def test_generate_takes_images_next_to_plain_prompts(model, llm):
    cat, dog = picture(40, 30, 1), picture(20, 60, 2)
    prompts = [
        {"prompt": "see <image>", "multi_modal_data": {"image": cat}},
        "plain text",
        {"prompt": "<image> and <image>", "multi_modal_data": {"image": [dog, cat]}},
    ]
    want = [("see <image>", (cat,)), ("plain text", ()), ("<image> and <image>", (dog, cat))]
    found = tokens(llm.generate(prompts, GREEDY, use_tqdm=False))
    assert found == [model.expected(*each) for each in want]
    twice = dataclasses.replace(GREEDY, n=2)
    assert tokens(llm.generate(prompts[0], twice, use_tqdm=False)) == [found[0]] * 2


def test_chat_takes_images_as_parts_of_messages(model, llm):
    cat, dog = picture(40, 30, 1), picture(20, 60, 2)
    messages = [
        {
            "role": "user",
            "content": [
                {"type": "image", "image": cat},
                {"type": "text", "text": "what is it?"},
                {"type": "image_pil", "image_pil": dog},
            ],
        }
    ]
    (output,) = llm.chat(messages, GREEDY, use_tqdm=False)
    text = "<|im_start|>user\n<image>what is it?<image><|im_end|>\n<|im_start|>assistant\n"
    assert output.prompt == text
    assert tokens([output]) == [model.expected(text, (cat, dog))]


def test_text_of_a_placeholder_in_a_message_is_no_image(model, llm):
    messages = [{"role": "user", "content": [{"type": "text", "text": "write <image> here"}]}]
    (output,) = llm.chat(messages, GREEDY, use_tqdm=False)
    assert model.processor.config.image_token_id not in output.prompt_token_ids
    assert "images" not in messages[0], "the caller's messages are unchanged"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"image": "cat.png"}, "expected a PIL image, found str"),
        ({"sound": []}, "found .'sound'."),
        ({"video": [7]}, "video: expected a list of PIL images or an array .*, found int"),
        ([picture(2, 2)], "found list"),
        ({"image": [picture(2, 2)] * 2}, "has 1 placeholders for 2 images"),
    ],
)
def test_wrong_media_are_refused(llm, data, words):
    with pytest.raises(InputError, match=words):
        llm.generate({"prompt": "<image>", "multi_modal_data": data}, GREEDY, use_tqdm=False)
    assert not llm.engine.has_work()


@pytest.mark.exhaustive
def test_async_generate_takes_images(model):
    cat, dog = picture(40, 30, 1), picture(20, 60, 2)
    prompts = [
        {"prompt": "see <image>", "multi_modal_data": {"image": cat}},
        {"prompt": "<image> and <image>", "multi_modal_data": {"image": [dog, cat]}},
        "plain text",
    ]

    async def last(llm, prompt):
        return [output async for output in llm.generate(prompt, GREEDY)][-1]

    async def scenario():
        async with AsyncLLM(str(model.folder), device="cpu", dtype="float32") as llm:
            with pytest.raises(InputError, match="prompt: has 0 placeholders for 1 images"):
                await last(llm, {"prompt": "none", "multi_modal_data": {"image": cat}})
            return await asyncio.gather(*(last(llm, prompt) for prompt in prompts))

    found = asyncio.run(scenario())
    want = [("see <image>", (cat,)), ("<image> and <image>", (dog, cat)), ("plain text", ())]
    assert tokens(found) == [model.expected(*each) for each in want]


@pytest.mark.exhaustive
def test_async_generate_of_a_text_model_refuses_images(docs_5m):
    async def scenario():
        async with AsyncLLM(str(docs_5m), device="cpu") as llm:
            prompt = {"prompt": "x", "multi_modal_data": {"image": picture(2, 2)}}
            with pytest.raises(InputError, match="images: are not taken by .*docs-5m"):
                async for _ in llm.generate(prompt):
                    pass

    asyncio.run(scenario())


def test_calls_that_take_no_images_say_so(llm):
    prompt = {"prompt": "<image>", "multi_modal_data": {"image": picture(2, 2)}}
    with pytest.raises(InputError, match="multi_modal_data: is not supported by this call"):
        llm.encode(prompt, use_tqdm=False)


@pytest.mark.parametrize(
    ("family", "settings", "words"),
    [
        ("smolvlm", {"language_model_only": True}, "remove --language-model-only"),
        (
            "gemma3",
            {"target_itl_ms": 10.0},
            "images of this model do not work with --target-itl-ms",
        ),
        ("gemma3", {"max_num_batched_tokens": 16}, "raise --max-num-batched-tokens"),
    ],
)
def test_settings_that_leave_text_alone(vision, family, settings, words):
    folder = str(vision(family).folder)
    assert read_model(EngineConfig(model=folder, device="cpu")).media_kinds == {"image"}
    found = read_model(EngineConfig(model=folder, device="cpu", **settings))
    assert found.vision is None and not found.media_kinds and words in found.no_vision


def test_text_model_has_no_tower_to_round(docs_5m):
    with pytest.raises(InputError, match="--mm-encoder-quantization w8a8: .* no vision tower"):
        read_model(EngineConfig(model=str(docs_5m), mm_encoder_quantization="w8a8"))


def test_model_without_its_tower_says_why(model, tmp_path):
    only = LLM(str(model.folder), device="cpu", dtype="float32", language_model_only=True)
    prompt = {"prompt": "<image>", "multi_modal_data": {"image": picture(2, 2)}}
    with pytest.raises(InputError, match="images: are not taken .*remove --language-model-only"):
        only.generate(prompt, GREEDY, use_tqdm=False)
    assert tokens(only.generate("text", GREEDY, use_tqdm=False)) == [model.expected("text")]


def test_tower_with_missing_or_strange_tensors_is_refused(model, tmp_path):
    folder = shutil.copytree(model.folder, tmp_path / "model")
    state = load_file(folder / "model.safetensors")
    name = "model.connector.modality_projection.proj.weight"
    taken = state.pop(name)
    for extra, words in (
        ({}, "connector.modality_projection.proj.weight: .*are missing from"),
        ({name: taken[:, 1:].contiguous()}, f"{name}: expected .*, found"),
        (
            {name: taken, "model.connector.more": taken.clone()},
            "model.connector.more: .*does not have",
        ),
    ):
        save_file({**state, **extra}, folder / "model.safetensors")
        with pytest.raises(CheckpointError, match=words):
            LLM(str(folder), device="cpu", dtype="float32")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("family", "method"),
    [
        ("smolvlm", "ngram"),
        ("qwen3_vl", "draft_model"),
        pytest.param("smolvlm", "draft_model", marks=pytest.mark.exhaustive),
        pytest.param("smolvlm", "eagle3", marks=pytest.mark.exhaustive),
        pytest.param("gemma3", "eagle", marks=pytest.mark.exhaustive),
        pytest.param("qwen3_vl", "eagle3", marks=pytest.mark.exhaustive),
    ],
)
def test_tokens_with_drafts(vision, tmp_path, family, method):
    """A drafter has the placeholders' embeddings alone; every token is verified."""
    model, folder = vision(family), tmp_path / "head"
    drafter = {"method": method, "num_speculative_tokens": 3}
    if method.startswith("eagle"):
        size = model.processor.config.values["text_config"]["vocab_size"]
        head = HEAD | {"vocab_size": size} | ({"draft_vocab_size": size} if "3" in method else {})
        write_head(folder, head)
        drafter["model"] = str(folder)
    elif method == "draft_model":
        drafter["model"] = str(model.folder)  # its text model, which drafts well for texts
    draft = json.dumps(drafter)
    engine = model.engine(1, speculative_config=draft, max_num_batched_tokens=16)
    requests = [
        (f"see {model.mark} see {model.mark}", (picture(40, 30, 1), picture(20, 60, 2))),
        ("again and again and again and", ()),
        (f"at the end {model.mark}", (picture(9, 30, 3),)),
    ]
    for _ in range(2):  # the second time on the pages of the first
        found, _ = model.run(engine, *requests)
        assert found == [model.expected(*request) for request in requests]
    verifies, _, *accepted = engine.scheduler.speculation.take_counts()
    assert verifies or method == "ngram"
    assert method != "draft_model" or accepted[0] >= 2


@pytest.mark.parametrize(
    "family", ["qwen3_vl", pytest.param("smolvlm", marks=pytest.mark.exhaustive)]
)
def test_random_weights_of_a_folder_without_tensors(vision, tmp_path, family):
    """--load-format dummy, for measurements: the tower is random as well."""
    model = vision(family)
    folder = shutil.copytree(model.folder, tmp_path / family)
    (folder / "model.safetensors").unlink()
    llm = LLM(str(folder), device="cpu", dtype="float32", load_format="dummy")
    image = picture(40, 30)
    prompt = {"prompt": f"{model.mark} is", "multi_modal_data": {"image": image}}
    (output,) = llm.generate(prompt, GREEDY, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == NUM_TOKENS
    assert output.prompt_token_ids == model.prompt(prompt["prompt"], [image])[0]


def test_a_part_of_type_image_url(llm):
    """OpenAI's form, with a data: URL; nothing is fetched."""
    image = picture(50, 40, 3)
    file = io.BytesIO()
    image.save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    own = {"type": "image", "image": image}
    outputs = []
    for part in (own, {"type": "image_url", "image_url": {"url": url}}):
        messages = [{"role": "user", "content": [part, {"type": "text", "text": "What?"}]}]
        (output,) = llm.chat(messages, GREEDY, use_tqdm=False)
        outputs.append((output.prompt_token_ids, output.outputs[0].token_ids))
    assert outputs[0] == outputs[1]
    part = {"type": "image_url", "image_url": {"url": "https://a.example/x.png"}}
    with pytest.raises(InputError, match="expected a data: URL, found 'https://a.example/x.png'"):
        llm.chat([{"role": "user", "content": [part]}], GREEDY)


@pytest.mark.parametrize("family", ["qwen3_vl", "smolvlm"])
def test_a_rounded_tower_answers_about_the_image(vision, family):
    """Its embeddings differ a little from those in float."""
    model = vision(family)
    embeds = []
    for scheme in (None, "w8a8", "w8a8-fp8"):
        engine = model.engine(mm_encoder_quantization=scheme)
        _, media = model.prompt(model.mark, (picture(40, 30, 1),))
        embeds.append(torch.cat(engine.runner.encoder.tower.encode(media)))
    plain, *rounded = embeds
    for each in rounded:
        assert 0.001 < (each - plain).norm() / plain.norm() < 0.1
