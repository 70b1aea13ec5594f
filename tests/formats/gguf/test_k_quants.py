"""K-quants: blocks that decode to their grid, errors below plain rounding's, files and mixes."""

import re
import shutil

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from calibrate import gguf_file
from formats.checkpoint import CheckpointReader
from formats.errors import CheckpointError, RangeError, SchemeError
from formats.gguf.blocks import decode_rows
from formats.gguf.container import read_gguf
from formats.gguf.k_quants.search import choose_grid
from formats.gguf.schemes import BLOCK_SCHEMES, gets_more_bits
from formats.gguf.writing.export import export_gguf
from formats.in_memory.k_weight import KWeight
from formats.in_memory.weights import round_to_nearest
from formats.inspection.inspect import inspect_checkpoint
from formats.scheme import K_TYPES
from qserve.cli import main
from qserve.llm import LLM

IDS = list(range(5, 45))


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """The folders that are made for GGUF files are below this home."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def spec_of(name):
    return BLOCK_SCHEMES[name].weight


def weights(kind="normal"):
    """[24, 512] with outliers, or of one odd kind."""
    torch.manual_seed(7)
    found = torch.randn(24, 512) * 0.02
    found[torch.rand_like(found) < 0.004] *= 9
    odd = {
        "normal": found,
        "zeros": torch.zeros_like(found),
        "constant": torch.full_like(found, -0.37),
        "positive": found.abs() + 0.5,
        "negative": -found.abs() - 0.5,
        "tiny": found * 1e-6,
        "one outlier": torch.nn.functional.pad(torch.full((24, 1), 3.0), (100, 411)),
    }
    return odd[kind]


@pytest.mark.parametrize("name", K_TYPES)
def test_blocks_decode_to_codes_on_grid(name):
    """Every code in every place, with random scales: packing is the decoder the other way round."""
    torch.manual_seed(1)
    grid = choose_grid(weights(), spec_of(name))
    codes_NK = torch.randint(0, grid.spec.max_code + 1, (24, 512), dtype=torch.uint8)
    groups_NGL = codes_NK.float().unflatten(1, (-1, grid.length))
    if grid.has_minima:
        want = groups_NGL * grid.steps()[..., None] - grid.lows()[..., None]
    else:
        want = (groups_NGL - 32) * grid.steps()[..., None]
    weight = KWeight.from_codes(codes_NK, grid)
    assert torch.equal(weight.dequantize(), want.flatten(1))
    assert (weight.out_features, weight.in_features) == (24, 512)


@pytest.mark.parametrize("name", [*K_TYPES, "q5_0", "q5_1"])
def test_block_decode_equals_gguf_py(name):
    gguf = pytest.importorskip("gguf", reason="gguf-py is not installed")
    from formats.gguf.block_types import BY_NAME
    from formats.gguf.writing.encode import encode_floats

    kind = BY_NAME[name.upper()]
    data = encode_floats(weights(), kind)
    theirs = gguf.quants.dequantize(data.numpy(), gguf.GGMLQuantizationType[kind.name])
    assert np.array_equal(theirs, decode_rows(data, kind, 512).numpy())


def plain(weight_NK, name):
    """Weights after a plain K-quant: ranges of groups, scales and minima in 6 or 8 bits."""
    bits, symmetric, length = K_TYPES[name]
    groups = weight_NK.double().numpy().reshape(24, 2, 256 // length, length)
    if symmetric:
        place = np.abs(groups).argmax(-1)[..., None]
        scale = np.take_along_axis(groups, place, -1)[..., 0] / -32
        most = np.take_along_axis(scale, np.abs(scale).argmax(-1)[..., None], -1)
        d = (most / -128).astype(np.float16).astype(float)
        step = (np.round(scale / d).clip(-128, 127) * d)[..., None]
        found = np.round(groups / step).clip(-32, 31) * step
    else:
        low = np.minimum(groups.min(-1), 0)
        scale, low = (groups.max(-1) - low) / (2**bits - 1), -low
        stored = []
        for values in (scale, low):
            d = (values.max(-1, keepdims=True) / 63).astype(np.float16).astype(float)
            stored.append((np.round(values / d).clip(0, 63) * d)[..., None])
        step, low = stored
        found = np.round((groups + low) / step).clip(0, 2**bits - 1) * step - low
    return torch.from_numpy(found.reshape(weight_NK.shape))


def error(found, want, importance=1.0):
    return float(((found.double() - want.double()).square() * importance).sum())


@pytest.mark.parametrize("name", K_TYPES)
def test_error_is_below_plain_k_quant(name):
    weight = weights()
    found = KWeight.from_float(weight, spec_of(name)).dequantize()
    assert error(found, weight) < 0.97 * error(plain(weight, name), weight)


@pytest.mark.parametrize("name", K_TYPES)
def test_importance_lowers_weighted_error(name):
    torch.manual_seed(3)
    importance = torch.rand(512).pow(6) * 10
    weight, spec = weights(), spec_of(name)
    with_it = KWeight.from_float(weight, spec, importance_K=importance).dequantize()
    without = KWeight.from_float(weight, spec).dequantize()
    assert error(with_it, weight, importance) < 0.97 * error(without, weight, importance)


@pytest.mark.parametrize("name", K_TYPES)
def test_huge_importance_keeps_other_inputs_accurate(name):
    importance = torch.ones(512)
    importance[::37] = 1e8
    weight = torch.randn(24, 512, generator=torch.Generator().manual_seed(5)) * 0.02
    found = KWeight.from_float(weight, spec_of(name), importance_K=importance).dequantize()
    simple = plain(weight, name)
    assert error(found, weight, importance) < 0.3 * error(simple, weight, importance)
    assert error(found, weight) < 3 * error(simple, weight)


@pytest.mark.parametrize("kind", ["zeros", "constant", "positive", "negative", "one outlier"])
@pytest.mark.parametrize("name", K_TYPES)
def test_extreme_blocks_stay_within_two_steps(name, kind):
    weight = weights(kind)
    found = KWeight.from_float(weight, spec_of(name)).dequantize()
    assert (found - weight).abs().max() <= weight.abs().max() * 2 / 2 ** spec_of(name).bits
    if kind == "zeros":
        assert torch.equal(found, weight)


@pytest.mark.parametrize("name", K_TYPES)
def test_weights_below_float16_minimum_are_not_nan(name):
    weight = weights("tiny")
    found = KWeight.from_float(weight, spec_of(name)).dequantize()
    assert torch.isfinite(found).all() and error(found, weight) <= error(0 * weight, weight)


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        (lambda w: w * 1e9, RangeError, "too large for the float16 scales"),
        (lambda w: w * torch.nan, CheckpointError, "NaN or infinity"),
        (lambda w: w[:, :300], SchemeError, "300 inputs are not divisible by the group size 256"),
    ],
)
def test_weight_without_finite_grid_is_refused(change, kind, words):
    with pytest.raises(kind, match=words):
        round_to_nearest(change(weights()), spec_of("q4_k"), "p")


def test_mix_assigns_types_as_llama_cpp():
    """Llama 2 7B in Q4_K_M, as published: 16 of its 32 layers."""
    wide = [layer for layer in range(32) if gets_more_bits(layer, 32)]
    assert wide == [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]


def quantize(model, file, scheme, *flags):
    flags = [*flags, "--scheme", scheme, "--recipe", "rtn", "--quality-windows", "0"]
    assert main(["quantize", str(model), "-o", str(file), *flags]) == 0
    return {name: each.type.name for name, each in read_gguf(file).tensors.items()}


def test_mix_round_trips_through_convert(docs_5m, tmp_path):
    file, copy = tmp_path / "mix.gguf", tmp_path / "copy.gguf"
    types = quantize(docs_5m, file, "q4_k_m", "--override", "layers.0.mlp.up_proj=q8_0")
    wide = {name for name, kind in types.items() if kind == "Q6_K"}
    assert wide == {
        "token_embd.weight",  # the head, too
        *(f"blk.{layer}.{local}.weight" for layer in (2, 3) for local in ("attn_v", "ffn_down")),
    }
    assert types["blk.0.ffn_up.weight"] == "Q8_0"
    assert set(types.values()) == {"Q4_K", "Q6_K", "Q8_0", "F32"}
    assert main(["convert", str(file), str(copy), "--format", "gguf"]) == 0
    first, second = read_gguf(file), read_gguf(copy)
    for name, each in first.tensors.items():
        again = second.tensors[name]
        assert each.type == again.type, name
        data = [
            path.read_bytes()[at.offset : at.offset + at.num_bytes]
            for path, at in ((file, each), (copy, again))
        ]
        assert data[0] == data[1], name


def test_convert_reports_tensors_written_as_float(docs_5m, tmp_path, capsys):
    """K-quants have no form in other formats, so the folder is larger than the file."""
    file, folder = tmp_path / "mix.gguf", tmp_path / "folder"
    quantize(docs_5m, file, "q4_0", "--override", "layers.0.mlp.up_proj=q6_k")
    assert main(["convert", str(file), str(folder), "--format", "compressed-tensors"]) == 0
    written = "model.embed_tokens, model.layers.0.mlp.up_proj: written as float16 numbers"
    output = capsys.readouterr().out
    assert written in output and "cannot store their blocks of Q6_K, Q8_0" in output
    file, folder = tmp_path / "all.gguf", tmp_path / "none"
    quantize(docs_5m, file, "q4_k")
    assert main(["convert", str(file), str(folder), "--format", "gptq"]) == 1
    assert (
        f"{file}: gptq cannot store its linears, which are in blocks of Q4_K"
        in capsys.readouterr().err
    )


def test_transformers_reads_same_weights(docs_5m, tmp_path):
    pytest.importorskip("gguf", reason="gguf-py is not installed")
    file = tmp_path / "mix.gguf"
    quantize(docs_5m, file, "q5_k_m")
    theirs = LlamaForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32)
    ours = LLM(str(file), device="cpu", dtype="float32", max_model_len=64).logits(IDS)
    with torch.no_grad():
        assert torch.allclose(theirs(torch.tensor([IDS])).logits[0], ours, atol=1e-3, rtol=0)


@pytest.fixture(scope="module")
def odd_widths(tmp_path_factory):
    """A tiny model with 320 and 608 inputs, and one layer's worth of linears."""
    sizes = {"hidden_size": 320, "intermediate_size": 608, "num_hidden_layers": 1}
    config = LlamaConfig(
        **{"vocab_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64},
        **{"tie_word_embeddings": False, "max_position_embeddings": 64, **sizes},
    )
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("odd")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("scheme", "most", "wide"), [("q4_k_m", "Q5_0", "Q8_0"), ("q5_k_m", "Q5_1", "Q8_0")]
)
def test_fallback_blocks_used_if_256_does_not_divide(
    odd_widths, tmp_path, capsys, scheme, most, wide
):
    """As llama.cpp has it: Q4_K -> Q5_0, Q5_K -> Q5_1, Q6_K -> Q8_0."""
    types = quantize(odd_widths, tmp_path / "odd.gguf", scheme)
    output = capsys.readouterr().out
    assert types["blk.0.attn_output.weight"] == scheme[:4].upper()  # 256 inputs
    assert types["blk.0.attn_q.weight"] == types["blk.0.ffn_gate.weight"] == most
    assert types["blk.0.attn_v.weight"] == types["blk.0.ffn_down.weight"] == wide
    assert types["token_embd.weight"] == most and types["output.weight"] == wide
    assert f"4 linears of 320 inputs are {most.lower()} instead of {scheme[:4]}" in output
    assert "1 linears of 608 inputs are q8_0 instead of q6_k" in output
    file, source = CheckpointReader(tmp_path / "odd.gguf", as_floats=True), odd_widths
    for name, entry in CheckpointReader(source).entries.items():
        distance = (file.get(name).float() - entry.read().float()).norm() / entry.read().norm()
        assert distance < 0.12, name


