"""Inkling: quantized tokens, published names, keys of config.json, and what is refused."""

import json
import re

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import Interleave, WeightRenaming

from calibrate.pipeline import quantize_checkpoint
from calibrate.texts.data import CalibrationData
from formats.checkpoint import CheckpointReader
from formats.errors import InputError
from formats.files.memory_tensors import MemoryTensors
from formats.inspection.inspect import inspect_checkpoint
from formats.scheme import Scheme
from qserve.llm import LLM
from qserve.model.blocks.states import convolved
from qserve.params.sampling_params import SamplingParams
from tests.qserve.model.test_family_tokens import check_greedy
from tests.qserve.model.test_hybrid_tokens import MODES, greedy, in_transformers, prompts
from tests.qserve.model.test_transformers import dense
from tests.qserve.model.variants import TOKENS, edited, logits, relative

NUM_ROUTED = 6


@pytest.fixture(scope="module")
def source(tiny_model):
    return tiny_model("inkling")


def with_stacks(folder):
    """Join the linears of experts to the tensors of transformers' modules, in place."""
    state, found = load_file(folder / "model.safetensors"), {}
    for name in [name for name in state if ".mlp.experts.0.gate_proj." in name]:
        stem = name.partition(".experts.")[0]

        def stack(leaf, numbers, stem=stem):
            return torch.stack([state.pop(f"{stem}.experts.{n}.{leaf}.weight") for n in numbers])

        routed, shared = range(NUM_ROUTED), range(NUM_ROUTED, NUM_ROUTED + 2)
        gate_up = torch.cat([stack(f"{leaf}_proj", routed) for leaf in ("gate", "up")], 1)
        found[f"{stem}.experts.gate_up_proj"] = gate_up
        found[f"{stem}.experts.down_proj"] = stack("down_proj", routed)
        for leaf in ("gate_proj", "up_proj", "down_proj"):
            found[f"{stem}.shared_experts.{leaf}"] = stack(leaf, shared)
    save_file(state | found, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("scheme", "recipe", "output_format"),
    [
        ("w4a16-sym-g32", "gptq", "compressed-tensors"),
        pytest.param("w4a16-asym-g32", "awq", "awq", marks=pytest.mark.exhaustive),
    ],
)
def test_quantized_tokens_equal_dequantized(source, tmp_path, scheme, recipe, output_format):
    """Calibration runs transformers' layers, with shared experts as linears of their own."""
    ids_WS = torch.randint(3, 500, (4, 24), generator=torch.Generator().manual_seed(0))
    folder = tmp_path / "model"
    quantize_checkpoint(
        source,
        folder,
        scheme=Scheme.parse(scheme),
        output_format=output_format,
        recipe=recipe,
        calibration=CalibrationData(ids_WS=ids_WS, source="test", seed=0),
        progress=False,
    )
    model = in_transformers(with_stacks(dense(folder, tmp_path / "dense", torch.float32)))
    with torch.no_grad():
        want = model(torch.tensor([TOKENS])).logits[0]
    assert relative(logits(folder), want) < 1e-5
    assert relative(logits(folder), logits(source)) < 0.7
    llm = LLM(folder, device="cpu", max_model_len=64, **MODES["chunked and preempted"])
    check_greedy(model, prompts(), greedy(llm, prompts()))
    problems = inspect_checkpoint(folder).problems
    assert all("has no tokenizer" in problem.text for problem in problems), problems


