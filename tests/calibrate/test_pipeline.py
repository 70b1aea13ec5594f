"""quantize_checkpoint: refusals, copied tensors, and no partial output after a failure."""

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch

from calibrate import recipe
from calibrate.pipeline import quantize_checkpoint
from calibrate.run import finish
from calibrate.solvers import rtn
from formats.checkpoint import CheckpointReader
from formats.codecs import gptq
from formats.errors import CheckpointError, DiskError, InputError, SchemeError
from formats.in_memory.packed import PackedWeight
from formats.inspection.inspect import inspect_checkpoint
from formats.quant_config import BLOCK
from formats.scheme import Scheme

ROOT = Path(__file__).parents[2]
SCHEME = Scheme.parse("w4a16-sym-g32")
# of one shape of layer; the others are tested on models that transformers makes
SERVED = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


def quantize(source: Path, scheme: Scheme = SCHEME, **options):
    target = source.parent / "out"
    return target, quantize_checkpoint(source, target, scheme=scheme, progress=False, **options)


def assert_nothing_left(source: Path) -> None:
    assert [path.name for path in source.parent.iterdir()] == [source.name]


@pytest.mark.parametrize("architecture", SERVED)
@pytest.mark.parametrize("scheme", ["w4a16-sym-g32", "w8a16-sym-channel"])
def test_rtn_codes_equal_from_float_and_other_tensors_equal_source(
    tiny_checkpoint, architecture, scheme
):
    model, scheme = tiny_checkpoint(architecture), Scheme.parse(scheme)
    target, report = quantize(model.write(), scheme)
    written = CheckpointReader(target)
    expected = dict(model.tensors)
    assert len(report.linears) == 14
    for linear in report.linears:
        weight = expected.pop(f"{linear.name}.weight")
        packed = PackedWeight.from_float(weight, scheme.weight)
        for field, tensor in gptq.encode(packed).items():
            expected[f"{linear.name}.{field}"] = tensor
        error = (packed.dequantize() - weight.float()).norm() / weight.float().norm()
        assert linear.relative_error == pytest.approx(float(error), rel=1e-5)
        assert linear.shape == tuple(weight.shape)
    assert written.entries.keys() == expected.keys()
    for name, tensor in expected.items():
        assert written.get(name).dtype == tensor.dtype, name
        assert torch.equal(written.get(name), tensor), name
    assert (target / "tokenizer.json").read_text() == '{"version": "1.0"}'
    block = written.config.pop(BLOCK)
    assert written.config == model.config
    assert block == json.loads((target / "quantize_config.json").read_text())
    assert report.bytes_after == sum(tensor.nbytes for tensor in expected.values())


@pytest.mark.parametrize(
    ("family", "linears"),
    [
        *(("phi3", 4), ("glm4", 6), ("gemma2", 7), ("gemma3", 7), ("granite", 7), ("olmo2", 7)),
        *(("exaone4", 7), ("mixtral", 4 + 12), ("qwen3_moe", 4 + 18)),
        *(("opt", 6), ("cohere", 7), ("cohere2", 7), ("starcoder2", 6), ("nemotron", 6)),
        *(("gemma", 7), ("stablelm", 7), ("phi", 6), ("gpt_neox", 4)),
        *(("gpt2", 4), ("gptj", 6), ("falcon", 4)),
        pytest.param("minimax_m2", 4 + 18, marks=pytest.mark.exhaustive),
        pytest.param("granite_moe_shared", 4 + 18 + 2, marks=pytest.mark.exhaustive),
        pytest.param("hunyuan_moe", 4 + 18 + 3, marks=pytest.mark.exhaustive),
        *(pytest.param(name, 4, marks=pytest.mark.exhaustive) for name in ("bloom", "mpt")),
    ],
)
def test_other_architectures_are_quantized(tiny_model, tmp_path, family, linears):
    source = CheckpointReader(tiny_model(family))
    report = quantize_checkpoint(
        source.folder, tmp_path / "out", scheme=SCHEME, recipe="rtn", progress=False
    )
    assert len(report.linears) == 3 * linears
    written = CheckpointReader(tmp_path / "out")
    layer = re.compile(r".*\.(layers|h|blocks)\.\d+\.(.*)\.weight")
    floats = {name: found[2] for name in written.entries if (found := layer.fullmatch(name))}
    assert all(
        "norm" in local or local.endswith((".gate", ".wg", ".layer")) or local in ("ln_1", "ln_2")
        for local in floats.values()
    )
    for name in floats:
        assert torch.equal(written.get(name), source.get(name))


