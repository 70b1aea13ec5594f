"""Files of GPT-2 and other older families as they are published: keys, names, order of dims, masks.

transformers reads the same folders: its logits are the truth.
"""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file

from calibrate.pipeline import quantize_checkpoint
from formats.architecture.stored_form.config import canonical_config
from formats.convert import convert_checkpoint
from formats.errors import InputError
from formats.inspection.inspect import inspect_checkpoint
from formats.save import save_quantized
from formats.scheme import Scheme
from qserve.llm import LLM
from tests.conftest import make_tiny
from tests.qserve.model.variants import TOKENS, edited, logits, relative
from tests.tiny_families import TINY_FAMILIES

MASK = torch.ones(1, 1, 256, 256).tril()


def of_transformers(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model.eval()(torch.tensor([TOKENS])).logits[0]


def as_published(state):
    """GPT-2's first files: no prefix, no head, masks."""
    for name in list(state):
        tensor = state.pop(name)
        if name.startswith("transformer."):
            state[name.removeprefix("transformer.")] = tensor
    for layer in range(3):
        state[f"h.{layer}.attn.bias"] = MASK.clone()
        state[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)


def test_gpt2_as_it_was_published(tiny_model, tmp_path):
    folder = edited(tiny_model("gpt2"), tmp_path / "published", as_published)
    assert "wte.weight" in load_file(folder / "model.safetensors")
    assert relative(logits(folder), of_transformers(folder)) < 1e-5
    assert [
        problem.text
        for problem in inspect_checkpoint(folder).problems
        if problem.severity == "error"
    ] == []


MINICPM = {"scale_emb": 3, "scale_depth": 1.4, "dim_model_base": 16}


def as_minicpm(**different):
    """Keys of MiniCPM instead of Granite's factors, which follow from them."""

    def change(config):
        for key in ("embedding", "residual", "attention", "logits"):
            config.pop(f"{key}_{'scaling' if key == 'logits' else 'multiplier'}")
        del config["tie_word_embeddings"]
        config.update(MINICPM)
        config.update(architectures=["MiniCPMForCausalLM"], model_type="minicpm", **different)

    return change


@pytest.mark.parametrize("tied", [True, False])
def test_minicpm_is_granite_with_keys_of_its_own(tmp_path, tied):
    """Its factors: of embeddings; of branches, over the root of the layers; of logits."""
    factors = {
        **{"embedding_multiplier": 3.0, "residual_multiplier": 1.4 / 3**0.5},
        **{"attention_multiplier": 0.25, "logits_scaling": 64 / 16},
    }
    name = TINY_FAMILIES["granite"][0]
    source = make_tiny(tmp_path / "x", name, {**factors, "tie_word_embeddings": tied})
    given = {} if tied else {"tie_word_embeddings": False}
    folder = edited(source, tmp_path / "y", config=as_minicpm(**given))
    assert relative(logits(folder), of_transformers(source)) < 1e-5
    for each, quantized in ((source, tmp_path / "a"), (folder, tmp_path / "b")):
        quantize_checkpoint(
            each,
            quantized,
            scheme=Scheme.parse("w4a16-sym-g32"),
            output_format="gptq",
            recipe="rtn",
            progress=False,
        )
    written = json.loads((tmp_path / "b" / "config.json").read_text())
    assert written["architectures"] == ["MiniCPMForCausalLM"]
    assert written["model_type"] == "minicpm"
    assert torch.equal(logits(tmp_path / "b"), logits(tmp_path / "a"))


def test_experts_of_minicpm_are_refused(tiny_model, tmp_path):
    change = as_minicpm(num_experts=8)
    folder = edited(tiny_model("granite"), tmp_path / "x", config=change)
    with pytest.raises(InputError, match=r"config\.json num_experts: expected no experts, found 8"):
        LLM(folder, device="cpu", max_model_len=64)


@pytest.mark.parametrize(
    ("family", "architecture", "keys"),
    [
        ("llama", "LLaMAForCausalLM", {}),
        ("qwen2", "MiMoForCausalLM", {"model_type": "mimo", "num_nextn_predict_layers": 1}),
        ("phimoe", "PhiMoEForCausalLM", {}),
        (
            "exaone_moe",
            "ExaoneMoEForCausalLM",
            {"is_moe_layer": [False, True, True], "first_last_k_dense_replace": 1},
        ),
    ],
)
def test_published_names_of_architectures(tiny_model, tmp_path, family, architecture, keys):
    """Files name classes of the code that was published with them."""
    source = tiny_model(family)
    stated = json.loads((source / "config.json").read_text())

    def change(config):
        config.update(architectures=[architecture], **keys)
        if "is_moe_layer" in keys:
            assert config.pop("mlp_layer_types") == ["dense", "sparse", "sparse"]

    assert stated["architectures"] != [architecture]

    def with_mtp_layer(state):
        if architecture == "MiMoForCausalLM":
            state["model.mtp_layers.0.input_proj.weight"] = torch.ones(64, 128)
            state["model.mtp_layers.0.self_attn.q_proj.bias"] = torch.ones(64)

    folder = edited(source, tmp_path / "x", with_mtp_layer, change)
    assert torch.equal(logits(folder), logits(source))
    problems = [problem.text for problem in inspect_checkpoint(folder).problems]
    assert all("has no tokenizer" in text for text in problems), problems


def test_masks_of_gpt_neox_are_not_read(tiny_model, tmp_path):
    def with_masks(state):
        for layer in range(3):
            stem = f"gpt_neox.layers.{layer}.attention"
            state[f"{stem}.bias"] = MASK.bool()
            state[f"{stem}.masked_bias"] = torch.tensor(-1e9)
            state[f"{stem}.rotary_emb.inv_freq"] = torch.ones(4)

    source = tiny_model("gpt_neox")
    folder = edited(source, tmp_path / "pythia", with_masks)
    assert torch.equal(logits(folder), logits(source))


@pytest.mark.parametrize(
    ("model_type", "architecture", "stated", "expected"),
    [
        ("gpt2", "GPT2LMHeadModel", {"n_inner": None}, {"n_inner": 256, "hidden_size": 64}),
        ("gptj", "GPTJForCausalLM", {"n_inner": 96}, {"n_inner": 96, "num_attention_heads": 4}),
        (
            "gpt_bigcode",
            "GPTBigCodeForCausalLM",
            {"multi_query": False},
            {"num_key_value_heads": 4},
        ),
    ],
)
def test_keys_of_gpt_get_their_usual_names(model_type, architecture, stated, expected):
    config = {"n_embd": 64, "n_head": 4, "n_layer": 3, **stated}
    config |= {"model_type": model_type, "architectures": [architecture]}
    assert expected.items() <= canonical_config(config).items()
    assert canonical_config({**config, "n_embd": 128})["hidden_size"] == 128


@pytest.mark.parametrize(
    ("stated", "kv_heads", "norms"),
    [
        ({}, 1, 1),
        ({"num_kv_heads": 4}, 1, 1),  # as transformers: 7B has one whatever this says
        ({"multi_query": False}, 4, 1),
        ({"new_decoder_architecture": True, "num_kv_heads": 2}, 2, 2),
        ({"new_decoder_architecture": True, "num_ln_in_parallel_attn": 1}, 4, 1),
    ],
)
def test_falcon_states_its_heads_and_norms(stated, kv_heads, norms):
    config = {"model_type": "falcon", "architectures": ["FalconForCausalLM"], **stated}
    found = canonical_config({**config, "hidden_size": 64, "num_attention_heads": 4})
    assert found["num_key_value_heads"] == kv_heads
    assert found["num_ln_in_parallel_attn"] == norms
    assert found["ffn_hidden_size"] == 256


def test_bloom_and_mpt_as_they_were_published(tiny_model, tmp_path):
    """BLOOM without a prefix and with its first key; MPT by the name of its folder's code."""

    def without_prefix(state):
        for name in list(state):
            state[name.removeprefix("transformer.")] = state.pop(name)

    def first_keys(config):
        config["n_embed"] = config.pop("hidden_size")

    source = tiny_model("bloom")
    bloom = edited(source, tmp_path / "bloom", without_prefix, first_keys)
    assert relative(logits(bloom), of_transformers(source)) < 1e-5
    assert (
        canonical_config(json.loads((bloom / "config.json").read_text()))["intermediate_size"]
        == 256
    )
    source = tiny_model("mpt")
    mpt = edited(
        source,
        tmp_path / "mpt",
        config=lambda config: config.update(architectures=["MPTForCausalLM"]),
    )
    assert torch.equal(logits(mpt), logits(source))
    assert [p.severity for p in inspect_checkpoint(mpt).problems] == ["warning"]  # no tokenizer
    convert_to = tmp_path / "out"
    codes = {
        "transformer.blocks.1.ffn.up_proj": (torch.randint(16, (256, 64)), torch.ones(256, 2), None)
    }
    save_quantized(convert_to, mpt, codes, scheme="w4a16-sym")
    written = json.loads((convert_to / "config.json").read_text())
    assert written["architectures"] == ["MPTForCausalLM"]


def test_experts_of_a_token_that_hunyuan_lists_by_layer(tiny_model, tmp_path):
    """Hunyuan-A13B states lists; the widths of experts among them are not read."""
    listed = {"moe_topk": [2, 2, 2], "num_shared_expert": [1, 1, 1], "moe_intermediate_size": [96]}
    source = tiny_model("hunyuan_moe")
    folder = edited(source, tmp_path / "lists", config=lambda c: c.update(listed))
    assert torch.equal(logits(folder), logits(source))
    uneven = edited(source, tmp_path / "uneven", config=lambda c: c.update(moe_topk=[2, 1, 2]))
    with pytest.raises(InputError, match=r"config\.json moe_topk: expected the same number"):
        logits(uneven)


@pytest.mark.parametrize(
    ("stated", "dense"),
    [
        ({}, [0]),
        ({"moe_layer_interval": 2, "moe_layer_start_index": 0}, [0, 2]),
        ({"moe_layer_end_index": 1}, [0, 2, 3]),
    ],
)
def test_layers_of_ernie_without_experts(stated, dense):
    config = {"model_type": "ernie4_5_moe", "architectures": ["Ernie4_5_MoeForCausalLM"], **stated}
    found = canonical_config({**config, "num_hidden_layers": 4, "moe_num_experts": 6})
    assert (found["mlp_only_layers"], found["num_experts"]) == (dense, 6)
    theirs = transformers.Ernie4_5_MoeConfig(num_hidden_layers=4, **stated)
    with torch.device("meta"):
        model = transformers.Ernie4_5_MoeForCausalLM(theirs)
    kinds = [type(layer.mlp).__name__ for layer in model.model.layers]
    assert [i for i, kind in enumerate(kinds) if kind == "Ernie4_5_MoeMLP"] == dense


@pytest.mark.parametrize(
    "stated", [{}, {"interleave_moe_layer_step": 2}, {"moe_layers": [0, 3]}, {"moe_layers": None}]
)
def test_layers_of_llama_4_without_experts(stated):
    config = {"model_type": "llama4_text", "architectures": ["Llama4ForCausalLM"], **stated}
    found = canonical_config({**config, "num_hidden_layers": 5})["mlp_only_layers"]
    theirs = transformers.Llama4TextConfig(num_hidden_layers=5, **stated)
    assert found == [i for i in range(5) if i not in theirs.moe_layers]


@pytest.mark.parametrize(
    "stated",
    [
        {},
        {"global_head_dim": 32, "num_global_key_value_heads": 2, "num_key_value_heads": 8},
        {"num_key_value_heads": 8},
        {"attention_k_eq_v": False, "num_global_key_value_heads": 2, "num_key_value_heads": 8},
        {"layer_types": ["sliding_attention"] * 6 + ["full_attention"]},
    ],
)
def test_heads_of_gemma_4(stated):
    """As published, and as transformers writes them: by layer."""
    stated = {"attention_k_eq_v": True, **stated, "num_hidden_layers": 7}
    theirs = transformers.Gemma4TextConfig(**stated)
    names = {"model_type": "gemma4_text", "architectures": ["Gemma4ForCausalLM"]}
    for config in (stated, json.loads(theirs.to_json_string(use_diff=False))):
        found = canonical_config({**config, **names})
        of_layer = theirs.per_layer_config[6]
        assert found["global_head_dim"] == of_layer.head_dim
        assert found["num_global_key_value_heads"] == of_layer.num_key_value_heads
        assert found["layer_types"] == theirs.layer_types


def test_float_linears_are_written_in_stored_form(tiny_model, tmp_path):
    """One linear is quantized; transformers reads the others from the written file."""
    source, name = tiny_model("gpt2"), "transformer.h.1.mlp.c_fc"
    generator = torch.Generator().manual_seed(0)
    codes_NK = torch.randint(16, (96, 64), generator=generator)
    scales_NG = torch.rand(96, 2, generator=generator).half() / 16
    weight_NK = (codes_NK - 8) * scales_NG.float().repeat_interleave(32, 1)
    saved = save_quantized(
        tmp_path / "out", source, {name: (codes_NK, scales_NG, None)}, scheme="w4a16-sym"
    )
    before, after = (
        load_file(folder / "model.safetensors") for folder in (source, tmp_path / "out")
    )
    kept = before.keys() - {f"{name}.weight"}
    assert saved.schemes == {name: "w4a16-sym-g32"} and kept <= after.keys()
    assert all(torch.equal(before[each], after[each]) for each in kept)
    assert tuple(after[f"{name}.weight_packed"].shape) == (96, 8)  # [outputs, words of 8 codes]

    dense = edited(
        source,
        tmp_path / "dense",
        lambda state: state.update({f"{name}.weight": weight_NK.T.contiguous()}),
    )
    assert relative(logits(tmp_path / "out"), of_transformers(dense)) < 1e-5


def test_quantized_gpt2_is_converted(written, tmp_path):
    source = written("w4a16-asym-g32", "gptq", "gpt2")
    convert_checkpoint(source, tmp_path / "awq", output_format="awq")
    assert torch.equal(logits(tmp_path / "awq"), logits(source))
    config = json.loads((tmp_path / "awq" / "config.json").read_text())
    assert config["n_embd"] == config["hidden_size"] == 64


def test_float8_weights_of_gpt2_are_stored_as_its_floats(written, tiny_model):
    folder = written("w8a16-fp8", "compressed-tensors", "gpt2")
    stored = load_file(folder / "model.safetensors")["transformer.h.0.mlp.c_fc.weight"]
    assert stored.dtype == torch.float8_e4m3fn and tuple(stored.shape) == (64, 96)
    assert relative(logits(folder), logits(tiny_model("gpt2"))) < 0.1


def test_length_beyond_the_learned_positions_is_refused(tiny_model):
    with pytest.raises(Exception, match="max-model-len: expected 2 to 256"):
        LLM(tiny_model("gpt2"), device="cpu", max_model_len=257)
