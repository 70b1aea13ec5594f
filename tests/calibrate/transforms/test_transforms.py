"""Streaming equals the whole model; transforms keep its logits and repair one with outliers."""

import json
import math
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from calibrate.calibration.activations import fake_quantize_tokens
from calibrate.calibration.capture import HiddenStates
from calibrate.calibration.layer_runner import LayerRunner
from calibrate.calibration.statistics import HeldOut, InputStatistics
from calibrate.layer_map import find_layer_map
from calibrate.solvers import rtn
from calibrate.solvers.solving import LayerContext, Transform
from calibrate.texts.data import read_calibration
from calibrate.transforms import awq, smoothquant
from calibrate.transforms.awq import AWQ
from calibrate.transforms.rotation import ROTATE, rotation_matrix
from calibrate.transforms.smoothquant import SMOOTHQUANT, smooth_layer
from formats.checkpoint import CheckpointReader
from formats.errors import InputError
from formats.scheme import QuantSpec
from tests.calibrate.statistics_of import collect_statistics

FAMILIES = ["llama", "mistral", "qwen2", "qwen3"]
IDS = torch.randint(0, 512, (3, 40), generator=torch.Generator().manual_seed(0))
FIXED_ALPHA = Transform(name="half", on_statistics=partial(smooth_layer, alpha=0.5))


@pytest.mark.parametrize("family", FAMILIES)
def test_layer_by_layer_logits_equal_whole_model(
    stream_logits, tiny_model, transformers_model, family
):
    folder = tiny_model(family)
    with torch.no_grad():
        expected = transformers_model(folder)(IDS).logits
    torch.testing.assert_close(stream_logits(folder, IDS), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "transforms",
    [(AWQ,), (SMOOTHQUANT,), (FIXED_ALPHA,), (ROTATE,), (ROTATE, AWQ)],
    ids=lambda transforms: "+".join(t.name for t in transforms),
)
def test_transforms_keep_the_logits(stream_logits, tiny_model, family, transforms):
    folder = tiny_model(family)
    changed = []

    def record(layer, state):
        changed.append(state)
        return state

    expected = stream_logits(folder, IDS)
    found = stream_logits(folder, IDS, *transforms, change=record, bits=8)
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-4 * float(expected.abs().max()))
    plain = []
    stream_logits(folder, IDS, change=lambda _, state: plain.append(state) or state)
    moved = [
        name
        for before, after in zip(plain, changed, strict=True)
        for name in before
        if not torch.equal(before[name].float(), after[name].float())
    ]
    assert "mlp.gate_proj.weight" in moved


# nothing but factors between a linear and the residual stream
ROTATABLE = (
    "phi3",
    "gemma",
    "arcee",
    "hunyuan",
    "ernie4_5",
    "glm",
    "granite",
    "smollm3",
    "seed_oss",
    "ministral",
    "ministral3",
    "helium",
    "cwm",
    "vaultgemma",
    "apertus",
)
OTHERS = (
    *("gemma2", "gemma3", "olmo2", "glm4", "mixtral", "qwen3_moe", "phi3", "granite"),
    *("opt", "cohere", "gpt_neox", "gpt2", "falcon", "nemotron_h_moe"),
    # much like others
    *(
        pytest.param(family, marks=pytest.mark.exhaustive)
        for family in (
            "cohere2",
            "nemotron",
            "starcoder2",
            "exaone4",
            "smollm3",
            "seed_oss",
            "ministral",
            "ministral3",
            "olmo3",
            *("gemma", "stablelm", "phi"),
            *("gptj", "gpt_bigcode", "arcee", "ernie4_5", "glm", "hunyuan"),
            *("olmoe", "minimax_m2", "ernie4_5_moe", "dots1"),
            *(
                "granite_moe",
                "granite_moe_shared",
                "hunyuan_moe",
                "helium",
                "cwm",
                "jais2",
                "vaultgemma",
                "solar_open",
                "exaone_moe",
                "flex_olmo",
                "afmoe",
                "minicpm3",
                "mistral4",
                "bloom",
                "falcon_rw",
                "mpt",
                "llama4",
                "gemma4",
                "gemma4_moe",
                "gemma4_shared",
                "nemotron_h_latent",
                "apertus",
            ),
        )
    ),
)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", OTHERS)
def test_transforms_keep_logits_of_other_architectures(stream_logits, tiny_model, family):
    folder = tiny_model(family)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        expected = model(IDS).logits
    close = partial(torch.testing.assert_close, rtol=2e-4, atol=2e-4 * float(expected.abs().max()))
    close(stream_logits(folder, IDS), expected)
    close(stream_logits(folder, IDS, AWQ), expected)
    close(stream_logits(folder, IDS, SMOOTHQUANT, bits=8), expected)
    if family in ROTATABLE:
        close(stream_logits(folder, IDS, ROTATE), expected)
    else:
        with pytest.raises(InputError, match="rotations cannot be folded"):
            stream_logits(folder, IDS, ROTATE)


