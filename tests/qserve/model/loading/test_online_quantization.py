"""Quantizing while loading gives the bits of `qserve quantize --recipe rtn`, or says why not."""

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file

from formats import quant_config
from formats.checkpoint import CheckpointReader, TensorEntry
from formats.codecs import mxfp4
from formats.errors import InputError
from formats.in_memory.weights import same_weight
from formats.numerics import affine
from formats.scheme import SCHEMES
from qserve import LLM
from qserve.config import EngineConfig
from qserve.engine.sizes import read_model
from qserve.engine.step.step_input import StepInput
from qserve.kv_transfer.model_digest import page_digest
from qserve.model.loading.loader import load
from qserve.model.loading.online_quantization import ALIASES, METHODS
from qserve.model.loading.rounding_source import open_source
from qserve.params.sampling_params import SamplingParams
from tests.conftest import make_tiny
from tests.qserve.model.live_bytes import LiveBytes
from tests.qserve.model.variants import TOKENS, edited
from tests.qserve.parallel.in_threads import run_ranks
from tests.qserve.parallel.sharded import rank_runner
from tests.tiny_families import TINY_FAMILIES

CPU = torch.device("cpu")
G32 = "w4a16-sym-g32"  # groups that fit the tiny models
# what --quantization is given -> what `quantize --scheme` is given
NAMES = {
    **{
        name if scheme.weight.type != "int" or name == "w8a8" else f"{name}-g32": None
        for name, scheme in SCHEMES.items()
        if scheme.activation is None or scheme.activation.dynamic
    },
    "w4a16-g32": G32,
    "w4a16-auto": G32,
    "w4a16": G32,  # its groups of 128 fit none
    "w8a16-channel": "w8a16-sym-channel",
    "fp8": "w8a8-fp8",
    "fp8_per_tensor": ALIASES["fp8_per_tensor"],
    "fp8_per_block": "w8a8-fp8-block",
    "mxfp4": "w4a16-mxfp4",
}
# tied head; q, k and v in one tensor; experts and dense layers; fused experts; recurrent states
FAMILIES = ("qwen3", "phi3", "qwen2_moe", "gpt_oss", "qwen3_next")


def read(folder, **settings):
    model = read_model(EngineConfig(model=str(folder), **settings))
    return model, open_source(CheckpointReader(folder), model, CPU)


def assert_same_bits(folder, quantized, but=(), **settings):
    """The linears of the quantized folder, and no others, are rounded, and to its bits.

    `but`: last names of linears whose bits may differ.
    """
    _, stored = read(quantized)
    model, rounded = read(folder, **settings)
    modules = {name.rpartition(".")[0] for name in stored.reader.entries}
    quantized = {module for module in modules if stored.is_quantized(module)}
    assert quantized and quantized == {m for m in modules if rounded.is_quantized(m)}
    assert model.rounding.schemes.keys() == quantized
    for module in quantized:
        shape = rounded.reader.entries[f"{module}.weight"].shape
        want, found = stored.weight(module, shape), rounded.weight(module, shape)
        assert found.scheme == want.scheme, module
        if module.rpartition(".")[2] in but:
            continue
        assert same_weight(found, want) is None, module


# the same code as another scheme's, with other numbers
RARE = ("w8a16-asym", "w2a16-sym", "w2a16-asym", "w3a16-asym", "w6a16-sym", "w4a8-fp8")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.exhaustive if name.startswith(RARE) else ())
        for name in NAMES
    ],
)
def test_every_scheme_equals_quantize_bitwise(name, tiny_model, written):
    quantized = written(NAMES[name] or name, None)
    # what other servers load as one matrix shares a scale in a file
    but = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj") if "nvfp4" in name else ()
    assert_same_bits(tiny_model("llama"), quantized, but, quantization=name)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("family", "name"),
    [(family, G32) for family in FAMILIES]
    + [
        pytest.param(family, name, marks=pytest.mark.exhaustive)
        for family in TINY_FAMILIES
        for name in (G32, "w8a8")
        if (family, name) not in [(each, G32) for each in FAMILIES]
    ],
)
def test_every_family_equals_quantize_bitwise(family, name, tiny_model, written):
    assert_same_bits(tiny_model(family), written(name, None, family), quantization=name)


