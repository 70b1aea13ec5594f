"""Folders made from Mistral's format: contents, changes of the source, and refusals."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from formats.checkpoint import CheckpointReader
from formats.errors import CheckpointError
from formats.files.model_path import is_in_mistral_format, model_folder, origin
from formats.inspection.inspect import inspect_checkpoint
from formats.mistral.names import Heads, NameMap
from formats.mistral.params import config_of
from tests.mistral_files import own_cache, write_mistral, write_tekken

__all__ = ["own_cache"]


@pytest.fixture
def folder(tiny_model, tmp_path):
    """A model in Mistral's files, whose layers alternate."""
    written = write_mistral(tiny_model("ministral"), tmp_path / "model", num_files=2)
    write_tekken(written, 512)
    return written


def params(folder):
    return json.loads((folder / "params.json").read_text())


def change(folder, **values):
    (folder / "params.json").write_text(json.dumps({**params(folder), **values}))


def test_contents(folder, tiny_model):
    made = model_folder(folder)
    assert made.name == "model" and model_folder(folder) == made and model_folder(made) == made
    assert origin(made) == folder.resolve()
    assert {path.name for path in made.iterdir()} == {
        *("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"),
        *("chat_template.jinja", "mistral.json"),
    }
    reader = CheckpointReader(folder)
    judge = load_file(tiny_model("ministral") / "model.safetensors")
    assert set(reader.entries) == set(judge)
    for name, entry in reader.entries.items():
        assert torch.equal(entry.read(), judge[name]), name
        assert torch.equal(entry.rows(1, 7), judge[name][1:7]), name
        found = torch.cat([values.clone() for _, values in entry.blocks(512)])
        assert torch.equal(found, judge[name].flatten()), name


def test_the_folders_own_files_are_kept(folder):
    (folder / "chat_template.jinja").write_text("own")
    (folder / "generation_config.json").write_text('{"temperature": 0.15}')
    made = model_folder(folder)
    assert (made / "chat_template.jinja").read_text() == "own"
    assert json.loads((made / "generation_config.json").read_text()) == {"temperature": 0.15}


def test_a_changed_source_makes_another_folder(folder):
    made = model_folder(folder)
    change(folder, rope_theta=12345.0)
    with pytest.raises(CheckpointError, match="params.json: has changed since it was opened"):
        CheckpointReader(made)
    assert model_folder(folder) != made
    assert CheckpointReader(folder).config["rope_parameters"]["rope_theta"] == 12345.0


def test_a_missing_file_is_named(folder):
    (folder / "consolidated-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match="lists 'consolidated-00002-of-00002.safetensors'"):
        model_folder(folder)


def test_an_unknown_tensor_is_named(folder):
    path = folder / "consolidated-00001-of-00002.safetensors"
    save_file({**load_file(path), "layers.0.attention.q_norm.weight": torch.ones(4)}, path)
    with pytest.raises(
        CheckpointError, match="tensor 'layers.0.attention.q_norm.weight': is in no"
    ):
        model_folder(folder)


def test_other_folders_are_not_in_the_format(tmp_path, docs_5m):
    (tmp_path / "params.json").write_text("{}")
    assert not is_in_mistral_format(tmp_path)
    (tmp_path / "consolidated.00.pth").write_bytes(b"")
    assert not is_in_mistral_format(tmp_path)
    (tmp_path / "consolidated.safetensors").write_bytes(b"")
    assert is_in_mistral_format(tmp_path)
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"")
    assert not is_in_mistral_format(tmp_path)
    assert not is_in_mistral_format(docs_5m)


def test_inspection(folder):
    found = inspect_checkpoint(folder)
    assert found.architecture == "MinistralForCausalLM" and not found.problems
    answers = {each.program: each.answer for each in found.loads_in}
    assert answers == {
        **{"this project": "yes", "vLLM": "yes"},
        **{"SGLang": "not judged", "transformers": "no"},
    }


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"dim": None}, "params.json dim: expected a whole number above 0, found None"),
        ({"norm_eps": "1"}, "params.json norm_eps: expected a number above 0"),
        ({"model_type": "mamba"}, "params.json model_type: expected transformer"),
        ({"multimodal": {"whisper_model_args": {}}}, "models with speech"),
        ({"kv_lora_rank": 32}, "params.json moe: models with latent attention"),
        ({"moe": {"num_experts": 4, "num_shared_experts": 1}}, "shared experts and dense layers"),
        ({"sliding_window": [7, 9, None]}, "params.json sliding_window: expected one width"),
        ({"sliding_window": [7, None]}, "in a pattern that divides 3 layers"),
        ({"yarn": {"factor": 2}}, "params.json original_max_position_embeddings"),
        ({"llama_4_scaling": {"beta": 0.1}}, "llama_4_scaling: expected null without yarn"),
        (
            {"quantization": {"qformat_weight": "int3"}},
            "params.json quantization: expected qformat",
        ),
        ({"activation": "gelu"}, "params.json activation: expected silu"),
        ({"head_dim": 8, "n_heads": 4}, "weight': expected (16|32) rows, or blocks of whole heads"),
    ],
)
def test_refusals_name_the_key(folder, values, words):
    change(folder, **values)
    with pytest.raises(CheckpointError, match=words):
        model_folder(folder)


def test_length_of_files_that_state_none(folder):
    stated = {key: value for key, value in params(folder).items() if "max_" not in key}
    assert config_of(stated, "bfloat16")["max_position_embeddings"] == 128_000
    yarn = {"factor": 16, "original_max_position_embeddings": 512, "beta": 32, "alpha": 1}
    scaled = config_of({**stated, "sliding_window": None, "yarn": yarn}, "bfloat16")
    assert scaled["max_position_embeddings"] == 8192


NAMES = NameMap(
    is_mixture=False,
    has_tower=True,
    queries=Heads(count=8, width=64),
    keys=Heads(count=2, width=64),
    tower=None,
)


@pytest.mark.parametrize(
    ("text", "own"),
    [
        ("output", "lm_head"),
        ("tok_embeddings", "model.language_model.embed_tokens"),
        ("re:.*wkv_a_with_mqa$", "re:.*kv_a_proj_with_mqa$"),
        ("re:.*wq_a$", "re:.*q_a_proj$"),
        ("re:vision_encoder.*", "re:vision_tower.*"),
        ("re:.*experts.*w1$", "re:.*experts.*gate_proj$"),
        ("Linear", "Linear"),
    ],
)
def test_patterns_of_quantization_blocks(text, own):
    assert NAMES.pattern(text) == own


def test_scales_of_blocks_stay_where_they_are():
    """Rows move inside a head, so blocks of whole heads keep their scales."""
    heads = NAMES.heads_of("layers.0.attention.wq.weight_scale", (4, 3))
    assert heads is None  # blocks of 128 rows: two heads
    assert NAMES.heads_of("layers.0.attention.wk.weight_scale", (128, 4)) == NAMES.keys
    assert NAMES.heads_of("layers.0.attention.wk.weight_scale", (1,)) is None
    assert NAMES.heads_of("layers.0.attention.wv.weight", (128, 4)) is None
    with pytest.raises(CheckpointError, match="blocks of whole heads of 64, found 16"):
        NAMES.heads_of("layers.0.attention.wq.weight_scale", (16, 3))
