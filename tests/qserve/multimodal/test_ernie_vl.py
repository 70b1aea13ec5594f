"""ERNIE 4.5 VL: experts for text and for images, their rotations, and files as published."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from calibrate.calibration.capture import HiddenStates, empty_statistics
from calibrate.calibration.layer_runner import LayerRunner
from calibrate.calibration.vision import open_media
from calibrate.float_model import FloatModel
from calibrate.pipeline import quantize_checkpoint
from calibrate.texts.data import read_for_model
from formats.architecture.rope_types import axes_with_frames_last
from formats.architecture.stored_form.mixtures import ernie_vl
from formats.checkpoint import CheckpointReader
from formats.errors import CheckpointError, InputError
from formats.inspection.inspect import inspect_checkpoint
from formats.scheme import Scheme
from qserve.model.axis_ropes import AxisRopes
from qserve.model.blocks.media_experts import MediaExperts
from qserve.model.blocks.rotary import Rotary
from qserve.multimodal.calibration import CalibrationChats
from tests.calibrate.statistics_of import collect_statistics
from tests.qserve.multimodal.conftest import Vision
from tests.tiny_vision import picture

FAMILY = "ernie_vl"
SCHEME = Scheme.parse("w4a16-sym-g32")
# keys of vision_config in transformers that Baidu's files state otherwise
OTHERS = ("model_type", "temporal_merge_size", "spatial_merge_size", "intermediate_size")


def requests_of(model):
    mark = model.mark
    return [
        ("what is a page table", ()),
        (f"look: {mark} what is it", (picture(40, 30, 1),)),
        (f"{mark} beside {mark} differs", (picture(64, 64, 2), picture(70, 9, 3))),
    ]


@pytest.fixture(scope="module")
def published(vision, tmp_path_factory):
    """The tiny model as Baidu writes it: a flat config.json, the tower outside of the model."""
    source = vision(FAMILY)
    folder = tmp_path_factory.mktemp("published") / FAMILY
    shutil.copytree(source.folder, folder)
    state = load_file(folder / "model.safetensors")
    state = {
        name.removeprefix("model.") if name.startswith("model.vision_model.") else name: tensor
        for name, tensor in state.items()
    }
    assert {name.split(".")[0] for name in state} == {"model", "vision_model", "lm_head"}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    text, vision_config = config.pop("text_config"), config.pop("vision_config")
    rope, count = text.pop("rope_parameters"), text.pop("moe_num_experts")
    assert text.pop("mlp_layer_types") == ["dense", "sparse", "sparse"]
    config |= {key: value for key, value in text.items() if key != "model_type"}
    config |= {
        **{"model_type": "ernie4_5_moe_vl", "im_patch_id": config.pop("image_token_id")},
        **{"moe_num_experts": [count, count], "moe_layer_interval": 1},
        **{"moe_layer_start_index": [1, 1], "moe_layer_end_index": [4, 2]},
        **{"rope_theta": rope["rope_theta"], "rope_3d": True},
        "rope_scaling": {"type": "default", "mrope_section": rope["mrope_section"]},
        **{"spatial_conv_size": 2, "temporal_conv_size": 2},
        "vision_config": {
            **{key: value for key, value in vision_config.items() if key not in OTHERS},
            **{"embed_dim": vision_config["hidden_size"], "mlp_ratio": 1.5},
            "model_type": "DFNRope_vision_transformer",
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    options = folder / "preprocessor_config.json"
    processor = json.loads(options.read_text())
    size = processor.pop("size")
    processor |= {"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]}
    processor |= {"image_processor_type": "Ernie4_5_VLImageProcessor", "temporal_conv_size": 2}
    del processor["temporal_patch_size"]
    options.write_text(json.dumps(processor))
    return folder


def test_tokens_of_published_files(vision, published):
    source = vision(FAMILY)
    model = Vision(published, source.model)
    for request in requests_of(source):
        assert model.run(model.engine(), request)[0] == [source.expected(*request)]


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    """Chats with images, for calibration."""
    folder, rows = tmp_path_factory.mktemp("chats"), []
    for number in range(4):
        picture(60, 40, number).save(folder / f"{number}.png")
        parts = [
            {"type": "image", "image": f"{number}.png"},
            {"type": "text", "text": f"what is number {number} of these pictures, and why"},
        ]
        rows.append({"messages": [{"role": "user", "content": parts}]})
    rows += [{"text": f"page {number} of a table of pages in memory " * 6} for number in range(4)]
    (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder / "chats.jsonl"


@pytest.mark.parametrize(
    "form", ["published", pytest.param("transformers", marks=pytest.mark.exhaustive)]
)
def test_quantized_with_images(vision, published, chats, tmp_path, form):
    """Both sets of experts are quantized, and both are calibrated."""
    source = published if form == "published" else vision(FAMILY).folder
    target = tmp_path / FAMILY
    report = quantize_checkpoint(
        source,
        target,
        scheme=SCHEME,
        recipe="gptq",
        calibration=str(chats),
        chats=CalibrationChats(source),
        samples=8,
        sequence_length=64,
        progress=False,
    )
    before, after = (CheckpointReader(path) for path in (source, target))
    for layer, number in ((1, 0), (1, 3), (2, 4), (2, 7)):
        name = f"model.layers.{layer}.mlp.experts.{number}.down_proj"
        assert f"{name}.weight_packed" in after.entries, name
    for name in ("mlp.gate.weight", "mlp.gate.weight_1", "mlp.moe_statics.e_score_correction_bias"):
        name = f"model.layers.1.{name}"
        assert torch.equal(before.get(name), after.get(name))
    for name, entry in before.other_parts.items():
        assert torch.equal(entry.read(), after.other_parts[name].read())
    assert not inspect_checkpoint(target).problems
    assert report is not None
    model = Vision(target, vision(FAMILY).model)
    found, _ = model.run(model.engine(), *requests_of(vision(FAMILY)))
    lags = [
        model.lags(*request, tokens)
        for request, tokens in zip(requests_of(vision(FAMILY)), found, strict=True)
    ]
    assert float(torch.cat(lags).mean()) < 0.2


def test_experts_see_only_their_tokens(vision, chats):
    """Statistics of experts for text and for images have no token in common."""
    folder = vision(FAMILY).folder
    model = FloatModel(folder)
    case = case_of(model, folder, chats)
    runner, hidden, is_expert_WS = case
    for layer in (0, 1):
        module = runner.build(layer, model.layer(layer, "cpu"))
        if layer == 1:
            seen = counted(runner, module, hidden)
        hidden.advance(runner, module, layer)
    assert sum(seen[:4]) == 2 * int((~is_expert_WS).sum())
    assert sum(seen[4:]) == 2 * int(is_expert_WS.sum()) > 0


def case_of(model, folder, chats):
    data = read_for_model(
        model, str(chats), 8, 64, seed=0, bos=True, chats=CalibrationChats(folder)
    )
    media, rotary = open_media(model, data, "cpu", torch.float32)
    runner = LayerRunner(model, model.layer_map, "cpu", rotary)
    hidden = HiddenStates(data.ids_WS, model.get(model.layer_map.embedding), runner, media=media)
    plain_S = torch.zeros(data.ids_WS.shape[1], dtype=torch.bool)
    kinds = [plain_S if each is None else each.is_expert_S for each in media]
    return runner, hidden, torch.stack(kinds)


def counted(runner, module, hidden):
    """Number of tokens that reach each expert of layer 1."""
    stats = collect_statistics(runner, module, 1, hidden)
    return [stats[f"mlp.experts.{number}.down_proj"].num_tokens for number in range(8)]


def test_statistics_of_all_tokens_are_of_one_kind(vision):
    model = FloatModel(vision(FAMILY).folder)
    runner = LayerRunner(model, model.layer_map, "cpu")
    stats = empty_statistics(runner, 1, model.layer(1, "cpu"), all_experts=True)
    first = [stats[f"mlp.experts.{number}.gate_proj"] for number in range(8)]
    assert len({id(each) for each in first[:4]}) == len({id(each) for each in first[4:]}) == 1
    assert first[0] is not first[4]


@pytest.mark.parametrize(
    "scheme", ["w8a8", pytest.param("w4a16-sym-g32", marks=pytest.mark.exhaustive)]
)
def test_rounded_while_loading(vision, tmp_path, scheme):
    """Experts of two widths; the codes are those of `quantize --recipe rtn`."""
    model, target = vision(FAMILY), tmp_path / FAMILY
    quantize_checkpoint(
        model.folder, target, scheme=Scheme.parse(scheme), recipe="rtn", progress=False
    )
    requests = requests_of(model)
    wanted, _ = Vision(target, model.model).run(Vision(target, model.model).engine(), *requests)
    found, _ = model.run(model.engine(quantization=scheme), *requests)
    assert found == wanted


def wrong_tokens(engine):
    """Tokens around images count as text."""
    engine._input_processor._expert_tokens = engine._input_processor._expert_tokens[1:2]


def exchanged_experts(engine):
    for layer in engine.runner.decoder.layers:
        if isinstance(layer.mlp, MediaExperts):
            layer.mlp.media = layer.mlp.text


def plain_axes(engine):
    encoder = engine.runner.encoder
    rotaries = [each for each in engine.runner.decoder.modules() if isinstance(each, Rotary)]
    encoder._ropes = AxisRopes(rotaries, [3, 3, 2], is_interleaved=False)


def without_correction(engine):
    for layer in engine.runner.decoder.layers:
        if isinstance(layer.mlp, MediaExperts):
            layer.mlp.media.router.correction.zero_()


@pytest.mark.parametrize(
    "change", [wrong_tokens, exchanged_experts, plain_axes, without_correction]
)
def test_wrong_readings_change_tokens(vision, change):
    model = vision(FAMILY)
    requests = requests_of(model)[1:]
    engine = model.engine()
    change(engine)
    found, _ = model.run(engine, *requests)
    assert found != [model.expected(*request) for request in requests]


def test_prompts_without_images_use_the_experts_for_text(vision):
    """A lone token of an image chooses the other experts, with or without an image."""
    model = vision(FAMILY)
    text = "what is <|IMAGE_END|> a page"
    engine = model.engine(max_num_batched_tokens=3)
    assert model.run(engine, (text, ()))[0] == [model.expected(text)]


def test_axes_of_pairs_are_those_of_transformers(vision):
    rotary = vision(FAMILY).model.model.language_model.rotary_emb
    positions_31 = torch.tensor([[3], [5], [7]])
    _, sin = rotary(torch.zeros(1), positions_31[:, None])
    frequencies = 100.0 ** -(torch.arange(8) / 8)
    axes = axes_with_frames_last([3, 3, 2], 8)
    want = torch.sin(positions_31[axes, 0] * frequencies)
    torch.testing.assert_close(sin[0, 0, ::2], want)
    for wrong in ([3, 2, 3], [4, 4], [3, 3, 3]):
        with pytest.raises(InputError, match="the first two equal, found"):
            axes_with_frames_last(wrong, 8)


@pytest.mark.parametrize("number", [[4, 8], [4], [4, 0], "4", 0])
def test_numbers_of_experts_that_cannot_be_are_refused(number):
    with pytest.raises(CheckpointError, match="moe_num_experts: expected two equal"):
        ernie_vl({"moe_num_experts": number})


def test_layers_with_experts_are_those_of_both_ranges():
    stated = {
        **{"num_hidden_layers": 6, "moe_num_experts": [4, 4], "moe_layer_interval": 2},
        **{"moe_layer_start_index": [2, 1], "moe_layer_end_index": [3, 4]},
    }
    kinds = ernie_vl(stated)["mlp_layer_types"]
    assert [i for i, kind in enumerate(kinds) if kind == "sparse"] == [1, 3]
    with pytest.raises(CheckpointError, match="moe_layer_end_index: expected a whole number"):
        ernie_vl({**stated, "moe_layer_end_index": ["3"]})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"enable_expert_parallel": True, "tensor_parallel_size": 2}, "--enable-expert-parallel"),
        ({"record_expert_loads": "loads.json"}, "--record-expert-loads"),
    ],
)
def test_settings_for_one_kind_of_experts_are_refused(vision, settings, words):
    with pytest.raises(InputError, match=f"{words}: does not work with Ernie.* experts for images"):
        vision(FAMILY).engine(**settings)