def test_inapplicable_settings_are_refused_early(docs_5m, tmp_path, capsys):
    for flags, words in (
        (["--scheme", "q4_k", "--act-order"], "--act-order: has no place"),
        (["--scheme", "q4_k", "--bits", "4.5"], "--bits: chooses integer codes"),
        (["--format", "gguf", "--bits", "4.5"], "--bits: GGUF has no blocks of 2, 3 and 6 bits"),
        (["--format", "gguf", "--override", "v_proj=w3a16-sym"], "w3a16-sym: has no lossless form"),
        (["--scheme", "q4_k", "--kv-cache-scheme", "fp8"], "has no place in GGUF"),
        (["--scheme", "q4_k", "--group-size", "64"], "blocks of q4_k are fixed"),
        (["--scheme", "q6_k", "--override", "v_proj=w8a8"], "w8a8: is no type of GGUF's blocks"),
    ):
        assert main(["quantize", str(docs_5m), "-o", str(tmp_path / "a.gguf"), *flags]) == 1
        error_line = capsys.readouterr().err
        assert re.search(words, error_line), error_line
    assert [each.name for each in tmp_path.iterdir() if each.name != "home"] == []


def test_model_unsupported_by_gguf_is_kept_as_folder(docs_5m, tmp_path, monkeypatch, capsys):
    """Quantization may take hours, and some contents are compared when the file is written."""

    def refuse(*arguments, **options):
        raise CheckpointError("config.json x", "has no key in GGUF", "write another format")

    monkeypatch.setattr(gguf_file, "export_gguf", refuse)
    command = ["quantize", str(docs_5m), "--scheme", "q4_0", "--recipe", "rtn"]
    assert main([*command, "-o", str(tmp_path / "a.gguf"), "--quality-windows", "0"]) == 1
    kept = tmp_path / "a-quantized"
    assert f"quantized model is kept as the folder {kept}" in capsys.readouterr().err
    assert [each.name for each in tmp_path.iterdir() if each.name != "home"] == ["a-quantized"]
    folder = tmp_path / "converted"
    assert main(["convert", str(kept), str(folder), "--format", "gptq"]) == 0
    assert inspect_checkpoint(folder).scheme == "w4a16-sym-g32"


