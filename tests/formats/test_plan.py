"""Which linears are quantized how: patterns, shapes that do not fit, and padding."""

import pytest
import torch

from formats.architecture.padding import make_padding
from formats.errors import CheckpointError, InputError, SchemeError
from formats.plan import default_group_scheme, fits, fitted_scheme, make_plan, parse_override
from formats.quant_config import QuantConfig
from formats.scheme import Scheme

SHAPES = {
    f"model.layers.{layer}.{local}": shape
    for layer in range(2)
    for local, shape in {
        "self_attn.q_proj": (64, 64),
        "self_attn.k_proj": (32, 64),
        "self_attn.v_proj": (32, 64),
        "self_attn.o_proj": (64, 64),
        "mlp.gate_proj": (80, 64),
        "mlp.up_proj": (80, 64),
        "mlp.down_proj": (64, 80),
    }.items()
}
G32 = Scheme.parse("w4a16-sym-g32")
FFN = [name for name in SHAPES if ".mlp." in name]


@pytest.mark.parametrize(
    ("pattern", "count"),
    [("q_proj", 2), ("layers.1.", 7), ("*.o_proj", 2), ("re:.*(q|k)_proj$", 4), ("q_proj*", 0)],
)
def test_ignore_and_override_patterns(pattern, count):
    assert sum(fits(pattern, name) for name in SHAPES) == count


def test_incompatible_shapes_stay_float_and_are_listed():
    plan = make_plan(SHAPES, G32, output_format="gptq")
    assert {name for name in SHAPES if plan.schemes[name] is None} == set(FFN)
    assert "not divisible by the group size 32" in plan.reasons["model.layers.0.mlp.down_proj"]
    assert "80 outputs are not divisible by 32" in plan.reasons["model.layers.0.mlp.up_proj"]
    config = plan.config("")
    for name in SHAPES:
        assert config.scheme_for(name) == plan.schemes[name]
    assert QuantConfig.from_dict(config.to_dict()) == config


def test_fused_members_share_their_scheme():
    plan = make_plan(SHAPES, G32, ignore=["layers.0.self_attn.k_proj"])
    assert plan.schemes["model.layers.0.self_attn.q_proj"] is None
    assert "one matrix with k_proj" in plan.reasons["model.layers.0.self_attn.q_proj"]
    assert plan.schemes["model.layers.1.self_attn.q_proj"] == G32
    with pytest.raises(SchemeError, match="one matrix"):
        make_plan(SHAPES, G32, overrides=[("q_proj", Scheme.parse("w8a16-sym-g32"))])


@pytest.mark.parametrize("name", ["gptq", "awq", "compressed-tensors"])
def test_written_config_lists_float_linears(name):
    plan = make_plan(SHAPES, G32, output_format=name, ignore=["layers.1.self_attn"])
    config = QuantConfig.from_dict(plan.config("").to_dict())
    for module in SHAPES:
        assert (config.scheme_for(module) is None) == (plan.schemes[module] is None), module
    assert config.scheme_for("lm_head") is None
    # vLLM asks for the fused name
    if name == "gptq":
        assert config.scheme_for("model.layers.1.self_attn.qkv_proj") is None
        assert config.scheme_for("model.layers.0.self_attn.qkv_proj") == G32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ignore": ["nothing"]}, "matches no linear"),
        ({"overrides": [("nothing", G32)]}, "matches no linear"),
        ({"ignore": ["re:("]}, "not a regular expression"),
        ({"ignore": ["model"]}, "no linear can be quantized"),
        ({"output_format": "awq", "overrides": [("*.o_proj", Scheme.parse("w8a8"))]}, "4-bit"),
        (
            {"output_format": "gptq", "overrides": [("o_proj", Scheme.parse("w4a16-asym-g32"))]},
            "symmetric and asymmetric modules need",
        ),
    ],
)
def test_impossible_plans_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        make_plan(SHAPES, G32, **options)


def test_override_flag_parses():
    assert parse_override("re:a=b=w8a8") == ("re:a=b", Scheme.parse("w8a8"))
    for text in ("w8a8", "=w8a8", "o_proj="):
        with pytest.raises(InputError):
            parse_override(text)