def test_inspect_finds_no_problems_in_result(tiny_checkpoint):
    model = tiny_checkpoint()
    model.config |= {"model_type": "llama", "intermediate_size": 96}
    model.config |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    target, report = quantize(model.write())
    inspection = inspect_checkpoint(target)
    assert inspection.problems == ()
    assert inspection.scheme == report.scheme == "w4a16-sym-g32"
    assert inspection.bits_per_weight == pytest.approx(report.bits_per_weight)
    assert inspection.total_bytes == report.bytes_after


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_tensors_that_are_not_quantized_keep_the_source_dtype(tiny_checkpoint, dtype):
    model = tiny_checkpoint("Qwen2ForCausalLM")
    model.tensors = {name: tensor.to(dtype) for name, tensor in model.tensors.items()}
    target, _ = quantize(model.write())
    written = CheckpointReader(target)
    for name in ("model.norm.weight", "model.layers.1.self_attn.q_proj.bias"):
        assert torch.equal(written.get(name), model.tensors[name])
        assert written.get(name).dtype == dtype
    assert written.get("model.layers.0.mlp.up_proj.scales").dtype == torch.float16


def test_unmapped_tensors_are_copied_bitwise(tiny_checkpoint):
    model = tiny_checkpoint()
    model.tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.tensor(
        [float("nan"), -0.0]
    )
    model.tensors["extra.embedding"] = torch.arange(5)
    target, _ = quantize(model.write())
    written = CheckpointReader(target)
    assert torch.equal(written.get("extra.embedding"), torch.arange(5))
    copied = written.get("model.layers.0.self_attn.rotary_emb.inv_freq")
    source = model.tensors["model.layers.0.self_attn.rotary_emb.inv_freq"]
    assert torch.equal(copied.view(torch.int32), source.view(torch.int32))


@pytest.mark.parametrize(("tied", "stored"), [(True, True), (True, False), (False, True)])
def test_tied_head_is_not_stored_twice(tiny_checkpoint, tied, stored):
    model = tiny_checkpoint()
    model.config["tie_word_embeddings"] = tied
    if not stored:
        del model.tensors["lm_head.weight"]
    elif tied:
        model.tensors["lm_head.weight"] = model.tensors["model.embed_tokens.weight"].clone()
    target, _ = quantize(model.write())
    assert ("lm_head.weight" in CheckpointReader(target)) == (not tied)


def test_shards_are_split_and_layers_written_in_order(tiny_checkpoint):
    model = tiny_checkpoint()
    target, _ = quantize(model.write(), max_shard_bytes=6000)
    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 3
    order = list(index["weight_map"])
    assert order[0] == "model.layers.0.self_attn.q_proj.qweight"
    first_of_layer_1 = order.index("model.layers.1.self_attn.q_proj.qweight")
    assert all(".layers.0." in name for name in order[:first_of_layer_1])
    assert {name for name in order if ".layers." not in name} == set(order[-3:])


def refused(source: Path, error: type[Exception], match: str, scheme: Scheme = SCHEME, **options):
    with pytest.raises(error, match=match) as caught:
        quantize(source, scheme, **options)
    assert_nothing_left(source)
    return str(caught.value)


def test_unknown_name_errors_list_known_names(tiny_checkpoint):
    model = tiny_checkpoint()
    refused(model.write(), InputError, "known recipes: rtn", recipe="magic")
    refused(
        model.write(),
        InputError,
        "known formats: gptq, awq, compressed-tensors",
        output_format="gguf",
    )
    refused(model.write(), InputError, "device 'abacus'", device="abacus")
    for architectures in (["RwkvForCausalLM"], [], None, "LlamaForCausalLM", [["x"]]):
        model.config["architectures"] = architectures
        message = refused(model.write(), InputError, r"one of 1\d\d supported architectures")
        assert "`qserve families` lists them" in message


def test_scheme_unsupported_by_format_is_refused_with_reason(tiny_checkpoint):
    source = tiny_checkpoint().write()
    for scheme, output_format, reason in (
        ("w8a16-sym-g32", "awq", "awq holds 4-bit weights.*write gptq or compressed"),
        ("w8a8-static", "gptq", "cannot store a static activation scale"),
        ("w8a8-fp8", "gptq", "integer codes, not floating point"),
        ("w6a16-sym-g32", "gptq", "has 2, 3, 4 or 8 bits, not 6"),
    ):
        refused(source, SchemeError, reason, Scheme.parse(scheme), output_format=output_format)


def test_recipe_without_float8_is_refused(tiny_checkpoint):
    refused(
        tiny_checkpoint().write(),
        InputError,
        "produces integer codes, not w8a8-fp8.*use rtn",
        Scheme.parse("w8a8-fp8"),
        recipe="gptq",
    )


