"""Latent attention and its families' routing: variants of published models against transformers.

test_family_tokens.py runs the usual tiny models; here is what their configs do not show, what
is planted wrong, Kimi-K2's files, and what is refused.
"""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from calibrate.float_model import FloatModel
from calibrate.pipeline import quantize_checkpoint
from formats.checkpoint import CheckpointReader, read_json
from formats.errors import InputError
from formats.inspection.inspect import inspect_checkpoint
from formats.scheme import Scheme
from qkernels import ops
from qserve.llm import LLM
from qserve.model.blocks.latent import attention as latent_attention
from qserve.params.sampling_params import SamplingParams
from tests.qserve.engine.make_step import make_step
from tests.qserve.model.test_family_tokens import FEW_PAGES, check_greedy, count_preemptions
from tests.qserve.model.variants import TOKENS, edited, logits, model_maker, relative
from tests.tiny_families import GROUPS, LATENT, YARN

NO_ROPE_SCALING = {"rope_type": "default", "rope_theta": 50000.0}
VARIANTS = {
    "moonlight": (
        "DeepseekV3Config",
        {
            **{**LATENT, **GROUPS, "n_group": 1, "topk_group": 1},
            **{"q_lora_rank": None, "rms_norm_eps": 1e-5, "rope_parameters": NO_ROPE_SCALING},
        },
    ),
    "deepseek-v2 236b": (
        "DeepseekV2Config",
        {
            **{**LATENT, **GROUPS, "q_lora_rank": 96, "topk_method": "group_limited_greedy"},
            "rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
    "halves rotate": (
        "DeepseekV3Config",
        {**LATENT, **GROUPS, "q_lora_rank": 96, "rope_interleave": False},
    ),
    # so large that the norms of latents, which have another one, show
    "large eps": (
        "DeepseekV3Config",
        {**LATENT, **GROUPS, "q_lora_rank": 96, "rms_norm_eps": 0.05},
    ),
}


@pytest.fixture(scope="session")
def model_of(tiny_model, tmp_path_factory):
    """Name of a family or of a variant -> its folder."""
    return model_maker(tiny_model, tmp_path_factory, VARIANTS)


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_transformers(model_of, transformers_model, name):
    with torch.no_grad():
        want = transformers_model(model_of(name))(torch.tensor([TOKENS])).logits[0]
    assert relative(logits(model_of(name)), want) < 1e-5


def quantized(source, folder, **options):
    quantize_checkpoint(
        source, folder, scheme=Scheme.parse("w4a16-asym-g32"), progress=False, **options
    )
    return folder


@pytest.mark.parametrize("name", ["moonlight", "deepseek-v2 236b"])
def test_greedy_tokens_of_quantized_weights(
    model_of, transformers_model, tmp_path, monkeypatch, name
):
    """Also of kv_b_proj: in chunks, with too few pages, on beginnings that were there."""
    folder = quantized(model_of(name), tmp_path / "model", output_format="gptq")
    assert "model.layers.0.self_attn.kv_b_proj.qweight" in CheckpointReader(folder).entries
    rng = random.Random(8)
    start = [rng.randrange(3, 512) for _ in range(17)]
    prompts = [start + [rng.randrange(3, 512) for _ in range(n)] for n in (1, 9, 13, 4, 2)]
    llm = LLM(folder, device="cpu", max_model_len=64, max_num_batched_tokens=11, **FEW_PAGES)
    preemptions = count_preemptions(llm, monkeypatch)
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, detokenize=False)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert preemptions
    check_greedy(transformers_model(folder), prompts, outputs)


@pytest.mark.parametrize("name", ["deepseek_v2", "glm4_moe_lite"])
def test_long_chunks_expand_keys(model_of, transformers_model, monkeypatch, name):
    """Next to decodes and short chunks, after a context, and from pages that were there."""
    rng = random.Random(8)
    prompts = [[rng.randrange(3, 512) for _ in range(n)] for n in (70, 3, 40, 5)]
    prompts.append(prompts[0][:33] + prompts[2][:20])
    found = []
    expand = ops.expanded_latent_attention

    def counted(q_NHD, cache, chunks, *rest, **options):  # noqa: N803
        step = chunks.step
        found.append((len(step.context_lengths_R), step.max_query_len, step.max_context_len))
        return expand(q_NHD, cache, chunks, *rest, **options)

    monkeypatch.setattr(ops, "expanded_latent_attention", counted)
    monkeypatch.setattr(latent_attention, "PAIRS_OF_MS", 0)
    llm = LLM(model_of(name), device="cpu", max_model_len=96, max_num_batched_tokens=64)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    outputs = [llm.generate(each, params, use_tqdm=False) for each in (prompts[:2], prompts[2:])]
    check_greedy(transformers_model(model_of(name)), prompts, [*outputs[0], *outputs[1]])
    assert any(rows == context for _, rows, context in found)
    assert any(rows < context for _, rows, context in found)
    assert any(requests > 1 for requests, _, _ in found)
    assert min(rows for _, rows, _ in found) >= 16


@pytest.mark.parametrize("name", ["deepseek_v2", "glm4_moe_lite"])
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_8_bit_latent_cache(model_of, monkeypatch, name, kind):
    """Logits are those of a float cache whose entries are rounded after they are written: of a
    prompt, and of tokens after it, in chunks that expand keys and rows that do not.
    """
    monkeypatch.setattr(latent_attention, "PAIRS_OF_MS", 0)
    prompt = [*TOKENS, *TOKENS[5:]]
    coded = LLM(model_of(name), device="cpu", max_model_len=96, kv_cache_dtype=kind)
    got = coded.logits(prompt)
    exact = LLM(model_of(name), device="cpu", max_model_len=96)
    assert 1e-4 < relative(got, exact.logits(prompt)) < (0.1 if kind == "int8" else 0.3)
    answers = [ask(coded, prompt)]
    sizes = [spec.bytes_per_page for spec in coded.engine.runner.cache_specs]
    assert set(sizes) == {16 * (80 + 2 * 4)}  # codes and two scales of 16 tokens

    write = ops.rope_write_latents_

    def written(q, made, norm, cos_sin, positions, cache, *rest, **options):
        out = write(q, made, norm, cos_sin, positions, cache, *rest, **options)
        cache.pages.copy_(
            torch.cat([rounded(part, kind) for part in cache.pages.split([64, 16], -1)], -1)
        )
        return out

    monkeypatch.setattr(ops, "rope_write_latents_", written)
    assert relative(got, exact.logits(prompt)) < 1e-5
    exact.reset_prefix_cache()
    answers.append(ask(exact, prompt))
    assert answers[0] == answers[1]


def test_chunks_with_key_expansion_run_eagerly(model_of, monkeypatch):
    """A CUDA graph computes all rows over entries."""

    class Graphs:
        def key_for(self, step, *, whole=False):
            return "graph"

    runner = LLM(model_of("deepseek_v2"), device="cpu", max_model_len=96).engine.runner
    assert runner.batch_form.split_rule.pairs_of_graph == latent_attention.PAIRS_OF_MS // 4
    runner.graphs = Graphs()
    step = make_step([1, 30], context_lengths_R=np.array([900, 60], np.int32), max_context_len=900)
    assert runner.graph_key_for(step) == "graph"
    for most, key in ((30 * 60 + 1, "graph"), (30 * 60, None)):
        monkeypatch.setattr(latent_attention, "PAIRS_OF_MS", 4 * most)
        del vars(runner)["batch_form"]
        assert runner.graph_key_for(step) == key
    runner.graphs = None


def ask(llm, prompt):
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
    starts = [prompt, prompt[:20] + prompt[:7], prompt[:9]]
    return [out.outputs[0].token_ids for out in llm.generate(starts, params, use_tqdm=False)]


def rounded(x, kind):
    """Rows with codes of 8 bits, each in units of its own scale."""
    if kind == "int8":
        scale = (x.abs().amax(-1, keepdim=True) / 127).clamp(min=1e-30)
        return (x / scale).round() * scale
    scale = (x.abs().amax(-1, keepdim=True) / 448).clamp(min=1e-30)
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


def of_attention(change):
    def apply(decoder):
        for layer in decoder.layers:
            change(layer.attention)

    return apply


def of_routing(**values):
    def apply(decoder):
        for layer in decoder.layers[1:]:
            layer.mlp.router.routing = replace(layer.mlp.router.routing, **values)

    return apply


def other_rotation(decoder):
    rotary = decoder.layers[0].attention.rotary
    rotary.interleaved = not rotary.interleaved


def table_of_one(decoder):
    """Cosines and sines without YaRN's factor."""
    table = decoder.layers[0].attention.rotary.cos_sin
    table /= table[0, 0].clone()


def set_scale(attention):
    attention.scale = (attention.shape.nope + attention.shape.rope) ** -0.5


def without_correction(decoder):
    for layer in decoder.layers[1:]:
        layer.mlp.router.correction.zero_()


def rolled(name):
    def change(attention):
        setattr(attention, name, getattr(attention, name).roll(1, 0))

    return of_attention(change)


def without_shared(decoder):
    for layer in decoder.layers[1:]:
        layer.mlp.shared = None


WRONG = {
    "wrong RoPE pairing": ("deepseek_v2", other_rotation),
    "wrong RoPE pairing, split halves": ("halves rotate", other_rotation),
    "scores without mscale_all_dim": ("deepseek_v2", of_attention(set_scale)),
    "RoPE without mscale": ("deepseek_v3", table_of_one),
    "scores scaled by another width": (
        "glm4_moe_lite",
        of_attention(lambda attention: setattr(attention, "scale", 40**-0.5 * 1.1)),
    ),
    "latents not normalized": ("moonlight", of_attention(lambda a: a.kv_norm.fill_(1))),
    "latents of queries not normalized": (
        "glm4_moe_lite",
        of_attention(lambda a: a.q_norm.fill_(1)),
    ),
    "keys of another head": ("deepseek_v2", rolled("key_up")),
    "values of another head": ("deepseek_v2", rolled("value_up")),
    "experts chosen without the correction": ("deepseek_v3", without_correction),
    "experts chosen from all groups": ("deepseek_v3", of_routing(num_groups=1, top_groups=1)),
    "groups ranked by their best": ("deepseek_v3", of_routing(group_score="max")),
    "groups ranked by two": ("deepseek-v2 236b", of_routing(group_score="top2")),
    "weights normalized": ("deepseek_v2", of_routing(normalized=True)),
    "weights not normalized": ("deepseek_v3", of_routing(normalized=False)),
    "weights without their factor": ("glm4_moe_lite", of_routing(factor=1.0)),
    "shared experts left out": ("deepseek_v2", without_shared),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_interpretation_fails_comparison(model_of, wrong):
    """Each would load without an error; the comparison above reports it."""
    name, plant = WRONG[wrong]
    llm = LLM(model_of(name), device="cpu", max_model_len=64)
    right = llm.logits(TOKENS)
    with torch.inference_mode():
        plant(llm.engine.runner.decoder)
    assert relative(llm.logits(TOKENS), right) > 1e-3


def test_latent_norms_have_own_eps(model_of):
    llm = LLM(model_of("large eps"), device="cpu", max_model_len=64)
    right = llm.logits(TOKENS)
    for layer in llm.engine.runner.decoder.layers:
        assert layer.attention.norm_eps == latent_attention.INNER_NORM_EPS
        layer.attention.norm_eps = 0.05
    assert relative(llm.logits(TOKENS), right) > 1e-3


def test_layers_with_experts_of_a_published_glm(model_of, transformers_model, tmp_path):
    """Its config.json states how many layers have none, and no list."""
    source = model_of("glm4_moe_lite")
    assert read_json(source / "config.json")["mlp_layer_types"][:2] == ["dense", "sparse"]
    folder = edited(source, tmp_path / "model", config=lambda c: c.pop("mlp_layer_types"))
    assert torch.equal(logits(folder), logits(source))
    two = edited(folder, tmp_path / "two", config=lambda c: c.update(first_k_dense_replace=2))
    with pytest.raises(InputError, match=r"model\.layers\.1\.mlp\.gate_proj"):
        logits(two)


def kimi(source, folder, tensors=None, block=None):
    """A copy whose config.json names Kimi-K2."""

    def change(config):
        config.update(model_type="kimi_k2", auto_map={"AutoConfig": "configuration_deepseek.X"})
        config.update({} if block is None else {"quantization_config": block})

    return edited(source, folder, tensors, change)


def test_kimi_k2_has_the_layers_of_v3(model_of, tmp_path):
    folder = kimi(model_of("moonlight"), tmp_path / "model")
    assert torch.equal(logits(folder), logits(model_of("moonlight")))
    result = quantized(folder, tmp_path / "codes", output_format="compressed-tensors")
    assert read_json(result / "config.json")["model_type"] == "kimi_k2"
    assert not [
        each
        for each in inspect_checkpoint(result).problems
        if each.severity == "error" and "tokenizer" not in each.text
    ]


# as the files of Kimi-K2-Thinking state it
NATIVE = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "input_activations": None,
            "output_activations": None,
            "weights": {
                **{"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"},
                **{"group_size": 32, "actorder": None, "dynamic": False, "observer": "minmax"},
            },
        }
    },
    "ignore": [
        *("lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"),
        "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
    ],
}


