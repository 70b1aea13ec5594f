"""InternVLChatModel: the form of InternVL 2 to 3.5 in which most folders are published.

transformers' InternVL with the same weights in its own names, and its image processor, decide.
"""

import base64
import io
import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, GotOcr2ImageProcessorPil

from calibrate.calibration.vision import open_media
from calibrate.float_model import FloatModel
from calibrate.pipeline import quantize_checkpoint
from calibrate.texts.data import read_for_model
from formats.checkpoint import CheckpointReader
from formats.errors import CheckpointError, InputError
from formats.inspection.inspect import inspect_checkpoint
from formats.quant_config import BLOCK
from formats.scheme import Scheme
from qserve.llm import LLM
from qserve.multimodal.calibration import CalibrationChats
from qserve.multimodal.families import VisionConfig
from qserve.multimodal.image_processors.own_processor import OwnImageProcessor
from qserve.multimodal.stored_forms.internvl_config import as_internvl
from qserve.params.sampling_params import SamplingParams
from qserve.text.tokenizer import Tokenizer
from tests.qserve.multimodal.conftest import Vision
from tests.qserve.multimodal.test_quantized_models import check_tower, codes
from tests.tiny_vision import INTERNVL, VISION_FAMILIES, picture, write_tiny_vision

FAMILY = "internvl_chat"  # name of the folders
IMAGE_NET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
ROW = {**INTERNVL, "processor": {**INTERNVL["processor"], **IMAGE_NET}}
LARGE = {"use_qk_norm": True, "norm_type": "rms_norm"}  # InternViT-6B
SMALL = {"attention_bias": True}  # InternViT-300M
# text model -> its model_type in transformers, more values of the vision part
MODELS = {
    "qwen3": ("qwen3", SMALL),
    "qwen2": ("qwen2", LARGE),
    "llama": ("llama", SMALL),
    "internlm2": ("llama", SMALL),
}
# part of a name in transformers' model -> in published files
TOWER_NAMES = {
    "vision_tower.": "vision_model.",
    "multi_modal_projector.layer_norm.": "mlp1.0.",
    "multi_modal_projector.linear_1.": "mlp1.1.",
    "multi_modal_projector.linear_2.": "mlp1.3.",
    "cls_token": "class_embedding",
    "position_embeddings": "position_embedding",
    "patch_embeddings.projection": "patch_embedding",
    "encoder.layer.": "encoder.layers.",
    "attention.projection_layer": "attn.proj",
    "attention.": "attn.",
    "layernorm_before": "norm1",
    "layernorm_after": "norm2",
    "lambda_": "ls",
}
INTERNLM2_NAMES = {
    "embed_tokens": "tok_embeddings",
    "lm_head": "output",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}
# keys of vision_config in transformers -> in published files
VISION_KEYS = {"attention_bias": "qkv_bias", "use_qk_norm": "qk_normalization"}
# published templates: InternVL 2 to 3 take texts alone, InternVL 3.5 takes parts
OF_TEXTS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
OF_PARTS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.content is string %}"
    "{{ m.content }}{% else %}{% for p in m.content %}{% if p.type == 'image' %}{{ '<image>\n' }}"
    "{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def renamed(name, names):
    for before, after in names.items():
        name = name.replace(before, after)
    return name


def published_tensors(state, text, config):
    """Tensors of transformers' model with the names and the fused rows of published files."""
    state = {
        name if name.startswith("language_model.") else renamed(name, TOWER_NAMES): tensor
        for name, tensor in state.items()
    }
    for first in [name for name in state if ".q_proj." in name]:
        is_of_tower = first.startswith("vision_model.")
        if not is_of_tower and text != "internlm2":
            continue
        rows = [state.pop(first.replace("q_proj", f"{part}_proj")) for part in "qkv"]
        if is_of_tower:
            state[first.replace("q_proj", "qkv")] = torch.cat(rows)
            continue
        groups = [each.unflatten(0, (config["num_key_value_heads"], -1)) for each in rows]
        name = first.replace("self_attn.q_proj", "attention.wqkv")
        state[name] = torch.cat(groups, 1).flatten(0, 1)
    if text == "internlm2":
        state = {
            renamed(name, INTERNLM2_NAMES) if name.startswith("language_model.") else name: tensor
            for name, tensor in state.items()
        }
    return {name: tensor.contiguous() for name, tensor in state.items()}


