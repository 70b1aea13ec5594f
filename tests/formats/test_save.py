"""save_quantized: one's own codes to a folder that reads back the same, or a refusal in advance."""

from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import torch
from safetensors.torch import load_file

from formats.checkpoint import CheckpointReader
from formats.codecs import awq
from formats.errors import InputError
from formats.in_memory.packed import PackedWeight
from formats.inspection.inspect import inspect_checkpoint
from formats.layouts import decode_linear, layout_of, tensor_names
from formats.plan import make_plan
from formats.quant_config import BLOCK, QuantConfig
from formats.save import Saved, save_quantized
from formats.scheme import QuantSpec, Scheme
from qkernels.quant_linear import QuantLinear

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def source(float_model, write_folder):
    return write_folder(*float_model)


Q0 = "model.layers.0.self_attn.q_proj"


def names_of(folder):
    return [n.removesuffix(".weight") for n in CheckpointReader(folder).entries if "_proj" in n]


def codes_of(folder, spec=None, seed=0):
    """Return name -> (codes, scales, zeros), as from a user's own solver."""
    spec = spec or QuantSpec(bits=4, symmetric=True, group_size=32)
    reader, generator = CheckpointReader(folder), torch.Generator().manual_seed(seed)
    found = {}
    for name in names_of(folder):
        rows, columns = reader.entries[f"{name}.weight"].shape
        groups = spec.num_groups(columns)
        codes = torch.randint(0, 2**spec.bits, (rows, columns), generator=generator)
        scales = torch.rand(rows, groups, generator=generator).half() + 0.1
        zeros = torch.randint(0, 2**spec.bits, (rows, groups), generator=generator)
        found[name] = (codes, scales, None if spec.symmetric else zeros)
    return found


@pytest.mark.parametrize("method", ["gptq", "awq", "compressed-tensors"])
def test_saved_codes_round_trip(source, tmp_path, method):
    given = codes_of(source)
    saved = save_quantized(tmp_path / "out", source, given, format=method, readers=())
    assert set(saved.schemes.values()) == {"w4a16-sym-g32"} and saved.left_in_float == ()
    reader = CheckpointReader(tmp_path / "out")
    config = QuantConfig.from_dict(reader.config[BLOCK])
    for name, (codes, scales, _) in given.items():
        tensors = tensor_names(name, layout_of(config), reader.entries)
        found = decode_linear(name, {f: reader.get(n) for f, n in tensors.items()}, config)
        assert torch.equal(found.codes(), codes.to(torch.uint8))
        assert torch.equal(found.scales_NG, scales)
        assert (found.zeros_NG == 8).all()
    before = CheckpointReader(source)
    for name in before.entries:
        if "_proj" not in name:
            assert torch.equal(before.get(name), reader.get(name))
    assert inspect_checkpoint(tmp_path / "out").problems == ()


def test_numpy_layers_and_weights_can_be_mixed(source, tmp_path):
    given = codes_of(source)
    names = list(given)
    given[names[0]] = tuple(part.numpy() for part in given[names[0]][:2])
    scheme = Scheme.parse("w4a16-sym-g32")
    for number in (1, 2):  # k and v, whose shapes GPTQ holds
        codes, scales, _ = given[names[number]]
        given[names[number]] = QuantLinear.from_codes(codes, scales, scheme=scheme)
    codes, scales, _ = given[names[3]]
    given[names[3]] = PackedWeight.from_codes(codes, scales, None, scheme.weight)
    save_quantized(tmp_path / "out", source, given)
    assert inspect_checkpoint(tmp_path / "out").problems == ()


@pytest.mark.parametrize(("largest", "bits"), [(15, 4), (128, 8), (3, 2), (4, 3), (255, 8)])
def test_bits_follow_largest_code(source, tmp_path, largest, bits):
    given = {name: (c.clamp(max=largest), s, z) for name, (c, s, z) in codes_of(source).items()}
    for codes, _, _ in given.values():
        codes[0, 0] = largest
    saved = save_quantized(tmp_path / "out", source, given, readers=())
    assert set(saved.schemes.values()) == {f"w{bits}a16-sym-g32"}