@pytest.mark.exhaustive
def test_patterns_equal_quantize(tiny_model, written):
    other = "w8a16-sym-channel"
    quantized = written(
        G32,
        "compressed-tensors",
        "qwen3_moe",
        ignore=["layers.1.self_attn"],
        overrides=[("layers.0.self_attn", SCHEMES["w8a8"]), ("*.experts.*", SCHEMES["w8a8-fp8"])],
    )
    config = {
        "ignore": ["layers.1.self_attn", "lm_head"],
        "targets": {"layers.0.self_attn": "w8a8"},
        "moe": "fp8",
    }
    folder = tiny_model("qwen3_moe")
    assert_same_bits(folder, quantized, quantization=G32, quantization_config=json.dumps(config))
    only = {"moe": other}
    model, _ = read(folder, quantization="online", quantization_config=json.dumps(only))
    assert {str(scheme) for scheme in model.rounding.schemes.values()} == {other}
    assert all(".experts." in name for name in model.rounding.schemes)


def logits(folder, communicator=None, **settings):
    with torch.inference_mode():
        runner = rank_runner(folder, communicator, **settings)
        runner.allocate_pages(4)
        step = StepInput.of_sequence(TOKENS, [1, 2], page_size=16, params=SamplingParams())
        return runner.logits(step)


@pytest.mark.parametrize(
    ("family", "name", "size"),
    [("llama", G32, 1), ("llama", "w8a8", 2), ("phi3", G32, 2), ("qwen3_moe", "w8a8-fp8", 2)],
)
def test_ranks_equal_quantized_folder(family, name, size, tiny_model, written):
    def compute(folder, **settings):
        if size == 1:
            return [logits(folder, **settings)]
        return run_ranks(size, lambda communicator: logits(folder, communicator, **settings))

    want = compute(written(name, None, family))
    found = compute(tiny_model(family), quantization=name)
    assert all(map(torch.equal, found, want))
    assert not torch.equal(found[0], compute(tiny_model(family))[0])


@pytest.fixture(scope="module")
def deep_model(tmp_path_factory):
    """family -> folder of a model of six equal layers in bfloat16."""

    def make(family):
        config_class, extra = TINY_FAMILIES[family]
        deep = {"num_hidden_layers": 6, "intermediate_size": 256, "mlp_only_layers": []}
        folder = tmp_path_factory.mktemp("deep") / family
        make_tiny(folder, config_class, {**extra, **deep})
        path = folder / "model.safetensors"
        save_file({name: t.bfloat16() for name, t in load_file(path).items()}, path)
        return folder

    return make


@pytest.mark.exhaustive
@pytest.mark.parametrize(("family", "names"), [("llama", (G32, "fp8")), ("qwen2_moe", ("w8a8",))])
def test_peak_memory_is_one_layer_above_the_result(family, names, deep_model, monkeypatch):
    """Rounding works in blocks of rows; a small model has as few weights in a block."""
    monkeypatch.setattr(affine, "BLOCK_ELEMENTS", 2**12)
    folder = deep_model(family)
    entries = CheckpointReader(folder).entries
    layers = [
        sum(each.num_bytes for n, each in entries.items() if n.startswith(f"model.layers.{i}."))
        for i in range(6)
    ]
    read_tensor = TensorEntry.read  # by other threads, too
    for name in names:
        model, source = read(folder, quantization=name)
        with LiveBytes() as live, monkeypatch.context() as patch:

            def counted(entry, live=live):
                tensor = read_tensor(entry)
                live.add(tensor)
                return tensor

            patch.setattr(TensorEntry, "read", counted)
            decoder = load(
                model,
                source,
                device=CPU,
                dtype=torch.bfloat16,
                max_model_len=64,
                progress=False,
                # torch's own 4-bit product unpacks a matrix to int32 first
                kernels={"w4a16": "reference"},
            )
        assert decoder is not None and live.peak - live.now <= layers[0], name
        assert live.now < sum(layers), name


QUANTIZED = "is quantized already"