def published(source, folder, text="qwen3", template=OF_TEXTS):
    """Write a tiny model of transformers' InternVL as InternVLChatModel."""
    shutil.copytree(source, folder)
    stated = json.loads((folder / "config.json").read_text())
    vision = {VISION_KEYS.get(key, key): each for key, each in stated["vision_config"].items()}
    vision |= {"model_type": "intern_vit_6b", "image_size": 32, "patch_size": 8}
    llm = {**stated["text_config"], "model_type": text}
    if text == "internlm2":
        llm["bias"] = False
    config = {
        **{"architectures": ["InternVLChatModel"], "model_type": "internvl_chat"},
        **{"auto_map": {"AutoConfig": "configuration_internvl_chat.InternVLChatConfig"}},
        **{"downsample_ratio": 0.5, "dynamic_image_size": True, "force_image_size": 32},
        **{"max_dynamic_patch": 4, "min_dynamic_patch": 1, "use_thumbnail": True},
        **{"ps_version": "v2", "select_layer": -1, "template": "internvl2_5"},
        **{"llm_config": llm, "vision_config": vision},
    }
    (folder / "config.json").write_text(json.dumps(config))
    state = published_tensors(load_file(folder / "model.safetensors"), text, llm)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    options = {"feature_extractor_type": "CLIPFeatureExtractor", "size": 448, **IMAGE_NET}
    (folder / "preprocessor_config.json").write_text(json.dumps(options))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(
        json.dumps({**settings, "chat_template": template})
    )
    return folder


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """text model -> transformers' model as a Vision, and the same one as published."""
    made = {}

    def make(text):
        if text not in made:
            kind, vision = MODELS[text]
            row = {**ROW, "text_type": kind, "vision": {**ROW["vision"], **vision}}
            with pytest.MonkeyPatch.context() as patch:
                patch.setitem(VISION_FAMILIES, FAMILY, row)
                place = tmp_path_factory.mktemp(text)
                source = Vision(write_tiny_vision(place / "source" / FAMILY, FAMILY))
            made[text] = source, published(source.folder, place / FAMILY, text)
        return made[text]

    return make


def engine_of(folder, source, **settings):
    model = Vision(folder, source.model)
    return model, model.engine(**settings)


def requests(mark):
    return [
        ("what is a page table", ()),
        (f"look: {mark}\nwhat is it", (picture(40, 30, 1),)),
        (f"{mark}\nbeside {mark} differs", (picture(64, 64, 2), picture(70, 9, 3))),
        (f"one more {mark}", (picture(1, 1, 4),)),
    ]


TEXTS = [
    name if name in ("qwen3", "internlm2") else pytest.param(name, marks=pytest.mark.exhaustive)
    for name in MODELS
]


@pytest.mark.parametrize("text", TEXTS)
def test_tokens_are_those_of_transformers(pair, text):
    """In chunks that cut images, and again with their pages in the cache."""
    source, folder = pair(text)
    model, engine = engine_of(folder, source, max_num_batched_tokens=7)
    wanted = [source.expected(*each) for each in requests("<IMG_CONTEXT>")]
    assert len(set(map(tuple, wanted))) == len(wanted), "the tiny model does not see the images"
    for number in range(2):
        found, events = model.run(engine, *requests("<image>"))
        assert found == wanted
        assert (max(event.facts.num_cached for event in events) > 0) == bool(number)


