"""`inspect` of AWQ and compressed-tensors, and its table of programs that load a checkpoint."""

import json

import pytest
import torch

from formats.codecs.kv_cache import write_kv_scheme
from formats.compatibility.loads_in import Facts
from formats.compatibility.rules import loads_in
from formats.inspection.config import Choices
from formats.inspection.inspect import inspect_checkpoint
from formats.inspection.linear_summary import LinearSummary
from formats.quant_config import BLOCK, QuantConfig
from formats.scheme import Scheme
from tests.formats.compatibility.changes import experts

Q0 = "model.layers.0.self_attn.q_proj"


GOOD = [
    ("gptq", "w4a16-sym-g32"),
    ("gptq", "w3a16-sym-g32"),
    ("gptq", "w8a8"),
    ("awq", "w4a16-sym-g32"),
    ("awq", "w4a16-asym-g32"),
    ("compressed-tensors", "w4a16-asym-g32"),
    ("compressed-tensors", "w8a16-sym-channel"),
    ("compressed-tensors", "w8a8"),
    ("compressed-tensors", "w8a8-static"),
    ("compressed-tensors", "w8a8-fp8"),
    ("compressed-tensors", "w8a8-fp8-static"),
    ("compressed-tensors", "w8a8-fp8-block"),
]


@pytest.mark.parametrize(("method", "scheme"), GOOD)
def test_valid_folder_has_no_problems(model, write_folder, method, scheme):
    tensors, config = model(method, scheme)
    found = inspect_checkpoint(write_folder(tensors, config))
    assert found.problems == ()
    assert len(found.linears) == 14
    assert found.format == method
    assert found.total_bytes == sum(tensor.nbytes for tensor in tensors.values())
    others = sum(t.nbytes for name, t in tensors.items() if "_proj" not in name)
    assert found.other_bytes == others
    assert "loads in" in found.to_text()


def put(name, value):
    return lambda tensors, config: tensors.update({name: value(tensors[name]).contiguous()})


def drop(name):
    return lambda tensors, config: tensors.pop(name)


def first(tensor, value):
    tensor = tensor.clone()
    tensor.view(-1)[0] = value
    return tensor


DAMAGE = [
    ("awq", "w4a16-asym-g32", drop(f"{Q0}.qzeros"), "error", "qzeros: is missing"),
    ("awq", "w4a16-asym-g32", drop(f"{Q0}.scales"), "error", "scales: is missing"),
    ("awq", "w4a16-asym-g32", put(f"{Q0}.scales", lambda s: s[:1]), "error", "expected [2, 64]"),
    ("awq", "w4a16-asym-g32", put(f"{Q0}.scales", lambda s: first(s, 0)), "error", "zero"),
    ("awq", "w4a16-asym-g32", put(f"{Q0}.scales", lambda s: first(s, 1e-7)), "warning", "subnorm"),
    ("awq", "w4a16-asym-g32", put(f"{Q0}.qweight", lambda w: w.long()), "error", "int64"),
    (
        "compressed-tensors",
        "w4a16-asym-g32",
        drop(f"{Q0}.weight_zero_point"),
        "error",
        "weight_zero_point: is missing",
    ),
    (
        "compressed-tensors",
        "w4a16-asym-g32",
        put(f"{Q0}.weight_shape", lambda s: s + 1),
        "error",
        "weight_shape: states [65, 65]",
    ),
    (
        "compressed-tensors",
        "w8a8",
        put(f"{Q0}.weight_scale", lambda s: first(s, float("nan"))),
        "error",
        "NaN",
    ),
    ("compressed-tensors", "w8a8", drop(f"{Q0}.weight_scale"), "error", "weight_scale: is missing"),
    (
        "compressed-tensors",
        "w4a16-asym-g32",
        put(f"{Q0}.weight_zero_point", lambda z: z[:4]),
        "error",
        "weight_zero_point: expected torch.int32 [8, 2], found torch.int32 [4, 2]",
    ),
    (
        "compressed-tensors",
        "w4a16-asym-g32",
        put(f"{Q0}.weight_zero_point", lambda z: z.float()),
        "error",
        "found torch.float32 [8, 2]",
    ),
    ("compressed-tensors", "w8a8-static", drop(f"{Q0}.input_scale"), "error", "input_scale: is mi"),
    *(
        ("compressed-tensors", "w8a8-static", put(f"{Q0}.input_scale", change), "error", "above 0")
        for change in (lambda s: -s, lambda s: s * 0, lambda s: s / 0, lambda s: s.expand(64))
    ),
    (
        "compressed-tensors",
        "w8a8-fp8",
        put(f"{Q0}.weight", lambda w: w.view(torch.int8)),
        "error",
        "expected torch.float8_e4m3fn",
    ),
    (
        "compressed-tensors",
        "w8a8-fp8-block",
        put(f"{Q0}.weight_scale", lambda s: s.expand(2, 1)),
        "error",
        "expected [1, 1]",
    ),
    (
        "compressed-tensors",
        "w8a8",
        lambda t, c: c.update(hidden_size=128),
        "error",
        "config.json states [96, 128]",
    ),
    (
        "compressed-tensors",
        "w4a16-sym-g32",
        put(f"{Q0}.weight_scale", lambda s: s.flatten()),
        "error",
        "expected [64, 2] for w4a16-sym-g32, found [128]",
    ),
    (
        "compressed-tensors",
        "w4a16-sym-g32",
        put(f"{Q0}.weight_shape", lambda s: s.float()),
        "error",
        "weight_shape: expected integers, found torch.float32",
    ),
]