def packed(codes_NK):
    """int32 [N, K / 8] of codes -8 to 7: eight to a word, the first in the lowest bits."""
    nibbles = (codes_NK + 8).unflatten(1, (-1, 8)).long() << torch.arange(0, 32, 4)
    words = nibbles.sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def test_kimi_k2_native_int4_experts(model_of, transformers_model, tmp_path):
    source, numbers = model_of("moonlight"), {}

    def quantize(state):
        for name in [n for n in state if ".mlp.experts." in n]:
            weight_NK = state.pop(name)
            scales_NG = weight_NK.unflatten(1, (-1, 32)).abs().amax(-1).div(7).bfloat16()
            wide_NK = scales_NG.float().repeat_interleave(32, 1)
            codes_NK = (weight_NK / wide_NK).round().clamp(-7, 7)
            numbers[name] = codes_NK * wide_NK
            stem = name.removesuffix(".weight")
            state[f"{stem}.weight_packed"] = packed(codes_NK)
            state[f"{stem}.weight_scale"] = scales_NG
            state[f"{stem}.weight_shape"] = torch.tensor(weight_NK.shape, dtype=torch.int32)

    folder = kimi(source, tmp_path / "model", quantize, NATIVE)
    dense = edited(source, tmp_path / "dense", lambda state: state.update(numbers))
    with torch.no_grad():
        want = transformers_model(dense)(torch.tensor([TOKENS])).logits[0]
    assert len(numbers) == 2 * 8 * 3 and relative(logits(folder), want) < 1e-5