@pytest.mark.parametrize("text", ["qwen3", "qwen2"])
def test_embeddings_are_those_of_transformers(pair, text):
    """InternViT-300M and 6B. Greedy tokens alone do not show each error of a tiny tower."""
    source, folder = pair(text)
    model, engine = engine_of(folder, source)
    images = (picture(70, 9, 3), picture(40, 30, 1))
    found = engine.runner.encoder.tower.encode(model.prompt("<image><image>", images)[1])
    inputs = source.inputs([source.processor.config.image_token_id], images)
    with torch.no_grad():
        wanted = source.model.model.get_image_features(inputs["pixel_values"]).pooler_output
    torch.testing.assert_close(torch.stack(found), wanted, atol=1e-5, rtol=1e-5)


def test_tokens_of_a_quantized_text_model(pair, tmp_path):
    """vLLM reads the names that the folder has: the tower's and projector's are unchanged."""
    source, folder = pair("qwen3")
    target = tmp_path / "quantized" / FAMILY
    quantize_checkpoint(folder, target, scheme=Scheme.parse("w4a16-sym-g32"), progress=False)
    check_tower(folder, target)
    names = {name.partition(".")[0] for name in CheckpointReader(target).other_parts}
    assert names == {"vision_model", "mlp1"}
    stored = load_file(target / "model.safetensors")
    assert "language_model.model.layers.0.mlp.down_proj.weight_packed" in stored
    block = json.loads((target / "config.json").read_text())[BLOCK]
    assert block["quant_method"] == "compressed-tensors"
    assert {"lm_head", "re:.*vision_model.*", "re:.*mlp1.*"} <= set(block["ignore"])
    report = inspect_checkpoint(target)
    assert not report.problems and "vision part: " in report.to_text()

    rounded = shutil.copytree(source.folder, tmp_path / "float" / FAMILY)
    state = load_file(rounded / "model.safetensors")
    for module, weight in codes(target).items():
        state[f"language_model.{module}.weight"].copy_(weight)
    save_file(state, rounded / "model.safetensors", metadata={"format": "pt"})
    truth = AutoModelForImageTextToText.from_pretrained(rounded, dtype=torch.float32)
    wanted = Vision(rounded, truth)
    wanted = [wanted.expected(*each) for each in requests("<IMG_CONTEXT>")]
    model, engine = engine_of(target, source, max_num_batched_tokens=16)
    assert model.run(engine, *requests("<image>"))[0] == wanted
    assert wanted[1] != source.expected(*requests("<IMG_CONTEXT>")[1]), "rounding changes tokens"


def with_template(folder, target, template):
    """Copy a folder with another chat template."""
    shutil.copytree(folder, target)
    settings = json.loads((target / "tokenizer_config.json").read_text())
    settings["chat_template"] = template
    (target / "tokenizer_config.json").write_text(json.dumps(settings))
    return target


def test_calibration_sees_the_images(pair, tmp_path):
    """The inputs of the layers are those of the same model in transformers' form."""
    source, folder = pair("qwen3")
    rows = []
    for number in range(4):
        picture(70, 9 + 20 * number, number).save(tmp_path / f"{number}.png")
        parts = [{"type": "image", "path": f"{number}.png"}, {"type": "text", "text": "what?"}]
        turns = [{"role": "user", "content": parts}, {"role": "assistant", "content": "blocks"}]
        rows.append(json.dumps({"messages": turns}))
    data = tmp_path / "chats.jsonl"
    data.write_text("\n".join(rows))
    own = OF_PARTS.replace("<image>", "<IMG_CONTEXT>")
    folders = [
        with_template(source.folder, tmp_path / "own", own),
        with_template(folder, tmp_path / "published", OF_PARTS),
    ]
    found = []
    for each in folders:
        model, chats = FloatModel(each), CalibrationChats(each)
        windows = read_for_model(model, str(data), 2, 96, seed=0, bos=True, chats=chats)
        media, rotary = open_media(model, windows, "cpu", torch.float32)
        assert rotary is None and sum(map(bool, media)) == 2
        found.append((windows, media))
    (wanted, theirs), (windows, ours) = found
    assert torch.equal(windows.ids_WS, wanted.ids_WS)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one.is_image_S, other.is_image_S) and not one.rows_RD.is_inference()
        torch.testing.assert_close(one.rows_RD, other.rows_RD, atol=1e-5, rtol=1e-5)
        assert (one.added_RD, one.positions_AS, one.is_mutual) == ((), None, other.is_mutual)

    settings = {"scheme": Scheme.parse("w4a16-sym-g32"), "recipe": "gptq", "progress": False}
    quantize_checkpoint(
        folders[1],
        tmp_path / "quantized",
        calibration=str(data),
        **{**settings, "samples": 2, "sequence_length": 96, "chats": CalibrationChats(folders[1])},
    )
    assert not inspect_checkpoint(tmp_path / "quantized").problems