@pytest.mark.parametrize(("method", "scheme", "change", "severity", "text"), DAMAGE)
def test_damage_is_reported_by_name(model, write_folder, method, scheme, change, severity, text):
    tensors, config = model(method, scheme)
    change(tensors, config)
    found = inspect_checkpoint(write_folder(tensors, config))
    assert any(text in str(problem) and problem.severity == severity for problem in found.problems)
    assert found.ok == (severity == "warning")
    if severity == "error":
        assert {verdict.answer for verdict in found.loads_in} == {"no"}


def answers(folder):
    return {verdict.program: verdict.answer for verdict in inspect_checkpoint(folder).loads_in}


def everywhere(answer, **others):
    return dict.fromkeys(("this project", "vLLM", "SGLang", "transformers"), answer) | others


def g_idx_reversed(tensors, config):
    for name in [name for name in tensors if name.endswith("g_idx")]:
        tensors[name] = tensors[name].flip(0).contiguous()


def block(**values):
    return lambda tensors, config: config[BLOCK].update(values)


def old_symmetric_awq(tensors, config):
    config[BLOCK]["zero_point"] = False


def without_zeros(tensors, config):
    old_symmetric_awq(tensors, config)
    for name in [name for name in tensors if name.endswith("qzeros")]:
        del tensors[name]


def act_order(tensors, config):
    g_idx_reversed(tensors, config)
    config[BLOCK]["desc_act"] = True


def desc_act(tensors, config):
    config[BLOCK]["desc_act"] = True


def without_desc_act(tensors, config):
    del config[BLOCK]["desc_act"]