@pytest.mark.parametrize("recipe", ["awq+gptq", "autoround", "smoothquant"])
def test_recipe_without_fp4_is_refused(tiny_checkpoint, recipe):
    refused(
        tiny_checkpoint().write(),
        InputError,
        "produces integer codes, not w4a16-mxfp4.*use rtn, imatrix, gptq, gptaq, rotate",
        Scheme.parse("w4a16-mxfp4"),
        recipe=recipe,
    )


def never(*_):
    raise AssertionError("a weight was solved before the check")


def use_solver(monkeypatch, solver) -> None:
    """Let the recipe rtn solve with `solver`."""
    row = dataclasses.replace(recipe.RECIPES["rtn"], solver=solver)
    monkeypatch.setitem(recipe.RECIPES, "rtn", row)


def test_incompatible_shape_is_refused_early(tiny_checkpoint, monkeypatch):
    use_solver(monkeypatch, never)
    model = tiny_checkpoint()
    message = refused(model.write(), SchemeError, "group size 128", Scheme.parse("w4a16-sym"))
    assert "model.layers.0.self_attn.q_proj" in message
    name = "model.layers.1.mlp.down_proj"
    model.tensors[f"{name}.weight"] = torch.randn(96)
    refused(model.write(), CheckpointError, rf"{name}.weight: .*states \[64, 96\], found \[96\]")
    model.tensors[f"{name}.weight"] = torch.zeros(64, 96, dtype=torch.int8)
    refused(model.write(), CheckpointError, f"{name}.weight.*float matrix")
    model.tensors[f"{name}.weight"] = torch.ones(64, 96, dtype=torch.int8)
    refused(model.write(), CheckpointError, f"{name}.weight.*float matrix")


def test_result_larger_than_free_disk_is_refused_early(tiny_checkpoint, monkeypatch):
    use_solver(monkeypatch, never)
    usage = shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    refused(tiny_checkpoint().write(), DiskError, "out: needs .* or more, but .* has 1.0 kB free")


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        ("LlamaForCausalLM", "model.layers.1.mlp.up_proj.weight"),
        ("LlamaForCausalLM", "model.layers.0.input_layernorm.weight"),
        ("LlamaForCausalLM", "model.embed_tokens.weight"),
        ("MistralForCausalLM", "lm_head.weight"),
        ("Qwen2ForCausalLM", "model.layers.1.self_attn.k_proj.bias"),
        ("Qwen3ForCausalLM", "model.layers.0.self_attn.q_norm.weight"),
    ],
)
def test_missing_tensor_is_reported_early(tiny_checkpoint, monkeypatch, architecture, name):
    use_solver(monkeypatch, never)
    model = tiny_checkpoint(architecture)
    del model.tensors[name]
    assert name in refused(model.write(), CheckpointError, "tensors missing")


def test_config_with_more_layers_than_file_is_refused(tiny_checkpoint):
    model = tiny_checkpoint()
    model.config["num_hidden_layers"] = 4
    message = refused(model.write(), CheckpointError, "tensors missing")
    assert "model.layers.2.self_attn.q_proj.weight" in message
    assert "and 10 more" in message
    for count in (None, "2", 0, True):
        model.config["num_hidden_layers"] = count
        refused(model.write(), CheckpointError, "num_hidden_layers")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nonfinite_weight_stops_run_and_leaves_no_files(tiny_checkpoint, bad):
    model = tiny_checkpoint()
    model.tensors["model.layers.1.mlp.down_proj.weight"][63, 95] = bad
    refused(model.write(), CheckpointError, "model.layers.1.mlp.down_proj", max_shard_bytes=3000)


def test_quantized_source_is_refused(tiny_checkpoint):
    model = tiny_checkpoint()
    target, _ = quantize(model.write())
    with pytest.raises(InputError, match="is quantized already .w4a16-sym-g32., in as few bits"):
        quantize_checkpoint(target, target.parent / "again", scheme=SCHEME, progress=False)
    config = json.loads((target / "config.json").read_text())
    del config[BLOCK]
    (target / "config.json").write_text(json.dumps(config))
    (target / "quantize_config.json").unlink()  # states the scheme, too
    with pytest.raises(
        CheckpointError, match="has .*qweight, but its config.json has no quantization_config"
    ):
        quantize_checkpoint(target, target.parent / "again", scheme=SCHEME, progress=False)
    assert not (target.parent / "again").exists()


def test_nonempty_target_is_refused_and_unchanged(tiny_checkpoint):
    source = tiny_checkpoint().write()
    (source.parent / "out").mkdir()
    (source.parent / "out" / "precious").write_text("x")
    with pytest.raises(CheckpointError, match="not empty"):
        quantize(source)
    with pytest.raises(CheckpointError, match="not empty"):
        quantize_checkpoint(source, source, scheme=SCHEME, progress=False)
    assert sorted(path.name for path in source.parent.iterdir()) == ["out", "source"]