def test_padding_makes_feed_forward_divisible():
    padding = make_padding({"intermediate_size": 80}, SHAPES, G32)
    assert (padding.after, padding.config_changes) == (96, {"intermediate_size": 96})
    plan = make_plan(SHAPES, G32, padding=padding)
    assert plan.reasons == {}
    gate, down = torch.ones(80, 64), torch.ones(64, 80)
    wide = padding.apply("model.layers.0.mlp.gate_proj.weight", gate)
    assert wide.shape == (96, 64) and wide.sum() == gate.sum() and (wide[80:] == 0).all()
    wide = padding.apply("model.layers.0.mlp.down_proj.weight", down)
    assert wide.shape == (64, 96) and (wide[:, 80:] == 0).all()
    assert padding.apply("model.layers.0.mlp.up_proj.bias", torch.ones(80)).shape == (96,)
    assert padding.apply("model.layers.0.mlp.down_proj.bias", torch.ones(64)).shape == (64,)
    with pytest.raises(CheckpointError, match="config.json's intermediate_size is 81"):
        make_padding({"intermediate_size": 81}, SHAPES, G32)


def test_padding_fills_groups_and_words():
    scheme = Scheme.parse("w4a16-sym-g24")
    padding = make_padding({"intermediate_size": 80}, SHAPES, scheme)
    assert padding.after == 96  # the least multiple of 24 and 32, not 80 to a multiple of one
    wider = {name: tuple(200 if n == 80 else n for n in shape) for name, shape in SHAPES.items()}
    assert make_padding({"intermediate_size": 200}, wider, scheme).after == 288


def test_first_matching_override_wins():
    eight, four = Scheme.parse("w8a16-sym-g32"), Scheme.parse("w4a16-sym-channel")
    shapes = {"model.layers.0.self_attn.o_proj": (64, 64), "model.layers.1.mlp.down_proj": (64, 64)}
    plan = make_plan(shapes, G32, overrides=[("o_proj", eight), ("layers", four)])
    assert list(plan.schemes.values()) == [eight, four]


def test_every_ignore_pattern_applies():
    names = [f"model.layers.{layer}.self_attn.o_proj" for layer in (0, 1)]
    plan = make_plan(SHAPES, G32, ignore=names)
    assert [plan.reasons.get(name) for name in names] == ["ignored", "ignored"]


def test_fused_gate_up_halves_are_padded_separately():
    """As Phi-3 stores them: the rows of gate, then those of up."""
    names = [f"model.layers.0.mlp.{name}" for name in ("gate_up_proj", "down_proj")]
    shapes = {names[0]: (160, 64), names[1]: (64, 80)}
    padding = make_padding({"intermediate_size": 80}, shapes, G32)
    assert [padding.shape(name, shape) for name, shape in shapes.items()] == [(192, 64), (64, 96)]
    gate, up = torch.randn(80, 64), torch.randn(80, 64)
    wide = padding.apply(f"{names[0]}.weight", torch.cat([gate, up]))
    wide_gate, wide_up = wide.chunk(2)
    assert torch.equal(wide_gate[:80], gate) and torch.equal(wide_up[:80], up)
    assert not wide_gate[80:].any() and not wide_up[80:].any()
    bias = padding.apply(f"{names[0]}.bias", torch.ones(160))
    assert bias.shape == (192,) and bias.sum() == 160 and not bias[80:96].any()
    with pytest.raises(CheckpointError, match="has 80 features, config.json's .* is 96"):
        make_padding({"intermediate_size": 96}, {names[0]: (160, 64)}, G32)


def test_mixed_schemes_default_to_transformers_readable_format():
    """transformers reads no `dynamic` of GPTQ; AWQ has one scheme for all."""
    shapes = {name: shape for name, shape in SHAPES.items() if not shape[0] % 32 | shape[1] % 32}
    eight = [("o_proj", Scheme.parse("w8a16-sym-g32"))]
    assert make_plan(shapes, G32).layout.name == "gptq"
    assert make_plan(shapes, G32).warnings == ()
    assert make_plan(shapes, G32, overrides=eight).layout.name == "compressed-tensors"
    assert make_plan(shapes, G32, ignore=["o_proj"]).layout.name == "compressed-tensors"
    asymmetric = make_plan(shapes, Scheme.parse("w4a16-asym-g32"), overrides=eight)
    assert asymmetric.layout.name == "compressed-tensors"
    asked_for = make_plan(shapes, G32, ignore=["o_proj"], output_format="gptq")
    assert asked_for.layout.name == "gptq"
    assert "transformers ignores the dynamic entries" in asked_for.warnings[0]