def test_hooks_see_the_inputs_of_shared_experts(source):
    """A calibrated layer computes what transformers' own layer does."""
    from calibrate.calibration.layer_runner import LayerRunner
    from calibrate.layer_map import find_layer_map

    reader = CheckpointReader(source)
    runner = LayerRunner(reader, find_layer_map(reader.config), "cpu")
    state = {name: entry.read() for name, entry in reader.children("model.layers.1").items()}
    hidden_BSD = torch.randn(2, 20, 64, generator=torch.Generator().manual_seed(1))
    seen = []
    layer = runner.build(1, state)
    last = layer.mlp.experts[NUM_ROUTED + 1]["down_proj"]
    last.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape))
    found = runner.run(layer, 1, hidden_BSD)
    model = in_transformers(source)
    with torch.no_grad():
        inputs = {}
        hook = model.model.layers[1].register_forward_pre_hook(
            lambda _, args, kwargs: inputs.update(mask=kwargs["attention_mask"]), with_kwargs=True
        )
        model(inputs_embeds=hidden_BSD)
        hook.remove()
        want = model.model.layers[1](hidden_BSD, attention_mask=inputs["mask"])
    assert relative(found, want) < 1e-5
    assert seen == [(40, 32)]


def published_name(name):
    """Return a tensor's name in published files, which transformers' mapping inverts."""
    for own, stored in (
        *(("model.embed_tokens.embed_norm.", "model.llm.embed_norm."),),
        *(("model.embed_tokens.", "model.llm.embed."), ("lm_head.", "model.llm.unembed.")),
        *(("model.layers.", "model.llm.layers."), ("model.norm.", "model.llm.norm.")),
        *(
            (f".self_attn.{x}_proj.", f".attn.w{stored}.")
            for x, stored in (
                ("q", "q_du"),
                ("k", "k_dv"),
                ("v", "v_dv"),
                ("r", "r_du"),
                ("o", "o_ud"),
            )
        ),
        *((".self_attn.", ".attn."), ("sconv.conv1d.", "sconv.")),
        *((".input_layernorm.", ".attn_norm."), (".post_attention_layernorm.", ".mlp_norm.")),
        *((".gate.e_score_correction_bias", ".gate.bias"), (".mlp.down_proj.", ".mlp.w2_md.")),
        *(
            (".experts.gate_up_proj", ".experts.w13_weight"),
            (".experts.down_proj", ".experts.w2_weight"),
        ),
        (".shared_experts.down_proj", ".shared_experts.shared_w2_weight"),
    ):
        name = name.replace(own, stored)
    return name


def alternating(gate_and_up, dim):
    op = Interleave(dim=dim, inverse=True)
    return op.convert({"": gate_and_up}, [""], ["x"])["x"]