def test_single_oversized_code_is_refused(source, tmp_path):
    """Codes of 4 bits would be read around 128 then, all weights negative."""
    given = codes_of(source)
    given[Q0][0][0, 0] = 16
    with pytest.raises(InputError, match=r"largest code is 1.: with the 8 bits .*state the scheme"):
        save_quantized(tmp_path / "out", source, given)
    assert not (tmp_path / "out").exists()


def scaled_by_row(folder):
    """name -> (8-bit codes, a scale for each output)."""
    spec = QuantSpec(bits=8, symmetric=True, group_size=-1)
    return {name: (codes, scales) for name, (codes, scales, _) in codes_of(folder, spec).items()}


@pytest.mark.parametrize(
    ("scheme", "spec", "expected"),
    [
        ("w8a8", QuantSpec(bits=8, symmetric=True, group_size=-1), "compressed-tensors"),
        ("w8a16-sym-channel", QuantSpec(bits=8, symmetric=True, group_size=-1), "gptq"),
        ("w4a16-asym", QuantSpec(bits=4, symmetric=False, group_size=32), "awq"),
        ("w4a16-sym", QuantSpec(bits=4, symmetric=True, group_size=32), "gptq"),
    ],
)
def test_default_format_equals_command_line(source, tmp_path, scheme, spec, expected):
    given = codes_of(source, spec)
    saved = save_quantized(tmp_path / "out", source, given, scheme=scheme)
    shapes = {n: (c.shape[0], c.shape[1]) for n, (c, _, _) in given.items()}
    plan = make_plan(shapes, Scheme.of_scales(scheme, given[Q0][1].shape[1], 64))
    assert saved.format == plan.layout.name == expected
    assert {v.answer for v in inspect_checkpoint(tmp_path / "out").loads_in} <= {"yes", "slow"}


def test_mixed_schemes_default_to_widely_readable_format(source, tmp_path):
    given = {n: v for n, v in codes_of(source).items() if "down_proj" not in n}
    saved = save_quantized(tmp_path / "out", source, given, readers=("transformers", "vLLM"))
    assert saved.format == "compressed-tensors"


def test_w8a8_defaults_to_8_bit_activations(source, tmp_path):
    save_quantized(tmp_path / "out", source, scaled_by_row(source), scheme="w8a8")
    block = CheckpointReader(tmp_path / "out").config[BLOCK]
    assert block["config_groups"]["group_0"]["input_activations"]["num_bits"] == 8


@pytest.mark.parametrize("scheme", ["w4a16-sym", "w4a16-sym-g32", None])
def test_groups_follow_from_the_scales(source, tmp_path, scheme):
    saved = save_quantized(tmp_path / "out", source, codes_of(source), scheme=scheme)
    assert set(saved.schemes.values()) == {"w4a16-sym-g32"}


def test_group_size_mismatch_with_scales_is_refused(source, tmp_path):
    with pytest.raises(InputError, match=r"scales: expected floating point \[\d+, \d+\]"):
        save_quantized(tmp_path / "out", source, codes_of(source), scheme="w4a16-sym-g16")


def test_summary_lists_each_linear_kind_once():
    left = tuple(f"model.layers.{i}.mlp.{n}_proj" for i in range(60) for n in ("gate", "up"))
    saved = Saved(
        folder="out",
        format="gptq",
        schemes={f"model.layers.{i}.self_attn.q_proj": "w4a16-sym" for i in range(60)},
        left_in_float=left,
        num_bytes=10,
        loads_in=(),
    )
    assert saved.to_text().splitlines() == [
        "60 linears, w4a16-sym, as gptq: 10 B in out",
        "left in float: model.layers.*.mlp.gate_proj (60), model.layers.*.mlp.up_proj (60)",
    ]
    assert str(saved) == repr(saved) == saved.to_text()


