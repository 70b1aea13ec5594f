"""Laguna, MiMo-V2-Flash, LFM3, Granite with windows, OLMo: variants, and wrong readings of each."""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import softplus

from formats.errors import InputError
from qserve.llm import LLM
from qserve.model.blocks.uneven_attention import UnevenAttention
from qserve.model.model_config import ModelConfig
from tests.qserve.model.variants import TOKENS, edited, logits, model_maker, relative
from tests.qserve.model.wrong_readings import every_layer
from tests.tiny_families import TINY_FAMILIES

VARIANTS = {
    "laguna, gates of channels": (
        "LagunaConfig",
        {**TINY_FAMILIES["laguna"][1], "gating": "per-element", "attention_bias": False},
    ),
    "mimo, values without a factor": (
        "MiMoV2FlashConfig",
        {**TINY_FAMILIES["mimo_v2"][1], "attention_value_scale": None, "n_group": 2},
    ),
    "granite moe without a shared expert": (
        "GraniteMoeSWAConfig",
        {**TINY_FAMILIES["granite_moe_swa"][1], "shared_intermediate_size": 0},
    ),
}


@pytest.fixture(scope="session")
def model_of(tiny_model, tmp_path_factory):
    """Name of a family or of a variant -> its folder."""
    return model_maker(tiny_model, tmp_path_factory, VARIANTS)


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_transformers(model_of, transformers_model, name):
    folder = model_of(name)
    with torch.no_grad():
        want = transformers_model(folder)(torch.tensor([TOKENS])).logits[0]
    assert relative(logits(folder), want) < 1e-5


def attention_of(**values):
    def change(decoder):
        for layer in decoder.layers:
            for name, value in values.items():
                setattr(layer.attention, name, value)

    return change


def half_gates(decoder):
    """Each gate is softplus(0), whatever the hidden state."""
    for layer in decoder.layers:
        layer.attention.gates.weight.zero_()


def exchanged_rotations(decoder):
    first, second = decoder.layers[-2].attention, decoder.layers[-1].attention
    first.rotary, second.rotary = second.rotary, first.rotary


def all_rotate(decoder):
    decoder.layers[0].attention.rotary = decoder.layers[1].attention.rotary


def without_correction(decoder):
    decoder.layers[1].mlp.router.correction.zero_()


def without_factor(decoder):
    router = decoder.layers[1].mlp.router
    router.routing = replace(router.routing, factor=1.0)


def longer_windows(decoder):
    for layer in decoder.layers:
        if layer.attention.window is not None:
            layer.attention.window += 1


def rms_norms(decoder):
    for layer in decoder.layers:
        for norm in (layer.attention_norm, layer.mlp_norm):
            norm.kind = "rms"
            norm._spec = norm._made_spec()


def of_heads(change):
    """`change` of attention, in models where other layers have none."""

    def plant(layer):
        if isinstance(layer.attention, UnevenAttention):
            change(layer.attention)

    return every_layer(plant)


def longer_window(attention):
    if attention.window is not None:
        attention.window += 1


def exchanged(first, second):
    first, second = first.attention, second.attention
    first.rotary, second.rotary = second.rotary, first.rotary


WRONG = {
    "gates left out": ("laguna", half_gates),
    "RoPE of the other layer type": ("laguna", exchanged_rotations),
    "experts chosen without the correction": ("laguna", without_correction),
    "routing weights without their factor": ("laguna", without_factor),
    "window one longer": ("laguna", longer_windows),
    "values without their factor": ("mimo_v2", attention_of(value_factor=1.0)),
    "no sinks": ("mimo_v2", attention_of(sinks=None)),
    "no sinks, Granite": ("granite_swa", attention_of(sinks=None)),
    "one theta for another": ("granite_swa", exchanged_rotations),
    "RoPE in a NoPE layer": ("granite_swa", all_rotate),
    "norms that keep the mean": ("olmo", rms_norms),
    "softplus gates, LFM3": ("lfm3", of_heads(lambda a: setattr(a, "activation", softplus))),
    "window one longer, LFM3": ("lfm3", of_heads(longer_window)),
    "RoPE parameters swapped, LFM3": ("lfm3", lambda d: exchanged(d.layers[1], d.layers[2])),
    "branches without norms, LFM3": (
        "lfm3",
        every_layer(lambda layer: setattr(layer.mlp_end, "norm", None)),
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_interpretation_fails_comparison(model_of, wrong):
    name, plant = WRONG[wrong]
    llm = LLM(model_of(name), device="cpu", max_model_len=64)
    right = llm.logits(TOKENS)
    with torch.inference_mode():
        plant(llm.engine.runner.decoder)
    assert relative(llm.logits(TOKENS), right) > 1e-3


def test_heads_that_differ_within_a_kind_are_refused(model_of, tmp_path):
    changed = {"num_attention_heads_per_layer": [4, 8, 8]}
    folder = edited(model_of("laguna"), tmp_path / "x", config=lambda c: c.update(changed))
    with pytest.raises(InputError, match="heads_per_layer: expected the same .* full_attention"):
        LLM(folder, device="cpu", max_model_len=64)


@pytest.mark.parametrize(
    ("changed", "key"),
    [
        ({"gating": "per-element"}, "attention_bias"),
        ({"moe_router_logit_softcapping": 5.0}, "moe_router_logit_softcapping"),
    ],
)
def test_unsupported_variant_is_refused(model_of, tmp_path, changed, key):
    folder = edited(model_of("laguna"), tmp_path / "x", config=lambda c: c.update(changed))
    with pytest.raises(InputError, match=rf"config\.json {key}: expected .*not supported"):
        LLM(folder, device="cpu", max_model_len=64)


def test_gates_of_heads_stay_in_float(written):
    """They are small, and config.json names them so that others read them as float, too."""
    folder = written("w4a16-sym-g32", "gptq", "laguna")
    quant = ModelConfig.from_folder(folder).quant
    assert quant.scheme_for("model.layers.1.self_attn.g_proj") is None
    assert quant.scheme_for("model.layers.1.self_attn.q_proj") is not None