def test_unsupported_tokenizer_is_refused_before_quantization(
    docs_5m, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(gguf_file, "quantize_checkpoint", None)  # the work would fail
    source = tmp_path / "source"
    shutil.copytree(docs_5m, source)
    (source / "tokenizer.json").write_text('{"model": {"type": "Unheard"}}')
    file = tmp_path / "a.gguf"
    flags = ["--scheme", "q4_0", "--recipe", "rtn", "--quality-windows", "0"]
    assert main(["quantize", str(source), "-o", str(file), *flags]) == 1
    assert "source" in capsys.readouterr().err and not file.exists()


def test_k_quant_scheme_requires_gguf(docs_5m, tmp_path, capsys):
    flags = ["--override", "v_proj=q6_k", "--recipe", "rtn"]
    assert main(["quantize", str(docs_5m), "-o", str(tmp_path / "out"), *flags]) == 1
    assert "q6_k: cannot be written as gptq" in capsys.readouterr().err


def test_float_file_keeps_its_types(docs_5m, tmp_path):
    """Types of the embedding are an option of `export_gguf`."""
    export_gguf(docs_5m, tmp_path / "a.gguf", embedding_type="q6_k")
    types = {name: t.type.name for name, t in read_gguf(tmp_path / "a.gguf").tensors.items()}
    assert types["token_embd.weight"] == "Q6_K" and types["blk.0.ffn_up.weight"] == "BF16"


@pytest.mark.exhaustive
def test_gptaq_solves_k_quant_mix(docs_5m, tmp_path, capsys):
    """Few linears have nearer outputs on held-out windows after plain rounding."""
    file, flags = tmp_path / "gptq.gguf", ["--samples", "8", "--sequence-length", "128"]
    scheme = ["--scheme", "q4_k_m", "--quality-windows", "0"]  # gptaq is the default at 4 bits
    assert main(["quantize", str(docs_5m), "-o", str(file), *scheme, *flags]) == 0
    output = capsys.readouterr().out
    assert "q4_k_m by gptaq, as gguf" in output
    assert output.count("rounded to nearest: output error") < 7  # of 28
    name = "model.layers.0.mlp.down_proj.weight"
    rounded = KWeight.from_float(CheckpointReader(docs_5m).get(name), spec_of("q4_k"))
    found = CheckpointReader(file, as_floats=True).get(name)
    assert not torch.equal(found, rounded.dequantize())