def test_tied_head_copy_is_not_written(tmp_path, float_model, write_folder):
    tensors, config = float_model
    tied = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    source = write_folder(tied, {**config, "tie_word_embeddings": True})
    save_quantized(tmp_path / "out", source, codes_of(source))
    assert "lm_head.weight" in CheckpointReader(source).entries
    assert "lm_head.weight" not in CheckpointReader(tmp_path / "out").entries


def test_linears_without_codes_stay_float_and_are_listed(source, tmp_path):
    given = {n: v for n, v in codes_of(source).items() if "down_proj" not in n}
    saved = save_quantized(tmp_path / "out", source, given, format="compressed-tensors")
    assert saved.left_in_float == tuple(f"model.layers.{i}.mlp.down_proj" for i in range(2))
    found = inspect_checkpoint(tmp_path / "out")
    assert found.problems == () and found.scheme == "mixed: 12 w4a16-sym-g32, 2 float"


def test_tensors_replace_those_of_the_source(source, tmp_path):
    norm = torch.rand(64)
    tensors = {"model.norm.weight": norm}
    save_quantized(tmp_path / "out", source, codes_of(source), tensors=tensors)
    assert torch.equal(CheckpointReader(tmp_path / "out").get("model.norm.weight"), norm.bfloat16())


def test_numpy_arrays_are_accepted(source, tmp_path):
    norm = {"model.norm.weight": numpy.full(64, 2.0)}
    save_quantized(tmp_path / "out", source, codes_of(source), tensors=norm, readers=())
    assert (CheckpointReader(tmp_path / "out").get("model.norm.weight") == 2).all()


def test_asymmetric_gptq_is_refused_early(source, tmp_path):
    given = codes_of(source, QuantSpec(bits=4, symmetric=False, group_size=32))
    with pytest.raises(InputError, match="vLLM takes symmetric.*write format='awq'"):
        save_quantized(tmp_path / "out", source, given, format="gptq")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    save_quantized(tmp_path / "out", source, given, format="awq")
    assert {v.answer for v in inspect_checkpoint(tmp_path / "out").loads_in} == {"yes"}


def test_mixed_gptq_is_refused_for_transformers(source, tmp_path):
    given = {n: v for n, v in codes_of(source).items() if "down_proj" not in n}
    with pytest.raises(InputError, match="transformers ignores dynamic.*compressed-tensors"):
        save_quantized(tmp_path / "out", source, given, format="gptq", readers=("transformers",))


def test_disagreeing_fused_members_are_refused(source, tmp_path):
    given = {n: v for n, v in codes_of(source).items() if "k_proj" not in n}
    with pytest.raises(
        InputError, match="0.self_attn: .*k_proj float, .*as one matrix .*one scheme"
    ):
        save_quantized(tmp_path / "out", source, given)


def test_scheme_mismatch_with_layers_is_refused(source, tmp_path):
    weights = {n: CheckpointReader(source).get(f"{n}.weight") for n in names_of(source)}
    layers = {n: QuantLinear.from_float(w, "w4a16-sym-g32") for n, w in weights.items()}
    for scheme in ("w8a8", "w4a16-asym", "w4a16-sym-g64"):
        with pytest.raises(InputError, match=f"{Q0}: has the scheme w4a16-sym-g32, .*'{scheme}'"):
            save_quantized(tmp_path / "out", source, {Q0: layers[Q0]}, scheme=scheme, readers=())
    for number, scheme in enumerate(("w4a16-sym", "w4a16-sym-g32")):
        saved = save_quantized(tmp_path / f"{number}", source, layers, scheme=scheme)
        assert set(saved.schemes.values()) == {"w4a16-sym-g32"}


def test_released_layer_is_refused(source, tmp_path):
    layer = QuantLinear.from_float(CheckpointReader(source).get(f"{Q0}.weight"), "w4a16-sym-g32")
    layer.prepare(torch.float32, release=True)
    with pytest.raises(InputError, match=f"{Q0}: its stored tensors were released"):
        save_quantized(tmp_path / "out", source, {Q0: layer}, readers=())