def test_factors_are_moved_through_biases_and_relu(stream_logits, tiny_model):
    """A norm's bias moves with its weight; a factor above 0 passes ReLU."""
    folder, states = tiny_model("opt"), []
    stream_logits(folder, IDS, AWQ, change=lambda _, state: states.append(state) or state)
    reader = CheckpointReader(folder)
    for number, state in enumerate(states):
        for name in ("self_attn_layer_norm", "final_layer_norm", "fc1"):
            for leaf in ("weight", "bias"):
                before = reader.get(f"model.decoder.layers.{number}.{name}.{leaf}")
                assert not torch.equal(state[f"{name}.{leaf}"].float(), before.float()), name


@pytest.mark.parametrize("size", [12, 64, 96, 7])
def test_rotations_are_orthogonal_and_mix_every_channel(size):
    rotation = rotation_matrix(size, seed=3)
    identity = torch.eye(size, dtype=torch.float64)
    torch.testing.assert_close(rotation @ rotation.t(), identity, rtol=0, atol=1e-12)
    assert not torch.equal(rotation, rotation_matrix(size, seed=4))
    if size == 64:
        assert torch.allclose(rotation.abs(), torch.tensor(1 / 8, dtype=torch.float64))


HOSTILE_CHANNELS = (3, 70, 141, 142, 255)
W4 = QuantSpec(bits=4, symmetric=True, group_size=128)
W8 = QuantSpec(bits=8, symmetric=True, group_size=-1)


@pytest.fixture(scope="module")
def hostile(docs_5m, tmp_path_factory):
    """The bundled model with a few channels of each norm times 50, the weights after it divided."""
    reader = CheckpointReader(docs_5m)
    folder = tmp_path_factory.mktemp("hostile")
    tensors = {name: reader.get(name).float() for name in reader.entries}
    channels = list(HOSTILE_CHANNELS)
    for name in tensors:
        if name.endswith("layernorm.weight"):
            tensors[name][channels] *= 50
        elif name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")) or name.endswith(
            ("gate_proj.weight", "up_proj.weight")
        ):
            tensors[name][:, channels] /= 50
    (folder / "config.json").write_text(json.dumps(reader.config))
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def windows(docs_5m, documents):
    """Three windows of texts of the bundled model's kind."""
    tokenizer = AutoTokenizer.from_pretrained(docs_5m)
    return read_calibration(str(documents), tokenizer, samples=3, sequence_length=256).ids_WS


@pytest.fixture(scope="module")
def perplexity(stream_logits, windows):
    @cache  # transforms are compared with the same plain models
    def measure(folder, *transforms, spec, bits=None):
        def round_weights(_, state):
            return {
                name: rtn.solve(tensor, None, spec, name).dequantize() if "proj" in name else tensor
                for name, tensor in state.items()
            }

        activation = partial(fake_quantize_tokens, bits=bits) if bits else None
        logits = stream_logits(
            folder,
            windows,
            *transforms,
            change=round_weights if spec else None,
            spec=spec or W4,
            bits=bits,
            activation=activation,
        )
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), windows[:, 1:].flatten()
        )
        return math.exp(loss)

    return measure


def test_model_with_planted_outliers_is_equivalent(perplexity, docs_5m, hostile):
    before, after = perplexity(docs_5m, spec=None), perplexity(hostile, spec=None)
    assert after == pytest.approx(before, rel=1e-4)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("transform", "spec", "bits"),
    [
        pytest.param(AWQ, W4, None, id="awq-w4", marks=pytest.mark.exhaustive),
        pytest.param(ROTATE, W4, None, id="rotate-w4", marks=pytest.mark.exhaustive),
        pytest.param(SMOOTHQUANT, W8, 8, id="smoothquant-w8a8"),
        pytest.param(ROTATE, W8, 8, id="rotate-w8a8", marks=pytest.mark.exhaustive),
    ],
)
def test_transform_repairs_a_model_with_outliers(
    perplexity, docs_5m, hostile, transform, spec, bits
):
    plain = perplexity(docs_5m, spec=spec, bits=bits)
    broken = perplexity(hostile, spec=spec, bits=bits)
    kept = perplexity(docs_5m, transform, spec=spec, bits=bits)
    mended = perplexity(hostile, transform, spec=spec, bits=bits)
    print(f"plain {plain:.3f} broken {broken:.3f} kept {kept:.3f} mended {mended:.3f}")
    assert broken > plain + 0.5
    assert abs(mended - kept) <= 0.25


