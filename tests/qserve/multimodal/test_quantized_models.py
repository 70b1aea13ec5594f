"""Quantized vision-language models: the text model is rounded, the tower is kept in float.

transformers loads the compressed-tensors folders itself; other formats hold the same codes.
"""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from calibrate.pipeline import quantize_checkpoint
from formats.architecture.text_part import stored_name, text_prefix
from formats.checkpoint import CheckpointReader
from formats.convert import convert_checkpoint
from formats.errors import InputError
from formats.files.model_writer import open_writer
from formats.inspection.inspect import inspect_checkpoint
from formats.layouts import decode_linear
from formats.quant_config import BLOCK, QuantConfig
from formats.scheme import Scheme
from qkernels import QuantLinear
from qserve import save_quantized
from tests.qserve.multimodal.conftest import Vision
from tests.tiny_vision import ALL_FAMILIES, loaded, picture

SCHEME = Scheme.parse("w4a16-sym-g32")
# transformers computes something else with quantized experts;
# compressed-tensors loses the tower's output of a model that has a parameter of its own
READ_AS_FLOAT = ("qwen3_vl_moe", "qwen3_5_moe", "llava_next", "llava_onevision", "ernie_vl")
# transformers merges linears, whose codes it cannot join
READ_AS_FLOAT += ("unlimited_ocr", "minimax_m3", "step3p7")
# config.json is not that of transformers' class
READ_AS_FLOAT += ("deepseek_ocr", "deepseek_ocr_2")
DOWN = "model.layers.1.mlp.down_proj"


@pytest.fixture(scope="module")
def quantized(vision, tmp_path_factory):
    """family -> folder of its text model in W4A16, in compressed-tensors by default."""
    made = {}

    def make(family):
        if family not in made:
            made[family] = tmp_path_factory.mktemp("quantized") / family
            source = vision(family).folder
            quantize_checkpoint(source, made[family], scheme=SCHEME, progress=False)
        return made[family]

    return make


def check_tower(source, folder):
    wanted, found = (CheckpointReader(each).other_parts for each in (source, folder))
    assert wanted and wanted.keys() == found.keys()
    for name, entry in wanted.items():
        assert torch.equal(entry.read(), found[name].read()), name
    for name in ("preprocessor_config.json", "tokenizer.json"):
        assert (folder / name).read_bytes() == (source / name).read_bytes()


def codes(folder):
    """Weights of the linears in float, by the text model's names."""
    return {name: weight.dequantize() for name, weight in packed(folder).items()}


def packed(folder):
    """Quantized weights, by the text model's names."""
    reader = CheckpointReader(folder)
    config, found = QuantConfig.from_dict(reader.config[BLOCK]), {}
    for name in CheckpointReader(folder).entries:
        module, _, field = name.rpartition(".")
        if field in ("qweight", "weight_packed"):
            found[module] = decode_linear(
                module,
                {leaf: reader.get(f"{module}.{leaf}") for leaf in reader.children(module)},
                config,
            )
    return found


def stacked_rows(state, name):
    """Return the rows of one expert's linear in transformers' tensors of all experts."""
    stem, number, leaf = re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)\.weight", name).groups()
    apart = f"{stem.removesuffix('.experts')}.{leaf}.weight"  # Step: a stack for each linear
    if apart in state:
        return state[apart][int(number)]
    if leaf == "down_proj":
        return state[f"{stem}.down_proj"][int(number)]
    return state[f"{stem}.gate_up_proj"][int(number)].chunk(2)[leaf == "up_proj"]