def test_progress_goes_to_stderr_and_can_be_silenced(tiny_checkpoint, capsys):
    source = tiny_checkpoint().write()
    quantize(source)
    assert capsys.readouterr() == ("", "")
    quantize_checkpoint(source, source.parent / "loud", scheme=SCHEME)
    out, err = capsys.readouterr()
    assert out == ""
    assert "layer 2/2 mlp.down_proj" in err


def test_weights_are_freed_layer_by_layer(tiny_checkpoint, monkeypatch):
    model, alive, most = tiny_checkpoint(), [], 0

    def counting(weight, stats, spec, name):
        nonlocal most
        alive.append(weakref.ref(weight))
        most = max(most, sum(ref() is not None for ref in alive))
        return rtn.solve(weight, stats, spec, name)

    use_solver(monkeypatch, counting)
    quantize(model.write())
    assert len(alive) == 14
    assert most <= 7


KILLED = """
import dataclasses, os, signal, sys
from calibrate import pipeline
from calibrate.solvers import rtn
from calibrate.recipe import RECIPES
from formats.scheme import Scheme
calls = []
def solve(weight, stats, spec, name):
    calls.append(name)
    if len(calls) == 9:
        os.kill(os.getpid(), signal.SIGKILL)
    return rtn.solve(weight, stats, spec, name)
RECIPES["rtn"] = dataclasses.replace(RECIPES["rtn"], solver=solve)
pipeline.quantize_checkpoint(
    sys.argv[1],
    sys.argv[2],
    scheme=Scheme.parse("w4a16-sym-g32"),
    max_shard_bytes=3000,
    recipe="rtn",
)
"""


def test_killed_run_leaves_no_folder_and_the_next_run_succeeds(tiny_checkpoint):
    source = tiny_checkpoint().write()
    target = source.parent / "out"
    run = subprocess.run(
        [sys.executable, "-c", KILLED, str(source), str(target)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.DEVNULL,
    )
    assert run.returncode == -signal.SIGKILL
    assert not target.exists()
    assert list((source.parent / ".out.partial").glob("*.safetensors"))
    quantize(source)
    assert sorted(path.name for path in source.parent.iterdir()) == ["out", "source"]


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def flip_in_tensor(field: str):
    def tamper(folder: Path) -> None:
        path = folder / "model.safetensors"
        content = path.read_bytes()
        length = int.from_bytes(content[:8], "little")
        begin, _ = json.loads(content[8 : 8 + length])[field]["data_offsets"]
        flip(path, 8 + length + begin)

    return tamper


def edit_config(file_name: str, change):
    def tamper(folder: Path) -> None:
        value = json.loads((folder / file_name).read_text())
        change(value)
        (folder / file_name).write_text(json.dumps(value))

    return tamper


DOWN = "model.layers.1.mlp.down_proj"


@pytest.mark.parametrize(
    ("tamper", "named"),
    [
        (flip_in_tensor(f"{DOWN}.qweight"), f"{DOWN}: its codes"),
        (flip_in_tensor(f"{DOWN}.scales"), f"{DOWN}: its scales"),
        (flip_in_tensor(f"{DOWN}.qzeros"), f"{DOWN}.qzeros"),
        (flip_in_tensor(f"{DOWN}.g_idx"), DOWN),
        (flip_in_tensor("model.norm.weight"), "model.norm.weight"),
        (flip_in_tensor("model.embed_tokens.weight"), "model.embed_tokens.weight"),
        (flip_in_tensor("model.layers.0.input_layernorm.weight"), "layers.0.input_layernorm"),
        (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors"),
        (lambda folder: os.truncate(folder / "model.safetensors", 4000), "model.safetensors"),
        (edit_config("config.json", lambda c: c[BLOCK].update(sym=False)), "quantize_config"),
        (edit_config("config.json", lambda c: c[BLOCK].update(more=1)), "config.json"),
        (edit_config("config.json", lambda c: c.update(vocab_size=41)), "config.json"),
        (edit_config("config.json", lambda c: c.pop(BLOCK)), "config.json|quantization_config"),
        (edit_config("quantize_config.json", lambda c: c.update(bits=8)), "quantize_config.json"),
    ],
)
def test_changed_staging_folder_is_not_published(tiny_checkpoint, monkeypatch, tamper, named):
    verify = finish.verify

    def tampered(folder, *others):
        tamper(folder)
        verify(folder, *others)

    monkeypatch.setattr(finish, "verify", tampered)
    source = tiny_checkpoint().write()
    with pytest.raises(CheckpointError, match=named):
        quantize(source, SCHEME)
    # the layers are solved: the same command needs them
    assert {path.name for path in source.parent.iterdir()} == {source.name, ".out.unfinished"}
