"""OLMo-Hybrid: wrong readings are seen, as are files of other writers, calibration and drafts.

test_hybrid_tokens.py compares its tokens with transformers'.
"""

import pytest
import torch
from safetensors.torch import load_file

from calibrate.pipeline import quantize_checkpoint
from calibrate.texts.data import CalibrationData
from formats.checkpoint import CheckpointReader, read_json
from formats.errors import InputError
from formats.inspection.inspect import inspect_checkpoint
from formats.quant_config import BLOCK, QuantConfig
from formats.scheme import Scheme
from qserve.llm import LLM
from qserve.model.blocks.norm import BranchEnd
from qserve.model.blocks.states.delta_net import DeltaNet
from qserve.params.sampling_params import SamplingParams
from tests.conftest import make_tiny
from tests.qserve.model.test_family_tokens import check_greedy
from tests.qserve.model.test_hybrid_tokens import in_transformers
from tests.qserve.model.test_transformers import dense
from tests.qserve.model.variants import TOKENS, edited, logits, relative
from tests.tiny_families import TINY_FAMILIES

FAMILY = "olmo_hybrid"


def nets(change):
    def plant(decoder):
        for layer in decoder.layers:
            if isinstance(layer.attention, DeltaNet):
                change(layer.attention)

    return plant


def of_attention(change):
    return lambda decoder: change(decoder.layers[1])


def gates_exchanged(net):
    net.gates.weight = torch.cat(net.gates.weight.chunk(2)[::-1])


def convolutions_exchanged(net):
    """Exchange the convolutions of queries and keys."""
    keys = net.shape.keys
    net.conv_weight[: 2 * keys] = net.conv_weight[: 2 * keys].roll(keys, 0)


def gate_for_values(net):
    widths = [2 * net.shape.keys, net.shape.values, net.shape.values]
    qk, v, z = net.in_proj.weight.split(widths)
    net.in_proj.weight = torch.cat([qk, z, v])


def norms_first(layer):
    """Norms before attention and feed-forward, as in layers with a net."""
    layer.attention_norm, layer.attention_end = layer.attention_end.norm, BranchEnd()
    layer.mlp_norm, layer.mlp_end = layer.mlp_end.norm, BranchEnd()