LOADS = [
    ("gptq", "w4a16-sym-g32", desc_act, everywhere("yes", vLLM="no", SGLang="slow")),
    ("gptq", "w4a16-sym-g32", without_desc_act, everywhere("yes", vLLM="no", SGLang="slow")),
    # with one group there is no order to keep
    ("gptq", "w4a16-sym-channel", desc_act, everywhere("yes", SGLang="slow")),
    ("gptq", "w4a16-sym-g32", None, everywhere("yes", SGLang="slow")),  # 64 x 64: no fast kernel
    ("gptq", "w4a16-asym-g32", None, everywhere("yes", vLLM="no", SGLang="slow")),
    (
        "gptq",
        "w3a16-sym-g32",
        None,
        everywhere("yes", vLLM="no", SGLang="slow"),
    ),
    (
        "gptq",
        "w4a16-sym-g32",
        act_order,
        {"this project": "slow", "vLLM": "no", "SGLang": "slow", "transformers": "yes"},
    ),
    (
        "gptq",
        "w4a16-sym-g32",
        g_idx_reversed,
        everywhere("no"),
    ),
    ("awq", "w4a16-sym-g32", None, everywhere("yes")),
    # no kernel of this project takes groups of 16
    ("awq", "w4a16-asym-g16", None, everywhere("slow", transformers="yes")),
    (
        "compressed-tensors",
        "w4a16-sym-g16",
        None,
        everywhere("yes", SGLang="no", **{"this project": "slow"}),
    ),
    (
        "awq",
        "w4a16-sym-g32",
        old_symmetric_awq,
        everywhere("yes", vLLM="slow", SGLang="slow"),
    ),
    ("awq", "w4a16-sym-g32", without_zeros, everywhere("no", **{"this project": "yes"})),
    ("compressed-tensors", "w4a16-sym-g32", None, everywhere("yes")),
    ("compressed-tensors", "w4a16-asym-g32", None, everywhere("yes", transformers="slow")),
    ("compressed-tensors", "w8a8", None, everywhere("yes")),
    ("compressed-tensors", "w8a8-fp8-block", None, everywhere("yes")),
    ("gptq", "w4a16-sym-g32", block(bits=5), everywhere("not judged", **{"this project": "no"})),
]


@pytest.mark.parametrize(("method", "scheme", "change", "expected"), LOADS)
def test_loads_in_verdicts(model, write_folder, method, scheme, change, expected):
    tensors, config = model(method, scheme)
    if change:
        change(tensors, config)
    assert answers(write_folder(tensors, config)) == expected


def test_tensor_parallel_sizes(model, write_folder):
    tensors, config = model("gptq", "w4a16-sym-g32")
    config["num_attention_heads"] = 4
    parallel = inspect_checkpoint(write_folder(tensors, config)).parallel
    assert [parallel[size] for size in (1, 2, 4)] == ["", "", ""], "3 groups over 2 and 4"
    kv_heads = config["num_key_value_heads"]
    problem = f"4 attention heads of {kv_heads} KV heads cannot be divided over 8 GPUs"
    assert parallel[8] == problem


@pytest.mark.parametrize("scheme", ["w8a8", "w8a8-fp8", "w4a16-sym-g32"])
def test_transposed_scales_are_reported(model, write_folder, scheme):
    tensors, config = model("compressed-tensors", scheme)
    tensors[f"{Q0}.weight_scale"] = tensors[f"{Q0}.weight_scale"].t().contiguous()
    found = inspect_checkpoint(write_folder(tensors, config))
    assert any(
        p.subject == f"{Q0}.weight_scale" and "expected [64, " in p.text for p in found.problems
    )
    assert not found.ok


def test_single_group_has_no_act_order_warning(model, write_folder):
    tensors, config = model("gptq", "w4a16-sym-channel")
    desc_act(tensors, config)
    assert inspect_checkpoint(write_folder(tensors, config)).problems == ()


def test_float_linear_does_not_hide_other_remarks(model, write_folder):
    tensors, config = model("compressed-tensors", "w8a8-fp8")
    config[BLOCK]["kv_cache_scheme"] = write_kv_scheme("int8")
    for layer in range(2):
        for kind in ("k_scale", "v_scale"):
            tensors[f"model.layers.{layer}.self_attn.{kind}"] = torch.ones(1)
    found = inspect_checkpoint(write_folder(tensors, config))
    reason = {verdict.program: verdict.reason for verdict in found.loads_in}["vLLM"]
    assert "refuses the kv_cache_scheme" in reason
    reason = {verdict.program: verdict.reason for verdict in found.loads_in}["SGLang"]
    assert "sm89" in reason and "its 8-bit KV cache is float8" in reason