def test_sensitive_linear_stays_float_unless_overridden():
    """It stays in float, and is named so in the file, until an override fits it."""
    name, reason = "model.layers.0.self_attn.o_proj", "decides much, in few outputs"
    plan = make_plan(SHAPES, G32, unasked={name: reason})
    assert plan.schemes[name] is None and plan.reasons[name] == reason
    assert plan.config("").scheme_for(name) is None
    assert plan.schemes[name.replace("0", "1")] == G32
    wide = Scheme.parse("w8a16-sym-g32")
    asked = make_plan(
        SHAPES, G32, unasked={name: reason}, overrides=[("layers.0.self_attn.o", wide)]
    )
    assert asked.schemes[name] == wide and name not in asked.reasons


def wide_shapes(inputs: int, inner: int) -> dict[str, tuple[int, int]]:
    """Two linears of `inputs` inputs, one of `inner`."""
    prefix = "model.layers.0"
    return {
        f"{prefix}.self_attn.q_proj": (inputs, inputs),
        f"{prefix}.self_attn.o_proj": (inputs, inputs),
        f"{prefix}.mlp.down_proj": (inputs, inner),
    }


def test_incompatible_size_error_lists_valid_groups():
    plan = make_plan(wide_shapes(576, 1536), Scheme.parse("w4a16-sym"))
    assert list(plan.quantized) == ["model.layers.0.mlp.down_proj"]
    (remark,) = plan.misfits
    assert "2 linears of 576 inputs have no whole groups of 128 and stay in float" in remark
    assert "a group size of 64, or auto" in remark
    assert "vLLM and SGLang take 128, 64, 32 or -1" in remark
    assert make_plan(wide_shapes(576, 1536), Scheme.parse("w4a16-sym-g64")).misfits == ()


def test_error_suggests_group_size_that_fits():
    with pytest.raises(SchemeError, match="a group size of 64, or auto, fits every linear"):
        make_plan(wide_shapes(576, 192), Scheme.parse("w4a16-sym"))


@pytest.mark.parametrize(
    ("inputs", "inner", "expected"),
    [
        (512, 1536, "w4a16-sym"),
        (576, 1536, "w4a16-sym-g64"),
        (576, 96, "w4a16-sym-g32"),
        (1000, 4096, "w4a16-sym-channel"),
    ],
)
def test_auto_group_size_is_largest_servable(inputs, inner, expected):
    found = fitted_scheme(Scheme.parse("w4a16-sym"), wide_shapes(inputs, inner))
    assert str(found) == expected


@pytest.mark.parametrize(
    ("inputs", "inner", "expected"),
    [
        (512, 1536, "w4a16-sym"),
        (576, 1536, "w4a16-sym-g64"),  # 43 % have no whole groups of 128
        (2048, 2080, "w4a16-sym-g32"),  # a third: down_proj
        (2048, 96, "w4a16-sym"),  # less than a tenth
        (1000, 4096, "w4a16-sym"),  # nothing smaller fits
    ],
)
def test_default_group_size_shrinks_only_for_many_weights(inputs, inner, expected):
    scheme = Scheme.parse("w4a16-sym")
    assert str(default_group_scheme(scheme, wide_shapes(inputs, inner))) == expected
    for fixed in ("w8a8", "w4a16-mxfp4", "w8a8-fp8-block"):
        scheme = Scheme.parse(fixed)
        assert default_group_scheme(scheme, wide_shapes(inputs, inner)) == scheme


def test_default_group_size_ignores_ignored_and_overridden():
    shapes, scheme = wide_shapes(2048, 2080), Scheme.parse("w4a16-sym")
    assert default_group_scheme(scheme, shapes, ignore=["down_proj"]) == scheme
    other = [("down_proj", Scheme.parse("w8a16-sym-g32"))]
    assert default_group_scheme(scheme, shapes, overrides=other) == scheme


def test_auto_group_size_considers_only_its_scheme():
    shapes = wide_shapes(512, 96)
    scheme = Scheme.parse("w4a16-sym")
    assert str(fitted_scheme(scheme, shapes, ignore=["down_proj"])) == "w4a16-sym"
    other = [("down_proj", Scheme.parse("w8a16-sym-g32"))]
    assert str(fitted_scheme(scheme, shapes, overrides=other)) == "w4a16-sym"
    with pytest.raises(SchemeError, match="its scales are fixed"):
        fitted_scheme(Scheme.parse("w8a8"), shapes)
