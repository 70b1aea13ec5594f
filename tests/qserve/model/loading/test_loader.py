"""Loading ends with an audit: nothing missing, nothing left over, no half-merged group."""

import json
import math
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from formats.checkpoint import CheckpointReader
from formats.errors import CheckpointError, InputError
from qkernels import QuantLinear
from qserve.llm import LLM
from qserve.model.loading.weight_source import WeightSource
from qserve.model.model_config import ModelConfig
from qserve.params.sampling_params import SamplingParams

Q_PROJ = "model.layers.1.self_attn.q_proj"


@pytest.fixture
def edited(tmp_path, quantized_5m):
    """A copy of the quantized model with its tensors and its config edited."""

    def edit(tensors=None, config=None, source=quantized_5m):
        folder = tmp_path / "edited"
        shutil.copytree(source, folder)
        path = folder / "model.safetensors"
        state = load_file(path)
        if tensors:
            tensors(state)
            save_file(state, path, metadata={"format": "pt"})
        if config:
            block = json.loads((folder / "config.json").read_text())
            config(block)
            (folder / "config.json").write_text(json.dumps(block))
        return folder

    return edit


def load(folder, **settings):
    return LLM(folder, device="cpu", max_model_len=64, **settings)


def refuse(folder, *words):
    with pytest.raises(InputError) as error:
        load(folder)
    for word in words:
        assert word in str(error.value)
    assert "\n" not in str(error.value)


def test_missing_tensor_is_named(edited):
    refuse(edited(lambda s: s.pop("model.layers.2.mlp.down_proj.qzeros")), "layers.2.mlp.down_proj")


@pytest.mark.parametrize("model_impl", ["native", "transformers"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model.embed_tokens.weight", math.nan),  # of a token that no test uses
        ("model.norm.weight", math.inf),
        ("model.layers.2.mlp.up_proj.weight", -math.inf),
    ],
)
def test_nonfinite_float_tensor_is_named(edited, docs_5m, model_impl, name, value):
    def spoil(state):
        state[name].view(-1)[-1] = value

    with pytest.raises(CheckpointError, match=f"^{re.escape(name)}: NaN or infinity"):
        load(edited(spoil, source=docs_5m), model_impl=model_impl)


def test_missing_float_tensor_is_named(edited):
    refuse(edited(lambda s: s.pop("model.norm.weight")), "model.norm.weight", "missing")


def test_leftover_tensor_is_named(edited):
    folder = edited(lambda s: s.update({"model.layers.9.extra.weight": torch.zeros(2)}))
    refuse(folder, "model.layers.9.extra.weight", "that no layer of the model uses")


@pytest.mark.parametrize(("value", "accepted"), [(0, True), (1, False)])
def test_old_gptq_files_have_biases_of_zero(edited, value, accepted):
    folder = edited(lambda s: s.update({f"{Q_PROJ}.bias": torch.full((256,), value).half()}))
    if accepted:
        load(folder)
    else:
        refuse(folder, f"{Q_PROJ}.bias", "that no layer of the model uses")


def test_layers_beyond_config_are_reported_as_leftover(edited):
    refuse(
        edited(config=lambda c: c.update(num_hidden_layers=3)),
        "model.layers.3",
        "that no layer of the model uses",
    )


def test_half_quantized_group_is_refused(edited):
    def dequantize_q(state):
        for name in ("qweight", "qzeros", "scales", "g_idx"):
            del state[f"{Q_PROJ}.{name}"]
        state[f"{Q_PROJ}.weight"] = torch.zeros(256, 256)

    refuse(edited(dequantize_q), "q_proj", "k_proj", "quantized")


def test_shape_mismatch_with_config_is_named(edited):
    refuse(edited(config=lambda c: c.update(vocab_size=8000)), "embed_tokens", "8000", "8192")


def test_quantized_shape_mismatch_with_config_is_named(edited):
    folder = edited(config=lambda c: c.update(intermediate_size=800))
    refuse(folder, "layers.0.mlp.gate_proj: expected [800, 256] from config.json, found [")


