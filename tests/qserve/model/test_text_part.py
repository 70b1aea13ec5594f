"""Checkpoints that also see pictures: the text model in them is quantized, inspected and served."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from calibrate.pipeline import quantize_checkpoint
from formats.architecture.text_part import stored_block, text_config
from formats.errors import InputError
from formats.inspection.inspect import inspect_checkpoint
from formats.scheme import Scheme
from tests.formats.inspection.findings import of_weights
from tests.own_code.models import TINY_MODELS
from tests.qserve.model.variants import TOKENS, edited, logits, relative
from tests.qserve.model.whole_models import TEXT, TEXT_ALONE, WHOLE
from tests.tiny_families import TINY_FAMILIES


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Name -> (folder, transformers' logits of the whole model on a text)."""
    found = {}

    def make(name):
        if name not in found:
            torch.manual_seed(3)
            model = transformers.AutoModelForMultimodalLM.from_config(
                WHOLE[name](), dtype=torch.float32
            ).eval()
            for parameter_name, parameter in model.named_parameters():
                if "norm" in parameter_name:
                    is_one = float(name != "gemma 3")
                    torch.nn.init.normal_(parameter, is_one, 0.2)
            folder = tmp_path_factory.mktemp("whole") / "model"
            model.save_pretrained(folder)
            if name == "kimi k2.5":  # transformers 5.23 saves its tower's names for layers
                state = load_file(folder / "model.safetensors")
                state = {key.replace("model.blocks.", "model.layers."): state[key] for key in state}
                save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
            with torch.no_grad():
                found[name] = folder, model(torch.tensor([TOKENS])).logits[0]
        return found[name]

    return make


# transformers takes 20 seconds for the tower of Kimi; the others are as LLaVA-NeXT is
LATER = ("kimi k2.5", *(name for name in TEXT_ALONE if "Llava" in name), "idefics 2")


def _marked(name):
    return pytest.param(name, marks=pytest.mark.exhaustive) if name in LATER else name


@pytest.mark.parametrize("name", [_marked(name) for name in WHOLE])
def test_text_model_is_served(made, name):
    folder, want = made(name)
    assert relative(logits(folder), want) < 1e-5


@pytest.mark.parametrize(
    ("architecture", "family", "part"),
    [
        ("InternVLChatModel", "qwen3", "mlp1.0.weight"),
        ("InternVLChatModel", "internlm2", "mlp1.0.weight"),
        ("KimiK25ForConditionalGeneration", "deepseek_v3", "mm_projector.proj.0.weight"),
        ("KimiVLForConditionalGeneration", "deepseek_v3", "vision_tower.x.weight"),
        ("NemotronH_Nano_Omni_Reasoning_V3", "nemotron_h", "sound_encoder.x.weight"),
        ("NemotronH_Nano_VL_V2", "nemotron_h", "vision_model.x.weight"),
    ],
)
def test_models_with_remote_code(tiny_model, own_code, tmp_path, architecture, family, part):
    """As published: the text model below `language_model.`, its config as llm_config."""
    make = own_code if family in TINY_MODELS else tiny_model
    source, whole = make(family), tmp_path / "whole"
    whole.mkdir()
    state = {f"language_model.{k}": v for k, v in load_file(source / "model.safetensors").items()}
    state[part] = torch.ones(2, 2)
    save_file(state, whole / "model.safetensors", metadata={"format": "pt"})
    text = json.loads((source / "config.json").read_text())
    key = "text_config" if "Kimi" in architecture else "llm_config"
    if "Kimi" in architecture:
        text["model_type"] = "kimi_k2"
    config = {"architectures": [architecture], "model_type": "x", key: text}
    (whole / "config.json").write_text(json.dumps(config))
    assert torch.equal(logits(whole), logits(source))
    if architecture not in ("InternVLChatModel", "NemotronH_Nano_VL_V2"):
        return  # the same writer
    for folder in (whole, source):
        target = tmp_path / f"quantized {folder.name}"
        quantize_checkpoint(
            folder,
            target,
            scheme=Scheme.parse("w4a16-sym-g32"),
            output_format="compressed-tensors",
            progress=False,
        )
    found, want = (
        load_file(tmp_path / f"quantized {folder.name}" / "model.safetensors")
        for folder in (whole, source)
    )
    assert torch.equal(found.pop(part), state[part])
    assert found.keys() == {f"language_model.{name}" for name in want} != state.keys()
    assert torch.equal(logits(tmp_path / "quantized whole"), logits(target))