@pytest.mark.parametrize(
    ("flag", "setting"),
    [
        (
            "--enable-lora with --batch-invariant",
            {"enable_lora": True, "batch_invariant": True},
        ),
    ],
)
def test_settings_unsupported_with_mla_are_refused(model_of, flag, setting):
    with pytest.raises(InputError, match=f"{flag}: does not work with DeepseekV3.*latent"):
        LLM(model_of("moonlight"), device="cpu", max_model_len=64, **setting)


def test_scales_of_keys_are_not_calibrated(model_of, tmp_path):
    with pytest.raises(InputError, match="`kv_cache`: does not work with DeepseekV3.*latents"):
        quantized(model_of("moonlight"), tmp_path / "model", kv_cache="int8")


NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}


def test_drafts_change_no_token(model_of, transformers_model):
    """A verify has several rows of a request, each with its own last entry."""
    llm = LLM(model_of("moonlight"), device="cpu", max_model_len=64, speculative_config=NGRAM)
    prompts = [[5, 9, 77, 5, 9, 77, 5, 9], [8] * 12, [3, 4, 5, 6, 3, 4, 5, 6, 3]]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, detokenize=False)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    check_greedy(transformers_model(model_of("moonlight")), prompts, outputs)


@pytest.mark.parametrize(
    ("family", "changed"),
    [
        ("deepseek_v3", {"attention_bias": True}),
        ("deepseek_v3", {"scoring_func": "softmax"}),
        ("deepseek_v3", {"moe_layer_freq": 2}),
        ("deepseek_v2", {"norm_topk_prob": True}),
    ],
)
def test_unsupported_variant_is_refused(model_of, tmp_path, family, changed):
    folder = edited(model_of(family), tmp_path / "model", config=lambda c: c.update(changed))
    (key,) = changed
    for read in (FloatModel, lambda folder: LLM(folder, device="cpu", max_model_len=64)):
        with pytest.raises(InputError, match=rf"config\.json {key}: expected .*not supported"):
            read(folder)