WRONG = [
    (lambda g: {}, "expected one or more"),
    (
        lambda g: {"model.layers.0.self_attn.x_proj": g[Q0]},
        "has no model.layers.0.self_attn.x_proj",
    ),
    (lambda g: {Q0: (g[Q0][0].t()[:, :32].contiguous(), g[Q0][1])}, "2 equal groups|codes"),
    (lambda g: {Q0: (g[Q0][0][:32], g[Q0][1][:32])}, r"\[32, 64\] codes, the model's.*\[64, 64\]"),
    (lambda g: {Q0: (g[Q0][0] - 8, g[Q0][1])}, "found -8..7 .signed codes"),
    (lambda g: {Q0: (g[Q0][0], g[Q0][1] * 0)}, "128 of 128 are zero .*give groups of zero weights"),
    (lambda g: {Q0: (g[Q0][0], g[Q0][1] * float("nan"))}, "contain NaN or infinity"),
    (lambda g: {Q0: (g[Q0][0], g[Q0][1].float() * 1e6)}, "beyond float16"),
    (lambda g: {Q0: torch.ones(64, 64)}, "expected a QuantLinear"),
    (lambda g: {Q0: (g[Q0][0],)}, "expected .codes, scales, zeros., found 1"),
    (lambda g: {Q0: ()}, "expected .codes, scales, zeros., found 0"),
    (lambda g: {Q0: ("codes", "scales", None)}, f"{Q0}: expected tensors or arrays of numbers"),
    (lambda g: {Q0: (g[Q0][0].to("meta"), g[Q0][1])}, "on the meta device"),
    (lambda g: [(Q0, g[Q0])], "in a mapping, found list"),
    (
        lambda g: {"model.embed_tokens": (torch.ones(40, 64).byte(), torch.ones(40, 2))},
        "model.embed_tokens: is not a linear of a layer",
    ),
    (lambda g: {f"{Q0}.weight": g[Q0]}, "give names without .weight"),
    (lambda g: {Q0.removeprefix("model."): g[Q0]}, f"one of its linears is {Q0}"),
    (lambda g: {Q0: ([[1, 2]], [[1.0]], None)}, rf"{Q0}: has \[1, 2\] codes"),
    (lambda g: {Q0: (g[Q0][0].float(), g[Q0][1])}, "convert rounded codes with .to.torch.uint8"),
    (lambda g: {Q0: (g[Q0][0].float() * torch.nan, g[Q0][1])}, "expected integer codes .*float32"),
    (
        lambda g: {Q0: (g[Q0][0], g[Q0][1].t())},
        rf"{Q0} scales: expected .64, groups., found .2, 64",
    ),
    (lambda g: {0: g[Q0]}, "linears: expected names of linears as keys, found 0"),
]


@pytest.mark.parametrize(("change", "text"), WRONG, ids=range(len(WRONG)))
def test_codes_not_matching_model_are_refused(source, tmp_path, change, text):
    with pytest.raises(InputError, match=text):
        save_quantized(tmp_path / "out", source, change(codes_of(source)), readers=())
    assert not (tmp_path / "out").exists()


def test_readers_given_as_string_are_refused(source, tmp_path):
    with pytest.raises(InputError, match="readers: expected a list of names, found 'vLLM'"):
        save_quantized(tmp_path / "out", source, codes_of(source), readers="vLLM")


def test_model_object_instead_of_folder_is_refused(source, tmp_path):
    with pytest.raises(InputError, match="source_model: expected the folder .* found Linear"):
        save_quantized(tmp_path / "out", torch.nn.Linear(64, 64), codes_of(source))


TENSORS = [
    ({f"{Q0}.weight": torch.zeros(64, 64)}, "is given twice"),
    ({"model.norm.weight": [1.0] * 64}, "expected a tensor, found list"),
    ([torch.ones(64)], "tensors: expected a mapping by name, found list"),
    ({"model.norm.weight": torch.ones(64, device="meta")}, "model.norm.weight: .*meta device"),
    # finite, but not in what the model stores
    ({"model.norm.weight": torch.full((64,), 1e39, dtype=torch.float64)}, "NaN or infinity in"),
]