@pytest.mark.parametrize(
    ("name", "config", "words"),
    [
        ("w4a17", None, "--quantization w4a17: unknown scheme (did you mean w4a16"),
        ("zzz", None, "known: w4a16, "),
        ("w8a8-static", None, "calibration data (use w8a8, or `qserve quantize` first)"),
        ("w8a8-fp8-static", None, "use w8a8-fp8,"),
        ("w8a8-auto", None, "--quantization w8a8-auto: its groups are fixed (use w8a8)"),
        ("w4a16-g64-auto", None, "use w4a16-g64"),
        ("w4a16-g12", None, "multiple of 8"),
        ("mxfp8", None, "not supported (use fp8_per_block)"),
        ("online", None, "requires --quantization-config with a scheme"),
        ("fp8", '{"linear": "w8a8"}', "names another scheme"),
        ("fp8", '{"ignored": []}', "unknown key 'ignored'"),
        ("fp8", '{"ignore": "lm_head"}', "expected a list of patterns"),
        ("fp8", '{"targets": ["fp8"]}', "expected an object of pattern: scheme"),
        ("fp8", '{"targets": {"q_proj": "w4a16-auto"}}', "give a size"),
        ("fp8", "fp8", "expected a JSON object"),
        (None, "{}", "--quantization-config: requires --quantization"),
    ],
)
def test_bad_settings_are_refused_before_the_model_is_read(name, config, words):
    with pytest.raises(InputError) as error:
        EngineConfig(model="nowhere", quantization=name, quantization_config=config)
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "config", "words"),
    [
        # the tiny model has 64 and 96 inputs
        ("w4a16-g128", {}, "64 inputs are not divisible by the group size 128 (use w4a16-sym-auto,"
         " here groups of 32)"),
        ("w4a16-asym-g64", {}, "down_proj: its 96 inputs"),
        ("w4a16-asym-g64", {"ignore": ["o_proj"]}, "use w4a16-asym-auto, here groups of 32"),
        ("fp8", {"targets": {"up_proj": "w4a16"}}, '"ignore": ["model.layers.0.mlp.up_proj"]'),
        ("fp8", {"ignore": ["nothing"]}, "matches no linear"),
        ("gptq", {}, "names a kind of quantized checkpoint"),
    ],
)  # fmt: skip
def test_schemes_that_do_not_fit_the_model_are_refused(name, config, words, tiny_model):
    with pytest.raises(InputError) as error:
        read(tiny_model("llama"), quantization=name, quantization_config=json.dumps(config))
    assert words in str(error.value) and "\n" not in str(error.value)


def test_quantized_checkpoints_keep_their_scheme(quantized_5m, tiny_model, tmp_path):
    for name in ("w4a16", "awq", "fp8"):
        with pytest.raises(InputError, match=QUANTIZED):
            read(quantized_5m, quantization=name)
    for name in ("gptq", "gptq_marlin"):  # users of vLLM state what config.json says anyway
        model, _ = read(quantized_5m, quantization=name)
        assert model.rounding is None and model.quant.method == "gptq"

    def remove_block(config):
        del config["quantization_config"]

    unlabelled = edited(quantized_5m, tmp_path / "unlabelled", config=remove_block)
    with pytest.raises(InputError, match="qweight|quantized tensors"):
        read(unlabelled, quantization="w4a16")

    def state_mxfp4(config):
        config["quantization_config"] = {"quant_method": mxfp4.METHOD}

    experts = edited(tiny_model("gpt_oss"), tmp_path / "experts", config=state_mxfp4)
    with pytest.raises(InputError, match=QUANTIZED):
        read(experts, quantization=G32)
    assert read(experts, quantization="mxfp4")[0].rounding is None


def test_incomplete_checkpoint_is_refused(tiny_model, tmp_path):
    def remove(tensors):
        del tensors["model.layers.1.mlp.up_proj.weight"]

    folder = edited(tiny_model("llama"), tmp_path / "incomplete", tensors=remove)
    with pytest.raises(InputError, match=r"layers\.1\.mlp\.up_proj\.weight: is missing"):
        read(folder, quantization=G32)


def test_weights_that_cannot_be_rounded_are_named(tiny_model, tmp_path):
    def spoil(tensors):
        tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = torch.nan

    folder = edited(tiny_model("llama"), tmp_path / "spoilt", tensors=spoil)
    for name in (G32, "fp8", "mxfp4"):
        _, source = read(folder, quantization=name)
        with pytest.raises(InputError, match=r"layers\.1\.mlp\.up_proj: .* NaN"):
            source.weight("model.layers.1.mlp.up_proj", (96, 64))


def test_quantization_method_names_equal_checkpoints():
    known = {*quant_config.METHODS, *quant_config.READ_ONLY, mxfp4.METHOD}
    assert set(METHODS.values()) == known


def test_log_and_python_know_the_scheme(docs_5m, caplog):
    config = {"ignore": ["layers.0.mlp"]}
    with caplog.at_level(logging.INFO):
        llm = LLM(
            docs_5m,
            device="cpu",
            quantization="w4a16",
            quantization_config=config,
            load_format="dummy",
            max_model_len=64,
        )
    llm.close()
    line = "Quantizing while loading: 25 linears rounded to w4a16-sym; 3 in float (ignored)"
    assert line in caplog.text


def test_model_digest_depends_on_scheme(tiny_model):
    def digest(**settings):
        model, _ = read(tiny_model("llama"), **settings)
        return page_digest(
            str(tiny_model("llama")), model, max_model_len=64, dummy_seed=None, form=""
        )

    ignore = json.dumps({"ignore": ["layers.1.mlp.up_proj", "layers.1.mlp.gate_proj"]})
    found = [
        digest(),
        digest(quantization=G32),
        digest(quantization="w8a8"),
        digest(quantization=G32, quantization_config=ignore),
    ]
    assert len(set(found)) == 4