def published(source, folder):
    """Write the text model as in published files, next to other parts."""
    folder.mkdir()
    state, found = load_file(source / "model.safetensors"), {}
    for name in list(state):
        if name.endswith(".mlp.experts.gate_up_proj"):
            state[name] = alternating(state[name], 1)
        elif name.endswith(".mlp.gate_proj.weight") or name.endswith("shared_experts.gate_proj"):
            gate, up = state.pop(name), state.pop(name.replace("gate_proj", "up_proj"))
            dim = gate.ndim - 2
            leaf = "w13_dn.weight" if gate.ndim == 2 else "shared_w13_weight"
            stem = name.partition("gate_proj")[0]
            found[published_name(stem + leaf)] = alternating(torch.cat([gate, up], dim), dim)
    found |= {published_name(name): tensor for name, tensor in state.items()}
    others = ("model.visual.layers.linear_0.weight", "model.audio.encoder.weight")
    others += ("model.mtp.layers.0.attn_norm.weight",)
    found |= {name: torch.ones(2, 3) for name in others}
    save_file(found, folder / "model.safetensors", metadata={"format": "pt"})
    text = json.loads((source / "config.json").read_text())
    del text["model_type"], text["architectures"]
    config = {
        "architectures": ["InklingForConditionalGeneration"],
        "model_type": "inkling_mm_model",
        "text_config": text,
        "vision_config": {},
        "audio_config": {},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def whole(source, tmp_path_factory):
    return published(source, tmp_path_factory.mktemp("published") / "model")


def test_published_names_are_those_of_transformers(source, whole):
    """The names of this test's files are the ones that transformers' mapping reads."""
    mapping = get_checkpoint_conversion_mapping("inkling_mm_model")
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    own = {
        name.replace("model.", "model.language_model.", 1)
        for name in load_file(source / "model.safetensors")
    }
    own = {
        name.replace("model.language_model.", "model.", 1) if "lm_head" in name else name
        for name in own
    }
    for name in load_file(whole / "model.safetensors"):
        if "w13" in name or not name.startswith("model.llm."):
            continue
        for each in renamings:
            (stored,), (target,) = each.source_patterns, each.target_patterns
            name = re.sub(stored, target, name)
        assert name in own, name


def test_published_files_are_read(source, whole, tmp_path):
    assert torch.equal(logits(whole), logits(source))
    target = tmp_path / "model"
    scheme = Scheme.parse("w4a16-sym-g32")
    quantize_checkpoint(whole, target, scheme=scheme, recipe="rtn", progress=False)
    alone = tmp_path / "alone"
    quantize_checkpoint(source, alone, scheme=scheme, recipe="rtn", progress=False)
    assert torch.equal(logits(target), logits(alone))
    found = CheckpointReader(target)
    assert found.other_parts.keys() == {
        "model.visual.layers.linear_0.weight",
        "model.audio.encoder.weight",
    }
    problems = inspect_checkpoint(whole).problems
    assert all("has no tokenizer" in problem.text for problem in problems), problems


def test_tensors_of_an_update(source):
    reader, stored = CheckpointReader(source), load_file(source / "model.safetensors")
    found = MemoryTensors(stored.items(), reader.config)
    assert found.entries.keys() == reader.entries.keys()
    for name in found.entries:
        assert torch.equal(found.get(name), reader.get(name)), name


def test_keys_of_published_files(source, tmp_path):
    def change(config):
        config["local_layer_ids"] = [0, 2]
        config["dense_mlp_idx"] = 1
        config["dense_intermediate_size"] = config.pop("intermediate_size")
        config["intermediate_size"] = config.pop("moe_intermediate_size")
        config["sconv_kernel_size"] = config.pop("conv_kernel_size")
        config["model_max_length"] = config.pop("max_position_embeddings")
        for key in ("layer_types", "mlp_layer_types"):
            del config[key]
        config.update(use_embed_norm=True, use_sconv=True)

    folder = edited(source, tmp_path / "model", config=change)
    assert torch.equal(logits(folder), logits(source))


def test_logits_after_the_vocabulary_are_of_no_tokens(source, tmp_path):
    folder = edited(source, tmp_path / "model", config=lambda c: c.update(unpadded_vocab_size=100))
    found = logits(folder)
    assert torch.equal(found[:, :100], logits(source)[:, :100])
    assert found[:, 100:].eq(float("-inf")).all()
    with torch.no_grad():
        want = in_transformers(folder)(torch.tensor([TOKENS])).logits[0]
    assert relative(found[:, :100], want) < 1e-5


def no_growth(decoder):
    for layer in decoder.layers:
        layer.attention.growth = None


def longer_window(decoder):
    for layer in decoder.layers:
        if layer.attention.window is not None:
            layer.attention.window += 1


def shorter_profiles(decoder):
    for layer in decoder.layers:
        layer.attention.profiles = layer.attention.profiles[:, :-1]


def usual_scale(decoder):
    for layer in decoder.layers:
        layer.attention.scale = layer.attention.head_dim**-0.5


def no_dense_factor(decoder):
    decoder.layers[0].mlp_factor = None


def no_factor_of_routing(decoder):
    from dataclasses import replace

    router = decoder.layers[1].mlp.router
    router.routing = replace(router.routing, factor=1.8)


def exchanged_convolutions(decoder):
    attention = decoder.layers[1].attention
    k, v, *others = attention.conv_weight.split(attention.widths)
    attention.conv_weight = torch.cat([v, k, *others])


WRONG = {
    "scores do not grow": no_growth,
    "window one longer": longer_window,
    "profiles one shorter": shorter_profiles,
    "another scale of scores": usual_scale,
    "dense feed-forward without its factor": no_dense_factor,
    "routing without its factor": no_factor_of_routing,
    "convolutions of keys and values exchanged": exchanged_convolutions,
    "embeddings without a norm": lambda decoder: setattr(decoder.embedding, "norm", None),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_reading_is_seen(source, wrong):
    llm = LLM(source, device="cpu", max_model_len=64)
    right = llm.logits(TOKENS)
    WRONG[wrong](llm.engine.runner.decoder)
    assert relative(llm.logits(TOKENS), right) > 1e-3


def test_convolutions_see_earlier_chunks(source, monkeypatch):
    """Without the kept inputs the tokens differ."""
    want = [
        each.outputs[0].token_ids
        for each in greedy(LLM(source, device="cpu", max_model_len=64), prompts())
    ]
    right = convolved.ops.short_conv_

    def forgotten(x, weight, bias, conv_PCL, *others):
        conv_PCL.zero_()
        return right(x, weight, bias, conv_PCL, *others)

    monkeypatch.setattr(convolved.ops, "short_conv_", forgotten)
    found = greedy(LLM(source, device="cpu", max_model_len=64), prompts())
    assert [each.outputs[0].token_ids for each in found] != want


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_keys_in_8_bits(source, dtype):
    llm = LLM(source, device="cpu", max_model_len=64, kv_cache_dtype=dtype)
    assert 0 < relative(llm.logits(TOKENS), logits(source)) < 0.3
    params = SamplingParams(temperature=0, max_tokens=4, detokenize=False)
    assert llm.generate([TOKENS], params, use_tqdm=False)[0].outputs[0].token_ids


def test_tokens_with_drafts(source):
    llm = LLM(
        source,
        device="cpu",
        max_model_len=64,
        speculative_config={"method": "ngram", "num_speculative_tokens": 3},
    )
    repeated = [prompt[:5] * 5 for prompt in prompts()]
    check_greedy(in_transformers(source), repeated, greedy(llm, repeated))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"kv_cache_dtype": "int4"}, "kv-cache-dtype int4"),
        ({"tensor_parallel_size": 2}, "tensor-parallel-size 2: does not divide .*onvolutions"),
    ],
)
def test_unsupported_settings_are_refused(source, settings, reason):
    with pytest.raises(InputError, match=reason):
        LLM(source, device="cpu", max_model_len=64, **settings)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"swa_head_dim": 16}, "swa_head_dim: expected head_dim"),
        ({"shared_expert_sink": False}, "shared_expert_sink"),
        ({"log_scaling_n_floor": 0}, "log_scaling_n_floor"),
        ({"unpadded_vocab_size": -1}, "unpadded_vocab_size"),
    ],
)
def test_other_values_are_refused(source, tmp_path, changed, reason):
    folder = edited(source, tmp_path / "model", config=lambda c: c.update(changed))
    with pytest.raises(InputError, match=reason):
        logits(folder)


def test_layers_are_those_of_transformers():
    """The default layer types, which published files leave out."""
    from formats.architecture.stored_form.config import canonical_config

    count = 13
    want = transformers.InklingTextConfig(num_hidden_layers=count)
    found = canonical_config(
        {
            "architectures": ["InklingForCausalLM"],
            "model_type": "inkling_text",
            "num_hidden_layers": count,
        }
    )
    assert found["layer_types"] == want.layer_types
    assert found["mlp_layer_types"] == want.mlp_layer_types


def test_name_of_embedding_norm_before_transformers_5_23_is_read(source, tmp_path):
    def rename(state):
        state["model.embed_norm.weight"] = state.pop("model.embed_tokens.embed_norm.weight")

    older = edited(source, tmp_path / "older", rename)
    assert torch.equal(logits(older), logits(source))