@pytest.mark.parametrize("template", [OF_TEXTS, OF_PARTS], ids=["texts", "parts"])
def test_chats_and_prompts_of_the_python_api(pair, tmp_path, template):
    """The text of a message is no placeholder, whatever it is."""
    source, folder = pair("qwen3")
    folder = with_template(folder, tmp_path / FAMILY, template)
    llm = LLM(str(folder), device="cpu", dtype="float32", block_size=4)
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    image, word = picture(70, 9, 1), "what <image> is <IMG_CONTEXT>"
    part, last = {"type": "image", "image": image}, {"type": "text", "text": "and this"}
    content = [part, {"type": "text", "text": word}, part, last]
    (found,) = llm.chat([{"role": "user", "content": content}], params, use_tqdm=False)
    tokenizer, mark = Tokenizer(folder), "<IMG_CONTEXT>\n"
    line = "\n" if template == OF_TEXTS else ""
    before, after = (
        tokenizer.encode(text, False)
        for text in (
            f"<|im_start|>user\n{mark}",
            f"{line}{mark}and this<|im_end|>\n<|im_start|>assistant\n",
        )
    )
    ids = [*before, *tokenizer.encode_plain(word), *after]
    wanted, _ = source.prompt(ids, [image, image])
    texts = (
        tokenizer.decode(each, skip_special_tokens=False)
        for each in (found.prompt_token_ids, wanted)
    )
    assert len(set(texts)) == 1
    token = source.processor.config.image_token_id
    assert found.prompt_token_ids.count(token) == wanted.count(token) == 2 * 5 * 4
    prompt = {"prompt": "<image>\nshows", "multi_modal_data": {"image": [image]}}
    (found,) = llm.generate([prompt], params, use_tqdm=False)
    assert found.prompt_token_ids == source.prompt("<IMG_CONTEXT>\nshows", [image])[0]
    assert found.outputs[0].token_ids == source.expected("<IMG_CONTEXT>\nshows", [image])


SIZES = [
    *[(1, 1), (3, 1), (1, 50), (40, 30), (30, 40), (200, 1), (64, 64), (65, 33), (100, 80)],
    *[(80, 100), (64, 32), (97, 31), (300, 300), (130, 700), (45, 36), (36, 45), (32, 32)],
]


def options_of(folder, **changed):
    values = {"dynamic_image_size": True, "use_thumbnail": True, "force_image_size": 32}
    values |= {"min_dynamic_patch": 1, "max_dynamic_patch": 12, **changed}
    (folder / "config.json").write_text(json.dumps(values))
    return OwnImageProcessor(folder, "internvl")


@pytest.mark.parametrize(("least", "most"), [(1, 12), (1, 5), (3, 7)])
def test_pixels_are_those_of_transformers(tmp_path, least, most):
    own = options_of(tmp_path, min_dynamic_patch=least, max_dynamic_patch=most)
    theirs = GotOcr2ImageProcessorPil(
        size={"height": 32, "width": 32},
        **{"min_patches": least, "max_patches": most, "crop_to_patches": True, **IMAGE_NET},
    )
    counts = set()
    for seed, size in enumerate(SIZES):
        image = picture(*size, seed)
        found, want = (np.asarray(each([image])["pixel_values"]) for each in (own, theirs))
        assert found.shape == want.shape, size
        np.testing.assert_allclose(found, want, rtol=0, atol=1e-6)
        counts.add(len(found))
    assert len(counts) > 3