@pytest.mark.exhaustive
@pytest.mark.parametrize("transform", [AWQ, SMOOTHQUANT], ids=lambda transform: transform.name)
def test_transformed_statistics_equal_recomputed(docs_5m, windows, transform):
    reader = CheckpointReader(docs_5m)
    layer_map = find_layer_map(reader.config)
    runner = LayerRunner(reader, layer_map, "cpu")
    hidden = HiddenStates(windows[:2], reader.get("model.embed_tokens.weight"), runner)
    state = {n: reader.get(f"model.layers.0.{n}") for n in reader.children("model.layers.0")}
    kept = collect_statistics(runner, runner.build(0, state), 0, hidden)
    context = LayerContext(layer_map=layer_map, config=reader.config, spec=W4, activation_bits=8)
    changed = {**state, **transform.on_statistics(state, kept, context)}
    found = collect_statistics(runner, runner.build(0, changed), 0, hidden)
    for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"):
        for field in ("moment_KK", "absmax_K"):
            expected, got = getattr(kept[name], field), getattr(found[name], field)
            torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4 * float(expected.max()))
    moved = 0
    for pair in context.scale_pairs:
        if pair.kind != "norm":
            continue
        norm = f"{pair.previous}.weight"
        assert changed[norm].dtype == state[norm].dtype == torch.bfloat16
        moved += not torch.equal(changed[norm], state[norm])
        for name in pair.linears[:1]:  # v and up are scaled again, for the linears after them
            before = state[f"{name}.weight"].float() * state[norm].float()
            after = changed[f"{name}.weight"].float() * changed[norm].float()
            torch.testing.assert_close(after, before, rtol=1e-6, atol=0)
    assert moved


def of_first_layer(folder, windows, **changes):
    """The first layer's tensors, statistics of its inputs, and its context."""
    reader = CheckpointReader(folder)
    layer_map = find_layer_map(reader.config)
    runner = LayerRunner(reader, layer_map, "cpu")
    hidden = HiddenStates(windows[:2], reader.get("model.embed_tokens.weight"), runner)
    state = {n: reader.get(f"model.layers.0.{n}") for n in reader.children("model.layers.0")}
    statistics = collect_statistics(runner, runner.build(0, state), 0, hidden)
    context = LayerContext(layer_map=layer_map, config=reader.config, spec=W4, activation_bits=8)
    return state, statistics, replace(context, prefix="model.layers.0", **changes)


@pytest.mark.parametrize("transform", [AWQ, SMOOTHQUANT], ids=lambda transform: transform.name)
def test_inputs_of_float_linears_are_not_scaled(docs_5m, windows, transform):
    """A float linear may have no whole groups, and its rounding error is no reason for factors."""
    quantized = frozenset({"model.layers.0.mlp.up_proj"})
    state, statistics, context = of_first_layer(docs_5m, windows, quantized=quantized)
    assert [names for _, names in context.rounded_pairs] == [("mlp.up_proj",)]
    changed = transform.on_statistics(state, statistics, context)
    assert "mlp.up_proj.weight" in changed and "mlp.gate_proj.weight" in changed  # share a norm
    assert not any(name.startswith(("self_attn.", "mlp.down_proj")) for name in changed)


@pytest.mark.parametrize("factor", [1e9, 1e-9])
def test_factors_beyond_scale_range_are_not_candidates(factor):
    stats = InputStatistics(64, "cpu")
    stats.update(torch.randn(128, 64, generator=torch.Generator().manual_seed(0)))
    weights = [torch.randn(32, 64, generator=torch.Generator().manual_seed(1))]
    spec = QuantSpec(bits=4, symmetric=True, group_size=32)
    context = LayerContext(layer_map=None, config={}, spec=spec)
    for scale_K, finite in ((torch.ones(64), True), (torch.full((64,), factor), False)):
        errors = (
            awq.output_error(weights, scale_K, stats, spec),
            smoothquant.product_error(weights, scale_K, stats.sample(), context),
        )
        assert all(error > 0 and math.isfinite(error) == finite for error in errors)


def test_scaled_statistics_equal_statistics_of_scaled_inputs():
    generator = torch.Generator().manual_seed(0)
    x, reference = torch.randn(2, 128, 16, generator=generator)
    scale_K = torch.rand(16, generator=generator) * 8 + 0.1
    scaled, expected = InputStatistics(16, "cpu"), InputStatistics(16, "cpu")
    scaled.update(x, reference)
    scaled.cache["gptq"] = "of the old inputs"
    scaled.scale_(scale_K)
    expected.update(x / scale_K, reference / scale_K)
    for name in ("moment_KK", "drift_KK", "absmax_K", "hessian_KK", "importance_K"):
        torch.testing.assert_close(
            getattr(scaled, name), getattr(expected, name), rtol=1e-4, atol=1e-3
        )
    torch.testing.assert_close(scaled.sample(), expected.sample())
    assert scaled.cache == {} and scaled.num_tokens == 128


def test_awq_factors_beyond_scale_range_are_dropped():
    """Also of an output that the search does not compare."""
    generator = torch.Generator().manual_seed(0)
    statistics = InputStatistics(8, "cpu")
    statistics.hold_out(HeldOut.of(torch.randn(64, 8, generator=generator)))
    weight_NK = torch.randn(awq.MAX_OUTPUTS * 2, 8, generator=generator)
    weight_NK[1] *= 1000  # the search compares every second output
    spec = QuantSpec(bits=4, group_size=8, symmetric=True)
    assert awq.helps_held_out([weight_NK], torch.ones(8), statistics, spec)
    assert not awq.helps_held_out([weight_NK], torch.full((8,), 10000.0), statistics, spec)