def rotates(layer):
    rotary = layer.attention.rotary
    angles = torch.arange(64)[:, None] * torch.linspace(1, 0.1, layer.attention.head_dim // 2)
    rotary.cos_sin = torch.cat([angles.cos(), angles.sin()], 1)


WRONG = {
    "writes at most once": nets(lambda net: setattr(net, "write_factor", 1.0)),
    "b and a swapped": nets(gates_exchanged),
    "convolutions swapped": nets(convolutions_exchanged),
    "gate of the output for values": nets(gate_for_values),
    "eps of the other norms": nets(lambda net: setattr(net, "eps", 1e-1)),
    "delta-net norm adds 1": nets(lambda net: net.norm.add_(1)),
    "norms before attention": of_attention(norms_first),
    "attention with RoPE": of_attention(rotates),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_interpretation_fails_comparison(tiny_model, wrong):
    llm = LLM(tiny_model(FAMILY), device="cpu", max_model_len=64)
    right = llm.logits(TOKENS)
    with torch.inference_mode():
        WRONG[wrong](llm.engine.runner.decoder)
    assert relative(llm.logits(TOKENS), right) > 1e-3


def published(state):
    """Names and convolutions as published, where transformers writes others."""
    for name in list(state):
        is_attention = ".layers.1." in name
        after = "post_attention_layernorm"
        for other, usual in (
            ("attention_layer_norm", "input_layernorm"),
            ("feedforward_layer_norm", after),
        ):
            if f".{other}." in name and not (is_attention and other.startswith("attention")):
                state[name.replace(other, usual)] = state.pop(name)
    for layer in (0, 2):
        names = [f"model.layers.{layer}.linear_attn.{x}_conv1d.weight" for x in "qkv"]
        joined = torch.cat([state[name] for name in names])
        state.update(zip(names, (x.clone() for x in joined.split([32, 32, 96])), strict=True))


def test_files_as_published(tiny_model, tmp_path):
    """transformers renames norms, and cuts the convolutions into equal parts."""
    source = tiny_model(FAMILY)
    folder = edited(source, tmp_path / "model", published)
    names = [
        f"model.layers.0.{name}.weight" for name in ("input_layernorm", "linear_attn.v_conv1d")
    ]
    theirs, ours = load_file(source / "model.safetensors"), load_file(folder / "model.safetensors")
    assert names[0] not in theirs and len(theirs[names[1]]) not in (32, 96)
    assert names[0] in ours and len(ours[names[1]]) == 96
    assert torch.equal(logits(folder), logits(source))
    for each in (source, folder):
        problems = inspect_checkpoint(each).problems
        assert all("has no tokenizer" in problem.text for problem in problems)
        reader = CheckpointReader(each)
        shapes = [reader.entries[f"model.layers.2.linear_attn.{x}_conv1d.weight"] for x in "qkv"]
        assert [entry.shape[0] for entry in shapes] == [32, 32, 96]
        for x, entry in zip("qkv", shapes, strict=True):
            want = ours[f"model.layers.2.linear_attn.{x}_conv1d.weight"]
            assert torch.equal(entry.read(), want)
            assert torch.equal(entry.rows(3, 31), want[3:31])
            values = [values.clone() for _, values in entry.blocks(64)]
            assert torch.equal(torch.cat(values), want.flatten())


def test_rows_not_matching_sizes_are_refused(tiny_model, tmp_path):
    def shorten(state):
        name = "model.layers.0.linear_attn.q_conv1d.weight"
        state[name] = state[name][:-1].clone()

    folder = edited(tiny_model(FAMILY), tmp_path / "model", shorten)
    with pytest.raises(InputError, match=r"q_conv1d\.weight: expected \[32, 1, 4\]"):
        logits(folder)


@pytest.mark.parametrize("recipe", ["gptq", pytest.param("awq", marks=pytest.mark.exhaustive)])
def test_solved_weights(tiny_model, tmp_path, recipe):
    """A calibrated run: its layers are transformers', the gates stay in float."""
    ids_WS = torch.randint(3, 500, (4, 24), generator=torch.Generator().manual_seed(0))
    folder = tmp_path / "model"
    quantize_checkpoint(
        tiny_model(FAMILY),
        folder,
        scheme=Scheme.parse("w4a16-asym-g32"),
        output_format="gptq",
        recipe=recipe,
        calibration=CalibrationData(ids_WS=ids_WS, source="test", seed=0),
        progress=False,
    )
    entries = CheckpointReader(folder).entries
    assert "model.layers.0.linear_attn.k_proj.qweight" in entries
    assert "model.layers.0.linear_attn.b_proj.weight" in entries
    quant = QuantConfig.from_dict(read_json(folder / "config.json")[BLOCK])
    assert quant.scheme_for("model.layers.0.linear_attn.a_proj") is None
    model = in_transformers(dense(folder, tmp_path / "dense", torch.float32))
    with torch.no_grad():
        want = model(torch.tensor([TOKENS])).logits[0]
    assert relative(logits(folder), want) < 1e-5


@pytest.mark.parametrize("rope", [{"rope_type": None}, {"rope_theta": None}])
def test_rotation_without_type_or_base_is_none(tiny_model, tmp_path, rope):
    source = tiny_model(FAMILY)
    folder = edited(source, tmp_path / "model", config=lambda c: c.update(rope_parameters=rope))
    assert torch.equal(logits(folder), logits(source))


NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_drafts_change_no_token(tiny_model, batch_invariant):
    """Rejected rows are left out of states whose tokens write up to twice their value."""
    settings = {"max_model_len": 64, "batch_invariant": batch_invariant}
    llm = LLM(tiny_model(FAMILY), device="cpu", speculative_config=NGRAM, **settings)
    texts = [[5, 9, 77, 5, 9, 77, 5, 9], [8] * 12, [3, 4, 5, 6, 3, 4, 5, 6, 3]]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, detokenize=False)
    outputs = llm.generate(texts, params, use_tqdm=False)
    check_greedy(in_transformers(tiny_model(FAMILY)), texts, outputs)


@pytest.mark.parametrize(
    "missing",
    [
        ["layer_types"],
        ["linear_num_key_heads", "linear_num_value_heads"],
    ],
)
def test_omitted_keys_use_defaults(tmp_path, missing):
    """transformers' defaults of kinds of layers and of heads."""
    name, values = TINY_FAMILIES[FAMILY]
    plain = {key: value for key, value in values.items() if not key.startswith("linear_")}
    plain = {**plain, "num_hidden_layers": 5, "layer_types": None}
    folder = make_tiny(tmp_path / "x", name, plain)
    without = edited(folder, tmp_path / "y", config=lambda c: [c.pop(key) for key in missing])
    assert torch.equal(logits(without), logits(folder))
    with torch.no_grad():
        want = in_transformers(folder)(torch.tensor([TOKENS])).logits[0]
    assert relative(logits(without), want) < 1e-5
