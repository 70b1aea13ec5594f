"""Faults during a run: NaN, starved experts, solvers that fail, another model's tokenizer."""

import contextlib
import json
import math
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from calibrate.pipeline import quantize_checkpoint
from calibrate.recipe import Recipe, default_recipe, find_recipe
from calibrate.solvers import rtn
from calibrate.solvers.solving import SolverError
from calibrate.texts.data import CalibrationData
from formats.checkpoint import CheckpointReader
from formats.errors import CheckpointError, InputError, RangeError
from formats.in_memory.fp8 import Fp8Weight
from formats.in_memory.packed import PackedWeight
from formats.inspection.inspect import inspect_checkpoint
from formats.scheme import Scheme

SCHEME = Scheme.parse("w4a16-sym")
FAST = {"scheme": SCHEME, "samples": 2, "sequence_length": 64, "progress": False}


@pytest.fixture
def copy_5m(docs_5m, tmp_path):
    """copy_5m(change) -> a copy of the bundled model with changed tensors."""

    def make(change):
        folder = tmp_path / "source"
        folder.mkdir()
        for path in docs_5m.iterdir():
            if path.suffix != ".safetensors":
                (folder / path.name).write_bytes(path.read_bytes())
        tensors = load_file(docs_5m / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    return make


def change_config(folder, **values):
    """Other values in a folder's config.json; None: without the key."""
    config = {**json.loads((folder / "config.json").read_text()), **values}
    config = {name: value for name, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))


def assert_nothing_left(tmp_path):
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("name", ["mlp.up_proj", "input_layernorm"])
def test_nan_weight_is_refused_by_name(copy_5m, tmp_path, name):
    full = f"model.layers.2.{name}.weight"
    source = copy_5m(lambda tensors: tensors[full].view(-1)[7:8].fill_(math.nan))
    with pytest.raises(CheckpointError, match=f"{full}: contains NaN"):
        quantize_checkpoint(source, tmp_path / "out", recipe="gptq", **FAST)
    assert_nothing_left(tmp_path)


def test_overflowing_activations_error_names_linear(copy_5m, tmp_path):
    def change(tensors):
        tensors["model.layers.1.mlp.up_proj.weight"].fill_(1e38)

    with pytest.raises(InputError, match=r"model\.layers\.1\.mlp\.down_proj: its activations"):
        quantize_checkpoint(copy_5m(change), tmp_path / "out", recipe="gptq", **FAST)
    assert_nothing_left(tmp_path)


GATE = "model.layers.2.mlp.gate_proj"


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("recipe", "scheme"),
    [(name, "w4a16-sym") for name in ("rtn", "imatrix", "gptq", "gptaq", "awq", "rotate")]
    + [("rtn", "w8a16-sym"), ("rtn", "w8a8"), ("smoothquant+gptq", "w8a8")],
)
@pytest.mark.parametrize("factor", [1e8, pytest.param(1e-9, marks=pytest.mark.exhaustive)])
def test_weights_beyond_float16_scales_are_refused(copy_5m, tmp_path, recipe, scheme, factor):
    source = copy_5m(lambda tensors: tensors[f"{GATE}.weight"].mul_(factor))
    options = {**FAST, "scheme": Scheme.parse(scheme), "ignore": ["layers.0", "layers.1"]}
    with pytest.raises(RangeError, match=f"{GATE}: its largest weight is .*float16"):
        quantize_checkpoint(source, tmp_path / "out", recipe=recipe, **options)
    assert_nothing_left(tmp_path)


def test_weights_beyond_float16_scales_run_as_float8_or_float(copy_5m, tmp_path):
    """The error's remedies work: float8 has float32 scales, and a linear may stay in float."""
    source = copy_5m(lambda tensors: tensors[f"{GATE}.weight"].mul_(1e-9))
    options = {**FAST, "scheme": Scheme.parse("w8a8-fp8")}
    report = quantize_checkpoint(source, tmp_path / "fp8", recipe="rtn", **options)
    assert max(linear.relative_error for linear in report.linears) < 0.03
    report = quantize_checkpoint(source, tmp_path / "w4", recipe="rtn", ignore=["2.mlp"], **FAST)
    assert not any(linear.notes for linear in report.linears)


def test_rows_with_smallest_scale_are_reported(copy_5m, tmp_path, caplog):
    def change(tensors):
        tensors[f"{GATE}.weight"][10:13] = 2e-6
        tensors[f"{GATE}.weight"][20] = 1e-4  # subnormal: 1e-4 / 8 is below 6.1e-5

    report = quantize_checkpoint(copy_5m(change), tmp_path / "out", recipe="rtn", **FAST)
    notes = {linear.name: linear.notes for linear in report.linears if linear.notes}
    assert list(notes) == [GATE]
    smallest, subnormal = notes[GATE]
    assert smallest == (
        "6 of 1536 scales are the smallest that are written: the weights there, up to 2e-06, are"
        " rounded more coarsely than in 4 bits"
    )
    assert subnormal.startswith("8 of 1536 scales are subnormal in torch.float16")
    assert smallest in report.to_text() and smallest in caplog.text