def test_gemma_3n_as_published(tiny_model, tmp_path):
    """Its towers need another library; their tensors are not read."""
    source, whole = tiny_model("gemma3n"), tmp_path / "whole"
    whole.mkdir()
    state = {
        f"model.language_model.{name.removeprefix('model.')}": tensor
        for name, tensor in load_file(source / "model.safetensors").items()
    }
    for part in ("vision_tower", "audio_tower", "embed_vision", "embed_audio"):
        state[f"model.{part}.x.weight"] = torch.ones(2, 2)
    save_file(state, whole / "model.safetensors", metadata={"format": "pt"})
    text = json.loads((source / "config.json").read_text())
    config = {
        "architectures": ["Gemma3nForConditionalGeneration"],
        "model_type": "gemma3n",
        "text_config": text,
    }
    (whole / "config.json").write_text(json.dumps(config))
    assert torch.equal(logits(whole), logits(source))


def test_text_model_of_gemma_4_12b_alone(tmp_path):
    """Gemma4UnifiedForCausalLM, also if config.json leaves out the window and the heads."""
    text = {**TEXT, **TINY_FAMILIES["gemma4"][1], "num_hidden_layers": 6}
    for key in ("hidden_size_per_layer_input", "layer_types", "sliding_window"):
        text.pop(key, None)
    torch.manual_seed(3)
    config = transformers.Gemma4UnifiedTextConfig(**text)
    model = transformers.Gemma4UnifiedForCausalLM(config).float().eval()
    model.save_pretrained(tmp_path / "model")
    with torch.no_grad():
        want = model(torch.tensor([TOKENS])).logits[0]
    assert relative(logits(tmp_path / "model"), want) < 1e-5

    def leave_out(values):
        assert values.pop("sliding_window") == 1024
        assert values["architectures"] == ["Gemma4UnifiedForCausalLM"]

    folder = edited(tmp_path / "model", tmp_path / "x", config=leave_out)
    assert relative(logits(folder), want) < 1e-5
    target = tmp_path / "quantized"
    quantize_checkpoint(folder, target, scheme=Scheme.parse("w8a16-sym-g32"), progress=False)
    assert 0 < relative(logits(target), want) < 0.1
    stated = json.loads((target / "config.json").read_text())
    assert stated["model_type"] == "gemma4_unified_text"


@pytest.mark.parametrize("name", ["gemma 3", "mistral 3"])
def test_names_of_the_modules_in_transformers(made, tmp_path, name):
    """model.language_model.layers, where published files have language_model.model.layers."""
    folder, want = made(name)

    def rename(state):
        for old in list(state):
            assert not old.startswith("model.")
            new = old.removeprefix("language_model.model.")
            new = f"model.{new}" if new == old else f"model.language_model.{new}"
            state[new] = state.pop(old)

    assert relative(logits(edited(folder, tmp_path / "x", rename)), want) < 1e-5


def test_head_of_its_own_is_read_whatever_the_config_says(made, tmp_path):
    """The whole states a tie, which transformers' default is, and its text model none."""
    folder, want = made("mistral 3")

    def add(state):
        embedding = state["language_model.model.embed_tokens.weight"]
        state["language_model.lm_head.weight"] = 2 * embedding

    assert relative(logits(edited(folder, tmp_path / "x", add)), 2 * want) < 1e-5


def test_omitted_config_values_are_filled_in(made, tmp_path):
    """As gemma-3-4b: the number of heads is transformers' default."""
    folder, _ = made("gemma 3")

    def leave_out(config):
        del config["text_config"]["num_attention_heads"]

    with pytest.raises(
        InputError, match=r"expected \[128, 64\] from config.json, found \[64, 64\]"
    ):
        logits(edited(folder, tmp_path / "x", config=leave_out))