def test_float_linear_does_not_hide_refused_group_size(model, write_folder):
    tensors, config = model("compressed-tensors", "w8a8-fp8")
    groups = config[BLOCK]["config_groups"]
    weights = QuantConfig(scheme=Scheme.parse("w4a16-sym-g24"), method="compressed-tensors")
    group = weights.to_dict()["config_groups"]["group_0"]
    groups["group_1"] = {**group, "targets": ["model.layers.9.mlp.down_proj"]}
    assert answers(write_folder(tensors, config))["SGLang"] == "no"


def test_declared_float_member_loads_in_unfused_readers(model, write_folder):
    tensors, config = model("gptq", "w4a16-sym-g32")
    for field in ("qweight", "qzeros", "scales", "g_idx"):
        del tensors[f"{Q0}.{field}"]
    tensors[f"{Q0}.weight"] = torch.zeros(64, 64)
    config[BLOCK]["dynamic"] = {rf"-:^{Q0.replace('.', '[.]')}$": {}}
    folder = write_folder(tensors, config)
    expected = everywhere("no", **{"this project": "yes"})
    assert answers(folder) == expected
    assert not inspect_checkpoint(folder).ok


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize(
    ("actorder", "stated"),
    [("group", True), ("dynamic", True), ("Dynamic", True), (True, True), ("weight", False)]
    + [("static", False), (False, False)],
)
def test_declared_act_order_is_not_reported(model, write_folder, actorder, stated, in_order):
    tensors, config = model("compressed-tensors", "w4a16-sym-g32")
    g_idx = torch.arange(64) // 32
    tensors[f"{Q0}.weight_g_idx"] = (g_idx if in_order else g_idx.flip(0)).int()
    config[BLOCK]["config_groups"]["group_0"]["weights"]["actorder"] = actorder
    folder = write_folder(tensors, config)
    subjects = [problem.subject for problem in inspect_checkpoint(folder).problems]
    assert subjects == ([] if stated or in_order else [f"{Q0}.weight_g_idx"])
    refused = "no" if stated or not in_order else "yes"
    assert [answers(folder)[name] for name in ("vLLM", "transformers")] == [refused, refused]
    served = "yes" if in_order else "slow" if stated else "no"
    assert answers(folder)["this project"] == served


def test_asymmetric_v1_qzeros_are_trusted_only_from_gptqmodel(model, write_folder):
    tensors, config = model("gptq", "w4a16-asym-g32")
    for name in [name for name in tensors if name.endswith("qzeros")]:
        tensors[name] = torch.full_like(tensors[name], 0x56565656)
    config[BLOCK].update(checkpoint_format="gptq", format="gptq")
    folder = write_folder(tensors, config)
    assert answers(folder)["transformers"] == "no"
    config[BLOCK]["meta"] = {"quantizer": ["gptqmodel:4.2.0"]}
    (folder / "config.json").write_text(json.dumps(config))
    assert answers(folder)["transformers"] == "yes"


@pytest.mark.parametrize(("scheme", "others"), [("w8a8", True), ("w8a16-sym-channel", False)])
def test_gptq_activation_key_is_ignored_by_other_servers(model, write_folder, scheme, others):
    """The others load the file and compute with 16-bit activations; that must be said."""
    for verdict in inspect_checkpoint(write_folder(*model("gptq", scheme))).loads_in:
        assert verdict.answer != "no"
        said = "as W8A16" in verdict.reason
        assert said == (others and verdict.program != "this project"), verdict