@pytest.mark.parametrize(("tensors", "text"), TENSORS, ids=range(len(TENSORS)))
def test_invalid_extra_tensors_are_refused(source, tmp_path, tensors, text):
    with pytest.raises(InputError, match=text):
        save_quantized(tmp_path / "out", source, codes_of(source), tensors=tensors, readers=())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("stored", [True, False])
def test_tied_head_codes_are_refused(tmp_path, float_model, write_folder, stored):
    embedding = float_model[0]["model.embed_tokens.weight"]
    tensors = {n: t for n, t in float_model[0].items() if n != "lm_head.weight"}
    source = write_folder(
        tensors | ({"lm_head.weight": embedding.clone()} if stored else {}),
        float_model[1] | {"tie_word_embeddings": True},
    )
    head = {"lm_head": (torch.ones(len(embedding), 64).byte(), torch.ones(len(embedding), 2))}
    with pytest.raises(InputError, match="lm_head: is the embedding .*--quantize-head"):
        save_quantized(tmp_path / "out", source, head, readers=())


def test_single_group_per_row_is_same_scheme(tiny_model, tmp_path):
    """Experts with 32 inner channels, all matrices in groups of 32."""
    source = tiny_model("qwen3_moe")
    reader = CheckpointReader(source)
    spec = QuantSpec(bits=4, symmetric=True, group_size=32)
    given = {}
    for name in [name for name in reader.entries if name.endswith("_proj.weight")]:
        weight = PackedWeight.from_float(reader.get(name), spec)
        given[name.removesuffix(".weight")] = (weight.codes(), weight.scales_NG)
    saved = save_quantized(tmp_path / "out", source, given)
    assert {scales.shape[1] for _, scales in given.values()} >= {1, 2}
    assert set(saved.schemes.values()) == {"w4a16-sym-g32"}


def test_quantized_router_is_refused(tiny_model, tmp_path):
    """A solver that rounds every matrix of a layer; the folder would not load anywhere."""
    source, router = tiny_model("qwen3_moe"), "model.layers.0.mlp.gate"
    reader = CheckpointReader(source)
    names = [
        name.removesuffix(".weight")
        for name, entry in reader.entries.items()
        if ".layers.0." in name and len(entry.shape) == 2
    ]
    spec = QuantSpec(bits=4, symmetric=True, group_size=32)
    given = {name: PackedWeight.from_float(reader.get(f"{name}.weight"), spec) for name in names}
    with pytest.raises(InputError, match=f"^{router}: routes tokens: no reader loads it quantized"):
        save_quantized(tmp_path / "out", source, given, readers=())
    assert router in given and not (tmp_path / "out").exists()


def test_wide_unsigned_codes_are_accepted(source, tmp_path):
    given = codes_of(source)
    wide = {n: (c.numpy().astype("uint16"), s, *rest) for n, (c, s, *rest) in given.items()}
    saved = [
        save_quantized(tmp_path / name, source, linears, readers=())
        for name, linears in (("wide", wide), ("given", given))
    ]
    first, second = (load_file(Path(each.folder) / "model.safetensors") for each in saved)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_quantized_source_is_refused(gptq_model, write_folder, tmp_path):
    folder = write_folder(*gptq_model)
    with pytest.raises(InputError, match="start from the float model"):
        save_quantized(tmp_path / "out", folder, {"a": 1})


def test_write_damage_is_detected_on_read_back(source, tmp_path, monkeypatch):
    """The folder is read back before it gets its name."""
    encode = awq.encode

    def damaged(packed, name="weight"):
        tensors = encode(packed, name)
        tensors["qweight"] = tensors["qweight"] ^ 1
        return tensors

    from formats import save
    from formats.layouts import LAYOUTS

    layout = replace(LAYOUTS["awq"], encode=damaged)
    monkeypatch.setattr(save, "find_layout", lambda name: layout)
    with pytest.raises(InputError, match="its codes differ"):
        save_quantized(tmp_path / "out", source, codes_of(source), format="awq")
    assert not (tmp_path / "out").exists()
