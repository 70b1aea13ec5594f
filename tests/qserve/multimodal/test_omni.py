"""Qwen2.5-Omni and Qwen3-Omni with images, against transformers' thinkers."""

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from calibrate.pipeline import quantize_checkpoint
from formats.checkpoint import CheckpointReader
from formats.scheme import Scheme
from tests.qserve.model.test_omni_text import AUDIO, MODELS, OTHERS
from tests.qserve.model.variants import edited
from tests.qserve.multimodal.conftest import NUM_TOKENS, Vision
from tests.tiny_vision import picture

LIKE = {"2.5": "qwen2_5_vl", "3": "qwen3_vl_moe"}
START, END = "<|vision_start|>", "<|vision_end|>"


class Omni(Vision):
    """Prompts of an Omni model; transformers' answers are computed without a cache."""

    def expected(self, text, images=(), videos=()):
        ids, _ = self.prompt(text, images)
        inputs = {k: v for k, v in self.inputs(ids, images).items() if k != "mm_token_type_ids"}
        tokens = list(ids)
        for _ in range(NUM_TOKENS):
            for module in (self.model, self.model.model):
                module.rope_deltas = None
            changed = {"input_ids": torch.tensor([tokens])}
            changed["attention_mask"] = torch.ones(1, len(tokens))
            with torch.no_grad():
                found = self.model(**{**inputs, **changed}, use_cache=False)
            tokens.append(int(found.logits[0, -1].argmax()))
        return tokens[len(ids) :]


@pytest.fixture(scope="module", params=LIKE)
def omni(request, vision, tmp_path_factory):
    """A tiny model with the sizes, tokenizer and image processor of Qwen-VL's tiny model."""
    source = vision(LIKE[request.param]).folder
    thinker, architecture, text, _ = MODELS[request.param]
    config = json.loads((source / "config.json").read_text())
    ids = {
        each["content"]: each["id"]
        for each in json.loads((source / "tokenizer.json").read_text())["added_tokens"]
    }
    vision_config = dict(config["vision_config"])
    for key in ("model_type", "tokens_per_second"):
        vision_config.pop(key, None)
    key = "image_token_index" if request.param == "2.5" else "image_token_id"
    own = {**config["text_config"], "model_type": text["model_type"]}
    if "num_local_experts" in own:
        own["num_experts"] = own.pop("num_local_experts")
    made = getattr(transformers, f"{thinker}Config")(
        text_config=own,
        audio_config=AUDIO,
        vision_config=vision_config,
        vision_start_token_id=ids[START],
        **{key: config["image_token_id"]},
        **{key.replace("image", "video"): config["video_token_id"]},
    )
    torch.manual_seed(9)
    model = getattr(transformers, f"{thinker}ForConditionalGeneration")(made).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name or "ln_q" in name or name.endswith("bias"):
            is_one = not name.endswith("bias")
            torch.nn.init.normal_(parameter, float(is_one), 0.2)
    folder, alone = (tmp_path_factory.mktemp("omni") / x for x in (LIKE[request.param], "alone"))
    shutil.copytree(source, folder)
    model.save_pretrained(alone)
    state = load_file(alone / "model.safetensors")
    state = {f"thinker.{name}": tensor for name, tensor in state.items()} | OTHERS
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    stated = json.loads((alone / "config.json").read_text())
    whole = {"architectures": [architecture], "thinker_config": stated}
    whole["model_type"] = stated["model_type"].removesuffix("_thinker")
    (folder / "config.json").write_text(json.dumps(whole))
    return Omni(folder, model)


def request_of(omni, *images):
    return "".join(f"{START}{omni.mark}{END} and " for _ in images) + "what is it", images


def test_tokens_are_those_of_transformers(omni):
    first, second = picture(40, 30), picture(24, 50, seed=3)
    requests = [request_of(omni, *images) for images in ((), (first,), (first, second))]
    want = [omni.expected(*each) for each in requests]
    assert want[1] != omni.expected(*request_of(omni, second))
    assert omni.run(omni.engine(), *requests)[0] == want


def test_tokens_in_chunks_with_hits_and_little_memory(omni):
    first, second = picture(40, 30), picture(24, 50, seed=3)
    requests = [request_of(omni, *images) for images in ((first, second), (second,), (first,))]
    want = [omni.expected(*each) for each in requests]
    engine = omni.engine(max_num_batched_tokens=9, num_gpu_blocks_override=24)
    for _ in range(2):
        assert omni.run(engine, *requests)[0] == want


def test_quantized_files_keep_the_tower(omni, tmp_path):
    folder = tmp_path / omni.folder.name
    scheme = Scheme.parse("w8a16-sym-g32")
    quantize_checkpoint(omni.folder, folder, scheme=scheme, recipe="rtn", progress=False)
    before, after = (CheckpointReader(each).other_parts for each in (omni.folder, folder))
    assert after.keys() == before.keys() > OTHERS.keys()
    found = Omni(folder, omni.model)
    request = request_of(found, picture(40, 30))
    assert len(found.run(found.engine(), request)[0][0]) == NUM_TOKENS


def test_thinker_alone(omni, tmp_path):
    folder = shutil.copytree(omni.folder, tmp_path / omni.folder.name)
    config = json.loads((folder / "config.json").read_text())["thinker_config"]
    (folder / "config.json").write_text(json.dumps(config))
    state = load_file(folder / "model.safetensors")
    state = {k.removeprefix("thinker."): v for k, v in state.items() if k not in OTHERS}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    request = request_of(omni, picture(40, 30))
    alone = Omni(folder, omni.model)
    assert alone.run(alone.engine(), request)[0] == [omni.expected(*request)]


def exchange_mergers(state):
    """Read the features of another level, or values of the tower as keys."""
    pairs = [
        ("merger_list.0.", "merger_list.1."),
        ("visual.blocks.0.attn.k.", "visual.blocks.0.attn.v."),
    ]
    for first, second in pairs:
        for name in [each for each in state if first in each]:
            other = name.replace(first, second)
            state[name], state[other] = state[other], state[name]


@pytest.mark.parametrize("what", ["tower", "axes"])
def test_a_wrong_reading_is_seen(omni, tmp_path, what):
    def change(config):
        ropes = config["thinker_config"]["text_config"]["rope_parameters"]
        assert sum(ropes["mrope_section"]) == 8
        ropes["mrope_section"] = [8, 0, 0]

    target = tmp_path / omni.folder.name
    edits = {"tower": (exchange_mergers, None), "axes": (None, change)}[what]
    made = edited(omni.folder, tmp_path / "edited", *edits)
    shutil.copytree(omni.folder, target)
    shutil.copytree(made, target, dirs_exist_ok=True)
    wrong = Omni(target, omni.model)
    request = request_of(omni, picture(40, 60), picture(64, 30, seed=3))
    assert wrong.run(wrong.engine(), request)[0] != [omni.expected(*request)]
