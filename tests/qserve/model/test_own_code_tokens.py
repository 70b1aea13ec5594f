"""Families whose code is in the model's folder: logits and tokens are the plain references'."""

import random
from dataclasses import replace

import pytest
import torch

from qserve.engine.kv_cache import state_snapshots
from qserve.llm import LLM
from qserve.params.sampling_params import SamplingParams
from tests.own_code.models import TINY_MODELS, VARIANTS
from tests.own_code.references import Reference
from tests.qserve.model.test_family_tokens import FEW_PAGES, count_preemptions
from tests.qserve.model.variants import TOKENS, logits, relative

exhaustive = pytest.mark.exhaustive


@pytest.mark.parametrize("name", [*TINY_MODELS, *VARIANTS])
def test_logits_equal_reference(own_code, name):
    folder = own_code(name)
    assert relative(logits(folder), Reference(folder).logits(TOKENS)) < 1e-5


def check_greedy(reference, prompts, outputs):
    """Each token is the one that the reference would have chosen after those before it."""
    said = {token for output in outputs for token in output.outputs[0].token_ids}
    assert len(said) > 5, "a text that says little"
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens = output.outputs[0].token_ids
        chosen = reference.logits(prompt + tokens).argmax(-1)
        assert chosen[len(prompt) - 1 : -1].tolist() == tokens


@pytest.mark.parametrize("name", TINY_MODELS)
def test_tokens_in_chunks_and_after_preemption(own_code, monkeypatch, name):
    rng = random.Random(3)
    prompts = [[rng.randrange(3, 512) for _ in range(n)] for n in (9, 17, 26, 30, 12)]
    llm = LLM(
        own_code(name), device="cpu", max_model_len=64, max_num_batched_tokens=11, **FEW_PAGES
    )
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, detokenize=False)
    preemptions = count_preemptions(llm, monkeypatch)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert preemptions
    check_greedy(Reference(own_code(name)), prompts, outputs)


@pytest.mark.parametrize("name", TINY_MODELS)
def test_tokens_after_a_prefix_hit(own_code, monkeypatch, name):
    monkeypatch.setattr(state_snapshots, "SPACING", 8)  # copies of states at short distances
    monkeypatch.setattr(state_snapshots, "MIN_GAIN", 4)
    rng = random.Random(4)
    start = [rng.randrange(3, 512) for _ in range(17)]
    prompts = [start + [rng.randrange(3, 512) for _ in range(n)] for n in (1, 7, 20)]
    llm = LLM(own_code(name), device="cpu", max_model_len=64, block_size=8)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False)
    llm.generate([start], params, use_tqdm=False)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.num_cached_tokens for output in outputs] == [16, 16, 16]
    check_greedy(Reference(own_code(name)), prompts, outputs)


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("name", ["ling_2_6", "plamo2"])
def test_drafts_change_no_token(own_code, name, batch_invariant):
    """Rejected rows are left out of states."""
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    settings = {"max_model_len": 64, "batch_invariant": batch_invariant}
    llm = LLM(own_code(name), device="cpu", speculative_config=drafts, **settings)
    prompts = [[5, 9, 77, 5, 9, 77, 5, 9], [8] * 12, [3, 4, 5, 6, 3, 4, 5, 6, 3]]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, detokenize=False)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    check_greedy(Reference(own_code(name)), prompts, outputs)


def attention(**values):
    def change(decoder):
        for layer in decoder.layers:
            for name, value in values.items():
                setattr(layer.attention, name, value)

    return change