def test_defaults_of_text_models_are_those_of_transformers():
    """Published files of LLaVA-1.5 and Idefics2 leave out even the sizes."""
    for kind, architecture in (
        ("llama", "LlavaForConditionalGeneration"),
        ("mistral", "Idefics2ForConditionalGeneration"),
        ("qwen2", "Qwen2AudioForConditionalGeneration"),
        ("granite", "GraniteSpeechForConditionalGeneration"),
        ("granite4_vision_text", "Granite4VisionForConditionalGeneration"),
        ("granite_docling_text", "GraniteDoclingForConditionalGeneration"),
    ):
        stated = {"architectures": [architecture], "text_config": {"model_type": kind}}
        found, wanted = text_config(stated, []), transformers.AutoConfig.for_model(kind)
        sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        assert all(found[key] == getattr(wanted, key) for key in sizes)
        kv_heads = found.get("num_key_value_heads", found["num_attention_heads"])
        assert kv_heads == wanted.num_key_value_heads


def test_result_of_quantizing_keeps_the_vision_part(made, tmp_path):
    folder, want = made("gemma 3")
    target = tmp_path / "quantized"
    quantize_checkpoint(folder, target, scheme=Scheme.parse("w8a16-sym-g32"), progress=False)
    config = json.loads((target / "config.json").read_text())
    assert config["architectures"] == ["Gemma3ForConditionalGeneration"]
    assert "vision_config" in config
    before, after = (load_file(path / "model.safetensors") for path in (folder, target))
    vision = {name for name in before if not name.startswith("language_model.")}
    assert any(name.startswith("vision_tower.") for name in vision)
    assert all(torch.equal(before[name], after[name]) for name in vision)
    assert "language_model.model.layers.0.self_attn.q_proj.weight_packed" in after
    assert 0 < relative(logits(target), want) < 0.1
    for checkpoint in (folder, target):
        assert of_weights(inspect_checkpoint(checkpoint)) == ()


@pytest.mark.exhaustive
def test_experts_in_one_tensor_are_quantized_each(made, tmp_path):
    """Names as llm-compressor writes them for Llama 4."""
    folder, want = made("llama 4")
    target = tmp_path / "quantized"
    scheme = Scheme.parse("w8a16-sym-g32")
    quantize_checkpoint(folder, target, scheme=scheme, recipe="rtn", progress=False)
    after = load_file(target / "model.safetensors")
    stem = "language_model.model.layers.1.feed_forward"
    assert f"{stem}.experts.5.gate_proj.weight_packed" in after
    assert f"{stem}.shared_expert.down_proj.weight_packed" in after
    assert 0 < relative(logits(target), want) < 0.1
    for checkpoint in (folder, target):
        assert of_weights(inspect_checkpoint(checkpoint)) == ()


def test_unknown_part_is_not_treated_as_vision(made, tmp_path):
    folder, _ = made("gemma 3")
    changed = edited(
        folder, tmp_path / "x", lambda s: s.update({"model.actions.weight": torch.ones(2)})
    )
    with pytest.raises(InputError, match="that no layer of the model uses.*model.actions.weight"):
        logits(changed)


def test_damage_of_a_stored_name_is_found(made, tmp_path):
    """`inspect` uses the tensor's name in the file."""
    folder, _ = made("mistral 3")
    target = tmp_path / "x"
    target.mkdir()
    state = load_file(folder / "model.safetensors")
    state["language_model.model.layers.1.mlp.up_proj.weight"][0, 0] = float("nan")
    save_file(state, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text((folder / "config.json").read_text())
    (problem, *_) = of_weights(inspect_checkpoint(target))
    assert problem.subject == "language_model.model.layers.1.mlp.up_proj.weight"


def test_head_inside_of_the_text_model_is_ignored_by_both_names():
    """transformers names Llama 4's head as the file does, and LLaVA's without the prefix."""
    block = {"ignore": ["lm_head"], "config_groups": {}}
    found = stored_block(block, "language_model.model.", ["vision_model"])
    assert found["ignore"] == ["lm_head", "re:.*lm_head", "re:.*vision_model.*"]
    assert stored_block(block, "model.language_model.", [])["ignore"] == ["lm_head"]