@pytest.mark.parametrize("shape", [(255, 256), (256, 255), (128, 512)])
def test_quantized_shape_equals_requested(quantized_5m, shape):
    source = WeightSource(CheckpointReader(quantized_5m), ModelConfig.from_folder(quantized_5m))
    source.weight(Q_PROJ, (256, 256))
    wanted = re.escape(f"{Q_PROJ}: expected {list(shape)} from config.json, found [256, 256]")
    with pytest.raises(CheckpointError, match=wanted):
        source.weight(Q_PROJ, shape)


def test_quantized_tensors_without_the_config_block_are_refused(edited):
    folder = edited(config=lambda c: c.pop("quantization_config"))
    load(folder)  # quantize_config.json still has the block
    (folder / "quantize_config.json").unlink()
    refuse(folder, "qweight", "quantization_config")


def test_unknown_architecture_error_names_families_command(edited):
    folder = edited(config=lambda c: c.update(architectures=["OtherForCausalLM"]))
    refuse(folder, "OtherForCausalLM", "served architectures", "qserve families")


def test_architecture_unsupported_by_fallback_is_refused_with_reason(edited):
    folder = edited(config=lambda c: c.update(architectures=["RwkvForCausalLM"]))
    refuse(
        folder,
        "RwkvForCausalLM is not in `qserve families`",
        "attention interface",
        "qserve families",
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("architectures", 7),
        ("architectures", {"a": 1}),
        ("architectures", None),
        ("head_dim", ["x"]),
        ("head_dim", 2**31),
        ("model_type", "llama2"),
        ("model_type", ["x"]),
        ("num_attention_heads", 0),
        ("num_hidden_layers", 2**63),
        ("rope_parameters", {"rope_type": "default", "rope_theta": "x"}),
        ("rope_parameters", {"rope_type": "linear", "rope_theta": None}),
    ],
)
def test_invalid_config_raises_one_line(edited, key, value):
    folder = edited(config=lambda c: c.update({key: value}))
    with pytest.raises(InputError, match="config.json") as error:
        load(folder)
    assert "\n" not in str(error.value) and len(str(error.value)) < 1000


def test_weights_giving_nan_raise_one_line(edited):
    folder = edited(lambda s: s["model.norm.weight"].fill_(3e38))
    with pytest.raises(InputError, match="request 0-0: the model's logits contain NaN"):
        load(folder).generate([[5]], use_tqdm=False)


def test_truncated_file_is_named(edited):
    folder = edited()
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    refuse(folder, "model.safetensors", "truncated")


def test_group_size_that_disagrees_with_the_tensors_is_refused(edited):
    folder = edited(config=lambda c: c["quantization_config"].update(group_size=64))
    refuse(folder, "qzeros", "64")


def test_tied_head_stored_twice_is_accepted(edited):
    folder = edited(lambda s: s.update({"lm_head.weight": s["model.embed_tokens.weight"].clone()}))
    load(folder)


def test_linears_are_quantlinear_without_their_checkpoint_tensors(quantized_5m):
    decoder = load(quantized_5m).engine.runner.decoder
    kinds = [m for m in decoder.modules() if isinstance(m, QuantLinear)]
    assert len(kinds) == 4 * 4  # qkv, o, gate_up, down of four layers


@pytest.mark.parametrize("model", ["quantized", "float"])
def test_dummy_weights_need_no_weights(model, quantized_5m, docs_5m, tmp_path):
    source = quantized_5m if model == "quantized" else docs_5m
    shutil.copy(source / "config.json", tmp_path)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    texts = []
    for seed in (0, 0, 1):
        llm = load(tmp_path, load_format="dummy", seed=seed)
        (output,) = llm.generate([[1, 2, 3]], params, use_tqdm=False)
        texts.append(output.outputs[0].token_ids)
    assert len(texts[0]) == 8
    assert texts[0] == texts[1] != texts[2]


def test_missing_weights_name_the_file(tmp_path, docs_5m):
    shutil.copy(docs_5m / "config.json", tmp_path)
    with pytest.raises(CheckpointError, match="model.safetensors: not found"):
        load(tmp_path)


def test_old_rope_keys_are_read(edited):
    def old_style(config):
        del config["rope_parameters"]
        config["rope_theta"] = 12345.0

    assert load(edited(config=old_style)).engine.model_config.ropes[0].theta == 12345.0