@pytest.mark.parametrize("scale", [1e5, 1e-8])
def test_custom_solver_with_scales_beyond_float16_is_refused(docs_5m, tmp_path, scale):
    def mine(weight, stats, spec, name):
        codes = torch.zeros(weight.shape, dtype=torch.uint8)
        scales = torch.full((weight.shape[0], spec.num_groups(weight.shape[1])), scale)
        return PackedWeight.from_codes(codes, scales, None, spec, name)

    recipe = Recipe(name="mine", solver=mine, needs_data=False)
    with pytest.raises(
        RangeError, match=r"layers\.0\.self_attn\.q_proj: .* scales are beyond float16"
    ):
        quantize_checkpoint(docs_5m, tmp_path / "out", recipe=recipe, **FAST)


def test_failed_solver_is_replaced_by_rounding_and_reported(docs_5m, tmp_path, caplog):
    def picky(weight, stats, spec, name):
        if name.endswith("1.mlp.down_proj"):
            raise SolverError(name, "too hard")
        return rtn.solve_weighted(weight, stats, spec, name)

    recipe = Recipe(name="picky", solver=picky)
    report = quantize_checkpoint(docs_5m, tmp_path / "out", recipe=recipe, **FAST)
    notes = {linear.name: linear.notes for linear in report.linears if linear.notes}
    assert notes == {"model.layers.1.mlp.down_proj": ("rounded to nearest: too hard",)}
    assert "rounded to nearest: too hard" in report.to_text()
    assert "too hard" in (tmp_path / "out" / "quantization_report.html").read_text()
    assert "model.layers.1.mlp.down_proj: rounded to nearest" in caplog.text
    weight = CheckpointReader(docs_5m).get("model.layers.1.mlp.down_proj.weight")
    written = CheckpointReader(tmp_path / "out").get("model.layers.1.mlp.down_proj.scales")
    assert torch.equal(written.t(), PackedWeight.from_float(weight, SCHEME.weight).scales_NG)


def _reordered(weight, spec):
    order = torch.arange(weight.shape[1]).flip(0)
    return replace(PackedWeight.from_float(weight[:, order], spec), input_order=order)


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        (lambda weight, spec: None, "returned NoneType, expected codes and scales"),
        (lambda weight, spec: weight, "returned Tensor, expected codes and scales"),
        (
            lambda weight, spec: PackedWeight.from_float(weight, replace(spec, bits=8)),
            r"returned w8a16-sym \[256, 256\], expected w4a16-sym \[256, 256\]",
        ),
        (
            lambda weight, spec: PackedWeight.from_float(weight, replace(spec, group_size=64)),
            "returned w4a16-sym-g64 .* expected w4a16-sym ",
        ),
        (
            lambda weight, spec: PackedWeight.from_float(weight[:128], spec),
            r"returned w4a16-sym \[128, 256\]",
        ),
        (
            lambda weight, spec: Fp8Weight.from_float(weight, Scheme.parse("w8a8-fp8").weight),
            "returned w8a16-fp8 ",
        ),
        (_reordered, "inputs are not grouped in order"),
    ],
)
def test_custom_solver_with_invalid_result_is_refused(docs_5m, tmp_path, returned, text):
    recipe = Recipe(
        name="mine", solver=lambda w, _, spec, name: returned(w, spec), needs_data=False
    )
    with pytest.raises(InputError, match=rf"layers\.0\.self_attn\.q_proj: its solver .*{text}"):
        quantize_checkpoint(docs_5m, tmp_path / "out", recipe=recipe, **FAST)
    assert list(tmp_path.iterdir()) == []


def test_custom_solver_may_modify_its_weight(docs_5m, tmp_path):
    def mine(weight, stats, spec, name):
        packed = rtn.solve(weight, stats, spec, name)
        weight.fill_(math.nan)
        return packed

    reports = [
        quantize_checkpoint(docs_5m, tmp_path / str(number), recipe=recipe, **FAST)
        for number, recipe in enumerate((Recipe(name="mine", solver=mine), "rtn"))
    ]
    mine, plain = ([linear.relative_error for linear in r.linears] for r in reports)
    assert mine == plain