def test_mixed_schemes_get_no_from_transformers(model, write_folder):
    tensors, config = model("compressed-tensors", "w4a16-asym-g32")
    groups = config[BLOCK]["config_groups"]
    other = QuantConfig(scheme=Scheme.parse("w8a16-sym"), method="compressed-tensors").to_dict()
    group = other["config_groups"]["group_0"]
    groups["group_1"] = {**group, "targets": ["model.layers.9.mlp.down_proj"]}
    assert answers(write_folder(tensors, config))["transformers"] == "no"


def test_zero_points_of_symmetric_weights_get_no_from_vllm(model, write_folder):
    tensors, config = model("compressed-tensors", "w4a16-sym-g32")
    tensors[f"{Q0}.weight_zero_point"] = torch.full((8, 2), -2004318072, dtype=torch.int32)
    assert answers(write_folder(tensors, config)) == everywhere("yes", vLLM="no", SGLang="no")


@pytest.mark.parametrize(
    ("shape", "answer"),
    [((64, 128), "yes"), ((128, 64), "yes"), ((64, 64), "slow"), ((96, 128), "slow")],
)
def test_sglang_verdict_by_kernel_shape_limits(shape, answer):
    linear = LinearSummary(
        name=Q0, out_features=shape[0], in_features=shape[1], scheme="", num_bytes=0
    )
    facts = Facts(
        architecture="LlamaForCausalLM",
        method="gptq",
        config=QuantConfig(scheme=Scheme.parse("w4a16-sym")),
        config_error="",
        linears=[linear],
        choices=Choices(),
        first_error="",
        fused_mixed="",
        unplaced="",
        desc_act=False,
        written_by_gptqmodel=False,
    )
    found = {verdict.program: verdict.answer for verdict in loads_in(facts)}
    assert found == everywhere("yes", SGLang=answer)


@pytest.mark.parametrize(("dtype", "subnormal"), [(torch.bfloat16, False), (torch.float16, True)])
def test_subnormal_scale_check_follows_scale_dtype(model, write_folder, dtype, subnormal):
    tensors, config = model("gptq", "w4a16-sym-g32")
    tensors[f"{Q0}.scales"] = torch.full((2, 64), 1e-6).to(dtype)
    problems = inspect_checkpoint(write_folder(tensors, config)).problems
    assert [problem.subject for problem in problems] == [f"{Q0}.scales"] * subnormal


def test_kv_scales_in_damaged_shard_are_not_reported_missing(model, write_folder):
    tensors, config = model("compressed-tensors", "w8a8-fp8")
    config[BLOCK]["kv_cache_scheme"] = write_kv_scheme("fp8")
    for layer in range(2):
        for kind in ("k_scale", "v_scale"):
            tensors[f"model.layers.{layer}.self_attn.{kind}"] = torch.ones(1)
    folder = write_folder(tensors, config, 3)
    for number in (1, 2):
        path = folder / f"model-{number:05d}-of-00003.safetensors"
        path.write_bytes(path.read_bytes()[:-1])
    assert {p.text.partition(":")[0] for p in inspect_checkpoint(folder).problems} == {"truncated"}


def test_quantized_router_is_an_error(model, write_folder):
    """No program has a place for its codes, this one neither."""
    tensors, config = model("compressed-tensors", "w4a16-sym-g32")
    experts(tensors, config)
    router = "model.layers.0.block_sparse_moe.gate"
    del tensors[f"{router}.weight"]
    for field, like in (("weight_packed", "q_proj"), ("weight_scale", "q_proj")):
        tensors[f"{router}.{field}"] = tensors[f"model.layers.0.self_attn.{like}.{field}"].clone()
    tensors[f"{router}.weight_shape"] = torch.tensor([64, 64])
    found = inspect_checkpoint(write_folder(tensors, config))
    errors = [str(each) for each in found.problems if each.severity == "error"]
    assert errors[0].startswith(f"error: {router}: is quantized, and programs load it in float")
    assert {verdict.answer for verdict in found.loads_in} == {"no"}