def test_options_about_tiles(tmp_path):
    image = picture(64, 32)
    shapes = {
        "whole": options_of(tmp_path).cut(image),
        "tiles": options_of(tmp_path, use_thumbnail=False).cut(image),
        "one": options_of(tmp_path, dynamic_image_size=False).cut(image),
    }
    assert {name: len(cut.tiles_CHW) for name, cut in shapes.items()} == {
        **{"whole": 3, "tiles": 2, "one": 1}
    }
    with pytest.raises(
        CheckpointError, match="max_patches of the image processor: expected a posi"
    ):
        options_of(tmp_path, max_dynamic_patch=0)


PUBLISHED = {
    "architectures": ["InternVLChatModel"],
    **{"force_image_size": 448, "ps_version": "v2", "select_layer": -1, "downsample_ratio": 0.5},
    "llm_config": {"model_type": "internlm2", "hidden_size": 6144, "vocab_size": 92553},
    "vision_config": {"model_type": "intern_vit_6b", "image_size": 448, "num_hidden_layers": 45},
}


def test_defaults_are_those_of_the_published_code():
    """InternVL2-26B: its vision_config leaves out what InternViT-6B has."""
    found = VisionConfig.of(PUBLISHED)
    vision = found.values["vision_config"]
    assert found.image_token_id is None, "the tokenizer knows it"
    assert (vision["hidden_size"], vision["num_attention_heads"]) == (3200, 25)
    assert (vision["num_hidden_layers"], vision["intermediate_size"]) == (45, 12800)
    assert vision["use_qk_norm"] and vision["norm_type"] == "rms_norm"
    assert not vision["attention_bias"] and vision["image_size"] == [448, 448]
    assert found.values["text_config"]["hidden_size"] == 6144
    assert as_internvl(PUBLISHED)["vision_feature_layer"] == -1


@pytest.mark.parametrize(
    "changed",
    [
        {"ps_version": "v1"},
        {"force_image_size": 224},
        {"vision_config": {"model_type": "siglip_vision_model", "image_size": 448}},
    ],
)
def test_other_vision_parts_are_served_as_text(changed):
    assert VisionConfig.of({**PUBLISHED, **changed}) is None


def test_folders_without_the_image_token_are_named(pair, docs_5m):
    _, folder = pair("qwen3")
    with pytest.raises(InputError, match="token <IMG_CONTEXT>: is not in the model's tokenizer"):
        VisionConfig.of(json.loads((folder / "config.json").read_text())).with_tokens(
            Tokenizer(docs_5m).encode
        )


@pytest.mark.exhaustive
def test_images_that_clients_send(pair, start_server):
    source, folder = pair("qwen3")
    images, file = (picture(70, 9, 3), picture(40, 30, 1)), "data:image/png;base64,"
    parts = []
    for image, text in zip(images, ("first <image>", "second"), strict=True):
        data = io.BytesIO()
        image.save(data, "PNG")
        url = file + base64.b64encode(data.getvalue()).decode()
        parts += [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]
    client = start_server(folder, "--served-model-name", "tiny", "--dtype", "float32").client()
    found = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": parts}],
        max_tokens=8,
        extra_body={"temperature": 0, "ignore_eos": True},
    )
    tokenizer, mark = Tokenizer(folder), "<IMG_CONTEXT>"
    before, after = (
        tokenizer.encode(text, False)
        for text in (
            f"<|im_start|>user\n{mark}\n",
            f"\n{mark}\nsecond<|im_end|>\n<|im_start|>assistant\n",
        )
    )
    ids = [*before, *tokenizer.encode_plain("first <image>"), *after]
    assert found.usage.prompt_tokens == len(source.prompt(ids, images)[0])
    wanted = source.expected(tuple(ids), images)
    assert found.choices[0].message.content == tokenizer.decode(wanted)