def dequantized(source, folder, target):
    """Write the source with the values that the codes of `folder` mean."""
    shutil.copytree(source, target)
    state = load_file(target / "model.safetensors")
    prefix = text_prefix(state)
    for module, weight in codes(folder).items():
        name = stored_name(f"{module}.weight", prefix)
        if name not in state:
            stacked_rows(state, name).copy_(weight)
            continue
        state[name] = weight.contiguous()
    save_file(state, target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.mark.parametrize(
    "family",
    [
        name if name == "smolvlm" else pytest.param(name, marks=pytest.mark.exhaustive)
        for name in ALL_FAMILIES
    ],
)
def test_tokens_are_those_of_transformers(vision, quantized, tmp_path, family):
    source, folder = vision(family), quantized(family)
    check_tower(source.folder, folder)
    readable = folder
    if family in READ_AS_FLOAT:
        readable = dequantized(source.folder, folder, tmp_path / "float")
    model = Vision(folder, loaded(readable, family))
    mark = model.mark
    requests = [
        ("what is a page table", ()),
        (f"look: {mark} what is it", (picture(40, 30, 1),)),
        (f"{mark} beside {mark}", (picture(64, 64, 2), picture(70, 9, 3))),
    ]
    engine = model.engine(max_num_batched_tokens=16)
    assert any(isinstance(each, QuantLinear) for each in engine.runner.decoder.modules())
    tower = engine.runner.encoder.tower
    assert not any(isinstance(each, QuantLinear) for each in tower.modules())
    found, _ = model.run(engine, *requests)
    assert found == [model.expected(*request) for request in requests]
    assert found[1] != source.expected(*requests[1]), "rounding changes some token"


def test_every_format_keeps_the_tower_and_the_codes(vision, quantized, tmp_path):
    source, folder = vision("gemma3").folder, quantized("gemma3")
    wanted, before = codes(folder), folder
    for step, name in enumerate(("gptq", "awq", "compressed-tensors")):
        after = tmp_path / str(step) / "gemma3"
        after.parent.mkdir()
        convert_checkpoint(before, after, name)
        check_tower(source, after)
        found = codes(after)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[each], wanted[each]) for each in wanted)
        report = inspect_checkpoint(after)
        assert not report.problems
        assert report.vision_bytes == sum(
            e.num_bytes for e in CheckpointReader(source).other_parts.values()
        )
        assert "vision part: " in report.to_text()
        before = after
    stated = json.loads((tmp_path / "0" / "gemma3" / "config.json").read_text())
    assert stated[BLOCK]["dynamic"].keys() == {
        "-:.*vision_tower.*",
        "-:.*multi_modal_projector.*",
    }
    assert stated["architectures"] == ["Gemma3ForConditionalGeneration"]
    stated = json.loads((tmp_path / "1" / "gemma3" / "config.json").read_text())
    skipped = stated[BLOCK]["modules_to_not_convert"]
    assert skipped == ["vision_tower", "multi_modal_projector"]
    files = [tmp_path / step / "gemma3" / "config.json" for step in "2"]
    assert json.loads(files[0].read_text()) == json.loads((folder / "config.json").read_text())


def test_exceptions_have_the_names_of_the_whole_model(vision, tmp_path):
    folder = tmp_path / "smolvlm"
    overrides = [(DOWN, Scheme.parse("w8a16-sym-g32"))]
    quantize_checkpoint(
        vision("smolvlm").folder,
        folder,
        scheme=SCHEME,
        overrides=overrides,
        ignore=["layers.0.mlp.up_proj"],
        progress=False,
    )
    text = (folder / "config.json").read_text()
    stated = json.dumps(json.loads(text)[BLOCK])
    assert "text_model" in stated and r"model.layers" not in stated.replace("text_model", "")
    config = QuantConfig.from_dict(CheckpointReader(folder).config[BLOCK])
    assert config.scheme_for(DOWN).weight.bits == 8
    assert config.scheme_for(DOWN.replace("1", "2")).weight.bits == 4
    engine = Vision(folder, vision("smolvlm").model).engine()
    layers = engine.runner.decoder.layers
    bits = [layer.mlp.down_proj.scheme.weight.bits for layer in layers]
    assert bits == [4, 8, 4]


def test_own_codes_are_saved_with_the_tower(vision, tmp_path):
    source = vision("llava").folder
    folder = tmp_path / "llava"
    reader = CheckpointReader(source)
    weight = reader.get(f"{DOWN}.weight")
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight.data = weight
    layer = QuantLinear.from_float(linear, "w4a16-sym-g32")
    save_quantized(folder, source, {DOWN: layer}, format="compressed-tensors")
    check_tower(source, folder)
    assert codes(folder).keys() == {DOWN}


def test_a_head_that_is_not_tied_any_more_is_stated_twice(vision, tmp_path):
    reader = CheckpointReader(vision("smolvlm").folder)
    config = {**reader.config, "tie_word_embeddings": not reader.config["tie_word_embeddings"]}
    with open_writer(tmp_path / "new", reader, min_bytes=0) as writer:
        for name in reader.entries:
            writer.add(name, reader.get(name))
        staged = writer.seal(config, side_files_from=reader.folder)
        stated = json.loads((staged / "config.json").read_text())
    wanted = config["tie_word_embeddings"]
    assert stated["tie_word_embeddings"] == stated["text_config"]["tie_word_embeddings"] == wanted


@pytest.mark.exhaustive
def test_quantized_experts_that_transformers_does_not_find(vision, quantized, tmp_path):
    """It looks for one float tensor of all experts, as the published files have."""
    found = inspect_checkpoint(quantized("qwen3_vl_moe")).loads_in
    verdicts = {verdict.program: verdict for verdict in found}
    assert verdicts["transformers"].answer == "no" and verdicts["vLLM"].answer == "yes"
    assert "float tensors of all experts" in verdicts["transformers"].reason
    found = inspect_checkpoint(quantized("qwen3_vl")).loads_in
    assert {verdict.program: verdict.answer for verdict in found}["transformers"] == "yes"
    weights = packed(quantized("qwen3_vl_moe"))
    arguments = tmp_path / "new", vision("qwen3_vl_moe").folder, weights
    with pytest.raises(InputError, match="float tensors of all experts"):
        save_quantized(*arguments, format="compressed-tensors", readers=["transformers"])