def test_custom_solver_receives_all_arguments(docs_5m, tmp_path):
    seen = {}

    def mine(weight, stats, spec, name):
        seen[name] = (tuple(weight.shape), stats.num_tokens, stats.moment_KK.shape, spec)
        return rtn.solve(weight, stats, spec, name)

    recipe = Recipe(name="mine", solver=mine)
    report = quantize_checkpoint(docs_5m, tmp_path / "out", recipe=recipe, **FAST)
    assert report.recipe == "mine" and len(seen) == 28
    down = seen["model.layers.3.mlp.down_proj"]
    assert down == ((256, 768), 128, (768, 768), SCHEME.weight)
    assert inspect_checkpoint(tmp_path / "out").problems == ()


@pytest.mark.parametrize(
    ("family", "module", "experts", "chosen"),
    [("qwen3_moe", "mlp", 6, 2), ("mixtral", "block_sparse_moe", 4, 1)],
)
def test_expert_without_tokens_is_rounded_and_reported(
    tiny_model, tmp_path, family, module, experts, chosen
):
    source = tmp_path / "moe"
    shutil.copytree(tiny_model(family), source)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "num_experts_per_tok": chosen}))
    tensors = load_file(source / "model.safetensors")
    # as many of the other scores as are chosen are always above the first two experts' 0
    gate = tensors[f"model.layers.1.{module}.gate.weight"]
    gate[:2] = 0
    gate[2 + chosen :] = -gate[2 : 2 + chosen]
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    ids = torch.randint(0, 512, (2, 64), generator=torch.Generator().manual_seed(0))
    report = quantize_checkpoint(
        source,
        tmp_path / "out",
        scheme=Scheme.parse("w4a16-sym-g32"),
        recipe="gptq",
        calibration=CalibrationData(ids_WS=ids, source="random ids", seed=0),
        progress=False,
    )
    starved = {linear.name: linear for linear in report.linears if linear.tokens == 0}
    prefix = f"model.layers.1.{module}.experts"
    assert {name.rpartition(".")[0] for name in starved} == {f"{prefix}.0", f"{prefix}.1"}
    assert len(starved) == 2 * 3
    assert f"{prefix}: experts saw 0 (expert 0) to " in report.to_text()
    note = "rounded to nearest: no calibration token reached it"
    weights = {name: load_file(source / "model.safetensors")[f"{name}.weight"] for name in starved}
    for name, linear in starved.items():
        assert linear.notes == (note,)
        assert f"{name}: {note}" in report.to_text()
        written = CheckpointReader(tmp_path / "out").get(f"{name}.scales")
        spec = Scheme.parse("w4a16-sym-g32").weight
        assert torch.equal(written.t(), PackedWeight.from_float(weights[name], spec).scales_NG)
    assert len(report.linears) == 3 * (4 + experts * 3)
    assert all(math.isfinite(linear.relative_error) for linear in report.linears)


def test_tokenizer_of_another_model_is_refused(copy_5m, tmp_path):
    def change(tensors):
        tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:100].clone()

    source = copy_5m(change)
    change_config(source, vocab_size=100)
    with pytest.raises(InputError, match="the model's vocabulary is 100"):
        quantize_checkpoint(source, tmp_path / "out", recipe="gptq", **FAST)


def test_text_shorter_than_window_is_refused_with_remedies(docs_5m, tmp_path):
    short = tmp_path / "short.txt"
    short.write_text("hello")
    for sequence_length in (2048, 2):  # a smaller --sequence-length would not help
        options = {**FAST, "sequence_length": sequence_length, "eval_text": str(short)}
        with pytest.raises(InputError, match="short.txt: has .* tokens, too few for .*is fixed"):
            quantize_checkpoint(docs_5m, tmp_path / "out", recipe="rtn", **options)
    assert [path.name for path in tmp_path.iterdir()] == ["short.txt"]


def test_dangling_side_file_link_is_refused_early(copy_5m, tmp_path):
    source = copy_5m(lambda tensors: None)
    (source / "chat_template.jinja").unlink()
    (source / "chat_template.jinja").symlink_to("../../blobs/gone")
    with pytest.raises(CheckpointError, match="chat_template.jinja: is a link to nothing"):
        quantize_checkpoint(source, tmp_path / "out", recipe="rtn", **FAST)
    assert_nothing_left(tmp_path)


def test_default_recipe_by_scheme():
    assert default_recipe(Scheme.parse("w4a16-sym")) == "awq+gptaq"
    assert default_recipe(Scheme.parse("w4a16-sym"), keeps_inputs=True) == "gptaq"
    assert default_recipe(Scheme.parse("w3a16-sym")) == "gptaq"
    assert default_recipe(Scheme.parse("w4a16-mxfp4")) == "gptaq"
    assert default_recipe(Scheme.parse("w8a8-fp8")) == "rtn"
    assert default_recipe(Scheme.parse("w8a16-sym")) == "rtn"
    with pytest.raises(InputError, match="known recipes: rtn.*gptq"):
        find_recipe("magic")