def exchanged_gates(decoder):
    """w1 for the gate, as in Llama's files."""
    for layer in decoder.layers:
        weight = layer.mlp.up_proj.weight
        weight.copy_(weight.roll(len(weight) // 2, 0))


def all_queries_first(decoder):
    """Rows read as [q | k | v], although each KV head's follow each other."""
    for layer in decoder.layers:
        weight = layer.attention.qkv_proj.weight
        q, k, v = weight.split((64, 32, 32))
        by_head = [q[:32], k[:16], v[:16], q[32:], k[16:], v[16:]]
        weight.copy_(torch.cat(by_head))


def plain_head(decoder):
    weight = decoder.head.weight
    weight.mul_(torch.linspace(1, 2, len(weight))[:, None])


def rms_norms(decoder):
    for layer in decoder.layers:
        layer.attention_norm.kind, layer.attention_norm.bias = "rms", None
        layer.attention_norm._spec = layer.attention_norm._made_spec()


def other_factor(decoder):
    for layer in decoder.layers:
        layer.mixes = tuple((kept, 0.9) for kept, _ in layer.mixes)


def mixes_late(decoder):
    """Kept after the layer that the key names."""
    layers = decoder.layers
    for before, after in zip([*layers][::-1][1:], [*layers][::-1][:-1], strict=True):
        after.keeps = before.keeps
    layers[0].keeps = ()


def longer_windows(decoder):
    for layer in decoder.layers:
        if layer.attention.window is not None:
            layer.attention.window += 1


def one_rotation(decoder):
    decoder.layers[1].attention.rotary = decoder.layers[0].attention.rotary


def norms_after_plus_one(decoder):
    """As all other norms are stored."""
    for layer in decoder.layers:
        norm = layer.attention_end.norm
        norm.weight.add_(0.8)


def whole_rotation(decoder):
    attention_of = decoder.layers[0].attention
    table = attention_of.rotary.cos_sin
    attention_of.rotary.cos_sin = torch.cat([table, table], -1)


def of_router(**values):
    def change(decoder):
        router = decoder.layers[1].mlp.router
        router.routing = replace(router.routing, **values)

    return change


def without_correction(decoder):
    decoder.layers[1].mlp.router.correction.zero_()


def half_shared(decoder):
    decoder.layers[1].mlp.shared.mlp.down_proj.weight.mul_(0.5)


def of_lightning(change):
    """Plant in the first two layers, which have lightning attention."""

    def plant(decoder):
        for layer in decoder.layers[:2]:
            change(layer.attention)

    return plant


def slopes_of_layer_numbers(decoder):
    """Decays of vLLM and SGLang, which count layers from 0."""
    for layer, wrong in zip(decoder.layers[:2], (1.0, 0.5), strict=True):
        factor = (wrong + 1e-5) / (wrong + 0.5 + 1e-5)
        layer.attention.a_log.add_(torch.tensor(factor).log())


def one_norm_for_all_heads(mixer):
    mixer.norm_groups = 1


def exchanged_parts(mixer):
    """Queries for values: the order on disk."""
    inner = mixer.heads * mixer.head_dim
    v, k, q, gates = mixer.in_proj.weight.split([inner] * 4)
    mixer.in_proj.weight.copy_(torch.cat([q, k, v, gates]))


def halves_rotate(decoder):
    decoder.layers[2].attention.rotary.interleaved = False


def of_states(change):
    """Plant in the layers with a state of PLaMo 2."""

    def plant(decoder):
        for layer in decoder.layers[::2]:
            change(layer.attention)

    return plant


def exchanged(mixer, name, parts, first, second):
    """Exchange two parts of the rows of a matrix."""
    rows = [*getattr(mixer, name).weight.clone().split(parts)]
    rows[first], rows[second] = rows[second], rows[first]
    getattr(mixer, name).weight.copy_(torch.cat(rows))


def one_norm_of_heads(decoder):
    """All heads with the weights of the first one."""
    for layer in decoder.layers[1::2]:
        layer.attention.q_norm.copy_(layer.attention.q_norm[:1].expand(4, -1))


WRONG = {
    "z and x swapped": (
        "plamo2",
        of_states(lambda mixer: exchanged(mixer, "in_proj", [96, 96], 0, 1)),
    ),
    "B and C swapped": (
        "plamo2",
        of_states(lambda mixer: exchanged(mixer, "x_proj", [16, 16, 64], 0, 1)),
    ),
    "dt without a norm": ("plamo2", of_states(lambda mixer: setattr(mixer, "dt_norm", None))),
    "B without a norm": ("plamo2", of_states(lambda mixer: setattr(mixer, "b_norm", None))),
    "dt without its bias": ("plamo2", of_states(lambda mixer: mixer.dt_bias.zero_())),
    "no skip": ("plamo2", of_states(lambda mixer: mixer.skip.zero_())),
    "one norm for heads": ("plamo2", one_norm_of_heads),
    "window of PLaMo 2 one longer": (
        "plamo2",
        lambda decoder: setattr(decoder.layers[1].attention, "window", 8),
    ),
    "one RoPE for all layers of PLaMo 2": (
        "plamo2",
        lambda d: setattr(d.layers[1].attention, "rotary", d.layers[3].attention.rotary),
    ),
    "layers counted from 0": ("ring_linear", slopes_of_layer_numbers),
    "slopes of other heads": (
        "ring_linear",
        of_lightning(lambda m: m.a_log.copy_(m.a_log.flip(0))),
    ),
    "one norm for all heads": ("ling_2_6", of_lightning(one_norm_for_all_heads)),
    "queries used as values": ("ling_2_6", of_lightning(exchanged_parts)),
    "lightning attention through SiLU": (
        "ling_2_6",
        of_lightning(lambda mixer: setattr(mixer, "is_activated", True)),
    ),
    "queries without norms": (
        "ring_linear",
        of_lightning(lambda mixer: setattr(mixer, "q_norm", None)),
    ),
    "linear attention without RoPE": (
        "ring_linear",
        of_lightning(lambda mixer: setattr(mixer, "rotary", None)),
    ),
    "split-half RoPE in MLA": ("ling_2_6", halves_rotate),
    "no ALiBi": ("baichuan_13b", attention(slopes=None)),
    "head not normalized": ("baichuan_13b", plain_head),
    "gate and up swapped": ("qwen", exchanged_gates),
    "queries before all keys": ("internlm2", all_queries_first),
    "RMS norms": ("orion", rms_norms),
    "factor of training": ("solar", other_factor),
    "inputs of other layers": ("solar", mixes_late),
    "window one longer": ("plamo3", longer_windows),
    "one RoPE for all layers": ("plamo3", one_rotation),
    "norms after attention plus 1": ("plamo3", norms_after_plus_one),
    "routing weights not normalized": ("ling", of_router(normalized=False)),
    "half of the shared experts": ("ling", half_shared),
    "full instead of partial RoPE": ("ling_2", whole_rotation),
    "routing weights without their factor": ("ling_2", of_router(factor=1.0)),
    "expert groups ranked by best expert": ("ling_2", of_router(group_score="max")),
    "all experts in one group": ("ling_2", of_router(num_groups=1, top_groups=1)),
    "experts chosen without the bias": ("ling_2", without_correction),
    "routing weights normalized": ("deepseek_moe", of_router(normalized=True)),
    "routing weights without their factor, DeepSeek-MoE": ("deepseek_moe", of_router(factor=1.0)),
    "heads without norms": ("ling_2", attention(q_norm=None, k_norm=None, norms_heads=False)),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_interpretation_fails_comparison(own_code, wrong):
    name, plant = WRONG[wrong]
    llm = LLM(own_code(name), device="cpu", max_model_len=64)
    right = llm.logits(TOKENS)
    with torch.inference_mode():
        plant(llm.engine.runner.decoder)
    assert relative(llm.logits(TOKENS), right) > 1e-3
