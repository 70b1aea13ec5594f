"""Kimi Linear: wrong readings of its mixer are seen, as are files as published, and drafts.

test_hybrid_tokens.py compares its tokens with transformers'.
"""

import json

import pytest
import torch
from safetensors.torch import load_file

from calibrate.pipeline import quantize_checkpoint
from calibrate.texts.data import CalibrationData
from formats.checkpoint import CheckpointReader, read_json
from formats.errors import InputError
from formats.quant_config import BLOCK, QuantConfig
from formats.scheme import Scheme
from qserve.llm import LLM
from qserve.model.blocks.latent.attention import LatentAttention
from qserve.model.blocks.states.kimi_delta import KimiDelta
from qserve.params.sampling_params import SamplingParams
from tests.qserve.model.test_family_tokens import check_greedy
from tests.qserve.model.test_hybrid_tokens import in_transformers
from tests.qserve.model.test_transformers import dense
from tests.qserve.model.variants import TOKENS, edited, logits, relative

FAMILY = "kimi_linear"


def of_mixers(change):
    def plant(decoder):
        for layer in decoder.layers:
            if isinstance(layer.attention, KimiDelta):
                change(layer.attention)

    return plant


def first_share_for_all(mixer):
    """A head keeps one share, as a gated delta net does."""
    H, V = mixer.shape.heads, mixer.shape.head_dim
    for tensor in (mixer.f_b.weight, mixer.dt_bias):
        by_head = tensor.unflatten(0, (H, V))
        by_head.copy_(by_head[:, :1].clone().expand_as(by_head))


def gates_exchanged(mixer):
    """f_a for g_a."""
    V, weight = mixer.shape.head_dim, mixer.low.weight
    weight[: 2 * V] = weight[: 2 * V].roll(V, 0)


def rotates(decoder):
    attention = decoder.layers[1].attention
    assert isinstance(attention, LatentAttention)
    angles = torch.arange(64)[:, None] * torch.linspace(1, 0.1, attention.shape.rope // 2)
    attention.rotary.cos_sin = torch.cat([angles.cos(), angles.sin()], 1)
    attention.rotates = True


def set_scale(decoder):
    decoder.layers[1].attention.scale *= 1.2


WRONG = {
    "one decay per head": of_mixers(first_share_for_all),
    "gates swapped": of_mixers(gates_exchanged),
    "decays without dt_bias": of_mixers(lambda each: each.dt_bias.zero_()),
    "wrong exponential of A_log": of_mixers(lambda each: each.a_log.exp_()),
    "convolutions swapped": of_mixers(
        lambda each: each.conv_weight.copy_(each.conv_weight.roll(each.shape.inner, 0))
    ),
    "norm adds 1": of_mixers(lambda each: each.norm.add_(1)),
    "MLA with RoPE": rotates,
    "another scale of scores": set_scale,
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_interpretation_fails_comparison(tiny_model, wrong):
    llm = LLM(tiny_model(FAMILY), device="cpu", max_model_len=64)
    right = llm.logits(TOKENS)
    with torch.inference_mode():
        WRONG[wrong](llm.engine.runner.decoder)
    assert relative(llm.logits(TOKENS), right) > 1e-3


def as_published(config):
    """A part of config.json has the mixers' sizes, and the layers, which are numbered from 1."""
    kinds = config.pop("layer_types")
    numbers = {kind: [i + 1 for i, k in enumerate(kinds) if k == kind] for kind in set(kinds)}
    config["linear_attn_config"] = {
        "full_attn_layers": numbers["full_attention"],
        "kda_layers": numbers["linear_attention"],
        "head_dim": config.pop("linear_head_dim"),
        "num_heads": config.pop("linear_num_heads"),
        "short_conv_kernel_size": config.pop("linear_conv_kernel_dim"),
    }
    del config["mlp_layer_types"]
    config.update(first_k_dense_replace=1, moe_layer_freq=1, mla_use_nope=True)
    config.update(moe_router_activation_func="sigmoid", use_grouped_topk=True)


def dense_layers_below_mlp(state):
    """transformers writes their names otherwise than the published files."""
    for name in [n for n in state if ".layers.0.block_sparse_moe." in n]:
        state[name.replace("block_sparse_moe", "mlp")] = state.pop(name)


def test_files_as_published(tiny_model, tmp_path):
    source = tiny_model(FAMILY)
    folder = edited(source, tmp_path / "model", dense_layers_below_mlp, as_published)
    assert "model.layers.0.mlp.gate_proj.weight" in load_file(folder / "model.safetensors")
    assert torch.equal(logits(folder), logits(source))


@pytest.mark.exhaustive
def test_solved_weights(tiny_model, tmp_path):
    """A calibrated run: its layers are transformers', the gates stay in float."""
    ids_WS = torch.randint(3, 500, (4, 24), generator=torch.Generator().manual_seed(0))
    folder = tmp_path / "model"
    quantize_checkpoint(
        tiny_model(FAMILY),
        folder,
        scheme=Scheme.parse("w4a16-asym-g32"),
        output_format="gptq",
        recipe="gptq",
        calibration=CalibrationData(ids_WS=ids_WS, source="test", seed=0),
        progress=False,
    )
    entries = CheckpointReader(folder).entries
    assert "model.layers.0.self_attn.k_proj.qweight" in entries
    assert "model.layers.0.self_attn.f_a_proj.weight" in entries
    quant = QuantConfig.from_dict(read_json(folder / "config.json")[BLOCK])
    assert quant.scheme_for("model.layers.0.self_attn.b_proj") is None
    model = in_transformers(dense(folder, tmp_path / "dense", torch.float32))
    with torch.no_grad():
        want = model(torch.tensor([TOKENS])).logits[0]
    assert relative(logits(folder), want) < 1e-5


NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_drafts_change_no_token(tiny_model, batch_invariant):
    """Rejected rows are left out of states with a decay by channel."""
    settings = {"max_model_len": 64, "batch_invariant": batch_invariant}
    llm = LLM(tiny_model(FAMILY), device="cpu", speculative_config=NGRAM, **settings)
    texts = [[5, 9, 77, 5, 9, 77, 5, 9], [8] * 12, [3, 4, 5, 6, 3, 4, 5, 6, 3]]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, detokenize=False)
    outputs = llm.generate(texts, params, use_tqdm=False)
    check_greedy(in_transformers(tiny_model(FAMILY)), texts, outputs)


def test_unsupported_routing_rule_is_refused(tiny_model, tmp_path):
    folder = edited(
        tiny_model(FAMILY),
        tmp_path / "model",
        config=lambda c: c.update(moe_router_activation_func="softmax"),
    )
    assert json.loads((folder / "config.json").read_text())["moe_router_activation_func"]
    with pytest.raises(InputError, match=r"config\.json moe_router_activation_func: expected"):
        logits(folder)