@pytest.mark.exhaustive
def test_report_has_settings_to_reproduce_run(docs_5m, tmp_path):
    text = tmp_path / "text.jsonl"
    text.write_text(json.dumps({"text": "Ownership is a set of rules. " * 300}))
    target = tmp_path / "out"
    report = quantize_checkpoint(
        docs_5m, target, recipe="gptq", eval_text=str(text), spill=tmp_path / "spill", **FAST
    )
    stored = json.loads((target / "quantization_report.json").read_text())
    assert stored["calibration"]["windows"] == 2
    assert len(stored["calibration"]["sha256"]) == len(stored["source_sha256"]) == 64
    assert stored["versions"]["transformers"]
    assert 1 < stored["quality"]["float_perplexity"] < 200
    assert abs(stored["quality"]["perplexity"] / stored["quality"]["float_perplexity"] - 1) < 0.5
    assert set(stored["seconds_by_stage"]) >= {"statistics", "solving", "writing"}
    assert any("small text set" in warning for warning in stored["warnings"])
    for linear in report.linears:
        assert 0 < linear.output_error < linear.relative_error * 2
        assert linear.input_absmax > 0 and linear.weight_absmax > 0
    page = (target / "quantization_report.html").read_text()
    assert page.count("<svg") == 6 and "http" not in page.replace("http://www.w3.org", "")
    for linear in report.linears:
        assert linear.name in page
    quantize_checkpoint(docs_5m, tmp_path / "memory", recipe="gptq", **FAST)
    one, two = ((f / "model.safetensors").read_bytes() for f in (target, tmp_path / "memory"))
    assert one == two
    assert list((tmp_path / "spill").iterdir()) == []


def test_remote_code_is_not_run(docs_5m, tmp_path, monkeypatch):
    """Not even if transformers asks and the user says yes."""
    source = tmp_path / "source"
    shutil.copytree(docs_5m, source)
    path = source / "tokenizer_config.json"
    stated = {"auto_map": {"AutoTokenizer": ["evil.Evil", None]}, "tokenizer_class": "Evil"}
    path.write_text(json.dumps({**json.loads(path.read_text()), **stated}))
    (source / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with contextlib.suppress(InputError):
        quantize_checkpoint(source, tmp_path / "out", recipe="gptq", **FAST)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("change", [{"model_type": "nonsense"}, {"hidden_act": ["a", "b"]}])
def test_config_refused_by_transformers_gives_one_line_error(docs_5m, tmp_path, change):
    source = tmp_path / "source"
    shutil.copytree(docs_5m, source)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(InputError) as error:
        quantize_checkpoint(source, tmp_path / "out", recipe="gptq", **FAST)
    assert "\n" not in str(error.value) and len(str(error.value)) < 1000


@pytest.mark.parametrize(
    ("recipe", "change", "text"),
    [
        # rtn runs no layer, so it would write weights that no server loads
        ("rtn", {"intermediate_size": 760}, r"down_proj.weight: .*states \[256, 760\], found"),
        ("gptq", {"intermediate_size": 760}, r"down_proj.weight: .*states \[256, 760\], found"),
        # not stated: transformers has a default of its own
        ("gptq", {"intermediate_size": None}, "config.json intermediate_size: is missing"),
        ("gptq", {"hidden_act": "nope"}, "config.json hidden_act: unknown: 'nope'"),
        # layers run with these, and make zeros or NaN of everything
        ("rtn", {"rms_norm_eps": math.inf}, "config.json rms_norm_eps: expected a number"),
        (
            "gptq",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 0}},
            "config.json rope_parameters.rope_theta: expected a number above 0, found 0 .copy",
        ),
    ],
)
def test_config_of_other_model_is_refused(copy_5m, tmp_path, recipe, change, text):
    source = copy_5m(lambda tensors: None)
    change_config(source, **change)
    with pytest.raises(InputError, match=text):
        quantize_checkpoint(source, tmp_path / "out", recipe=recipe, **FAST)
    assert_nothing_left(tmp_path)


def test_transformed_tensors_keep_their_dtype(docs_5m, tmp_path):
    quantize_checkpoint(docs_5m, tmp_path / "out", recipe="smoothquant", **FAST)
    source, written = load_file(docs_5m / "model.safetensors"), tmp_path / "out"
    for name, tensor in load_file(written / "model.safetensors").items():
        if name in source:
            assert tensor.dtype == source[name].dtype, name
